"""The state before a step, predicted from the state after it by the inverse of the optimizer, block by block.

A block is a row of numbers of weights that one rule updates with the same options: several small weights, or a part of
a large one. Its temporary tensors fit into a processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.trees import State
from ..update.inverse import INVERSES, Inverse, numbers, wide
from ..update.update import Update
from .layout import dense_strides, flat

_SIZE = 2**17  # the numbers of a block


class Piece(NamedTuple):
    """A part of the numbers of a weight, in the order of its memory."""

    name: str
    begin: int
    end: int
    strides: tuple[int, ...]


class Block(NamedTuple):
    """Pieces of weights, the inverse of their rule with its options, and the keys of the rule's tensors."""

    inverse: Inverse
    options: dict[str, Any]
    keys: tuple[str, ...]  # those that the state after the step has
    wanted: tuple[str, ...]  # those that the state before it has too
    pieces: list[Piece]

    def names(self, weight: str) -> list[str]:
        """Return the names of the wanted tensors of a weight."""
        return [f"{weight}@{key}" for key in self.wanted]

    def flat(self, z: State, key: str) -> Tensor:
        """Return the numbers of the block, of the tensors of one key, or of the weights if it is empty."""
        rows = [flat(z[_name(p, key)].detach(), p.strides)[p.begin : p.end] for p in self.pieces]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def write(self, z: State, key: str, row: Tensor) -> None:
        """Write the numbers into the tensors of z."""
        parts = row.split([p.end - p.begin for p in self.pieces])
        for p, part in zip(self.pieces, parts, strict=True):
            flat(z[_name(p, key)], p.strides)[p.begin : p.end] = part


def _name(piece: Piece, key: str) -> str:
    return f"{piece.name}@{key}" if key else piece.name


def blocks(update: Update, after: State, weights: Iterable[str], before: State) -> list[Block]:
    """Divide the weights and their tensors into blocks."""
    chosen, found, room = set(weights), list[Block](), dict[tuple[object, ...], tuple[Block, int]]()
    keys: dict[str, list[str]] = {n: [] for n in chosen}
    for name, x in after.items():
        weight, _, key = name.rpartition("@")
        if weight in chosen and x.shape == after[weight].shape:
            keys[weight].append(key)
    counts: Any = getattr(update, "counts", {})
    groups: Any = getattr(update, "groups", ())
    for i, (names, options, rule) in enumerate(groups):
        options = numbers(options)
        for n in names:
            if n not in chosen:
                continue
            w, count, wanted = after[n], counts.get(n, 0) + 1, tuple(k for k in keys[n] if f"{n}@{k}" in before)
            kind, begin = (i, count, w.dtype, w.device, tuple(keys[n]), wanted), 0
            strides = dense_strides(w)
            while begin < w.numel():
                if kind not in room or room[kind][1] <= 0:
                    block = Block(INVERSES[rule.formula], {**options, "count": count}, kind[4], wanted, [])
                    room[kind] = block, _SIZE
                    found.append(block)
                block, left = room[kind]
                end = min(w.numel(), begin + left)
                block.pieces.append(Piece(n, begin, end, strides))
                room[kind] = block, left - (end - begin)
                begin = end
    return found


def predictions(
    parts: list[Block], after: State, at: Callable[[], tuple[State, State]]
) -> Iterator[tuple[Block, str, Tensor]]:
    """Yield predictions, each with its block and key: of all weights, then of tensors, with (z, d) from `at`."""
    for block in parts:
        w = block.flat(after, "")
        state = {key: wide(block.flat(after, key)) for key in block.keys}
        yield block, "", block.inverse.weight(wide(w), state, block.options).to(w.dtype)
    if not any(block.wanted for block in parts):
        return
    z, d = at()
    for block in parts:
        if block.wanted:
            w = block.flat(z, "")
            state = {key: wide(block.flat(after, key)) for key in block.keys}
            found = block.inverse.state(state, wide(w), wide(block.flat(d, "")), block.options)
            for key in block.wanted:
                yield block, key, found[key].to(after[_name(block.pieces[0], key)].dtype)
