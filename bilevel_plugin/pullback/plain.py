"""Double backward: the gradient with its graph, differentiated once more.

∇_(w, λ) ⟨∇ℓ(w, λ), u⟩ + b̄·∂b⁺,    u the cotangent of the gradient, b̄ the adjoint of the running statistics
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..autograd.derive import vjp
from ..autograd.trees import State
from ..guards.held import warn_if_read
from ..model.model import Evaluation
from ..step.cotangent import CotangentOf, PulledPiece
from ..step.piece import Found, Piece


def pull(piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]) -> PulledPiece:
    """Compute ∇⟨∇ℓ, u⟩ for any piece."""

    def use(evaluation: Evaluation, found: Found) -> PulledPiece:
        piece.record.check_leaves(found.weighted)
        return differentiate(piece, evaluation, found, cotangent(piece, found.direction), b, wanted)

    return piece.evaluate(z, use, graph=True, follow=bool(piece.model.seen.moving))


def differentiate(
    piece: Piece, evaluation: Evaluation, found: Found, u: State, b: State, wanted: Sequence[Tensor]
) -> PulledPiece:
    """Return ∇⟨∇ℓ, u⟩ + b̄·∂b⁺ from the graph of a piece, which is freed."""
    statistics = evaluation.statistics
    # a buffer that became part of the state in this step is not among the statistics
    moved = {n: x for n, x in found.left.items() if n in b and (n in statistics or x.requires_grad)}
    outputs, along = {**found.direction, **moved}, {**u, **{n: b[n] for n in moved}}
    inputs = {**evaluation.leaves, **statistics}
    watched = evaluation.watched
    retain = piece.runs_into_other_graphs
    grads = vjp(outputs, along, [*inputs.values(), *watched.values(), *wanted], retain_graph=retain)
    first, second = len(inputs), len(inputs) + len(watched)
    if watched:
        warn_if_read(piece.model, dict(zip(watched, grads[first:second], strict=True)))
    adjoint = {n: x for n, x in zip(inputs, grads, strict=False) if x is not None}
    left = {} if evaluation.taking.unknown else {n: x.detach() for n, x in moved.items()}
    return PulledPiece(adjoint, grads[second:], found.values, statistics, left)
