"""What a study leaves behind: results.json, curves.csv, weights.csv, plots, report.html, and the table on screen."""

from __future__ import annotations

import math
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .. import plots, report, runs, tables
from ..data import Images, Split
from .score import PAPER
from .study import Job, Settings, jobs, problem, source, summary

Record = dict[str, Any]
LEGEND = (
    "F1 clean is the paper's figure: keeping a clean sample is the positive prediction. F1 corrupted is that of the "
    "list of suspects. Test accuracy is that of a model trained on what was kept. Steps to gd's F1: outer steps "
    "until the mean F1 clean is what gd has at its end. Mean ± standard deviation over the seeds."
)
HEADER = ["method", "F1 clean", "F1 corrupted", "test accuracy", "seconds", "steps to gd's F1", "paper: F1 clean"]


def write(s: Settings, records: list[Record], folder: Path, command: str) -> tuple[str, Path]:
    """Write everything into the folder; returns the table in plain text and the path of the report."""
    rows, titles = summary(records), _titles(s)
    paper = {t: {str(rho): pair for rho, pair in PAPER[t].items()} for t in titles.values() if t in PAPER}
    runs.write_results(folder, command, s, data=titles, table=rows, paper_f1_clean_improved_basic=paper, runs=records)
    runs.write_text(folder / "curves.csv", _curves_csv(records))
    featured = next((j for j in jobs(s) if j.judge), None) or next(jobs(s))
    runs.write_text(folder / "weights.csv", weights_csv(s, featured, folder))
    figures = draw(s, records, rows, featured, folder)
    runs.write_text(folder / "table.md", markdown(rows, titles))
    runs.write_text(folder / "report.html", _report(s, rows, featured, figures, folder, command))
    return screen(rows, titles), folder / "report.html"


def _source(s: Settings, dataset: str) -> Images:
    return source(dataset, s.data_root, s.download, s.image_size)


def _titles(s: Settings) -> dict[str, str]:
    return {d: _source(s, d).name for d in s.dataset}


# --- tables ----------------------------------------------------------------------------------------------------


def blocks(rows: list[Record], titles: dict[str, str]) -> list[tables.Block]:
    """One table for each cell, in the order of the study."""
    cells: dict[tuple[Any, ...], list[list[str]]] = {}
    for r in rows:
        cell = (r["dataset"], r["model"], r["rho"], r["validation"])
        line = [
            r["label"],
            *(tables.spread(r, key) for key in ("f1_clean", "f1_corrupted", "test_accuracy")),
        ]
        reached = "" if r.get("steps_to_gd") is None else str(r["steps_to_gd"])
        cells.setdefault(cell, []).append([*line, tables.spread(r, "seconds", ".1f"), reached, _paper(r, titles)])
    return [tables.block(_cell_title(cell, titles), HEADER, lines) for cell, lines in cells.items()]


def _paper(row: Record, titles: dict[str, str]) -> str:
    """The paper's figure for this row, if it has one: its improved model is bigsam, its basic one gd."""
    improved, basic = PAPER.get(titles[row["dataset"]], {}).get(row["rho"], (None, None))
    for name, figure in (("bigsam (validation", improved), ("gd (validation", basic)):
        if figure is not None and row["label"].startswith(name):
            return f"{figure:.3f}"
    return ""


def _cell_title(cell: tuple[Any, ...], titles: dict[str, str]) -> str:
    dataset, model, rho, validation = cell
    parts = [titles[dataset], model] if dataset.endswith((".npz", ".csv")) else [titles[dataset], model, f"ρ = {rho:g}"]
    return ", ".join(parts + ([f"{validation} checked samples"] if validation else []))


def screen(rows: list[Record], titles: dict[str, str]) -> str:
    """The table in plain text."""
    return tables.screen(blocks(rows, titles))


def markdown(rows: list[Record], titles: dict[str, str]) -> str:
    return tables.markdown(blocks(rows, titles))


def _curves_csv(records: list[Record]) -> str:
    keys = ["dataset", "model", "rho", "validation", "method", "judge", "every", "steps", "seed"]
    columns = ["step", "seconds", "g", "kept", "f1_clean", "f1_corrupted"]
    rows = [[r[k] for k in keys] + [h.get(c, "") for c in columns] for r in records for h in r["history"]]
    return tables.csv_text([*keys, *columns], rows)


def _verdicts(job: Job, folder: Path) -> tuple[Any, Any, Any]:
    """λ and suggested labels of a finished run, and the order from the most suspicious on."""
    state = runs.load(folder / "runs" / job.file)
    if state is None or "record" not in state:
        raise FileNotFoundError(f"recipes: {folder / 'runs' / job.file} is missing; run again with --resume")
    lam = state["lam"].numpy()
    return lam, state["suggested"].numpy(), np.argsort(lam, kind="stable")


def weights_csv(s: Settings, job: Job, folder: Path) -> str:
    """Every training sample, the most suspicious first."""
    p = problem(s, job)
    images = p.split.source
    lam, suggested, order = _verdicts(job, folder)
    header = ["index", "given_label", "suggested_label", "weight", "verdict"]
    header += ["file"] * bool(images.files) + ["clean"] * (p.split.clean is not None)
    rows: list[list[Any]] = []
    for i in order:
        row = int(p.split.rows[i])
        line = [row, images.classes[p.split.y[i]], images.classes[suggested[i]], f"{1 / (1 + math.exp(-lam[i])):.6f}",
                "keep" if lam[i] >= 0 else "mislabelled"]  # fmt: skip
        line += [images.files[row]] if images.files else []
        rows.append(line + ([int(p.split.clean[i])] if p.split.clean is not None else []))
    return tables.csv_text(header, rows)


# --- figures ---------------------------------------------------------------------------------------------------


def draw(s: Settings, records: list[Record], rows: list[Record], featured: Job, folder: Path) -> dict[str, Path]:
    """The plots that this study has the data for."""
    figures: dict[str, Path] = {}
    with_curves = [r for r in records if r["history"] and "f1_clean" in r["history"][0]]
    if with_curves:
        for name, axis, label, log in (
            ("f1_by_step", "step", "outer step", False), ("f1_by_time", "seconds", "seconds", True),
        ):  # fmt: skip
            figures[name] = _curve_figure(s, with_curves, rows, axis, label, log, folder / name)
    p = problem(s, featured)
    lam, suggested, _ = _verdicts(featured, folder)
    if featured.judge:
        clean = p.split.clean
        groups = {"all": lam} if clean is None else {"clean": lam[clean], "corrupted": lam[~clean]}
        figure, (ax,) = plots.panels([featured.label], 5.5)
        plots.histogram(ax, groups, "λ (below 0: called mislabelled)")
        figures["histogram"] = plots.save(figure, folder / "histogram")
    bad = lam < 0
    n = p.classes
    table = np.zeros((n, n), int)
    np.add.at(table, (p.split.y[bad], suggested[bad]), 1)
    figure, (ax,) = plots.panels([f"{int(bad.sum())} samples called mislabelled"], 5.5, 5)
    plots.confusion(ax, table, p.split.source.classes, "suggested label", "given label")
    figures["confusion"] = plots.save(figure, folder / "confusion")
    return figures


def _curve_figure(
    s: Settings, records: list[Record], rows: list[Record], axis: str, label: str, log: bool, path: Path
) -> Path:
    cells = list(dict.fromkeys((r["dataset"], r["model"], r["rho"], r["validation"]) for r in records))
    titles = _titles(s)
    figure, axes = plots.panels([_cell_title(c, titles) for c in cells])
    for ax, cell in zip(axes, cells, strict=True):
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        for r in records:
            if (r["dataset"], r["model"], r["rho"], r["validation"]) == cell:
                points = [h[axis] for h in r["history"]], [h["f1_clean"] for h in r["history"]]
                lines.setdefault(r["label"], []).append(points)
        plots.curves(ax, lines, label, "F1 of the clean class", log)
        for r in rows:
            if (r["dataset"], r["model"], r["rho"], r["validation"]) == cell and r["label"] == "validation-only":
                plots.level(ax, r["f1_clean"], "validation-only")
        paper = PAPER.get(titles[cell[0]], {}).get(cell[2])
        if paper is not None and "validation" in s.judge:
            plots.level(ax, paper[0], "paper, improved", style=":")
    plots.legend(figure, axes)
    return plots.save(figure, path)


# --- report ----------------------------------------------------------------------------------------------------


def _report(
    s: Settings, rows: list[Record], featured: Job, figures: dict[str, Path], folder: Path, command: str
) -> str:
    titles, notes = _titles(s), [images.note for d in s.dataset if (images := _source(s, d)).note]
    p = problem(s, featured)
    lam, suggested, order = _verdicts(featured, folder)
    bad, checked = int((lam < 0).sum()), len(p.validation[1])
    lead = f"{len(lam)} samples judged with {checked} checked ones: {bad} are called mislabelled ({featured.label})."
    shown = [f"<h3>{escape(title)}</h3>{report.table(head, lines)}" for title, head, lines in blocks(rows, titles)]
    sections = [("Table", "".join([*shown, *map(report.text, [LEGEND, *notes])]))]
    words = {
        "f1_by_step": ("F1 against outer step", "F1 of the clean class after each outer step."),
        "f1_by_time": ("F1 against time", "The same against seconds of this machine."),
        "histogram": ("Weights", "λ of each training sample in the run shown; below 0 is called mislabelled."),
        "confusion": ("Given and suggested labels", "Of the samples called mislabelled."),
    }
    for name, path in figures.items():
        head, caption = words[name]
        sections.append((head, report.text(caption) + report.figure(path, caption)))
    sections.append(("The most suspicious samples", _suspects(p.split, lam, suggested, order)))
    sections.append(report.made(command, asdict(s), runs.versions()))
    return report.page(f"Data cleaning: {', '.join(titles.values())}", lead, sections)


def _suspects(split: Split, lam: Any, suggested: Any, order: Any, most: int = 60) -> str:
    images = split.source
    worst = [i for i in order[:most] if lam[i] < 0]
    if not worst:
        return report.text("No sample is called mislabelled.")

    def caption(i: int) -> str:
        row = int(split.rows[i])
        name = images.files[row] if images.files else f"row {row}"
        return f"{name}: {images.classes[split.y[i]]} → {images.classes[suggested[i]]}"

    words = report.text("The most suspicious first: given label → suggested label. All samples are in weights.csv.")
    if split.x.ndim == 2:
        lines = [[caption(i), f"{lam[i]:.2f}"] for i in worst]
        return words + report.table(["sample: given → suggested", "λ"], lines)
    return words + report.gallery((split.x[i], caption(i)) for i in worst)
