"""How a state becomes bytes: all its tensors of one dtype and device, one after the other in one flat tensor.

A row of the store, a record of the file and the part of a state that a rank keeps are laid out in this one way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.trees import State
from ..model.model import Model

Kind = tuple[torch.dtype, torch.device]
_ALIGNED = 64  # flat tensors begin at multiples of this many bytes
_PART = "..part "  # no tensor of a model has a name that begins so


class Place(NamedTuple):
    """Where a tensor begins in the flat tensor of its kind, and what is needed to make the tensor again."""

    kind: Kind
    begin: int
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The places of the tensors of a state, and the sizes of the flat tensors that hold them."""

    places: dict[str, Place]
    sizes: dict[Kind, int]

    @classmethod
    def of(cls, z: State) -> Layout:
        sizes: dict[Kind, int] = defaultdict(int)
        places: dict[str, Place] = {}
        for n, x in z.items():
            kind = x.dtype, x.device
            places[n] = Place(kind, sizes[kind], x.shape, dense_strides(x))
            sizes[kind] += x.numel()
        return cls(places, dict(sizes))

    def views(self, flat: dict[Kind, Tensor]) -> State:
        """Return the tensors of a state as views of flat tensors, one of each kind."""
        return {
            n: flat[p.kind].as_strided(p.shape, p.strides, flat[p.kind].storage_offset() + p.begin)
            for n, p in self.places.items()
        }

    @property
    def nbytes(self) -> int:
        """The bytes of the flat tensors, one after the other in a buffer."""
        return sum(_room(kind, size) for kind, size in self.sizes.items())

    def in_bytes(self, buffer: Tensor) -> dict[Kind, Tensor]:
        """Return the flat tensors as views of a buffer of bytes, on the device of the buffer."""
        found, begin = dict[Kind, Tensor](), 0
        for kind, size in self.sizes.items():
            found[kind] = buffer[begin : begin + size * kind[0].itemsize].view(kind[0])
            begin += _room(kind, size)
        return found

    def part(self, z: State, kind: Kind, part: range) -> Tensor:
        """Return these entries of a flat tensor, with zeros beyond its end, without making the whole of it."""
        pieces = list[Tensor]()
        for n, p in self.places.items():
            if p.kind == kind and p.begin < part.stop and p.begin + p.shape.numel() > part.start:
                row = flat(z[n].detach(), p.strides)
                pieces.append(row[max(0, part.start - p.begin) : part.stop - p.begin])
        missing = len(part) - sum(map(len, pieces))
        return torch.cat([*pieces, torch.zeros(missing, dtype=kind[0], device=kind[1])])


class Shards:
    """The parts of states that this process keeps: an equal part of what all ranks hold, and its own statistics."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._layouts: list[Layout] = []

    def cut(self, z: State) -> State:
        """Return the part of a state that is kept here."""
        own = self._model.seen.statistics
        layout = known(Layout.of({n: x for n, x in z.items() if n not in own}), self._layouts)
        kept = {n: x for n, x in z.items() if n in own}
        for i, (kind, size) in enumerate(layout.sizes.items()):
            kept[f"{_PART}{self._layouts.index(layout)}.{i}"] = layout.part(z, kind, self._model.ranks.part_of(size))
        return kept

    def join(self, kept: State) -> State:
        """Return the whole state."""
        z = {n: x for n, x in kept.items() if not n.startswith(_PART)}
        if len(z) < len(kept):
            number, _, _ = next(n for n in kept if n.startswith(_PART)).removeprefix(_PART).partition(".")
            layout = self._layouts[int(number)]
            parts = [self._model.ranks.join_parts(kept[f"{_PART}{number}.{i}"]) for i in range(len(layout.sizes))]
            z.update(layout.views(dict(zip(layout.sizes, parts, strict=True))))
        return z


def known(layout: Layout, layouts: list[Layout]) -> Layout:
    """Return an equal layout of the list, to which this one is added if there is none."""
    if layout not in layouts:
        layouts.append(layout)
    return layouts[layouts.index(layout)]


def _room(kind: Kind, size: int) -> int:
    return -(-size * kind[0].itemsize // _ALIGNED) * _ALIGNED


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of x if it has no gaps (channels-last is preserved), else those of a contiguous tensor."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dense = x.numel() == 0 or (span == x.numel() and 0 not in x.stride())
    return x.stride() if dense else torch.empty(x.shape, device="meta").stride()


def flat(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the numbers of x in the order that a tensor without gaps of these strides has them in memory."""
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided((x.numel(),), (1,))
