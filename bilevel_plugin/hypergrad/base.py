"""What an engine is, and what it is given: recorded steps, and the outer loss traced at z_K."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from ..graph import Gradients, State, Traced, as_leaves
from ..replay import RecordedStep
from ..step import LossMonitor, Moved, Step
from .plan import Plan


class OuterLoss(ABC):
    """An outer loss at the weights of some step, as far as a sweep needs it."""

    leaves: Sequence[Tensor] = ()  # the outer variables that it depends on directly; known once it was pulled through
    cut: Sequence[tuple[Tensor, Tensor]] = ()  # tensors of its batch that require grad, and what stands for each

    @abstractmethod
    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        """∇_z of the loss; what goes to λ directly is added to the sums, for `inputs`, or for every leaf if None."""


class End(OuterLoss):
    """An outer loss at the current weights, with its graph."""

    is_function: bool = True  # it can be evaluated at another state

    @abstractmethod
    def traced(self, z: State | None = None) -> AbstractContextManager[Traced]:
        """The loss with its graph at z (the last state, if None), as long as this lasts."""

    def warn_of_buffers(self, value: Tensor) -> None:
        """Warn if the value reads a buffer that a step has changed by a rule that can't be differentiated."""

    @abstractmethod
    def kept(self) -> OuterLoss:
        """The same loss without its graph, to be pulled through at this state when later steps have been taken."""


class Engine(ABC):
    """How to differentiate. A frozen dataclass of options, with one method."""

    needs: ClassVar[tuple[str, ...]] = ()  # of solver and optimizer: "fixed point", "symmetry"

    @property
    def keeps_graphs(self) -> bool:
        """Whether the graph of a step outlives the step: then weights are swapped in (see binding.py)."""
        return False

    @property
    def spares_memory(self) -> bool:
        """Whether it is meant for models that just fit in memory: the sentinel must not need more than the loop."""
        return False

    @property
    def traces_steps(self) -> bool:
        """Whether it goes over the graph of a whole step, update included, and not only through its gradient."""
        return False

    @property
    def refuses_group(self) -> str:
        """Why it takes no group of processes, if it takes none."""
        return ""

    @abstractmethod
    def tape(self) -> Tape:
        """A fresh record of one inner loop."""


class Tape(ABC):
    """The record that an engine keeps of one inner loop."""

    replays: ClassVar[bool] = True  # it takes recorded steps; else steps as they are, with their whole graph
    reaches_start: bool = True  # the adjoint gets back to w_0

    def make_step(self, *args: object) -> Step:
        """The formula of a step."""
        return Step(*args)  # pyright: ignore[reportArgumentType]

    def start(self, z: State, copies: State) -> State:
        """z_0 from tensors that are attached to the model, and copies of some of them that nobody writes to."""
        return as_leaves({n: copies[n] if n in copies else x.detach().clone() for n, x in z.items()})

    def start_of_graph(self) -> Sequence[Tensor]:
        """Where a graph that runs through all steps begins; nothing, for an engine that has none."""
        return ()

    @abstractmethod
    def step(self, step: RecordedStep, z: State, monitor: LossMonitor) -> Moved:
        """Take the step from z, and record it. `to` of what is returned is the next z."""

    @abstractmethod
    def pull(self, end: End | None, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        """The gradients of the scalar `end` for `inputs` (None: for every leaf) and that for z_0.

        Without an `end` the scalar is the sum of the losses that were added.
        """

    def add_loss(self, loss: End) -> None:
        """Add a loss at the present state to the sum that `pull` differentiates."""
        raise ValueError(
            "bilevel.inner: this engine differentiates an outer loss at the last weights alone, and can't take losses "
            "of several steps (loop.add_outer_loss). Use engine='reverse', 'unroll' or 'forward'."
        )

    def first_not_finite(self, end: End | None) -> str | None:
        """Where the adjoint stopped being finite, going backwards, if the tape can tell."""
        return None

    def plan(self) -> Plan | None:
        """What is kept for the sweep, and what it will cost; None for an engine that has no choice."""
        return None


def refuse_create_graph(create_graph: bool) -> None:
    if create_graph:
        raise ValueError(
            "bilevel.inner: create_graph=True needs the whole graph of the loop, which only engine='unroll' keeps."
        )
