"""The results of a study: results.json, curves.csv, table.md, plots, report.html, and the table on screen."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import plots, report, runs, tables
from . import sources
from .study import CELL, Settings, elsewhere, images, summary

Record = dict[str, Any]
LEGEND = (
    "Accuracy on the queries of test tasks, whose classes were never trained on, in %, with its 95 % interval: over "
    "the tasks for one seed, over the seeds for several. Heads start from zero and take K steps of rate t on the "
    "support set alone; with --adapt all, encoder and head take them from the start that was learnt. After "
    "k: the same encoder with another number of steps. Nearest mean: no head, the nearest class mean of the same "
    "features. With query labels: K BiG-SAM steps that see the labels they are judged by, as "
    "the paper's wording would also allow; no user could take them. Seconds of training, evaluation not counted."
)


def write(s: Settings, records: list[Record], folder: Path, command: str) -> tuple[str, Path]:
    """Write all results to the folder. Return the table in plain text, and the path of the report."""
    rows = summary(records)
    found = {d: sources.load(d, s.data_root, s.download) for d in s.dataset}
    titles = {d: source.name for d, source in found.items()}
    runs.write_results(folder, command, s, data=titles, table=rows, runs=records)
    runs.write_text(folder / "curves.csv", _curves_csv([*records, *elsewhere(records)]))
    shown = blocks(rows, titles)
    runs.write_text(folder / "table.md", tables.markdown(shown))
    notes = [source.note for source in found.values() if source.note]
    runs.write_text(folder / "report.html", _report(s, records, titles, shown, notes, folder, command))
    return tables.screen(shown), folder / "report.html"


def cell_title(cell: tuple[Any, ...], titles: dict[str, str]) -> str:
    dataset, model, ways, shots = cell
    return f"{titles[dataset]}, {model}, {ways}-way {shots}-shot"


def blocks(rows: list[Record], titles: dict[str, str]) -> list[tables.Block]:
    """Return a table for each cell, in the order of the study."""
    counts = sorted({int(name) for r in rows for name in r["scores"] if name.isdigit()})
    header = ["method", "accuracy", *(f"after {k}" for k in counts), "nearest mean", "with query labels", "seconds"]
    cells: dict[tuple[Any, ...], list[list[str]]] = {}
    for r in rows:
        score = r["scores"]
        head = score[str(r["steps"])]
        line = [r["label"], f"{100 * head['mean']:.2f} ± {100 * head['interval']:.2f}"]
        line += [f"{100 * score[str(k)]['mean']:.2f}" if str(k) in score else "" for k in counts]
        line += [f"{100 * score[name]['mean']:.2f}" if name in score else "" for name in ("nearest mean", "leaky")]
        cells.setdefault(tuple(r[k] for k in CELL), []).append([*line, f"{r['seconds']:.0f}"])
    return [tables.block(cell_title(cell, titles), header, lines) for cell, lines in cells.items()]


def _curves_csv(records: list[Record]) -> str:
    keys = [*CELL, "label", "method", "steps", "every", "lr", "seed"]
    columns = ["step", "seconds", "mean", "interval"]
    rows = [[r[k] for k in keys] + [h[c] for c in columns] for r in records for h in r["history"]]
    return tables.csv_text([*keys, *columns], rows)


def curve_figure(records: list[Record], titles: dict[str, str], axis: str, label: str, path: Path) -> Path:
    """Draw accuracy against outer steps or seconds, with a panel for each cell, as in the paper's figures."""
    cells = list(dict.fromkeys(tuple(r[k] for k in CELL) for r in records))
    figure, axes = plots.panels([cell_title(c, titles) for c in cells])
    for ax, cell in zip(axes, cells, strict=True):
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        for r in records:
            if tuple(r[k] for k in CELL) == cell:
                points = [h[axis] for h in r["history"]], [100 * h["mean"] for h in r["history"]]
                lines.setdefault(r["label"], []).append(points)
        plots.curves(ax, lines, label, "accuracy on new classes, %")
    plots.legend(figure, axes)
    return plots.save(figure, path)


def _report(
    s: Settings, records: list[Record], titles: dict[str, str], shown: list[tables.Block], notes: list[str],
    folder: Path, command: str,
) -> str:  # fmt: skip
    html = [f"<h3>{escape(title)}</h3>{report.table(head, lines)}" for title, head, lines in shown]
    sections = [("Table", "".join([*html, *map(report.text, [LEGEND, *notes])]))]
    trained = [r for r in [*records, *elsewhere(records)] if r["history"]]
    if trained:
        for name, axis, label in (("step", "step", "outer step"), ("time", "seconds", "seconds")):
            figure = curve_figure(trained, titles, axis, label, folder / f"accuracy_by_{name}")
            caption = f"Accuracy on tasks of new classes against {label}, over {s.curve_episodes} tasks each time."
            sections.append((f"Accuracy against {label}", report.text(caption) + report.figure(figure, caption)))
    sections.append(("A task", _task(s)))
    sections.append(report.made(command, asdict(s), runs.versions()))
    lead = f"Encoders trained in {s.outer_steps} outer steps, each judged on {s.test_episodes} tasks of new classes."
    return report.page(f"Few-shot: {', '.join(titles.values())}", lead, sections)


def _task(s: Settings) -> str:
    """Return one test task of the first cell: its support set, then some queries."""
    test = images(s.dataset[0], s.data_root, s.download, s.turns, s.device, s.test_on)
    draw = torch.Generator().manual_seed(1)
    items = test.draw(1, s.ways[0], s.shots[0] + s.queries, draw)[0, : s.shots[0] + 2]
    pixels = test[items].cpu() * test.scale[1][:, None, None] + test.scale[0][:, None, None]
    pictures = pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    words = report.text("A test task: the images of each class to learn from, then two of its queries.")
    named = (
        (np.asarray(pictures[i, c]), f"{'support' if i < s.shots[0] else 'query'}, class {c}")
        for i in range(len(pictures))
        for c in range(pictures.shape[1])
    )
    return words + report.gallery(named)
