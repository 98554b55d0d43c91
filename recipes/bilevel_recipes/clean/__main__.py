"""`bilevel-clean DATA`: find wrong labels, review them in a browser, and write the cleaned table."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from ..malloc import keep_memory
from .cleaner import Cleaner, limited
from .compare import Comparison, Demo, demo
from .run import REPORT, check_folder, resumed, write

ABOUT = "Find wrong labels, with the help of a few that were checked, review them, and write the cleaned table."
EXAMPLES = """examples:
  bilevel-clean demo                                          handwritten digits with wrong labels, in a minute
  bilevel-clean mine.csv --label species --checked verified   a table of numbers and words
  bilevel-clean reviews.parquet --text review                 text in a column
  bilevel-clean list.csv --image file --root photos           image files that a column names
  bilevel-clean photos --checked verified.txt                 a folder of images with one folder for each class
  bilevel-clean mine.csv --out runs/mine --decisions decisions.csv --overwrite      after a review
"""


def _named(metavar: str) -> Any:
    """Return how the help shows a flag whose sentence explains the default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Column = Annotated[str | None, _named("COLUMN")]
File = Annotated[Path | None, _named("FILE")]
Folder = Annotated[Path | None, _named("DIR")]
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Reading:
    """What the columns and files are. What you leave out is detected, and the report says how."""

    label: Column = None
    """Column of the labels; without this flag, "label"."""
    checked: Annotated[str | None, _named("COLUMN|FILE|DIR")] = None
    """Checked rows: a column (without this flag, "checked"), a file of names or row numbers, or a folder of images."""
    image: Column = None
    """Column of image files."""
    text: Column = None
    """Column of texts."""
    columns: Annotated[tuple[str, ...] | None, _named("COLUMN ...")] = None
    """Columns of numbers or categories to use."""
    embeddings: File = None
    """A .npy file with one line of numbers for each row, which are used instead."""
    pred_probs: File = None
    """A .npy file with the probability of each class for each row, by models that were not trained on that row."""
    root: Folder = None
    """Folder that the image files are in; without this flag, that of the data."""


@dataclass(frozen=True)
class Output:
    """Where the results go, and what happens to an earlier run in that folder."""

    out: Folder = None
    """Folder for the results; without this flag, runs/NAME with the name of the data."""
    decisions: File = None
    """The review that was exported from report.html. Its labels are known from then on."""
    resume: Switch = False
    """Write the files that are missing from the run in --out, if data and settings are still the same."""
    overwrite: Switch = False
    """Replace the run in --out. Its decisions.csv and your own files are kept."""
    quiet: Switch = False
    """Show no progress."""


@dataclass(frozen=True)
class Command:
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A .csv, .tsv, .xlsx, .jsonl, .parquet or .npz file, a folder of images with one folder for each class, or the
    word demo."""
    reading: Reading
    judging: Annotated[Cleaner, tyro.conf.arg(help="How the labels are judged.")]
    output: Output


def parse(argv: Sequence[str]) -> Command:
    """Read the command line. A misspelt flag ends the command with code 2 and a suggestion."""
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(Command, prog="bilevel-clean", description=f"{ABOUT}\n\n{EXAMPLES}", args=argv, config=style)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    keep_memory()
    try:
        print(run(parse(argv), argv))
    except KeyboardInterrupt:
        print("\nbilevel-clean: stopped. The same command begins again; with --resume it keeps what was written.",
              file=sys.stderr)  # fmt: skip
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"bilevel-clean: error: {_with_flags(str(error).removeprefix('bilevel-clean: '))}", file=sys.stderr)
        return 2
    return 0


def _with_flags(error: str) -> str:
    """Write arguments of `read` as flags: "label='kind'" becomes "--label kind", and "text=," becomes "--text,"."""
    names = "|".join(field.name for field in fields(Reading))
    value = r"""(?:(?P<quote>['"])(?P<value>.*?)(?P=quote)|(?P<metavar>[A-Z]+)|(?=[\s,.)]))"""

    def flag(found: re.Match[str]) -> str:
        value = found["metavar"] or (found["value"] is not None and shlex.quote(found["value"]))
        name = found["name"].replace("_", "-")
        return f"--{name} {value}" if value else f"--{name}"

    return re.sub(rf"(?<![\w/.-])(?P<name>{names})={value}", flag, error)


def run(command: Command, argv: Sequence[str]) -> str:
    """Do what the command line says, and return what is printed at the end."""
    begin, output, cleaner = time.perf_counter(), command.output, command.judging
    folder = output.out or Path("runs") / (Path(command.data).resolve().stem or "data")
    check_folder(folder, Path(command.data), output.resume, output.overwrite)
    how = {k: v for k, v in asdict(command.reading).items() if v is not None}
    known = _demo(command, how)
    data = command.data if known is None else known.rows()
    found = resumed(folder, cleaner, data, how, output.decisions) if output.resume else None
    if found is None:
        with tqdm(total=100, disable=output.quiet, bar_format="{l_bar}{bar}| {elapsed}") as bar:
            found = cleaner.fit(data, **how, decisions=output.decisions, progress=lambda *step: _show(bar, *step))
    words = [word for word in argv if word not in ("--resume", "--overwrite", "--quiet")]
    with limited(cleaner.threads):
        comparison = None if known is None else Comparison.of(known, found)
    written = write(folder, found, shlex.join(["bilevel-clean", *words]), comparison, keep=output.resume)
    parts = [found.trust(), _reviewed(found), _files(folder, written, time.perf_counter() - begin)]
    if comparison is not None:
        parts += [comparison.text(), f"plot    {comparison.draw(folder / 'comparison')}"]
    parts.append(_next(folder, words, output.decisions))
    return "\n\n".join(filter(None, parts))


def _demo(command: Command, how: dict[str, Any]) -> Demo | None:
    """Return the data of the demo if the command is for it, and not for a file that is called demo."""
    if command.data != "demo" or Path("demo").exists():
        return None
    if how:
        flags = ", ".join(f"--{name}" for name in how)
        raise ValueError(f"bilevel-clean: the demo has data of its own and takes no {flags}; leave it out.")
    return demo(command.judging.seed)


def _show(bar: tqdm[Any], share: float, words: str) -> None:
    bar.set_description_str(words)
    bar.update(round(100 * share) - bar.n)


def _reviewed(cleaner: Cleaner) -> str:
    """Return a sentence that tells how many decisions were applied."""
    review = cleaner.fitted.decisions
    if review is None:
        return ""
    counts = ", ".join(f"{n} {name}" for name, n in review["decision"].value_counts().items())
    return f"{len(review)} decisions were applied ({counts or 'the file has none'})."


def _files(folder: Path, written: list[str], seconds: float) -> str:
    if not written:
        return f"Nothing was missing in {folder}: the same data, the same settings, every file there ({seconds:.0f} s)."
    return f"{', '.join(written)} written to {folder} in {seconds:.0f} s."


def _next(folder: Path, words: Sequence[str], decisions: Path | None) -> str:
    """Return what to do next, with the command to paste."""
    review = () if decisions else ("--decisions", "decisions.csv")
    rerun = shlex.join(["bilevel-clean", *words, *review, "--overwrite"])
    return f"Next: open {folder / REPORT}, review the suspects, export decisions.csv, then run\n  {rerun}"


if __name__ == "__main__":
    sys.exit(main())
