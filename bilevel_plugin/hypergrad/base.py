"""What an engine is, and what it is given: Φ_k as a function, and the outer loss traced at z_K."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..binding import State
from ..step import Gradients, Phi, Traced
from .plan import Plan


class Engine(ABC):
    """How to differentiate. A frozen dataclass of options, with one method."""

    needs: ClassVar[tuple[str, ...]] = ()  # of solver and optimizer: "fixed point", "symmetry"

    @property
    def alone(self) -> str:
        """Why it takes no group of processes, if it takes none."""
        return ""

    @abstractmethod
    def tape(self) -> Tape:
        """A fresh record of one inner loop."""


class Tape(ABC):
    """The record that an engine keeps of one inner loop."""

    again: ClassVar[bool] = True  # a step may be run again: batches are cut (see step.py), what it saw is remembered
    phi: Callable[..., Phi] = Phi  # what makes a step
    whole: bool = True  # the adjoint gets back to w_0

    def start(self, z: State) -> State:
        """z_0 from tensors that are attached to the model."""
        return as_leaves({n: x.detach().clone() for n, x in z.items()})

    @abstractmethod
    def step(self, phi: Phi, z: State) -> State:
        """z⁺ = Φ(z), recorded."""

    @abstractmethod
    def pull(self, end: Traced, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        """The gradients of the scalar `end` for `inputs` (None: for every leaf) and that for z_0."""

    def blame(self, end: Traced) -> int | None:
        """The step in which the adjoint stopped being finite, if the tape can tell."""
        return None

    def plan(self) -> Plan | None:
        """What is kept for the sweep, and what it will cost; None for an engine that has no choice."""
        return None


def as_leaves(z: State) -> State:
    return {n: x.detach().requires_grad_() for n, x in z.items()}


def one(end: Traced) -> State:
    """The adjoint of the loss itself."""
    return {n: torch.ones_like(x) for n, x in end.to.items()}


def finite(tensors: Sequence[Tensor]) -> bool:
    return all(x.device.type == "meta" or bool(torch.isfinite(x).all()) for x in tensors)


def refuse_create_graph(create_graph: bool) -> None:
    if create_graph:
        raise ValueError(
            "bilevel.inner: create_graph=True needs the whole graph of the loop, which only hypergrad='unroll' keeps."
        )
