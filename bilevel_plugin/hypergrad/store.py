"""Where iterates are kept: side by side in a few large buffers.

A tensor that lives long, allocated among those that come and go with a step, leaves a hole in the heap next to it: a
list of iterates took several times its own size. Rows of a buffer that was allocated in one piece do not.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..graph import State

_BUFFER = 32 * 2**20  # bytes that a buffer has at the most, unless a single row has more


class Store:
    """Copies of states in a buffer of some rows, then in further ones of an eighth of all rows so far.

    A row is used again once its state was dropped, and no more than `most` rows are bought while one of them is free.
    With `offload` the rows are in (pinned) host memory.
    """

    def __init__(self, rows: int = 4, offload: bool = False) -> None:
        self._least, self._offload = rows, offload
        self.most: int | None = None
        self._buffers: list[tuple[tuple[str, ...], list[State]]] = []  # the names in a row, and the rows
        self._free: dict[tuple[str, ...], list[State]] = defaultdict(list)
        self._devices: dict[str, torch.device] = {}

    @property
    def rows(self) -> int:
        """How many rows were bought, free ones as well."""
        return sum(len(rows) for _, rows in self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, free ones as well."""
        return sum(x.nbytes for _, rows in self._buffers for row in rows for x in row.values())

    def keep(self, z: State) -> State:
        """A copy of z. With offload, `fetch` brings it back."""
        names = tuple(sorted(z))  # tensors keep shape and type from step to step; momentum adds some
        free = self._free[names]
        if not free:
            self._devices.update((n, x.device) for n, x in z.items())
            if self.most is not None and self.rows >= self.most:
                self.shrink(self.most)  # of rows that have other names
            wanted = max(self._least, self.rows // 8)
            free += self._buy(names, z, wanted if self.most is None else max(1, min(wanted, self.most - self.rows)))
        kept = free.pop()
        with torch.no_grad():
            for n, x in z.items():
                kept[n].copy_(x, non_blocking=True)
        return kept

    def fetch(self, kept: State) -> State:
        """What `keep` returned, on the devices that it was on."""
        return {n: x.to(self._devices[n], non_blocking=True) for n, x in kept.items()} if self._offload else kept

    def replace(self, kept: State | None, z: State) -> State:
        """A copy of z in place of the one that was kept before."""
        new = self.keep(z)
        if kept is not None:
            self.drop(kept)
        return new

    def drop(self, kept: State) -> None:
        """Forget a state that `keep` returned."""
        self._free[tuple(sorted(kept))].append(kept)

    def shrink(self, most: int) -> None:
        """Let go of buffers until no more than `most` rows are left, or none is free enough.

        States that live in a buffer move to free rows of others; whoever holds what `keep` returned holds them still.
        """
        self.most = most
        for buffer in sorted(self._buffers, key=lambda b: len(b[1])):
            names, rows = buffer
            if self.rows <= most:
                return
            free = self._free[names]
            inside = {id(row) for row in free} & {id(row) for row in rows}
            elsewhere = [row for row in free if id(row) not in inside]
            living = [row for row in rows if id(row) not in inside]
            missing = len(living) - len(elsewhere)
            if missing >= len(rows):
                continue
            self._buffers = [b for b in self._buffers if b is not buffer]
            if missing > 0:
                elsewhere += self._buy(names, living[0], missing)
            for row in living:
                to = elsewhere.pop()
                with torch.no_grad():
                    for n, x in row.items():
                        to[n].copy_(x)
                row.update(to)
                home = next(others for _, others in self._buffers if any(other is to for other in others))
                home[next(i for i, other in enumerate(home) if other is to)] = row
            self._free[names] = elsewhere

    def _buy(self, names: tuple[str, ...], z: State, rows: int) -> list[State]:
        homes = {
            n: torch.device("cpu") if self._offload and x.type != "meta" else x
            for n, x in ((n, self._devices[n]) for n in z)
        }
        pin = any(home != self._devices[n] for n, home in homes.items())
        total = sum(x.nbytes for x in z.values())
        rows = max(1, min(rows, _BUFFER // max(total, 1)))
        sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        places: dict[str, int] = {}
        for n, x in z.items():
            group = x.dtype, homes[n]
            places[n] = sizes[group]
            sizes[group] += x.numel()
        buffers = {(t, d): torch.empty(rows, size, dtype=t, device=d, pin_memory=pin) for (t, d), size in sizes.items()}
        bought = [
            {
                n: buffers[x.dtype, homes[n]].as_strided(x.shape, _strides(x), i * sizes[x.dtype, homes[n]] + places[n])
                for n, x in z.items()
            }
            for i in range(rows)
        ]
        self._buffers.append((names, bought))
        return list(bought)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those of x where it has no gaps (channels-last stays so), else those of a plain tensor."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dense = x.numel() == 0 or (span == x.numel() and 0 not in x.stride())
    return x.stride() if dense else torch.empty(x.shape, device="meta").stride()
