"""Make one page of finished studies: tables, curves (the paper's Figures 4 and 5), and the notes of another file.

python -m bilevel_recipes.few_shot.results NOTES RUN [RUN …] --out docs/results

NOTES is Markdown. The text before its first section opens the page. A line `## NAME [NAME …]: TITLE` begins the
section of the runs with these names, which are the last parts of their folders. The text after it has notes on them.
Runs of one section share its table, whose lines are named by the settings that differ. A section without any of its
runs is left out. The tables of a section stand between marks of pymdownx.snippets with the name of its first run, so
that other pages can include them.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from .. import plots, runs, tables
from .output import Record
from .study import UNTRAINED, Settings, elsewhere, over_seeds, summary

PAGE, NAME = "few_shot.md", "few_shot"
MOST = 8  # the largest number of curves that can be told apart in one panel
HEADING = re.compile(r"^## ([\w. -]+): (.+)$", re.MULTILINE)
# settings that each run of a study has for itself, and those that no accuracy depends on
OWN = {"dataset", "model", "ways", "shots", "solvers", "steps", "every", "lr", "seeds", "also", "baselines"}
OWN |= {"data_root", "download", "save_every", "threads", "precision", "curve_points", "curve_episodes", "test_steps"}
Kind = tuple[int, int]  # ways, shots


@dataclass(frozen=True)
class Flags:
    """Make the page."""

    notes: tyro.conf.Positional[Path]
    """Titles and notes of the sections, in Markdown."""
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that python -m bilevel_recipes.few_shot, or its .cost, has written (their --out)."""
    out: Path = Path("docs/results")
    """The folder for few_shot.md and its pictures."""


@dataclass(frozen=True)
class Section:
    """A section: its heading, the names of its runs, and notes on them."""

    names: tuple[str, ...]
    title: str
    text: str


@dataclass(frozen=True)
class Line:
    """The subject of a line of a table, or of a curve.

    settings: those in which the studies of the section differ. trained: the tasks of training, where it was tested on
    others as well. lr: only where the section has one kind of task at several rates.
    """

    method: str
    settings: str
    steps: int
    every: int
    trained: str
    lr: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m bilevel_recipes.few_shot.results"
    flags = tyro.cli(Flags, prog=prog, description=__doc__, args=argv)
    try:
        lead, sections = read_notes(flags.notes)
        named = [name for section in sections for name in section.names]
        found = {folder.resolve().name: read_run(folder) for folder in flags.runs}
        for what, names in ((f"no section of {flags.notes} names", found.keys() - set(named)),
                            (f"two places of {flags.notes} name", {n for n in named if named.count(n) > 1}),
                            ("there are two folders for", _twice(f.resolve().name for f in flags.runs))):  # fmt: skip
            if names:
                raise ValueError(f"recipes.few_shot: {what} the run {', '.join(sorted(names))}; change one of them")
        write(lead, sections, found, flags.out)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    missing = [name for name in named if name not in found]
    if missing:
        print(f"{prog}: not given, and so not on the page: {', '.join(missing)}", file=sys.stderr)
    print(flags.out / PAGE)
    return 0


def _twice(names: Iterable[str]) -> set[str]:
    names = list(names)
    return {name for name in names if names.count(name) > 1}


# --- what is read ----------------------------------------------------------------------------------------------


def read_notes(file: Path) -> tuple[str, list[Section]]:
    """Return the text before the first section, and the sections."""
    try:
        lead, *parts = HEADING.split(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"recipes.few_shot: there is no file {file}; give the notes first") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ValueError(f"recipes.few_shot: {file} is no text; give the file of the notes first") from None
    if not parts:
        raise ValueError(f"recipes.few_shot: {file} has no line '## RUN: TITLE'; write one for each section")
    found = [Section(tuple(n.split()), title, text.strip()) for n, title, text in zip(*[iter(parts)] * 3, strict=True)]
    return lead.strip(), found


def read_run(folder: Path) -> dict[str, Any]:
    """Read results.json of a study, or of a measurement of the cost, which already has its tables."""
    file = folder / "results.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        common = {key: found[key] for key in ("command", "settings", "versions")}
        _machine(common)
        if "blocks" in found:
            return {**common, "blocks": [tables.block(*block) for block in found["blocks"]]}
        found["settings"]["outer_steps"]  # a study has it
        settings = {**json.loads(json.dumps(asdict(Settings()))), **found["settings"]}  # earlier ones had fewer flags
        return {**common, "settings": settings, "data": dict(found["data"]), "runs": [*map(_record, found["runs"])]}
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"recipes.few_shot: {file} does not exist; finish that study, with --resume if it was stopped"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"recipes.few_shot: {file} is not the result of a few-shot study ({error!r})") from error


def _record(r: Any) -> Record:
    """Return a record of results.json, if it has all that the page needs."""
    for name in ("dataset", "model", "label", "method"):
        if not isinstance(r[name], str):
            raise TypeError(f"{name} is {r[name]!r}")
    for number in (*(r[k] for k in ("ways", "shots", "steps", "every", "lr", "seed", "seconds", "cpu_seconds")),
                   *(scores[str(r["steps"])]["mean"] for scores in (r["scores"], *r["also"].values())),
                   *(point[k] for point in r["history"] for k in ("step", "mean"))):  # fmt: skip
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"a number is {number!r}")
    return r


# --- the page --------------------------------------------------------------------------------------------------


def write(lead: str, sections: list[Section], found: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Write the page, and a picture for each section with curves."""
    parts = [lead]
    pictures: dict[str, Any] = {}
    for section in sections:
        studies = [found[name] for name in section.names if name in found]
        if studies:
            parts += [f"## {section.title}", *filter(None, [section.text])]
            parts.append("\n".join(["```", *(shown(study["command"]) for study in studies), "```"]))
            parts += _measured(section, studies, pictures)
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        plots.save(picture, out / name).with_suffix(".svg").unlink()
    runs.write_text(out / PAGE, "\n\n".join(filter(None, parts)) + "\n")


def _measured(section: Section, studies: list[dict[str, Any]], pictures: dict[str, Any]) -> list[str]:
    """Return the tables of a section and a line on the machine, and add its picture to the others."""
    ready = [block for study in studies for block in study.get("blocks", [])]
    studies_of_runs = [study for study in studies if "runs" in study]
    parts = [tables.markdown([block]).strip() for block in ready]
    if not studies_of_runs:
        return [*parts, _machine(studies[0])]
    records = tested(studies_of_runs, section.names)
    names = names_of(r["line"] for r in records)
    titles = {k: v for study in studies_of_runs for k, v in study["data"].items()}
    for dataset, model in dict.fromkeys((r["dataset"], r["model"]) for r in records):
        part = [r for r in records if (r["dataset"], r["model"]) == (dataset, model)]
        title = ", ".join([titles[dataset], model, *_in_common(part)])
        blocks = [accuracy_table(title, part, names), difference_table(part, names)]
        parts += [tables.markdown([block]).strip() for block in blocks if block is not None]
    parts.append(f"{_effort(studies_of_runs, records)} {_machine(studies_of_runs[0])}")
    mark = "<!-- --8<-- [{}:" + section.names[0] + "] -->"
    parts = [mark.format("start"), *parts, mark.format("end")]
    curves = [r for r in records if len(r["history"]) > 1]
    if curves:
        name = f"{NAME}_{section.names[0]}"
        pictures[name] = figure(curves, names, titles)
        parts.append(f"![{section.title}: accuracy on new classes against outer steps]({name}.png)")
    return parts


def tested(studies: list[dict[str, Any]], section: Sequence[str]) -> list[Record]:
    """Return a record for each encoder and kind of test tasks, with its `line`."""
    differ = differing([study["settings"] for study in studies])
    found: list[Record] = []
    for study in studies:
        of_it = ", ".join(f"{k.replace('_', '-')} {_plain(study['settings'].get(k))}" for k in differ)
        for r in study["runs"]:
            trained = name_of_kind((r["ways"], r["shots"])) if r["also"] else ""
            line = Line(r["method"], of_it, r["steps"], r["every"], trained)
            found += [{**one, "line": line} for one in (r, *elsewhere([r]))]
    if any(len(rates) > 1 for rates in _grouped(found, "lr").values()):
        found = [{**r, "line": replace(r["line"], lr=r["lr"])} for r in found]
    for (*_, line), seeds in _grouped(found, "seed").items():
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"recipes.few_shot: two runs of the section {' '.join(section)} have {line.method}, K = {line.steps}, "
                "with the same seed and settings; make them two sections"
            )
    return found


def _grouped(records: list[Record], value: str) -> dict[tuple[Any, ...], list[Any]]:
    """Group a value of the records by data, encoder, kind and line, with each rate once."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for r in records:
        values = found.setdefault((r["dataset"], r["model"], kind_of(r), r["line"]), [])
        if value != "lr" or r[value] not in values:
            values.append(r[value])
    return found


def differing(settings: list[dict[str, Any]]) -> list[str]:
    """Return the settings that differ between studies, apart from those of a single run."""
    names = dict.fromkeys(name for s in settings for name in s if name not in OWN)
    return [name for name in names if any(s.get(name) != settings[0].get(name) for s in settings)]


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


# --- tables ----------------------------------------------------------------------------------------------------


def kind_of(r: Record) -> Kind:
    return r["ways"], r["shots"]


def name_of_kind(kind: Kind) -> str:
    return f"{kind[0]}-way {kind[1]}-shot"


def names_of(lines: Iterable[Line]) -> dict[Line, str]:
    """Return a name for each line: its method, and the settings that differ between lines."""
    order = sorted(set(lines), key=lambda x: (x.method != UNTRAINED, x.trained, x.settings, x.steps, x.method != "gd",
                                              x.method, x.every, x.lr or 0.0))  # fmt: skip
    several = {k: len({getattr(x, k) for x in order if x.method != UNTRAINED}) > 1
               for k in ("settings", "steps", "every", "trained")}  # fmt: skip
    found: dict[Line, str] = {}
    for line in order:
        extra = [f"K = {line.steps}"] if several["steps"] else []
        extra += [f"every {line.every}"] if several["every"] else []
        extra += [] if line.lr is None else [f"t = {line.lr:g}"]
        extra += [line.settings] if several["settings"] else []
        extra += [f"trained on {line.trained}"] if several["trained"] else []
        found[line] = ", ".join([line.method, *extra])
    return found


def _in_common(records: list[Record]) -> list[str]:
    """Return what all lines share and no name contains."""
    steps, trained = ({getattr(r["line"], k) for r in records} for k in ("steps", "trained"))
    found = [f"K = {next(iter(steps))}"] if len(steps) == 1 else []
    return found + ([f"trained on {next(iter(trained))}"] if len(trained) == 1 and trained != {""} else [])


def accuracy_table(title: str, records: list[Record], names: Mapping[Line, str]) -> tables.Block:
    """Return the accuracies in % with their intervals: a line for each method, a column for each kind of task."""
    kinds = sorted({kind_of(r) for r in records})
    cells: dict[str, dict[Kind, Record]] = {}
    for r in summary([{**r, "also": {}, "label": names[r["line"]]} for r in records]):
        cells.setdefault(r["label"], {})[kind_of(r)] = r
    lines: list[list[str]] = []
    for name in (name for name in names.values() if name in cells):
        found = [cells[name][kind] for kind in kinds if kind in cells[name]]
        rates = " / ".join(dict.fromkeys(f"{r['lr']:g}" for r in found))
        seconds = float(np.mean([r["cpu_seconds"] for r in found]))
        lines.append([name, rates, *(_score(cells[name].get(kind)) for kind in kinds),
                      f"{seconds:.0f}" if seconds else ""])  # fmt: skip
    return tables.block(title, ["method", "t", *map(name_of_kind, kinds), "CPU s of a training"], lines)


def _score(row: Record | None) -> str:
    if row is None:
        return ""
    score = row["scores"][str(row["steps"])]
    return f"{100 * score['mean']:.2f}" + ("" if score["interval"] is None else f" ± {100 * score['interval']:.2f}")


def difference_table(records: list[Record], names: Mapping[Line, str]) -> tables.Block | None:
    """Return each method minus gd with the same seed, K and settings, in points, with an interval over the seeds."""
    kinds = sorted({kind_of(r) for r in records})
    base = {(kind_of(r), r["line"], r["seed"]): _mean(r) for r in records if r["method"] == "gd"}
    gains: dict[Line, dict[Kind, list[float]]] = {}
    for r in records:
        plain = base.get((kind_of(r), replace(r["line"], method="gd", every=1), r["seed"]))
        if plain is not None and r["method"] not in ("gd", UNTRAINED):
            gains.setdefault(r["line"], {}).setdefault(kind_of(r), []).append(100 * (_mean(r) - plain))
    lines = [[name, *(_gain(gains[line].get(k, [])) for k in kinds)] for line, name in names.items() if line in gains]
    if not lines:
        return None
    return tables.block("Less gd with the same seeds, in points", ["", *map(name_of_kind, kinds)], lines)


def _mean(r: Record) -> float:
    return r["scores"][str(r["steps"])]["mean"]


def _gain(gains: list[float]) -> str:
    if not gains:
        return ""
    return f"{np.mean(gains):+.2f}" + (f" ± {over_seeds(gains):.2f}" if len(gains) > 1 else "")


# --- words and pictures ----------------------------------------------------------------------------------------


def shown(command: str) -> str:
    """Return a command without paths of the machine that it ran on."""
    words = [w for word in shlex.split(command) for w in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, of in (("--data-root", lambda _: "DATA"), ("--out", lambda path: f"runs/{Path(path).name}")):
        if flag in words[:-1]:
            i = words.index(flag) + 1
            words[i] = of(words[i])
    return shlex.join(word for word in words if word != "--quiet")


def _effort(studies: list[dict[str, Any]], records: list[Record]) -> str:
    counts = sorted({len(seeds) for seeds in _grouped(records, "seed").values()})
    tests = sorted({study["settings"]["test_episodes"] for study in studies})
    minutes = sum(r["cpu_seconds"] for study in studies for r in study["runs"]) / 60
    over = "the tasks" if counts == [1] else "the seeds (Student's t)" + (", or the tasks for one seed" * (1 in counts))
    bf16 = {bool(r.get("bf16")) for r in records if r["method"] != UNTRAINED}
    precision = " or ".join(name for name, value in (("bfloat16", True), ("float32", False)) if value in bf16)
    seeds = "one seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
    return (
        f"{seeds.capitalize()}, {' or '.join(f'{n:,}' for n in tests)} test tasks of each kind; ± is the 95 % interval "
        f"over {over}. The trainings took {minutes:.0f} CPU minutes in all" + (f", in {precision}." if bf16 else ".")
    )


def _machine(study: dict[str, Any]) -> str:
    v = study["versions"]
    threads = "one thread" if v["threads"] == 1 else f"{v['threads']} threads"
    cores = [f"{v['cores']} cores"] if v.get("cores") else []
    words = ", ".join([v["machine"], *cores, v["cuda"] or "no GPU", f"{threads} a process", f"torch {v['torch']}"])
    return f"Machine: {words}."


def figure(records: list[Record], names: Mapping[Line, str], titles: Mapping[str, str]) -> Any:
    """Draw accuracy against outer steps: a panel for each kind, a colour for each K, a style for each method."""
    cells = sorted({(r["dataset"], r["model"], *kind_of(r)) for r in records})
    same = len({cell[:2] for cell in cells}) == 1
    drawn, axes = plots.panels(
        [("" if same else f"{titles[d]}, {model}, ") + name_of_kind((w, s)) for d, model, w, s in cells]
    )
    there = [line for line in names if any(r["line"] == line for r in records)]
    inner, methods = ({getattr(line, k): i for i, line in enumerate(there)} for k in ("steps", "method"))
    by_k = len(inner) > 1 and len(there) == len({(x.steps, x.method) for x in there}) and len(methods) <= 4
    looks = {names[line]: (plots.COLOURS[i % len(plots.COLOURS)], "-") for i, line in enumerate(there)}
    if by_k:
        looks = {names[x]: (plots.COLOURS[[*inner].index(x.steps)], ["--", "-", ":", "-."][[*methods].index(x.method)])
                 for x in there}  # fmt: skip
    for ax, cell in zip(axes, cells, strict=True):
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        for line in there:
            for r in records:
                if r["line"] == line and (r["dataset"], r["model"], *kind_of(r)) == cell:
                    points = [h["step"] for h in r["history"]], [100 * h["mean"] for h in r["history"]]
                    lines.setdefault(names[line], []).append(points)
        if len(lines) > MOST:
            raise ValueError(
                f"recipes.few_shot: {len(lines)} curves in one panel can't be told apart ({', '.join(lines)}); make "
                f"sections of at most {MOST}, or train with --curve-points 1, which draws none"
            )
        plots.curves(ax, lines, "outer step", "accuracy on new classes, %", looks=looks)
    plots.legend(drawn, axes)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
