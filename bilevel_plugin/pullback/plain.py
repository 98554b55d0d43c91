"""Double backward: the gradient with its graph, differentiated once more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..autograd.trees import State
from ..model.model import Inside
from ..step.step import Evaluated, Step
from .base import Pulled, pull_through


def pull(
    step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after: State | None = None
) -> Pulled:
    """Compute ∇⟨∇ℓ, u⟩ for any step."""
    return pull_through(step, z, buffers, a, wanted, _evaluate)


def _evaluate(step: Step, inside: Inside) -> Evaluated:
    return step.evaluate(inside, create_graph=True)
