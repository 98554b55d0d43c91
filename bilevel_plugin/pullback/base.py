"""The derivative of one step, in two: pull the adjoint through Υ, then pull what that gives through the gradient.

    a·∂Φ/∂(z, λ):   u = a·∂Υ/∂d,   then   a·∂Υ/∂z + ∇_(w, λ) ⟨∇ℓ(w, λ), u⟩

The second part is the same for every optimizer. A pullback is one way to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..binding import Inside
from ..graph import State, vjp
from ..step import Evaluated, Step, statistics_under_checkpointing


@dataclass
class Pulled:
    """What pulling an adjoint through a step gives."""

    adjoint: State  # a·∂Φ/∂z
    wanted: Sequence[Tensor | None]  # a·∂Φ for what was wanted
    to: State  # z⁺, as far as its numbers were computed
    values: State  # of the losses


Pull = Callable[[Step, State, State, State, Sequence[Tensor]], Pulled]  # (step, z, buffers, a, wanted)


def pull_through(
    step: Step,
    z: State,
    buffers: State,
    a: State,
    wanted: Sequence[Tensor],
    evaluate: Callable[[Step, Inside], Evaluated],
) -> Pulled:
    """a·∂Φ/∂z and a·∂Φ for what is wanted; `evaluate` gives the step's direction with a graph."""
    binding = step.binding
    with binding.inside(z, buffers, graph=True, statistics=bool(binding.moving)) as inside:
        found = evaluate(step, inside)
        after_update = step.update.pull(z, binding.mean_of_direction(found.direction), a, wanted)
        # a buffer that the step made state is not among what it was given
        followed = {n: b for n, b in found.buffers.items() if n in inside.statistics or (n in a and b.requires_grad)}
        outputs = {**found.direction, **followed}
        share = binding.share
        along = {n: u if share == 1 else u * share for n, u in after_update.cotangent.items()}
        along.update({n: a[n] for n in followed if n in a})
        inputs = [*inside.leaves.values(), *inside.statistics.values(), *wanted]
        if inside.taking.without_graph and any(n in a for n in followed):
            raise RuntimeError(statistics_under_checkpointing("g in training mode"))
        watched = list(inside.watched.values())
        grads = vjp(outputs, along, [*inputs, *watched])
        binding.warn_if_read(dict(zip(inside.watched, grads[len(inputs) :], strict=True)))
        grads = grads[: len(inputs)]
        n = len(inside.leaves)
        weights = binding.sum_over_ranks(grads[:n], list(inside.leaves.values()))
    through_gradient = dict(zip((*inside.leaves, *inside.statistics), (*weights, *grads[n:]), strict=False))
    adjoint = {name: x for name, x in after_update.adjoint.items() if name not in inside.statistics}
    for name, x in through_gradient.items():
        adjoint[name] = add(adjoint.get(name), x)  # pyright: ignore[reportArgumentType]
    unknown = found.without_value | frozenset(binding.statistics)
    to = {name: x for name, x in after_update.to.items() if name.partition("@")[0] not in unknown}
    if not inside.taking.without_graph:
        to.update({name: x.detach() for name, x in followed.items()})
    return Pulled(
        {name: x for name, x in adjoint.items() if x is not None},
        [add(one, other) for one, other in zip(after_update.wanted, grads[len(inputs) - len(wanted) :], strict=True)],
        to,
        found.values,
    )


def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """The sum, where None is 0."""
    return x if y is None else y if x is None else x + y
