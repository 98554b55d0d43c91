"""The labelled rows to clean, whatever file they came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import util

Kind = Literal["images", "text", "table", "embeddings"]


@dataclass(frozen=True)
class Rows:
    """Labelled rows, and which of the labels a person has verified.

    table: the input, one line for each of its rows, with the user's own index and columns.
    used: the positions in table of the M rows that can be judged. The fields below are aligned with it.
    y: M labels as numbers, of classes, as the data has them. checked: M booleans, true for the rows of a random sample
    whose labels were verified. truth: M numbers, the right label of each row of which it is known beside the given one,
    and -1 elsewhere; None if there is no such row.
    content: M images (a list of uint8 arrays H × W or H × W × 3, or one such array), M texts, an M-row frame of
    columns (float64 for numbers, category for everything else), or an M × D array of embeddings.
    names: the name of each row for the user: a file name, or its index.
    skipped: position, name and reason of every other row.
    note: a sentence that says which part of the input is the content.
    warnings: a sentence for each thing in the input that is probably a mistake.
    label: the column of table with the given labels. values: each class as it is written in that column, where
    `classes` has its name.
    probabilities: M × classes, the probability of each class by models that were not trained on that row, if given.
    shown, shown_kind: what to show of the M rows if their content is embeddings: images, texts or columns. An image
    that could not be read is None.
    """

    title: str
    kind: Kind
    table: pd.DataFrame
    used: NDArray[np.int64]
    y: NDArray[np.int64]
    checked: NDArray[np.bool_]
    classes: list[str]
    content: Any
    names: list[str]
    skipped: pd.DataFrame  # columns: row, name, reason
    note: str = ""
    warnings: list[str] = field(default_factory=list[str])
    label: Any = "label"
    values: list[Any] = field(default_factory=list[Any])
    shown: Any = None
    shown_kind: Kind | None = None
    truth: NDArray[np.int64] | None = None
    probabilities: NDArray[np.float32] | None = None

    @property
    def right(self) -> NDArray[np.int64]:
        """The right label of each row where it is known beside the given one, and -1 elsewhere."""
        return np.full(len(self.y), -1) if self.truth is None else self.truth

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each row from now on: the right one where it is known, and the given one elsewhere."""
        return np.where(self.right >= 0, self.right, self.y)

    @property
    def known(self) -> NDArray[np.bool_]:
        """The rows that a person has looked at."""
        return self.checked | (self.right >= 0)


def take(content: Any, positions: NDArray[np.int64]) -> Any:
    """Return these entries of a list, an array or a frame, or None for None."""
    if content is None:
        return None
    if isinstance(content, pd.DataFrame):
        return content.iloc[positions]
    return content[positions] if isinstance(content, np.ndarray) else [content[i] for i in positions]


def fingerprint(rows: Rows) -> str:
    """Return a SHA-256 of labels, checked marks, content and class names, which changes if one of them does."""
    digest = hashlib.sha256(repr((rows.kind, rows.classes, len(rows.y))).encode())
    more = [part for part in (rows.truth, rows.probabilities) if part is not None]
    for part in (rows.y, rows.checked, *more, *_arrays(rows.content)):
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _arrays(content: Any) -> list[NDArray[Any]]:
    """Return the whole content as arrays of plain bytes or numbers."""
    if content is None:
        return []
    if isinstance(content, pd.DataFrame):
        head = np.frombuffer(repr(list(content.columns)).encode(), np.uint8)
        hashes: Any = util.hash_pandas_object  # its module is loaded lazily, which hides the type
        return [head, hashes(content, index=False).to_numpy()]
    if isinstance(content, np.ndarray):
        return [content]
    return [np.frombuffer(i.encode("utf-8", "surrogatepass"), np.uint8) if isinstance(i, str) else i for i in content]
