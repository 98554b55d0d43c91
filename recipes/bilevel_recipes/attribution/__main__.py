"""`bilevel-attribute DATA --queries FILE`: which training rows made a model answer these queries as it does."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import tyro
from tqdm import tqdm

from .. import runs, tables
from ..clean.cleaner import limited
from ..malloc import keep_memory
from .explain import Explained, explain
from .models import Plan
from .report import write_report
from .rows import Both, read_both

ABOUT = "Train a model on features of your rows, and show which rows made it answer your queries as it does."
EXAMPLES = """examples:
  bilevel-attribute demo                                      handwritten digits that are answered wrongly, in a minute
  bilevel-attribute train.csv --queries test.csv --label species
  bilevel-attribute photos --queries new-photos --wrong       two folders of images, with a folder for each class
  bilevel-attribute reviews.csv --queries some.csv --text review --leave-out 0.1
"""
FILES = ("influence.pt", "influence.npz", "attribution.csv", "together.csv", "report.html", "results.json")


def _named(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Column = Annotated[str | None, _named("COLUMN")]
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Asking:
    """What is asked."""

    queries: Annotated[Path | None, _named("FILE|DIR")] = None
    """The rows to explain: a table with the same columns, a folder of images, or an .npz file."""
    about: Literal["prediction", "label"] = "prediction"
    """Explain what the model says, or the label that it should have said."""
    wrong: Switch = False
    """Explain only the queries that are answered wrongly."""
    most: int = 40
    """The largest number of queries to explain; the first ones are taken."""
    leave_out: Annotated[str, tyro.conf.arg(metavar="N|SHARE")] = "1"
    """What would be left out: 1 for single rows, another number of rows, or a share such as 0.1."""
    subsets: int = 8
    """How often to train again on a random subset, to check the result."""


@dataclass(frozen=True)
class Reading:
    """What the columns are. What you leave out is detected."""

    label: Column = None
    """Column of the labels; without this flag, "label"."""
    image: Column = None
    """Column of image files."""
    text: Column = None
    """Column of texts."""
    columns: Annotated[tuple[str, ...] | None, _named("COLUMN ...")] = None
    """Columns of numbers or categories to use."""
    features: str = "auto"
    """How rows become numbers: auto, pixels, patches, tfidf, columns, torchvision:NAME or timm:NAME."""


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Annotated[Path | None, _named("DIR")] = None
    """Folder for the results; without this flag, runs/attribute-NAME with the name of the data."""
    count: int = 10
    """How many rows of each query the .csv file has, of those that helped and of those that hurt."""
    resume: Switch = False
    """Go on with the run in --out; queries that are finished are kept."""
    overwrite: Switch = False
    """Replace the run in --out."""
    quiet: Switch = False
    """Show no progress."""
    threads: int | None = None
    """Number of processor threads; None leaves that to PyTorch."""


@dataclass(frozen=True)
class Command:
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A .csv, .tsv, .parquet or .npz file, a folder of images with one folder for each class, or the word demo."""
    asking: Asking
    reading: Reading
    training: Plan = field(default_factory=Plan)
    output: Output = field(default_factory=Output)


def parse(argv: Sequence[str]) -> Command:
    """Read the command line. A misspelt flag ends the command with code 2 and a suggestion."""
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(Command, prog="bilevel-attribute", description=f"{ABOUT}\n\n{EXAMPLES}", args=argv, config=style)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    keep_memory()
    try:
        print(run(parse(argv), argv))
    except KeyboardInterrupt:
        print("\nbilevel-attribute: stopped. The same command with --resume goes on.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        told = re.sub(r"^(bilevel-attribute|bilevel-clean|attribution|recipes\.data|recipes): ", "", str(error))
        hint = " A smaller --rate may help." if isinstance(error, FloatingPointError) else ""
        print(f"bilevel-attribute: error: {told}{hint}", file=sys.stderr)
        return 2
    return 0


def run(command: Command, argv: Sequence[str]) -> str:
    """Do what the command line says, and return what is printed at the end."""
    begin, asking, output = time.perf_counter(), command.asking, command.output
    leave_out, is_demo = _leave_out(asking.leave_out), command.data == "demo" and not Path("demo").exists()
    folder = output.out or Path("runs") / f"attribute-{Path(command.data).resolve().stem or 'data'}"
    with limited(output.threads):
        both = _demo(command) if is_demo else _read(command)
        _open(folder, command, both)
        with tqdm(total=100, disable=output.quiet, bar_format="{l_bar}{bar}| {elapsed}") as bar:
            found = explain(
                both, command.training, leave_out=leave_out, about=asking.about, wrong=asking.wrong or is_demo,
                subsets=asking.subsets, most=min(asking.most, 8) if is_demo else asking.most, folder=folder,
                progress=lambda share, words: _show(bar, share, words),
            )  # fmt: skip
    words = shlex.join(["bilevel-attribute", *(w for w in argv if w not in ("--resume", "--overwrite", "--quiet"))])
    _write(folder, found, command, words)
    seconds = time.perf_counter() - begin
    return "\n\n".join(
        [_summary(found), str(found.trust), f"{', '.join(FILES[1:])} written to {folder} in {seconds:.0f} s."]
    )


def _leave_out(text: str) -> float | int:
    try:
        found: float | int = float(text) if "." in text else int(text)
    except ValueError:
        found = -1
    if not (0 < found < 1 or (isinstance(found, int) and found >= 1)):
        raise ValueError(f"--leave-out is a number of rows, such as 1, or a share, such as 0.1; got {text}.")
    return found


def _read(command: Command) -> Both:
    how = command.reading
    if command.asking.queries is None:
        raise ValueError(
            "--queries is missing: a file or folder with the rows to explain, of the same kind as the data."
        )
    return read_both(
        command.data, command.asking.queries, kind=how.features, seed=command.training.seed, label=how.label,
        image=how.image, text=how.text, columns=how.columns,
    )  # fmt: skip


def _demo(command: Command) -> Both:
    """Digits of scikit-learn, 3 % of them with a wrong label, and digits of other writers as queries."""
    from ..data import corrupt, load

    if command.asking.queries is not None:
        raise ValueError("the demo has queries of its own; leave out --queries.")
    digits = load("digits")
    labels, _ = corrupt(digits.y, 0.03, 10, np.random.default_rng(command.training.seed))
    data, queries = {"x": digits.x, "y": labels}, {"x": digits.x_test, "y": digits.y_test}
    return read_both(data, queries, kind=command.reading.features, seed=command.training.seed)


def _open(folder: Path, command: Command, both: Both) -> None:
    """Make the folder, or see that an earlier run in it can be gone on with or replaced."""
    if command.output.resume and command.output.overwrite:
        raise ValueError("--resume keeps a run and --overwrite replaces it; give one of them.")
    if command.output.overwrite:
        for name in (*FILES, "influence.pt.before", "settings.json"):
            (folder / name).unlink(missing_ok=True)
    runs.open_folder(folder, {**_settings(command), "fingerprint": both.fingerprint}, command.output.resume)


def _settings(command: Command) -> dict[str, Any]:
    parts = {**asdict(command.asking), **asdict(command.reading), **asdict(command.training)}
    return {"data": command.data, **{k: str(v) if isinstance(v, Path) else v for k, v in parts.items()}}


def _show(bar: tqdm[Any], share: float, words: str) -> None:
    bar.set_description_str(words)
    bar.update(round(100 * share) - bar.n)


def _write(folder: Path, found: Explained, command: Command, words: str) -> None:
    settings, trust = _settings(command), found.trust
    found.influence.save(folder / "influence.npz")
    rows, classes = found.both.rows, np.array(found.both.rows.classes, dtype=object)
    labels = classes[rows.y[found.both.train]]
    frame, together = (
        found.influence.frame(command.output.count),
        found.influence.together(count=2 * command.output.count),
    )
    said = {"said": classes[found.said][frame["query"]], "explained": classes[found.asked][frame["query"]]}
    frame = frame.assign(label=labels[frame["row"]], **said)
    _csv(folder / "attribution.csv", frame)
    _csv(folder / "together.csv", together.assign(label=labels[together["row"]]))
    title = "demo: handwritten digits" if command.data == "demo" else Path(command.data).name
    about = command.asking.about
    write_report(folder / "report.html", found, title=title, about=about, settings=settings, command=words)
    figures = {
        "smoothness": trust.smoothness, "agreement": trust.agreement, "agreement_error": trust.error,
        "subsets": trust.subsets, "left_out": trust.left_out, "radius": trust.forecast.radius,
        "forecast": {k: getattr(trust.forecast, k) for k in ("value", "sizes", "promised", "realised")},
    }  # fmt: skip
    made = {"command": words, "settings": settings, "versions": runs.versions(), "trust": figures,
            "accuracy": found.accuracy, "verdict": trust.verdict()}  # fmt: skip
    runs.write_text(folder / "results.json", json.dumps(tables.plain(made), indent=1, ensure_ascii=False) + "\n")


def _csv(path: Path, frame: pd.DataFrame) -> None:
    runs.write_text(path, frame.to_csv(index=False))


def _summary(found: Explained) -> str:
    first = found.influence.together(count=3)
    names = {did: ", ".join(first.loc[first["did"] == did, "name"]) or "none" for did in ("hurt", "helped")}
    right = "" if np.isnan(found.accuracy) else f" {found.accuracy:.1%} of the queries are answered rightly."
    return (
        f"{len(found.both.train):,} rows, {len(found.said)} queries explained.{right}\n"
        f"The rows that speak most for what was explained: {names['helped']}; most against it: {names['hurt']}."
    )


if __name__ == "__main__":
    sys.exit(main())
