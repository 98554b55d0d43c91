"""Training rows and queries of a file or folder, read together by the readers of `bilevel-clean`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..clean.content import ABOUT_LABELS
from ..clean.features import features
from ..clean.read import fingerprint, read
from ..clean.rows import Rows, take
from ..clean.sources import Source, find_column, images_of_classes, open_source

Array = NDArray[Any]


@dataclass(frozen=True)
class Both:
    """Training rows and queries with their features, in one numbering.

    rows: all of them, as `bilevel-clean` reads them. train, queries: their positions in it.
    labelled: whether the queries came with labels.
    """

    rows: Rows
    x: Array
    words: str
    train: Array
    queries: Array
    labelled: bool

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.rows)

    def only(self, chosen: Array) -> Both:
        """The same with some of the queries."""
        return replace(self, queries=self.queries[chosen])

    def name(self, position: int) -> str:
        return self.rows.names[position]


def read_both(
    data: Any, queries: Any, *, kind: str = "auto", seed: int = 0, label: str | None = None, image: str | None = None,
    text: str | None = None, columns: tuple[str, ...] | None = None,
) -> Both:  # fmt: skip
    """Read training rows and queries: two tables with the same columns, two folders of images, or two .npz files.

    The label of a query is what the model should have said. A table of queries without that column is read too.
    """
    sources = [_open(of, what, label, text) for of, what in ((data, "the data"), (queries, "--queries"))]
    column = find_column(sources[0].table, "label" if label is None else label, "label")
    labelled = column in sources[1].table
    if not labelled:
        first = sources[0].table[column].dropna().iloc[0]
        sources[1].table = sources[1].table.assign(**{str(column): first})
    _refuse_columns(sources[0].table, sources[1].table, column)
    count = len(sources[0].table)
    given, how = _joined(sources, column)
    marks = _marks(pd.concat([s.table[column] for s in sources]))
    if isinstance(given, pd.DataFrame):
        how |= {"image": image or how.get("image"), "text": text, "columns": columns}
    try:
        rows = read(given, checked=marks if isinstance(given, pd.DataFrame) else None, **how)
    except ValueError as error:
        raise ValueError(str(error).replace("bilevel-clean:", "bilevel-attribute:")) from error
    found = features(rows, kind, seed=seed)
    asked = rows.used >= count
    both = Both(rows, found.x, found.words, np.flatnonzero(~asked), np.flatnonzero(asked), labelled)
    _refuse_rows(both)
    return both


def _open(data: Any, what: str, label: Any, text: Any) -> Source:
    if isinstance(data, (str, Path)) and Path(data).is_dir():
        files, _ = images_of_classes(Path(data))
        table = pd.DataFrame({"image": files, "label": [f.split("/")[0] if "/" in f else None for f in files]})
        source = Source(str(data), table, Path(data), image="image")
        return source if table["label"].notna().any() else replace(source, table=table[["image"]])
    try:
        return open_source(data, [str(n) for n in ("label" if label is None else label, text) if n is not None], None)
    except (ValueError, OSError, TypeError) as error:
        raise ValueError(f"{str(error).replace('bilevel-clean: ', '')} (This is {what}.)") from error


def _joined(sources: list[Source], column: Any) -> tuple[Any, dict[str, Any]]:
    """Return one table or one set of arrays, and how to read it."""
    first, second = sources
    if (first.x is None) != (second.x is None):
        raise ValueError("bilevel-attribute: the data and --queries have to be of one kind: tables, folders or .npz.")
    table = pd.concat([first.table, second.table], ignore_index=True)
    if first.x is not None and second.x is not None:
        if first.x.shape[1:] != second.x.shape[1:]:
            raise ValueError(
                f"bilevel-attribute: rows of the data have the shape {first.x.shape[1:]}, and those of --queries "
                f"{second.x.shape[1:]}."
            )
        x = np.concatenate([first.x, second.x])
        names = None if first.names is None or second.names is None else np.array([*first.names, *second.names])
        parts = {"x": x, "y": table[column].to_numpy(), "checked": _marks(table[column])}
        return {**parts, **({} if names is None else {"names": names})}, {}
    how: dict[str, Any] = {"label": column}
    if first.image is not None:
        folders = [Path(os.path.abspath(s.folder)) for s in sources]
        root = Path(os.path.commonpath(folders))
        table["image"] = [
            (folder / name).relative_to(root).as_posix()
            for folder, s in zip(folders, sources, strict=True) for name in s.table["image"]
        ]  # fmt: skip
        return table, {**how, "image": "image", "root": root}
    return table, {**how, "root": first.folder} if first.folder.is_dir() else how


def _marks(labels: pd.Series) -> Array:
    """Return marks for a reader that wants some rows of every class to be checked. Nothing else is made of them."""
    return (labels.groupby(labels.to_numpy()).cumcount() % 2 == 0).to_numpy()


def _refuse_columns(data: pd.DataFrame, queries: pd.DataFrame, label: Any) -> None:
    missing = [str(c) for c in data if c not in queries and c not in ABOUT_LABELS and c != label]
    if missing:
        raise ValueError(
            f"bilevel-attribute: --queries has no column {', '.join(missing)}; it has {', '.join(map(str, queries))}. "
            "It needs the columns of the data; that of the labels may be left out."
        )


def _refuse_rows(both: Both) -> None:
    rows = both.rows
    if not len(both.queries):
        reasons = "; ".join(rows.skipped["reason"].astype(str).unique()[:3])
        raise ValueError(f"bilevel-attribute: no row of --queries can be used ({reasons or 'it has none'}).")
    unknown = sorted(set(rows.y[both.queries].tolist()) - set(rows.y[both.train].tolist()))
    if unknown:
        names = ", ".join(repr(rows.classes[c]) for c in unknown)
        raise ValueError(
            f"bilevel-attribute: no training row has the label {names}, which --queries has. Correct those labels, or "
            "leave out the column of the labels in --queries."
        )


def content_of(rows: Rows) -> tuple[str, Any]:
    """Return what can be shown of the rows: its kind, and the items."""
    if rows.shown is not None and rows.shown_kind is not None:
        return rows.shown_kind, rows.shown
    if rows.kind == "embeddings":
        return "table", take(rows.table, rows.used)
    return rows.kind, rows.content
