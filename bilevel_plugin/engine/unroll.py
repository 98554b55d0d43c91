"""The engine that keeps the whole graph of the loop, for autograd. Its result can be differentiated again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd.derive import Gradients, grad, is_finite
from ..autograd.graph import find_leaves
from ..autograd.missing import explained
from ..autograd.trees import State
from ..step.record import RecordedStep
from ..step.step import LossMonitor, Moved
from .base import End, Engine, Tape


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

    def step(self, step: RecordedStep, z: State, monitor: LossMonitor) -> Moved:
        moved = step.take_with_whole_graph(z, monitor)
        self._remember(moved.to)
        return moved

    def _remember(self, z: State) -> None:
        self._edges.append([get_gradient_edge(x) for x in z.values() if x.requires_grad])

    def add_loss(self, loss: End) -> None:
        with self._value(loss) as value:
            self._losses.append(value)

    @contextmanager
    def _value(self, end: End | None) -> Generator[Tensor]:
        """Yield the scalar to differentiate, with its graph: the loss at the end, or the sum of the added losses."""
        if end is None:
            yield sum(self._losses[1:], self._losses[0])
            return
        with end.traced() as traced:
            value = traced.to["g"] * traced.share if traced.share != 1 else traced.to["g"]
            end.warn_of_buffers(value)
            yield value

    def pull(self, end: End | None, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        found = Gradients()
        with self._value(end) as loss, explained():
            wanted = find_leaves(loss, self._start.values())[0] if inputs is None else inputs
            if wanted:
                grads = grad([loss], wanted, [None], retain_graph=True, create_graph=create_graph)
                for tensor, part in zip(wanted, grads, strict=True):
                    found.add(found.direct, tensor, part)
        return found, {}  # z_0 has a graph to the model, so the gradients for what it was computed from are in `found`

    def first_not_finite(self, end: End | None) -> str | None:
        with self._value(end) as loss:
            for k, edges in reversed(list(enumerate(self._edges))):
                grads = torch.autograd.grad(loss, edges, allow_unused=True, retain_graph=True)
                if not is_finite([g for g in grads if g is not None]):
                    return "in the outer loss itself" if k + 1 == len(self._edges) else f"at step k = {k + 1}"
        return None
