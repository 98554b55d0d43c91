"""The engine that keeps the whole graph of the loop, for autograd. Its result can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd.derive import Gradients, Traced, grad, is_finite
from ..autograd.graph import find_leaves
from ..autograd.missing import explained
from ..autograd.trees import Pairs, State
from ..step.computed import Computed
from ..step.monitor import LossMonitor
from ..step.piece import Piece
from ..step.step import Step
from ..update.update import Update
from .base import Engine, OuterLoss, Tape

T = TypeVar("T")


@dataclass(frozen=True)
class Unroll(Engine):
    """∇ g(Φ_K ∘ … ∘ Φ_1(z_0)) by autograd. Memory: the graphs of all K steps.

    Examples:
        The result can be differentiated again. Two steps of rate 0.5 from 1 end at w = (1 − λ/2)². At λ = 1 its
        first and second derivative are −1/2 and 1/2.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> lam = torch.tensor(1.0, requires_grad=True)
        >>> h = lambda m: 0.5 * lam * m.weight.square().sum()
        >>> with bilevel.inner(model, h, lambda m: m.weight.sum(), solver="gd", lr=0.5, engine="unroll") as loop:
        ...     _ = loop.run(2)
        ...     first = loop.hypergrad(lam, create_graph=True)
        >>> first.item(), torch.autograd.grad(first, lam)[0].item()
        (-0.5, 0.5)
    """

    @property
    def keeps_graphs(self) -> bool:
        return True

    def tape(self) -> Tape:
        return _UnrollTape()


class _UnrollTape(Tape):
    replays: ClassVar[bool] = False

    def __init__(self) -> None:
        self._start: State = {}
        self._edges: list[list[GradientEdge]] = []  # the place of each state in the graph, without its values
        self._losses: list[Tensor] = []  # the added losses, with their graphs
        self._leaves: list[Tensor] = []  # the outer variables that computed values use

    def start(self, z: State, copies: State) -> State:
        with torch.enable_grad():
            # a clone, so that writing to the parameters does not touch the graph
            self._start = {
                n: x.clone() if x.requires_grad or not x.is_floating_point() else x.clone().requires_grad_()
                for n, x in z.items()
            }
        self._remember(self._start)
        return self._start

    def start_of_graph(self) -> Sequence[Tensor]:
        return list(self._start.values())

    def begin(self, step: Step, z: State, *, whole: bool) -> None:
        pass

    def evaluate(self, step: Step, z: State, pieces: Sequence[Piece], cut: Pairs, monitor: LossMonitor) -> State:
        return step.evaluate(z, pieces, cut, monitor, graph=True)

    def close(self, step: Step, z: State, update: Update) -> State:
        to = step.close(z, update, graph=True)
        # A weight that does not change must be a new tensor in the next step. Otherwise the direction of that step
        # would go back through this step, by a buffer that this step has changed.
        # So must every weight that a companion has followed.
        every = step.model.companions is not None
        to = {n: x.view_as(x) if x.requires_grad and (every or x is z.get(n)) else x for n, x in to.items()}
        self._remember(to)
        return to

    def _remember(self, z: State) -> None:
        self._edges.append([get_gradient_edge(x) for x in z.values() if x.requires_grad])

    def add_loss(self, loss: OuterLoss) -> None:
        self._losses.append(loss.traced(_value))

    def compute(self, value: Computed, z: State) -> tuple[Any, State]:
        given = value.first(z)
        self._leaves += value.leaves
        # The next step takes its direction with respect to new tensors, so that the value is a constant there.
        return given, {n: x.view_as(x) if x.requires_grad else x for n, x in z.items()}

    def _with(self, end: OuterLoss | None, run: Callable[[Tensor], T]) -> T:
        """Return run(the scalar to differentiate): the loss at the end, or the sum of the added losses."""
        if end is None:
            return run(sum(self._losses[1:], self._losses[0]))
        return end.traced(lambda traced: run(_value(traced)))

    def pull(
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        found = Gradients()

        def run(loss: Tensor) -> None:
            wanted = inputs
            if wanted is None:
                found_here = find_leaves(loss, self._start.values())[0]
                wanted = list({id(x): x for x in (*found_here, *self._leaves)}.values())
            if wanted:
                with explained():
                    along = self.along(loss)
                    grads = grad([loss], wanted, [along], retain_graph=True, create_graph=create_graph)
                for tensor, part in zip(wanted, grads, strict=True):
                    found.add(found.direct, tensor, part)

        self._with(end, run)
        return found, {}  # z_0 has a graph to the model, so the gradients for what it was computed from are in `found`

    def first_not_finite(self, end: OuterLoss | None) -> str | None:
        def run(loss: Tensor) -> str | None:
            for k, edges in reversed(list(enumerate(self._edges))):
                grads = torch.autograd.grad(loss.sum(), edges, allow_unused=True, retain_graph=True)
                if not is_finite([g for g in grads if g is not None]):
                    return "in the outer loss itself" if k + 1 == len(self._edges) else f"at step k = {k + 1}"
            return None

        return self._with(end, run)


def _value(traced: Traced) -> Tensor:
    """Return the value of an outer loss on this process, with its graph."""
    return traced.to["g"] if traced.share == 1 else traced.to["g"] * traced.share
