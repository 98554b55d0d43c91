"""A step with its graph: for engines that keep it, or that differentiate it many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..autograd.derive import Traced
from ..autograd.trees import State
from ..model.model import Evaluation
from .piece import Found
from .step import Step
from .sums import Sums

T = TypeVar("T")


def traced_at(step: Step, z: State, to: State) -> Traced:
    """Return the step from z to a state that has its graph."""
    leaves = {id(x): x for piece in step.pieces for x in piece.record.leaves}
    pairs = {id(x): (x, y) for piece in step.pieces for x, y in piece.record.cut}
    return Traced(z, to, list(pairs.values()), list(leaves.values()))


def trace(step: Step, z: State) -> Traced:
    """Run the step again with a graph that outlives the call, which needs weights that are swapped in."""
    return traced_at(step, z, step.close_again(z, step.again(z, graph=True), graph=True))


def traced(step: Step, z: State, run: Callable[[Traced], T]) -> T:
    """Return run(the step from z with its graph), while the model holds its weights."""
    try:
        return _from_piece(step, 0, z, Sums(step.model), z, run)
    finally:
        step.release()


def _from_piece(step: Step, i: int, z: State, sums: Sums, at: State, run: Callable[[Traced], T]) -> T:
    """Evaluate the pieces from the i-th on, each inside of the one before, and the update inside of the last."""
    if i == len(step.pieces):
        return run(traced_at(step, at, step.close_again(at, sums, graph=True)))
    piece = step.pieces[i]

    def use(evaluation: Evaluation, found: Found) -> T:
        whole = sums.add(piece, found, graph=True)
        if whole is not None:
            sums.take_statistics(whole.left, graph=True)
        leaves = {} if piece.row is not None else {**evaluation.leaves, **evaluation.statistics}
        return _from_piece(step, i + 1, z, sums, {**leaves, **at} if i else {**at, **leaves}, run)

    with piece.record.repeating():
        return piece.evaluate(sums.at(z), use, graph=True, follow=True)
