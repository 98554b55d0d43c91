"""The page of predictions: one HTML file that opens from disk, with no script and no network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from .. import on_page, runs

if TYPE_CHECKING:
    from .predict import Predictions

_SHOWN = 8  # the number of support pictures of each class that are shown
_CLOSE = 0.2  # a picture is marked if the probability of its second class is less than this behind the first


def write_page(path: Path, found: Predictions, title: str, command: str) -> list[Path]:
    """Write the page. Return its path, and those of the pictures that do not fit into it.

    Pictures that take more than about 15 MB are files in the folder NAME_files beside the page NAME.html.
    """
    env = Environment(loader=PackageLoader("bilevel_recipes.few_shot"), autoescape=True, trim_blocks=True)
    env.filters["breakable"] = _breakable
    chosen = _support_rows(found)
    examples = [found.pictures[0][i] for i in chosen]
    addresses, files = on_page.place([*examples, *found.pictures[1]], on_page.folder_beside(path))
    shown = dict(zip(chosen, addresses, strict=False))
    page = env.get_template("predictions.html").render(
        title=title,
        groups=_groups(found, shown, addresses[len(chosen) :]),
        figures=_figures(found),
        words=found.words,
        sentence=found.sentence(),
        warnings=[*found.support.warnings, *found.query.warnings],
        skipped=[(part.home.name, *row) for part in (found.support, found.query) for row in part.skipped],
        command=command,
        made=json.dumps(runs.versions(), indent=1),
        close=f"{100 * _CLOSE:.0f}",
    )
    # the name of a file may have characters that UTF-8 can't encode
    runs.write(path, page.encode("utf-8", "backslashreplace"))
    return [path, *files]


def _breakable(name: str) -> Markup:
    """Let a name go on in the next line behind _ - . and /, and not within its last word."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[_./-])", name))


def _support_rows(found: Predictions) -> list[int]:
    """Return the rows of the first support pictures of each class."""
    labels = found.support.labels
    return [i for name in found.classes for i in [i for i, label in enumerate(labels) if label == name][:_SHOWN]]


def _groups(found: Predictions, support: dict[int, Any], query: list[Any]) -> list[dict[str, Any]]:
    """Return for each class its support pictures and the queries assigned to it, the least certain first."""
    order, top = found.order, found.p.max(1)
    groups: list[dict[str, Any]] = []
    for k, name in enumerate(found.classes):
        rows = np.flatnonzero(order[:, 0] == k)
        rows = rows[np.argsort(top[rows], kind="stable")]
        cards = [_card(found, int(i), query[int(i)], int(order[i, 1])) for i in rows]
        total = sum(label == name for label in found.support.labels)
        examples = [address for i, address in support.items() if found.support.labels[i] == name]
        groups.append({"name": name, "anchor": f"class-{k}", "cards": cards, "examples": examples, "total": total})
    return groups


def _card(found: Predictions, row: int, address: Any, second: int) -> dict[str, Any]:
    top, next_best = float(found.p[row].max()), float(found.p[row, second])
    return {
        "name": found.query.names[row],
        "address": address,
        "percent": f"{100 * top:.0f}",
        "unsure": top - next_best < _CLOSE,
        "second": found.classes[second],
        "second_percent": f"{100 * next_best:.0f}",
    }


def _figures(found: Predictions) -> list[tuple[str, str, str]]:
    best = np.sort(found.p, axis=1)
    close = int((best[:, -1] - best[:, -2] < _CLOSE).sum())
    skipped = len(found.query.skipped)
    tried = f"{100 * found.right / found.tried:.0f}\u202f%" if found.tried else "unknown"
    why = f"{found.right} of {found.tried} support pictures" if found.tried else "one picture in each class"
    return [
        ("Pictures", f"{len(best):,}", f"{skipped} could not be read" if skipped else "all could be read"),
        ("Classes", str(len(found.classes)), f"learnt from {len(found.support.names)} pictures"),
        ("Leave-one-out accuracy", tried, why),
        ("Close calls", f"{close:,}", f"orange edge: the second class is less than {100 * _CLOSE:.0f} points behind"),
    ]
