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

    A row is used again once its state was dropped. With `offload` the rows are in (pinned) host memory.
    """

    def __init__(self, rows: int = 4, offload: bool = False) -> None:
        self._least, self._offload = rows, offload
        self._count = 0
        self._free: dict[tuple[str, ...], list[State]] = defaultdict(list)
        self._devices: dict[str, torch.device] = {}

    def keep(self, z: State) -> State:
        """A copy of z. With offload, `fetch` brings it back."""
        free = self._free[tuple(z)]  # tensors keep shape and type from step to step; momentum adds some
        if not free:
            free += self._rows(z, max(self._least, self._count // 8))
            self._count += len(free)
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
        self._free[tuple(kept)].append(kept)

    def _rows(self, z: State, rows: int) -> list[State]:
        self._devices.update((n, x.device) for n, x in z.items())
        homes = {
            n: torch.device("cpu") if self._offload and x.device.type != "meta" else x.device for n, x in z.items()
        }
        pin = any(homes[n] != x.device for n, x in z.items())
        total = sum(x.nbytes for x in z.values())
        rows = max(1, min(rows, _BUFFER // max(total, 1)))
        sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        places: dict[str, int] = {}
        for n, x in z.items():
            group = x.dtype, homes[n]
            places[n] = sizes[group]
            sizes[group] += x.numel()
        buffers = {(t, d): torch.empty(rows, size, dtype=t, device=d, pin_memory=pin) for (t, d), size in sizes.items()}
        return [
            {
                n: buffers[x.dtype, homes[n]].as_strided(x.shape, _strides(x), i * sizes[x.dtype, homes[n]] + places[n])
                for n, x in z.items()
            }
            for i in range(rows)
        ]


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those of x where it has no gaps (channels-last stays so), else those of a plain tensor."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dense = x.numel() == 0 or (span == x.numel() and 0 not in x.stride())
    return x.stride() if dense else torch.empty(x.shape, device="meta").stride()
