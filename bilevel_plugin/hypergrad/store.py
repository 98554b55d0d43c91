"""Where iterates are kept: side by side in a few large buffers.

A tensor that lives long, allocated among those that come and go with a step, leaves a hole in the heap next to it: a
list of iterates took several times its own size. Rows of a buffer that was allocated in one piece do not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..binding import State

Row = dict[tuple[torch.dtype, torch.device], Tensor]

_BUFFER = 32 * 2**20  # bytes that a buffer has at the most, unless a single row has more


class Store:
    """Copies of states in a buffer of some rows, then another of twice as many, and so on.

    A row is used again once its state was dropped.
    """

    def __init__(self, rows: int = 4) -> None:
        self._next = rows
        self._free: dict[Any, list[Row]] = defaultdict(list)
        self._rows: dict[int, tuple[Any, Row]] = {}

    def keep(self, z: State) -> State:
        """A copy of z."""
        sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        for x in z.values():
            sizes[x.dtype, x.device] += x.numel()
        layout = tuple(sizes.items())
        if not self._free[layout]:
            self._free[layout] = _rows(sizes, self._next)
            self._next *= 2
        row = self._free[layout].pop()
        used: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        kept: State = {}
        with torch.no_grad():
            for n, x in z.items():
                group = x.dtype, x.device
                kept[n] = row[group].as_strided(x.shape, _strides(x), row[group].storage_offset() + used[group])
                kept[n].copy_(x)
                used[group] += x.numel()
        self._rows[id(kept)] = layout, row
        return kept

    def replace(self, kept: State | None, z: State) -> State:
        """A copy of z in place of the one that was kept before."""
        new = self.keep(z)
        if kept is not None:
            self.drop(kept)
        return new

    def drop(self, kept: State) -> None:
        """Forget a state that `keep` returned."""
        layout, row = self._rows.pop(id(kept))
        self._free[layout].append(row)


def _rows(sizes: dict[tuple[torch.dtype, torch.device], int], rows: int) -> list[Row]:
    total = sum(size * dtype.itemsize for (dtype, _), size in sizes.items())
    rows = max(1, min(rows, _BUFFER // max(total, 1)))
    buffers = {(t, d): torch.empty(rows, size, dtype=t, device=d) for (t, d), size in sizes.items()}
    return [{group: buffer[i] for group, buffer in buffers.items()} for i in range(rows)]


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those of x where it has no gaps (channels-last stays so), else those of a plain tensor."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dense = x.numel() == 0 or (span == x.numel() and 0 not in x.stride())
    return x.stride() if dense else torch.empty(x.shape, device="meta").stride()
