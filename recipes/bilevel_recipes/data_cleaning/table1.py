"""The paper's Table 1 and Figures 1 to 3 from finished runs, as one page with its pictures.

python -m bilevel_recipes.data_cleaning.table1 RUN [RUN …] --out docs/results
A run with several --every is Figure 2, one with several --steps is Figure 3, another one without baselines is Figure 1.
All others are Table 1, and Figure 1 if no run is that alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from .. import plots, runs, tables
from .output import Record, cell_of, curve_figure
from .score import paper
from .study import summary

METHODS = ("validation-only", "gd", "bigsam", "bigsam-convergent")
HEADER = ("data set", "ρ", *METHODS, "paper: basic", "paper: improved", "bigsam > gd and > paper")
NAME = "data_cleaning"
FIGURES = {
    1: "Figure 1: F1 of the clean class against outer steps; mean and standard deviation over the seeds.",
    2: "Figure 2: a BiG-SAM step every 1, 5, 10, 20 inner steps, plain descent between.",
    3: "Figure 3: 25, 50, 100, 200 inner steps, against the seconds that they took.",
}


@dataclass(frozen=True)
class Flags:
    """Make the page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that python -m bilevel_recipes.data_cleaning has written (its --out)."""
    out: Path = Path("docs/results")
    """Folder for data_cleaning_table1.md and data_cleaning_figure1.png to …figure3.png."""


def main(argv: Sequence[str] | None = None) -> int:
    flags = tyro.cli(Flags, prog="python -m bilevel_recipes.data_cleaning.table1", description=__doc__, args=argv)
    try:
        found = [_read(folder) for folder in flags.runs]
        write(found, flags.out)
    except (ValueError, OSError) as error:
        print(f"python -m bilevel_recipes.data_cleaning.table1: error: {error}", file=sys.stderr)
        return 2
    print(flags.out / f"{NAME}_table1.md")
    return 0


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "results.json"
    try:
        found = json.loads(file.read_text())
        return {key: found[key] for key in ("command", "settings", "versions", "data", "notes", "runs")}
    except FileNotFoundError:
        raise FileNotFoundError(f"recipes: {file} does not exist; finish that run with --resume") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"recipes: {file} is no result of this study ({error!r}); run it again") from error


def figure_of(study: dict[str, Any]) -> int:
    """Return the number of the paper's figure that a study is for, or 0 for the table."""
    s = study["settings"]
    return 2 if len(s["every"]) > 1 else 3 if len(s["steps"]) > 1 else 0 if s["baselines"] else 1


def write(studies: list[dict[str, Any]], out: Path) -> None:
    """Write the page, and the figures for which the studies have data."""
    out.mkdir(parents=True, exist_ok=True)
    records = {n: [r for s in studies if figure_of(s) == n for r in s["runs"]] for n in (0, *FIGURES)}
    if not records[0]:
        raise ValueError("recipes: none of these runs belongs to Table 1; give one with --paper and no other grid")
    records[1] = records[1] or records[0]
    titles: dict[str, str] = {k: v for s in studies for k, v in s["data"].items()}
    for n in FIGURES:
        if found := records[n]:
            plots.save(_figure(n, found, titles), out / f"{NAME}_figure{n}").with_suffix(".svg").unlink()
    runs.write_page(out / f"{NAME}_table1.md", page(studies, summary(records[0]), titles, records))


def table(rows: list[Record], titles: dict[str, str]) -> list[list[str]]:
    """Return a line for each data set and ρ: mean ± standard deviation, with the best in bold."""
    cells: dict[tuple[Any, ...], dict[str, Record]] = {}
    for r in rows:
        cells.setdefault(cell_of(r), {})[r["method"]] = r
    lines: list[list[str]] = []
    for (dataset, _, rho, _), found in cells.items():
        improved, basic = paper(dataset, rho) or (None, None)
        figures = [found[m]["f1_clean"] if m in found else None for m in METHODS] + [basic, improved]
        texts = [tables.spread(found[m], "f1_clean") if m in found else "" for m in METHODS]
        texts += ["" if f is None else f"{f:.3f}" for f in (basic, improved)]
        best = max(f for f in figures if f is not None)
        shown = [f"**{t}**" if f == best else t for t, f in zip(texts, figures, strict=True)]
        lines.append([titles[dataset], f"{rho:g}", *shown, _claim(figures)])
    return lines


def _claim(figures: list[float | None]) -> str:
    """Return whether the paper's claim holds in this line, if all figures for it are there."""
    _, gd, bigsam, _, _, improved = figures
    if gd is None or bigsam is None or improved is None:
        return ""
    return "yes" if bigsam > gd and bigsam > improved else "no"


def _figure(number: int, records: list[Record], titles: dict[str, str]) -> Any:
    """Figure 1 has a panel for each ρ of MNIST and SVHN, Figures 2 and 3 have one for each data set."""
    if number == 1:
        shown = [r for r in records if r["dataset"] in ("mnist", "svhn")] or records
        records = sorted(shown, key=lambda r: (list(titles).index(r["dataset"]), r["rho"]))
    axis, label = ("seconds", "seconds") if number == 3 else ("step", "outer step")
    rows = summary(records) if number == 1 else []
    return curve_figure(records, rows, lambda cell: f"{titles[cell[0]]}, ρ = {cell[2]:g}", axis, label, log=number == 3)


def page(
    studies: list[dict[str, Any]], rows: list[Record], titles: dict[str, str], records: dict[int, list[Record]]
) -> str:
    """Return the page in Markdown. All its figures come from the runs."""
    lines = table(rows, titles)
    first = next(s for s in studies if figure_of(s) == 0)
    commands = [_shown(s["command"]) for s in sorted(studies, key=figure_of)]
    out = [
        "# Table 1 and Figures 1 to 3, ours", "",
        "Written by `python -m bilevel_recipes.data_cleaning.table1`; not edited by hand.", "",
        "```", *commands, "```", "",
        _machine(first["versions"], studies), "",
        _claims(rows, lines), "",
        tables.markdown([("Table 1", list(HEADER), lines)]).partition("\n\n")[2],
        _settings(first["settings"], records[0]), "",
        *([] if records[1] is records[0] else [_longer(records[1], titles), ""]),
        *(f"- {note}" for note in dict.fromkeys(note for s in studies for note in s["notes"].values())), "",
    ]  # fmt: skip
    for n, caption in FIGURES.items():
        if records[n]:
            out += [f"![{caption}]({NAME}_figure{n}.png)", "", caption, "", *_ends(records[n], titles), ""]
    return "\n".join(out)


def _machine(v: dict[str, Any], studies: list[dict[str, Any]]) -> str:
    seconds = [f"{_shown(s['command']).rpartition('/')[2]} {sum(r['seconds'] for r in s['runs']):.0f}" for s in studies]
    return (
        f"{date.today().isoformat()}, {v['machine']}, {os.cpu_count()} cores, Python {v['python']}, "
        f"torch {v['torch']}, {v['cuda'] or 'no GPU'}, {v['threads']} thread(s) per process. "
        f"Wall-clock seconds of the methods themselves: {', '.join(seconds)}."
    )


def _claims(rows: list[Record], lines: list[list[str]]) -> str:
    """Return a sentence that counts the results of the table."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        cells.setdefault(cell_of(r), {})[r["method"]] = r["f1_clean"]
    behind = sum(c.get("validation-only", 0) > c.get("bigsam", 0) for c in cells.values())
    holds, all_lines = sum(line[-1] == "yes" for line in lines), len(lines)
    seeds = " or ".join(str(n) for n in sorted({r["seeds"] for r in rows}))
    return (
        f"F1 of the clean class, mean ± standard deviation over {seeds} seeds; the best of each line in bold. "
        f"`bigsam` is above `gd` and above the paper's improved model in **{holds} of {all_lines}** lines. A "
        f"classifier of the checked samples alone, which the paper does not have, is above `bigsam` in {behind}."
    )


def _longer(records: list[Record], titles: dict[str, str]) -> str:
    """Return a sentence on whether bigsam stays above gd in the further outer steps of Figure 1."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in summary(records):
        cells.setdefault(cell_of(r), {})[r["method"]] = r["f1_clean"]
    both = {cell: found for cell, found in cells.items() if {"gd", "bigsam"} <= found.keys()}
    passed = [
        f"{titles[cell[0]]}, ρ = {cell[2]:g} ({found['bigsam']:.3f}; gd {found['gd']:.3f})"
        for cell, found in both.items()
        if found["bigsam"] <= found["gd"]
    ]
    steps = max(len(r["history"]) for r in records)
    return (
        f"The number of outer steps matters. {len(both)} cells were run for {steps} of them. At the end, `bigsam` is "
        f"above `gd` in {len(both) - len(passed)} of these. Exceptions: {'; '.join(passed) or 'none'}."
    )


def _shown(command: str) -> str:
    """Return a command without paths of this machine."""
    words = command.split()
    for flag, word in (("--data-root", "DATA"), ("--out", None)):
        if flag in words:
            i = words.index(flag)
            words[i + 1] = word or f"runs/{Path(words[i + 1]).name}"
    return " ".join(w for w in words if w != "--quiet")


def _settings(settings: dict[str, Any], records: list[Record]) -> str:
    patches = " and ".join(dict.fromkeys(r["dataset"] for r in records if r["features"] == "patches"))
    return (
        f"A {settings['model'][0]} model, K = {settings['steps'][0]} full-batch steps of rate {settings['lr']:g}, "
        f"{settings['outer_steps']} outer steps of Adam with rate {settings['eta']:g}; the paper trains a ResNet-18 "
        f"until the outer problem converges. {patches or 'No data set'}: features of whitened patches, learnt without "
        f"labels, in place of pixels. The inner loop runs in the {settings['components']} first principal components. "
        "`validation-only` is a classifier of the checked samples alone, on all pixels or features: a label it "
        "disagrees with is called wrong. Rates were chosen on seed 0."
    )


def _ends(records: list[Record], titles: dict[str, str]) -> list[str]:
    """Return the last F1 of each curve, with a line for each data set and ρ."""
    cells: dict[tuple[str, float], list[str]] = {}
    for row in summary([r for r in records if r["history"]]):
        cells.setdefault((row["dataset"], row["rho"]), []).append(f"{row['label']} {row['f1_clean']:.3f}")
    return [f"- {titles[d]}, ρ = {rho:g}, at the end: {', '.join(ends)}" for (d, rho), ends in cells.items()]


if __name__ == "__main__":
    sys.exit(main())
