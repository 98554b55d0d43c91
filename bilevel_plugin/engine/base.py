"""The interface of engines, and of the outer losses that they differentiate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ..autograd.derive import Gradients, Traced
from ..autograd.trees import Pairs, State, as_leaves
from ..step.computed import Computed
from ..step.monitor import LossMonitor
from ..step.piece import Piece
from ..step.step import Step
from ..update.update import Update
from .schedule import Plan

T = TypeVar("T")


class OuterLoss(ABC):
    """An outer loss at the weights of some step."""

    leaves: Sequence[Tensor] = ()  # the outer variables that it uses directly; known after `pull`
    cut: Pairs = []  # noqa: RUF012 (tensors of its batch that require grad, and the leaf in place of each)
    is_function: bool = True  # whether it can be evaluated at another state

    @property
    def numbers(self) -> Sequence[Tensor]:
        """Numbers by which a sweep that is resumed is told from another one."""
        return ()

    @abstractmethod
    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        """Return ∇_z of the loss, and add its direct gradient for `inputs` (None: for every leaf) to the sums."""

    @abstractmethod
    def traced(self, run: Callable[[Traced], T]) -> T:
        """Return run(the loss with its graph), while the model holds its weights."""

    @abstractmethod
    def kept(self) -> OuterLoss:
        """Return the same loss without its graph, so that its gradient at this state can be computed later."""


class Engine(ABC):
    """A way to differentiate the loop. It is a frozen dataclass of options."""

    needs: ClassVar[tuple[str, ...]] = ()  # what solver and optimizer must have: "fixed point", "symmetry"

    @property
    def keeps_graphs(self) -> bool:
        """Whether graphs are kept after their step. Then weights are swapped in (see model/model.py)."""
        return False

    @property
    def spares_memory(self) -> bool:
        """Whether it is for models that hardly fit in memory. Then the sentinel must not need more than the loop."""
        return False

    @property
    def traces_steps(self) -> bool:
        """Whether it differentiates the graph of a whole step, with the update, and not only its gradient."""
        return False

    @property
    def refuses_group(self) -> str:
        """The reason why it takes no group of processes, or "" if it takes one."""
        return ""

    @abstractmethod
    def tape(self) -> Tape:
        """Return an empty record of an inner loop."""


class Tape(ABC):
    """The record that an engine keeps of one inner loop.

    A step is open until it is closed. Its pieces come in one call of the user, or in several; between them, losses may
    be added, and hypergradients taken.
    """

    replays: ClassVar[bool] = True  # whether it records steps for a replay; if not, it keeps their whole graph
    reaches_start: bool = True  # whether the adjoint goes back to w_0

    def start(self, z: State, copies: State) -> State:
        """Return z_0, given tensors with a graph to the model, and read-only copies of some of them."""
        return as_leaves({n: copies[n] if n in copies else x.detach().clone() for n, x in z.items()})

    def start_of_graph(self) -> Sequence[Tensor]:
        """Return the leaves of a graph through all steps, or nothing if the engine keeps no such graph."""
        return ()

    @abstractmethod
    def begin(self, step: Step, z: State, *, whole: bool) -> None:
        """Record that a step begins at z. `whole`: the pieces that follow are all that it has."""

    def evaluate(self, step: Step, z: State, pieces: Sequence[Piece], cut: Pairs, monitor: LossMonitor) -> State:
        """Evaluate pieces of the open step, and return the means of their losses."""
        return step.evaluate(z, pieces, cut, monitor)

    def close(self, step: Step, z: State, update: Update) -> State:
        """Close the step, and return the next state."""
        return step.close(z, update)

    @abstractmethod
    def pull(
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        """Return the gradients of the scalar `end` for `inputs` (None: for every leaf), and the gradient for z_0.

        Without `end`, the scalar is the sum of the losses that were added.
        """

    def add_loss(self, loss: OuterLoss) -> None:
        """Add a loss at the current state to the sum that `pull` differentiates."""
        raise ValueError(
            "bilevel.inner: this engine differentiates an outer loss at the last weights alone, and can't take losses "
            "of several steps (loop.add_outer_loss). Use engine='reverse', 'unroll' or 'forward'."
        )

    def compute(self, value: Computed, z: State) -> tuple[Any, State]:
        """Evaluate a value that later steps use, and return what the user is given and the state for later steps."""
        raise ValueError(
            "bilevel.inner: this engine differentiates the last step alone, and can't go back to where a value was "
            "computed from the weights (loop.compute). Use engine='reverse', 'unroll' or 'forward'."
        )

    def first_not_finite(self, end: OuterLoss | None) -> str | None:
        """Return where the adjoint stops being finite on its way back, or None if that is not known."""
        return None

    def plan(self) -> Plan | None:
        """Return what is stored for the sweep and what it will cost, or None if the engine has no choice."""
        return None


def refuse_create_graph(create_graph: bool) -> None:
    if create_graph:
        raise ValueError(
            "bilevel.inner: create_graph=True needs the whole graph of the loop, which only engine='unroll' keeps."
        )
