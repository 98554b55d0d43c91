"""The results of a study: results.json, curves.csv, table.md, plots, report.html, and the table on screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from .. import plots, report, runs, tables
from .score import paper
from .study import CELL, Job, Settings, jobs, problem, source, summary

Record = dict[str, Any]
LEGEND = (
    "F1 clean is the paper's figure: keeping a clean sample is the positive prediction. F1 corrupted is that of the "
    "samples called mislabelled. Test accuracy is that of a model trained on what was kept. Steps to gd's F1: outer "
    "steps until the mean F1 clean is what gd has at its end. Mean ± standard deviation over the seeds."
)
HEADER = ["method", "F1 clean", "F1 corrupted", "test accuracy", "seconds", "steps to gd's F1", "paper: F1 clean"]
F1 = "F1 of the clean class"


def write(s: Settings, records: list[Record], folder: Path, command: str) -> tuple[str, Path]:
    """Write all results to the folder. Return the table in plain text, and the path of the report."""
    found = {d: source(d, s.data_root, s.download) for d in s.dataset}
    rows, titles = summary(records), {d: images.name for d, images in found.items()}
    notes = {d: images.note for d, images in found.items() if images.note}
    runs.write_results(folder, command, s, data=titles, notes=notes, table=rows, runs=records)
    runs.write_text(folder / "curves.csv", _curves_csv(records))
    figures = draw(s, records, rows, titles, folder)
    shown = blocks(rows, titles)
    runs.write_text(folder / "table.md", tables.markdown(shown))
    runs.write_text(folder / "report.html", _report(s, shown, titles, notes, figures, command))
    return tables.screen(shown), folder / "report.html"


# --- tables ----------------------------------------------------------------------------------------------------


def cell_of(row: Record) -> tuple[Any, ...]:
    return tuple(row[k] for k in CELL)


def blocks(rows: list[Record], titles: dict[str, str]) -> list[tables.Block]:
    """Return a table for each cell, in the order of the study."""
    cells: dict[tuple[Any, ...], list[list[str]]] = {}
    for r in rows:
        scores = [tables.spread(r, key) for key in ("f1_clean", "f1_corrupted", "test_accuracy")]
        reached = "" if r["steps_to_gd"] is None else str(r["steps_to_gd"])
        line = [r["label"], *scores, tables.spread(r, "seconds", ".1f"), reached, _paper(r)]
        cells.setdefault(cell_of(r), []).append(line)
    return [tables.block(cell_title(cell, titles), HEADER, lines) for cell, lines in cells.items()]


def _paper(row: Record) -> str:
    """Return the paper's figure for this row, if it has one. Its improved model is bigsam, its basic one gd."""
    found, place = paper(row["dataset"], row["rho"]), {"bigsam": 0, "gd": 1}.get(row["method"])
    return "" if found is None or place is None else f"{found[place]:.3f}"


def cell_title(cell: tuple[Any, ...], titles: dict[str, str]) -> str:
    dataset, model, rho, validation = cell
    return f"{titles[dataset]}, {model}, ρ = {rho:g}" + (f", {validation} checked samples" if validation else "")


def _curves_csv(records: list[Record]) -> str:
    keys = [*CELL, "method", "every", "steps", "seed"]
    columns = ["step", "seconds", "g", "kept", "f1_clean", "f1_corrupted"]
    rows = [[r[k] for k in keys] + [h[c] for c in columns] for r in records for h in r["history"]]
    return tables.csv_text([*keys, *columns], rows)


# --- figures ---------------------------------------------------------------------------------------------------


def draw(
    s: Settings, records: list[Record], rows: list[Record], titles: dict[str, str], folder: Path
) -> dict[str, Path]:
    """Draw the plots for which this study has data."""
    figures: dict[str, Path] = {}
    learnt = next((job for job in jobs(s) if job.steps), None)
    if learnt is not None:
        by_step = curve_figure(records, rows, lambda cell: cell_title(cell, titles), "step", "outer step")
        figures["f1_by_step"] = plots.save(by_step, folder / "f1_by_step")
        by_time = curve_figure(records, rows, lambda cell: cell_title(cell, titles), "seconds", "seconds", log=True)
        figures["f1_by_time"] = plots.save(by_time, folder / "f1_by_time")
        figures["histogram"] = _histogram(s, learnt, folder)
    return figures


def curve_figure(
    records: list[Record], rows: list[Record], title: Callable[[tuple[Any, ...]], str], axis: str, label: str,
    log: bool = False,
) -> Any:  # fmt: skip
    """Draw F1 against outer steps or seconds, a panel for each cell, with validation-only and the paper as levels."""
    records = [r for r in records if r["history"]]
    cells = list(dict.fromkeys(map(cell_of, records)))
    figure, axes = plots.panels([title(cell) for cell in cells])
    for ax, cell in zip(axes, cells, strict=True):
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        for r in records:
            if cell_of(r) == cell:
                points = [h[axis] for h in r["history"]], [h["f1_clean"] for h in r["history"]]
                lines.setdefault(r["label"], []).append(points)
        plots.curves(ax, lines, label, F1, log)
        for r in rows:
            if cell_of(r) == cell and r["label"] == "validation-only":
                plots.level(ax, r["f1_clean"], "validation-only")
        if found := paper(cell[0], cell[2]):
            plots.level(ax, found[0], "paper, improved", style=":")
    plots.legend(figure, axes)
    return figure


def _histogram(s: Settings, job: Job, folder: Path) -> Path:
    """Draw λ of the clean and of the corrupted samples of one run."""
    state = runs.load(folder / "runs" / job.file)
    if state is None or "record" not in state:
        raise FileNotFoundError(f"recipes: {folder / 'runs' / job.file} is missing; run again with --resume")
    clean = problem(s, job).clean
    figure, (ax,) = plots.panels([job.title], 5.5)
    plots.histogram(ax, {"clean": state["lam"][clean], "corrupted": state["lam"][~clean]}, "λ (below 0: mislabelled)")
    return plots.save(figure, folder / "histogram")


# --- report ----------------------------------------------------------------------------------------------------

_CAPTIONS = {
    "f1_by_step": ("F1 against outer step", "F1 of the clean class after each outer step."),
    "f1_by_time": ("F1 against time", "The same against seconds of this machine."),
    "histogram": ("Weights", "λ of each training sample in the run shown; below 0 is called mislabelled."),
}


def _report(
    s: Settings, shown: list[tables.Block], titles: dict[str, str], notes: dict[str, str], figures: dict[str, Path],
    command: str,
) -> str:  # fmt: skip
    table = [f"<h3>{escape(title)}</h3>{report.table(head, lines)}" for title, head, lines in shown]
    sections = [("Table", "".join([*table, *map(report.text, [LEGEND, *notes.values()])]))]
    for name, path in figures.items():
        head, caption = _CAPTIONS[name]
        sections.append((head, report.text(caption) + report.figure(path, caption)))
    sections.append(report.made(command, asdict(s), runs.versions()))
    lead = (
        "Training samples with labels changed at random, and how well each method tells the clean ones from the rest."
    )
    return report.page(f"Data cleaning: {', '.join(titles.values())}", lead, sections)
