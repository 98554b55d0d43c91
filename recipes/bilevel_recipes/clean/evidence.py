"""What helps a person to decide about a row: its nearest rows, a typical row of each class, rows that are the same."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.util import hash_pandas_object

from .rows import Rows
from .verdict import Verdict

SHOWN = 300  # the first rows of the page, whose nearest rows are shown as well; of the others, the labels are told
TWINS = 5  # the largest number of equal rows that are named

Places = NDArray[np.int64]


def gallery(rows: Rows, verdict: Verdict, positions: Places) -> tuple[Places, dict[str, Any]]:
    """Return the rows to show beside those at these positions, and what the page is told of them.

    near: for each position the nearest rows, as [label, number in the gallery or -1, name]. typical: for each class the
    number in the gallery of the row that is most surely of it, or -1. twins: for each position the rows of the same
    content, as [label, name].
    """
    typical = typical_rows(verdict)
    first = verdict.near[positions[:SHOWN]].ravel()
    shown = np.unique(np.concatenate([first, typical[typical >= 0]])).astype(np.int64)
    at = {int(row): k for k, row in enumerate(shown)}
    labels, same = verdict.labels, twins(rows)
    near = [
        [[int(labels[j]), at[int(j)] if k < SHOWN else -1, rows.names[j]] for j in verdict.near[i]]
        for k, i in enumerate(positions)
    ]
    equal = [[[int(labels[j]), rows.names[j]] for j in same.get(int(i), ()) if j != i][:TWINS] for i in positions]
    return shown, {"near": near, "typical": [at.get(int(row), -1) for row in typical], "twins": equal}


def typical_rows(verdict: Verdict) -> Places:
    """Return for each class the row with its label that is most surely right, and -1 for a class without rows."""
    found = np.full(len(verdict.noise), -1, np.int64)
    for c in range(len(found)):
        rows = np.flatnonzero((verdict.labels == c) & ~verdict.issue)
        if len(rows):
            found[c] = rows[np.argmax(verdict.probabilities[rows, c])]
    return found


def twins(rows: Rows) -> dict[int, list[int]]:
    """Return, for each row whose content occurs more than once, all rows with the same content."""
    if rows.content is None:
        return {}
    if isinstance(rows.content, pd.DataFrame):
        hashed: Any = hash_pandas_object  # its annotations are incomplete
        keys = hashed(rows.content, index=False).tolist()
    else:
        keys = [item if isinstance(item, str) else (item.shape, item.tobytes()) for item in rows.content]
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key].append(i)
    return {i: group for group in groups.values() if len(group) > 1 for i in group}


def together(order: Places, rows: Rows) -> Places:
    """Return the rows in this order, but those of the same content side by side."""
    same, left = twins(rows), dict.fromkeys(order.tolist())
    found: list[int] = []
    while left:
        row = next(iter(left))
        for i in [row, *(j for j in same.get(row, ()) if j != row)]:
            if i in left:
                del left[i]
                found.append(i)
    return np.array(found, np.int64)
