"""The adjoint of a step, pulled through its update: u = a·∂Υ/∂d, which every piece of the step needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..autograd import rows
from ..autograd.trees import State
from ..update.update import PulledUpdate, weight_of
from .piece import Piece

if TYPE_CHECKING:
    from .step import Step


@dataclass
class PulledPiece:
    """∇⟨∇ℓ_i, u⟩ of a piece, and b̄·∂b_i."""

    adjoint: State  # with respect to the weights, and to the statistics before the piece
    wanted: Sequence[Tensor | None]  # with respect to each wanted tensor
    values: State  # the values of the losses
    followed: Collection[str]  # the statistics that were differentiated with respect to
    left: State = field(default_factory=dict[str, Tensor])  # the statistics after it, as far as they are known


@dataclass
class Pulled:
    """The result of pulling an adjoint through a step."""

    adjoint: State  # a·∂Φ/∂z
    to: State  # z⁺, as far as its values were computed
    direction: State | None  # d, as far as its values were computed


class CotangentOf(Protocol):
    """What a pullback asks for u = a·∂Υ/∂d."""

    known: State | None  # the direction, if its values are known or do not matter
    rows: int | None  # how many rows u has, for as many outer losses, or None if it has no dimension for them

    def __call__(
        self, piece: Piece, d: State | None = None, without_value: frozenset[str] = frozenset(), *, end: bool = True
    ) -> State:
        """Return u for a piece. `d` is the direction that it has found, where its values were computed."""
        ...

    def handed_over(self, piece: Piece) -> State:
        """Return u without its counterpart here, for a pullback that frees it tensor by tensor."""
        ...


class Cotangent:
    """u = a·∂Υ/∂d of a step at z, computed when a pullback first asks for it.

    The derivative of Υ may depend on the values of d. They are `known` if it does not depend on them (zeros stand for
    them), if Υ can tell them from the states before and after the step, or if they were computed. Otherwise a pullback
    that computes them, of the only piece, hands them over.
    """

    def __init__(self, step: Step, z: State, a: State, after: State | None, wanted: Sequence[Tensor]) -> None:
        self._step, self._z, self._a, self._wanted = step, z, a, wanted
        self.known = self._known(after)
        given = {n: x for n, x in a.items() if n in z}
        self.rows = rows.number([z[n] for n in given], list(given.values()))
        self.direction: State | None = None
        self._pulled: PulledUpdate | None = None
        self._gone = False  # u was handed over, and has to be computed again if it is needed again

    def _known(self, after: State | None) -> State | None:
        update, names = self._step.update, self._step.directed
        if update is None or not update.reads_direction:
            return {n: self._z[n].new_zeros(()).expand_as(self._z[n]) for n in names}
        return None if after is None else update.direction_between(self._z, after, names)

    def note(self, direction: State) -> None:
        """Take the values of the direction, which were computed."""
        model = self._step.model
        self.known = self.direction = model.ranks.mean(direction, model.parameters)

    def __call__(
        self, piece: Piece, d: State | None = None, without_value: frozenset[str] = frozenset(), *, end: bool = True
    ) -> State:
        """Return u for a piece. `d` is the direction that it has found, where its values were computed."""
        if self._pulled is None or self._gone:
            step, self._gone = self._step, False
            if d is not None and len(step.pieces) == 1:
                d = step.model.ranks.mean(d, step.model.parameters)
                self.direction = {n: x.detach() for n, x in d.items() if n not in without_value}
                numbers = {n: x for n, x in (self.known or {}).items() if n in without_value}
                self._pull({**d, **numbers}, without_value, end)
            else:
                if self.known is None:
                    self.note(step.again(self._z).direction)
                self._pull(self.known or {}, frozenset(), end and self.direction is not None)
        assert self._pulled is not None
        u = self.whole()
        return u if piece.row is None else {n: x[piece.row] for n, x in u.items()}

    def whole(self) -> State:
        """Return u of the direction of this process."""
        share, u = self._step.model.ranks.share, self.update().cotangent
        return u if share == 1 else {n: x * share for n, x in u.items()}

    def handed_over(self, piece: Piece) -> State:
        """Return u without its counterpart here, for a pullback that frees it piece by piece."""
        u = self(piece, end=False)
        if len(self._step.pieces) > 1 or self._pulled is None:
            return dict(u)
        self._pulled.cotangent = {}
        self._gone = True
        return u

    def _pull(self, d: State, without_value: frozenset[str], end: bool) -> None:
        step, a = self._step, self._a
        if step.update is None:  # the step is open: it has changed no weight
            self._pulled = PulledUpdate(
                {}, {n: x for n, x in a.items() if n in self._z}, {}, [None] * len(self._wanted)
            )
            return
        self._pulled = step.update.pull(self._z, d, a, self._wanted, end=end)
        unknown = without_value | frozenset(step.model.seen.statistics)
        self._pulled.to = {n: x for n, x in self._pulled.to.items() if weight_of(n) not in unknown}

    def update(self) -> PulledUpdate:
        """Return what Υ passes on, with the adjoint a·∂Υ/∂z."""
        if self._pulled is None:
            self(self._step.pieces[0])
        assert self._pulled is not None
        return self._pulled


Pull = Callable[[Piece, State, CotangentOf, State, Sequence[Tensor]], PulledPiece]
"""(piece, z, cotangent, b̄, wanted): ∇⟨∇ℓ_i, u⟩ with respect to the weights and the wanted tensors"""
