"""The labelled rows that somebody wants cleaned, whatever file they came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Kind = Literal["images", "text", "table", "embeddings"]


@dataclass(frozen=True)
class Rows:
    """Labelled rows, and which of the labels a person has verified.

    table: the input, one line for each of its rows, with the user's own index and columns.
    used: the positions in table of the M rows that can be judged; all that follows is aligned with it.
    y: M labels as numbers, of classes. checked: M booleans.
    content: M images (a list of uint8 arrays H × W or H × W × 3, or one such array), M texts, an M-row frame of
    columns, or an M × D array of embeddings.
    names: how the user calls each row: a file name, or its index.
    skipped: position, name and reason of every other row.
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
