"""The derivative of a step of several inner problems: any pullback, applied to one problem after the other.

d = ∇ℓ and ∇⟨∇ℓ, u⟩ have a row for each problem, which depends on the same row of z and u alone; what they give to an
outer variable is summed. Only the graph of one problem exists at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..autograd.trees import State
from ..step.conditions import set_modes
from ..step.step import Step
from ..update.update import add, weight_of
from .base import Pull, Pulled, direction_of, joined


def pull(
    how: Pull, step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after_step: State | None
) -> Pulled:
    """Apply the pullback `how` to the step, or to each of its inner problems if they are separate."""
    problems = step.problems()
    if not problems:
        return how(step, z, buffers, a, wanted, after_step)
    binding, update = step.binding, step.update
    after = update.pull(z, direction_of(step, z, buffers, after_step), a, wanted)
    u = {**after.cotangent, **{n: a[n] for n in binding.statistics if n in a}}
    grads: list[Tensor | None] = [None] * len(wanted)
    values: State = {}
    adjoints: list[State] = []
    statistics: list[State] = []
    modes = [m.training for m in binding.modules]
    for problem in problems:
        set_modes(binding.modules, modes)  # a loss may have changed them
        pulled = how(step.of(problem), problem.leaves(z), problem.rows(buffers), problem.rows(u), wanted, None)
        adjoints.append(pulled.adjoint)
        statistics.append(pulled.to)
        grads = [add(x, y) for x, y in zip(grads, pulled.wanted, strict=True)]
        for n, x in pulled.values.items():
            values[n] = values[n] + x if n in values else x
        del pulled
    to = {n: x for n, x in after.to.items() if weight_of(n) not in binding.statistics} if update.reads_direction else {}
    through: dict[str, Tensor | None] = {**binding.joined(adjoints)}
    return joined(step, after, through, binding.statistics, grads, {**to, **binding.joined(statistics)}, values)
