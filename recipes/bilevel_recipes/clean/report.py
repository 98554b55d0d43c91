"""The page to review suspects on: one HTML file that opens from disk, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray

from .. import on_page, runs
from . import trust
from .calibration import Range
from .decisions import COLUMNS as DECISION_COLUMNS
from .decisions import random_order, review_key
from .evidence import gallery, together
from .rows import Rows
from .verdict import Verdict

SAMPLE = 100  # the number of rows of the random order that can be reviewed
REST = 200  # the number of further rows, after the suspects, that can be reviewed
COLUMNS = 60  # the largest number of table columns that are shown for a row
BARS, MATRIX, CONFUSIONS, BINS = 12, 30, 60, 40


def write_report(
    path: Path,
    rows: Rows,
    verdict: Verdict,
    *,
    title: str,
    settings: dict[str, Any],
    command: str,
    table: pd.DataFrame | None = None,
    decisions: pd.DataFrame | None = None,
) -> list[Path]:
    """Write the page, and return its path and that of the folder of its pictures, if there is one.

    Pictures that take more than about 15 MB are files in the folder NAME_files beside the page NAME.html. table: a
    comparison with other methods. decisions: earlier decisions about rows. The page shows them, and exports them again
    together with new ones.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    env = Environment(
        loader=PackageLoader("bilevel_recipes.clean"), autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    script, style = (_template_text(env, name) for name in ("report.js", "report.css"))
    data, folder = _data(path, rows, verdict, decisions)
    page = env.get_template("report.html").render(
        title=title,
        data=data,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        table=None if table is None else _grid(table),
        command=command,
        made=json.dumps({"settings": settings, "versions": runs.versions()}, indent=1, ensure_ascii=False, default=str),
        **_trust(rows, verdict),
        **_behind(rows, verdict),
    )
    # the name of a file may have characters that UTF-8 can't encode
    runs.write(path, page.encode("utf-8", "backslashreplace"))
    return [path] if folder is None else [path, folder]


def _template_text(env: Environment, name: str) -> str:
    assert env.loader is not None
    return env.loader.get_source(env, name)[0]


# --- the rows to review ----------------------------------------------------------------------------------------


def _data(
    path: Path, rows: Rows, verdict: Verdict, decisions: pd.DataFrame | None
) -> tuple[dict[str, Any], Path | None]:
    """Return the data for the script of the page, by column, and the folder of the pictures if there is one."""
    before = [] if decisions is None else decisions[DECISION_COLUMNS].to_numpy().tolist()
    groups, positions = _groups(rows, verdict, decisions)
    kind = rows.shown_kind or rows.kind
    columns = _columns(rows, verdict, positions, {line[0]: line for line in before})
    gone = [line for line in before if line[0] not in set(columns["row"])]
    beside, more = gallery(rows, verdict, positions)
    content, folder, look = _content(path, kind, rows, np.concatenate([positions, beside]))
    more["gallery"], content = content[len(positions) :], content[: len(positions)]
    for line in gone:  # a dropped row can be taken back, but nothing else is known about it
        columns["row"].append(line[0])
        columns["name"].append(line[1])
        columns["given"].append(rows.classes.index(line[2]))
        columns["suggested"].append(-1)
        for lists in (columns["score"], content):
            lists.append(None)
        for lists in (columns["others"], more["near"], more["twins"]):
            lists.append([])
    groups["earlier"][1] += len(gone)
    key = review_key(rows, decisions)
    seed = hashlib.sha256(json.dumps(before).encode()).hexdigest()[:16]
    data = {"key": key, "seed": seed, "kind": kind, "classes": rows.classes, "groups": groups, "earlier": before}
    return {**data, **columns, **more, "content": content, **look}, folder


def _groups(
    rows: Rows, verdict: Verdict, decisions: pd.DataFrame | None
) -> tuple[dict[str, list[int]], NDArray[np.int64]]:
    """Return the begin and end of each group of rows, and the positions of all rows, the most suspicious first."""
    before = set() if decisions is None else {int(row) for row in decisions["row"]}
    order = np.argsort(verdict.belief, kind="stable")
    new = np.array([int(row) not in before for row in rows.used], bool)
    where = {int(row): i for i, row in enumerate(rows.used)}
    sample = [row for row in random_order(rows, decisions) if row not in before][:SAMPLE]
    parts = {
        "suspects": together(order[(verdict.issue & new)[order]], rows),
        "rest": order[(~(verdict.issue | verdict.known) & new)[order]][:REST],
        "sample": np.array([where[row] for row in sample], np.int64),
        "doubted": np.array([i for i in verdict.doubted if new[i]], np.int64),
        "earlier": np.flatnonzero(~new),
    }
    ends = np.cumsum([0, *map(len, parts.values())]).tolist()
    groups = {name: [start, end] for name, start, end in zip(parts, ends, ends[1:], strict=False)}
    return groups, np.concatenate(list(parts.values())).astype(np.int64)


def _columns(
    rows: Rows, verdict: Verdict, positions: NDArray[np.int64], before: dict[int, list[Any]]
) -> dict[str, list[Any]]:
    """Return row number, name, given and suggested class, score and most probable other classes of these rows."""
    number = rows.used[positions].tolist()
    given = verdict.given[positions]
    p = verdict.probabilities[positions].astype(float)
    p[np.arange(len(p)), given] = -1
    best = np.argsort(-p, axis=1, kind="stable")[:, : min(3, p.shape[1] - 1)]
    called = verdict.issue[positions]
    suggested = np.where(called, verdict.suggested[positions], best[:, 0])
    for k, row in enumerate(number):
        if row in before and before[row][3] == "relabel":
            suggested[k] = rows.classes.index(before[row][4])
    others = [[[int(c), round(float(p[k, c]), 3)] for c in line] for k, line in enumerate(best)]
    belief = verdict.belief[positions]
    score = [round(s, 4) for s in belief.tolist()]
    names = [rows.names[i] for i in positions]
    return {"row": number, "name": names, "given": given.tolist(), "suggested": suggested.tolist(), "score": score,
            "others": others}  # fmt: skip


def _content(
    path: Path, kind: str, rows: Rows, positions: NDArray[np.int64]
) -> tuple[list[Any], Path | None, dict[str, Any]]:
    """Return what is shown of each row, the folder of the pictures if there is one, and how to show it."""
    source = rows.content if rows.shown is None else rows.shown
    folder = on_page.folder_beside(path)
    look: dict[str, Any] = {"columns": [], "pixelated": False, "large": False}
    images = [source[i] for i in positions] if kind == "images" else []
    addresses, written = on_page.place((None if x is None else on_page.shown(x) for x in images), folder)
    if kind == "images":
        content = addresses
        side = max((max(x.shape[:2]) for x in images if x is not None), default=0)
        grey = side <= on_page.TINY and all(on_page.is_grey(x) for x in images if x is not None)
        look |= {"pixelated": grey, "large": side > on_page.TINY}  # small photos are easier to recognise when smoothed
    elif source is None:
        content = [None] * len(positions)
    elif kind == "text":
        most = max(400, min(20_000, on_page.INSIDE // max(1, len(positions))))
        content = [_shortened(str(source[i]), most) for i in positions]
    else:
        frame = source if isinstance(source, pd.DataFrame) else rows.table.iloc[rows.used]
        frame = frame.iloc[positions, :COLUMNS]
        look["columns"] = [str(c) for c in frame.columns]
        content = [[_cell(v) for v in line] for line in frame.itertuples(index=False, name=None)]
    return content, folder if written else None, look


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters are in the data)"


def _cell(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return "–" if math.isnan(value) else f"{value:.6g}"
    return _shortened("–" if value is None or value is pd.NA else str(value), 300)


# --- the trust line --------------------------------------------------------------------------------------------


def _trust(rows: Rows, verdict: Verdict) -> dict[str, Any]:
    """Return the figures at the top: how much there is to do, and how far the result can be trusted."""
    suspects, checked = int(verdict.issue.sum()), int(verdict.checked.sum())
    known, reviewed = int(verdict.known.sum()), int((verdict.truth >= 0).sum())
    noise = verdict.noise_rate
    figures = [
        ("Rows", f"{len(rows.table):,}", f"{checked:,} checked, {len(rows.skipped):,} skipped"),
        ("Suspects", f"{suspects:,}", f"of {len(rows.used) - known:,} labels that nobody checked"),
        ("Estimated noise", _percent(noise.value), f"of those labels are wrong{_range(noise)}"),
        (
            "Expected precision", _percent(verdict.precision.value),
            f"expected share of suspects whose label is wrong{_range(verdict.precision)}",
        ),
    ]  # fmt: skip
    if checked:
        figures.append((
            "Accuracy on checked rows", _percent(verdict.checked_accuracy),
            f"cross-validated; {_percent(verdict.base_accuracy)} by always naming the most frequent class",
        ))  # fmt: skip
    if reviewed:
        left = verdict.left
        figures.append((
            "Wrong labels left", f"{left.value:,.0f}",
            f"90 %: {left.low:,.0f} to {left.high:,.0f}; {verdict.found:,} of {reviewed:,} reviewed ones were wrong. "
            + trust.advice(verdict),
        ))  # fmt: skip
    share = verdict.by_class
    order = [int(c) for c in np.argsort(-np.nan_to_num(share, nan=-1), kind="stable") if not math.isnan(share[c])]
    top = max((share[c] for c in order), default=0.0) or 1.0
    bars = [
        {"name": rows.classes[c], "width": f"{100 * share[c] / top:.1f}", "value": _percent(share[c])}
        for c in order[:BARS]
    ]
    return {
        "method": " ".join(filter(None, (rows.note, verdict.method))),
        "figures": [dict(zip(("label", "value", "note"), f, strict=True)) for f in figures],
        "bars": bars,
        "more_bars": len(order) - len(bars),
        "warnings": [*verdict.warnings, *rows.warnings],
    }


def _range(share: Range) -> str:
    return "" if math.isnan(share.low) else f"; 90 %: {100 * share.low:.1f} to {100 * share.high:.1f}\u202f%"


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:.1f}\u202f%"


# --- behind the verdict ----------------------------------------------------------------------------------------


def _behind(rows: Rows, verdict: Verdict) -> dict[str, Any]:
    """Return the tables and curves that explain the verdict."""
    return {
        "classes": rows.classes,
        "class_lines": _class_lines(rows, verdict),
        "noise": _noise(rows.classes, verdict.noise),
        "histogram": _histogram(verdict),
        "curves": _curves(verdict.history),
        "skipped": rows.skipped[["row", "name", "reason"]].to_numpy().tolist(),
    }


def _class_lines(rows: Rows, verdict: Verdict) -> list[list[str]]:
    size = len(rows.classes)
    counts = [np.bincount(rows.y[m], minlength=size) for m in (slice(None), verdict.known, verdict.issue)]
    return [
        [name, *(f"{count[c]:,}" for count in counts), _percent(verdict.by_class[c])]
        for c, name in enumerate(rows.classes)
    ]


def _noise(classes: Sequence[str], noise: NDArray[np.float64]) -> dict[str, Any]:
    """Return the whole matrix, or for many classes only the most frequent confusions."""
    if len(classes) <= MATRIX:
        return {"cells": noise.tolist(), "top": []}
    off = noise - np.diag(np.diag(noise))
    best = np.argsort(-off, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [np.unravel_index(i, off.shape) for i in best]
    return {"cells": [], "top": [[classes[c], classes[d], _percent(float(noise[c, d]))] for c, d in pairs]}


def _histogram(verdict: Verdict) -> dict[str, Any]:
    """Return bars of log(1 + count) of the unchecked rows, with suspects and others side by side in each bin."""
    edges = np.linspace(0, 1, BINS + 1)
    width = 600 / BINS
    counts = {
        suspect: np.histogram(verdict.score[~verdict.known & (verdict.issue == suspect)], edges)[0]
        for suspect in (True, False)
    }
    top = math.log1p(max(1, *(int(c.max()) for c in counts.values())))
    bars = [
        {
            "suspect": suspect,
            "x": f"{20 + width * (b + (0 if suspect else 0.48)):.1f}",
            "y": f"{170 - 150 * math.log1p(n) / top:.1f}",
            "height": f"{150 * math.log1p(n) / top:.1f}",
            "title": f"score {edges[b]:.3f} to {edges[b + 1]:.3f}: {n:,} {'suspects' if suspect else 'other rows'}",
        }
        for suspect, count in counts.items()
        for b, n in enumerate(count.tolist())
        if n
    ]
    return {"bars": bars, "width": f"{width * 0.44:.1f}"}


def _curves(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a curve for each figure that all outer steps have."""
    shared = [k for k in (history[0] if history else {}) if k != "step" and all(_is_number(h.get(k)) for h in history)]
    return [_curve(name, np.array([float(h[name]) for h in history])) for name in shared if len(history) > 1]


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _curve(name: str, y: NDArray[np.float64]) -> dict[str, Any]:
    x = np.linspace(10, 290, len(y))
    height = 105 - 95 * (y - y.min()) / (np.ptp(y) or 1)
    first, last, low, high = (f"{v:.4g}" for v in (y[0], y[-1], y.min(), y.max()))
    return {
        "name": name.replace("_", " "),
        "points": " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, height, strict=True)),
        "count": len(y),
        "first": first,
        "last": last,
        "low": low,
        "high": high,
    }


def _grid(table: pd.DataFrame) -> dict[str, Any]:
    """Return a frame as text. If its index has names, that is the first column."""
    frame = table if isinstance(table.index, pd.RangeIndex) else table.reset_index(names=table.index.name or "method")
    lines = [[_cell(v) for v in line] for line in frame.itertuples(index=False, name=None)]
    return {"header": [str(c) for c in frame.columns], "lines": lines}
