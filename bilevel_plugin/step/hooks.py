"""Hooks on parameters act on the gradient of each call, before the gradients of several calls are summed.

d = Σ_c ψ(d_c),  d_c = Σ_(i in c) ∇ℓ_i;    the cotangent of d_c is u·ψ′(d_c)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..autograd.derive import Gradients, grad
from ..autograd.graph import find_leaves
from ..autograd.trees import State
from .cotangent import Cotangent
from .piece import Found, Piece
from .sums import Sums

if TYPE_CHECKING:
    from .step import Step


def call_of(step: Step, end: int) -> range:
    """Return the pieces of the call that ends with this piece."""
    return range(max((j + 1 for j in range(end) if step.pieces[j].last), default=0), end + 1)


def leaves_of_hooks(piece: Piece, d: State) -> list[Tensor]:
    """Return the outer variables that the hooks of a call have used."""
    assert piece.hooks is not None
    with torch.enable_grad():
        to = piece.hooks({n: x.detach() for n, x in d.items()})
    return list({id(x): x for y in to.values() if y.requires_grad for x in find_leaves(y)[0]}.values())


class OfCall:
    """The cotangent of the gradient of a call, as its pieces ask for it."""

    def __init__(
        self,
        step: Step,
        end: int,
        z: State,
        before: Sequence[State],
        cotangent: Cotangent,
        wanted: Sequence[Tensor],
        into: Gradients,
    ) -> None:
        self.rows = cotangent.rows
        self.known: State | None = {}  # the values of the direction are not needed any more
        last, sums = step.pieces[end], Sums(step.model)
        assert last.hooks is not None
        for i in call_of(step, end):
            piece = step.pieces[i]
            with piece.record.repeating():
                found = piece.evaluate({**z, **before[i]}, lambda _, found: Found([], {}, found.direction, found.left))
            sums.add(piece, found, graph=False)
        d = {n: x.detach().requires_grad_() for n, x in sums.before_hooks.items()}
        with torch.enable_grad():
            to = last.hooks(d)
        u = cotangent.whole()
        keys = [n for n in u if n in to and to[n].requires_grad]
        grads = grad([to[n] for n in keys], [*d.values(), *wanted], [u[n] for n in keys], retain_graph=True)
        into.collect([], wanted, grads[len(d) :])
        self._u = {n: g.detach() for n, g in zip(d, grads, strict=False) if g is not None}

    def __call__(
        self, piece: Piece, d: State | None = None, without_value: frozenset[str] = frozenset(), *, end: bool = True
    ) -> State:
        return self._u if piece.row is None else {n: x[piece.row] for n, x in self._u.items()}

    def handed_over(self, piece: Piece) -> State:
        return dict(self(piece))
