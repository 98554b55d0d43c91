"""The derivative of a step whose batch is taken in parts: any pullback, applied to one part after the other.

Both d = ∇ℓ and ∇⟨∇ℓ, u⟩ are sums over the parts, and u is the cotangent of the whole sum. There are three stages. If
the derivative of the update depends on the values of d, these are summed over the parts without a graph. Then u is
computed, a·∂Υ/∂d. Then ∇⟨∇ℓ_i, u⟩ is computed for each part. Only the graph of one part exists at any time.

The parts draw random numbers one after the other, so a pullback must leave the generators as the losses left them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..autograd.trees import State
from ..step.step import Step
from ..update.update import add
from .base import Pull, Pulled, direction_of


def pull(
    how: Pull, step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after_step: State | None
) -> Pulled:
    """Apply the pullback `how` to each part of the step."""
    binding, update = step.binding, step.update
    after = update.pull(z, direction_of(step, z, buffers, after_step), a, wanted)
    adjoint: dict[str, Tensor | None] = {**after.adjoint}
    grads, values = list(after.wanted), State()
    for part in step.parts():
        if not part.step.terms and binding.share == 1:  # of several processes, all must take part
            continue
        pulled = how(part.step, z, buffers, dict(after.cotangent), wanted, None)
        for n, x in pulled.adjoint.items():
            adjoint[n] = add(adjoint.get(n), x)
        grads = [add(x, y) for x, y in zip(grads, pulled.wanted, strict=True)]
        part.add_values(pulled.values, values)
        del pulled
    to = {n: x for n, x in after.to.items() if n.partition("@")[0] not in binding.statistics}
    return Pulled(
        {n: x for n, x in adjoint.items() if x is not None}, grads, to if update.reads_direction else {}, values
    )
