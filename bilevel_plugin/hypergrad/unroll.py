"""The whole graph kept, differentiated by autograd in one go: the oracle, differentiable again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..binding import State
from ..step import Gradients, Phi, Traced, walk
from .base import Engine, Tape, finite


@dataclass(frozen=True)
class Unroll(Engine):
    """∇ g(Φ_K ∘ … ∘ Φ_1(z_0)) by autograd. Memory: the graphs of all K steps."""

    def tape(self) -> Tape:
        return _UnrollTape()


class _UnrollTape(Tape):
    again: ClassVar[bool] = False

    def __init__(self) -> None:
        self._start: State = {}
        self._edges: list[list[GradientEdge]] = []  # where each state is in the graph, which may let go of its numbers

    def start(self, z: State) -> State:
        with torch.enable_grad():
            # a clone, so that commit_() may write to the parameters without touching the graph
            self._start = {n: x.clone() if x.requires_grad else x.clone().requires_grad_() for n, x in z.items()}
        return self._remember(self._start)

    def step(self, phi: Phi, z: State) -> State:
        return self._remember(phi(z, graph=True).to)

    def _remember(self, z: State) -> State:
        self._edges.append([get_gradient_edge(x) for x in z.values()])
        return z

    def pull(self, end: Traced, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        (loss,) = end.to.values()
        wanted = walk(loss, self._start.values())[0] if inputs is None else inputs
        found = Gradients()
        if wanted:
            grads = torch.autograd.grad(
                loss, list(wanted), allow_unused=True, retain_graph=True, create_graph=create_graph
            )
            for tensor, grad in zip(wanted, grads, strict=True):
                found.add(found.direct, tensor, grad)
        return found, {}  # z_0 is attached to the model: what lies before it was reached through it

    def blame(self, end: Traced) -> int | None:
        (loss,) = end.to.values()
        for k, edges in reversed(list(enumerate(self._edges))):
            grads = torch.autograd.grad(loss, edges, allow_unused=True, retain_graph=True)
            if not finite([g for g in grads if g is not None]):
                return k + 1
        return None
