"""The derivative of one step in two parts: pull the adjoint through Υ, then pull the cotangent through the gradient.

    a·∂Φ/∂(z, λ):   u = a·∂Υ/∂d,   then   a·∂Υ/∂z + ∇_(w, λ) ⟨∇ℓ(w, λ), u⟩

The second part is the same for every optimizer. A pullback is one way to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..autograd.derive import vjp
from ..autograd.trees import State
from ..model.model import Inside
from ..step.conditions import undisturbed
from ..step.step import Evaluated, Step
from ..update.update import PulledUpdate, add, weight_of


@dataclass
class Pulled:
    """The result of pulling an adjoint through a step."""

    adjoint: State  # a·∂Φ/∂z
    wanted: Sequence[Tensor | None]  # a·∂Φ for each wanted tensor
    to: State  # z⁺, as far as its values were computed
    values: State  # the values of the losses
    direction: State | None = None  # d, as far as its numbers were computed; None if z⁺ is that of another d


Pull = Callable[[Step, State, State, State, Sequence[Tensor], State | None], Pulled]
"""(step, z, buffers, a, wanted, the state after the step where it is known)"""


def known_direction(step: Step, z: State, after: State | None) -> State | None:
    """Return the direction of a step that was taken, as far as the derivative of Υ depends on its values, or None.

    If it does not depend on them, zeros stand for the values. Otherwise they are recovered from the states before and
    after the step, if Υ can do that.
    """
    if not step.update.reads_direction:
        return {n: z[n].new_zeros(()).expand_as(z[n]) for n in step.directed}
    return None if after is None else step.update.direction_between(z, after, step.directed)


def direction_of(step: Step, z: State, buffers: State, after: State | None) -> State:
    """Return the direction of a step that was taken, without a graph. It is computed again if it is not known."""
    d = known_direction(step, z, after)
    if d is not None:
        return d
    binding = step.binding
    with undisturbed(binding), binding.inside(z, buffers) as inside:
        return binding.mean_of_direction(step.evaluate(inside, create_graph=False).direction)


def pull_through(
    step: Step,
    z: State,
    buffers: State,
    a: State,
    wanted: Sequence[Tensor],
    evaluate: Callable[[Step, Inside], Evaluated],
    known: State | None = None,
) -> Pulled:
    """Return a·∂Φ/∂z, and a·∂Φ for each wanted tensor; `evaluate` returns the direction of the step with a graph.

    `known` has the values of directions that have a graph but no values.
    """
    binding = step.binding
    with binding.inside(z, buffers, graph=True, statistics=bool(binding.moving)) as inside:
        found = evaluate(step, inside)
        numbers = {n: x for n, x in (known or {}).items() if n in found.without_value}
        direction = {**binding.mean_of_direction(found.direction), **numbers}
        after_update = step.update.pull(z, direction, a, wanted)
        # a buffer that became part of the state in this step is not among inside.statistics
        followed = {n: b for n, b in found.buffers.items() if n in inside.statistics or (n in a and b.requires_grad)}
        outputs = {**found.direction, **followed}
        share = binding.share
        along = {n: u if share == 1 else u * share for n, u in after_update.cotangent.items()}
        along.update({n: a[n] for n in followed if n in a})
        inputs = [*inside.leaves.values(), *inside.statistics.values(), *wanted]
        watched = list(inside.watched.values())
        grads = vjp(outputs, along, [*inputs, *watched], retain_graph=step.runs_into_other_graphs)
        binding.warn_if_read(dict(zip(inside.watched, grads[len(inputs) :], strict=True)))
        grads = grads[: len(inputs)]
    named = {**inside.leaves, **inside.statistics}
    unknown = found.without_value | frozenset(binding.statistics)
    to = {name: x for name, x in after_update.to.items() if weight_of(name) not in unknown}
    if not inside.taking.unknown:
        to.update({name: x.detach() for name, x in followed.items()})
    through = dict(zip(named, grads, strict=False))
    pulled = joined(step, after_update, through, inside.statistics, grads[len(named) :], to, found.values)
    pulled.direction = {n: x.detach() for n, x in direction.items() if n not in found.without_value}
    return pulled


def joined(
    step: Step,
    update: PulledUpdate,
    through_gradient: dict[str, Tensor | None],
    statistics: Collection[str],
    wanted: Sequence[Tensor | None],
    to: State,
    values: State,
) -> Pulled:
    """Return a·∂Υ/∂(z, λ) + ∇_(w, λ) ⟨∇ℓ, u⟩, summed over the ranks for the weights; `through_gradient` is emptied.

    Υ does not change `statistics`, so their adjoint comes from the losses alone.
    """
    binding = step.binding
    parameters = binding.parameters
    weights = binding.sum_over_ranks([through_gradient.get(n) for n in parameters], list(parameters.values()))
    through_gradient.update(zip(parameters, weights, strict=True))
    del weights
    adjoint: dict[str, Tensor | None] = {n: x for n, x in update.adjoint.items() if n not in statistics}
    update.adjoint = {}
    for n in list(through_gradient):
        adjoint[n] = add(adjoint.pop(n, None), through_gradient.pop(n))
    return Pulled(
        {n: x for n, x in adjoint.items() if x is not None},
        [add(one, other) for one, other in zip(update.wanted, wanted, strict=True)],
        to,
        values,
    )
