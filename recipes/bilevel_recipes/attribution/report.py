"""The page of the command: each query beside the rows that helped and hurt it, in one HTML file without a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from .. import on_page, runs
from .explain import Explained
from .rows import content_of
from .trust import GOOD

WORDS = {  # the headings of the two sides: of a query, and of all queries together
    "prediction": ("Rows that say {}", "Rows that speak against it", "Rows behind these answers", "Rows against them"),
    "label": ("Rows that say {}", "Rows that speak against it", "Helped: without this row the mean loss rises",
              "Hurt: without this row the mean loss falls"),
}  # fmt: skip
SHOWN = 6  # rows that helped, and as many that hurt, of each query
CELLS, CHARACTERS = 8, 320


def write_report(
    path: Path, found: Explained, *, title: str, about: str, settings: dict[str, Any], command: str
) -> list[Path]:
    """Write the page, and return its path and that of the folder of its pictures, if there is one."""
    look = Environment(loader=PackageLoader("bilevel_recipes.clean"), autoescape=True)
    env = Environment(
        loader=PackageLoader("bilevel_recipes.attribution"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    style = _text(look, "report.css") + _text(env, "attribution.css")
    items, folder = _items(path, found)
    page = env.get_template("attribution.html").render(
        title=title, style=Markup(style), figures=_figures(found), verdict=found.trust.verdict(),
        together=_pair(found.influence.together(count=2 * SHOWN), items, found),
        queries=[_query(found, q, items) for q in range(len(found.said))],
        words=WORDS[about], good=found.trust.agreement >= GOOD, about=_about(found),
        method=f"{found.both.rows.note} {found.both.words}", command=command,
        made=json.dumps({"settings": settings, "versions": runs.versions()}, indent=1, ensure_ascii=False, default=str),
    )  # fmt: skip
    runs.write(path, page.encode("utf-8", "backslashreplace"))
    return [path] if folder is None else [path, folder]


def _text(env: Environment, name: str) -> str:
    assert env.loader is not None
    return env.loader.get_source(env, name)[0]


def _figures(found: Explained) -> list[dict[str, str]]:
    train, asked = len(found.both.train), len(found.said)
    lines = [("Rows", f"{train:,}", f"{asked} queries are explained")]
    if not np.isnan(found.accuracy):
        lines.append(("Right answers", f"{found.accuracy:.1%}", "of all queries that have a label"))
    return [dict(zip(("label", "value", "note"), line, strict=True)) for line in [*lines, *found.trust.lines()]]


def _about(found: Explained) -> str:
    share = found.influence.share
    which = "one row" if found.influence.weight == 1 else f"{share:.1%} of the rows"
    return (
        f"The question is what happens without {which}. A row helped if the loss of the query rises without it. Its "
        "share is that of its effect in the effects of all rows, regardless of their signs."
    )


def _query(found: Explained, q: int, items: dict[int, dict[str, Any]]) -> dict[str, Any]:
    rows, position = found.both.rows, int(found.both.queries[q])
    return {
        **items[position],
        "name": rows.names[position],
        "said": rows.classes[found.said[q]],
        "sure": f"{found.sure[q]:.0%}",
        "label": rows.classes[rows.y[position]] if found.both.labelled else "",
        "asked": rows.classes[found.asked[q]],
        "wrong": found.both.labelled and found.said[q] != rows.y[position],
        **_pair(found.influence.top(q, SHOWN), items, found),
    }


def _pair(lines: pd.DataFrame, items: dict[int, dict[str, Any]], found: Explained) -> dict[str, Any]:
    rows = found.both.rows
    sides: dict[str, list[dict[str, Any]]] = {"helped": [], "hurt": []}
    for line in lines.to_dict("records"):
        position = int(found.both.train[line["row"]])
        sides[line["did"]].append(
            {**items[position], "name": rows.names[position], "label": rows.classes[rows.y[position]],
             "share": f"{line['share']:.1%}", "effect": f"{line['effect']:+.2e}"}
        )  # fmt: skip
    return sides


def _items(path: Path, found: Explained) -> tuple[dict[int, dict[str, Any]], Path | None]:
    """Return what is shown of each row that occurs on the page, by its position, and the folder of the pictures."""
    lists = [found.influence.together(count=2 * SHOWN)["row"]]
    lists += [found.influence.top(q, SHOWN)["row"] for q in range(len(found.said))]
    used = [int(found.both.train[r]) for r in pd.concat(lists).unique()] + [int(i) for i in found.both.queries]
    kind, content = content_of(found.both.rows)
    if kind != "images":
        return {i: {"words": _words(content, i)} for i in used}, None
    folder = on_page.folder_beside(path)
    images = [content[i] for i in used]
    places, written = on_page.place((None if x is None else on_page.shown(x) for x in images), folder)
    tiny = all(x is None or max(x.shape[:2]) <= on_page.TINY for x in images)
    return {i: {"picture": place, "tiny": tiny} for i, place in zip(used, places, strict=True)}, (
        folder if written else None
    )


def _words(content: Any, i: int) -> str:
    if isinstance(content, pd.DataFrame):
        line = content.iloc[i]
        cells = [f"{c}: {v:.4g}" if isinstance(v, float) else f"{c}: {v}" for c, v in list(line.items())[:CELLS]]
        return " · ".join(cells) + (" …" if len(line) > CELLS else "")
    text = str(content[i])
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
