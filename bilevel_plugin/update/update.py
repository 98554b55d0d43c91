"""Υ, the update after a gradient: z⁺ = Υ(z, d), written so that autograd can differentiate it.

d is the solver's direction; it takes the place of `.grad` in torch.optim. The state z of the inner problem holds the
weights under their names, and an optimizer's tensors under "name@tensor". As in torch.optim, a weight on which the
step's loss does not depend is left unchanged. The optimizer is read at every step, so that a learning-rate scheduler
works. It is never stepped.

An `UpdateRule` belongs to a loop; `at_step` gives the `Update` of one step, with the options at that time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.trees import State
from .solvers import Rate, Value, evaluate

CountOnce = Callable[[Tensor], Tensor]  # Alone.once


def weight_of(key: str) -> str:
    """Return the name of the weight that this entry of the state is, or whose optimizer tensor it is."""
    return key.rpartition("@")[0] or key


def optimizer_state(name: str, z: State) -> State:
    """Return the optimizer's tensors for one weight."""
    begin = f"{name}@"
    return {key[len(begin) :]: x for key, x in z.items() if key.startswith(begin)}


def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return x + y, where None counts as 0."""
    return x if y is None else y if x is None else x + y


@dataclass
class PulledUpdate:
    """The result of pulling an adjoint a through Υ: z⁺, a·∂Υ/∂z, u = a·∂Υ/∂d, and the gradients of wanted options."""

    to: State
    adjoint: State
    cotangent: State
    wanted: Sequence[Tensor | None]


class Update(ABC):
    """The update of one step, z⁺ = Υ(z, d), with the options that it had then."""

    options: Sequence[Tensor] = ()  # the tensors among its options that require grad

    @property
    def reads_direction(self) -> bool:
        """Whether the derivative of Υ depends on the values of d, and not only on its shape."""
        return True

    @property
    def closes_over(self) -> bool:
        """Whether the update calls a function of the user, which may use outer variables that `options` lacks."""
        return False

    @property
    def base(self) -> Update:
        """The update without functions of the direction before it."""
        return self

    def given(self, z: State, d: State) -> State:
        """Return the direction that `base` is given."""
        return d

    def moves(self, z: State, d: State) -> Iterable[str]:
        """Return the names of the weights that the update changes."""
        return tuple(d)

    @abstractmethod
    def __call__(self, z: State, d: State) -> State:
        """Compute z⁺ = Υ(z, d) in differentiable operations."""

    def direction_between(self, z: State, to: State, names: Iterable[str]) -> State | None:
        """Return the direction d with z⁺ = Υ(z, d) for these weights, or None if z and z⁺ do not determine it."""
        return None

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        """Pull the adjoint a through Υ, by autograd. Without `end`, z⁺ is not returned."""
        at = {n: x.detach().requires_grad_() for n, x in z.items() if x.is_floating_point()}
        direction = {n: x.detach().requires_grad_() for n, x in d.items()}
        with torch.enable_grad():
            to = self({**z, **at}, direction)
        keys = [n for n in a if n in to and to[n].requires_grad]
        inputs = [*at.values(), *direction.values(), *wanted]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if keys:
            grads = grad([to[n] for n in keys], inputs, [a[n] for n in keys], retain_graph=bool(self.options))
        first, second = len(at), len(at) + len(direction)
        return PulledUpdate(
            {n: x.detach() for n, x in to.items()} if end else {},
            {n: g for n, g in zip(at, grads, strict=False) if g is not None},
            {n: g for n, g in zip(direction, grads[first:second], strict=True) if g is not None},
            grads[second:],
        )


class UpdateRule(ABC):
    """The rule by which a loop updates its weights."""

    start: State  # the optimizer's tensors at the beginning
    has_no_rate: bool = False  # the direction already contains the rate (of a solver object)

    def open(self, current: Callable[[], State]) -> None:  # noqa: B027 (plain steps have no optimizer)
        """Called when the block begins. `current` returns the state that the block has."""

    def close(self) -> None:  # noqa: B027 (plain steps have no optimizer)
        """Called when the block ends."""

    @abstractmethod
    def at_step(self, k: int) -> Update:
        """Return Υ_k, with the present options."""

    def count(self, moved: Iterable[str]) -> None:  # noqa: B027 (plain steps have nothing to count)
        """Count an update of each of these weights; called after a step with the names of those that it changed."""

    def names_held_by(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        """Return the weights that the optimizer holds, or None if it is not one of this loop's optimizers."""
        return None

    def write_state(self, z: State) -> None:
        """Write the optimizer's part of z into the optimizer itself."""
        raise ValueError(
            "bilevel.inner: commit_(optimizer=True) has no optimizer to write to. Open the block with optimizer=..., "
            "or leave out optimizer=True."
        )

    def check(self) -> None:  # noqa: B027 (plain steps have no optimizer)
        """Raise if the optimizer was changed in a way that a step would not notice."""

    def lacks(self, need: str) -> str | None:
        """Return why Υ does not have what an engine needs ("fixed point", "symmetry"), or None if it has it."""
        return None


# --- plain steps ---


@dataclass(frozen=True)
class Descent(Update):
    """w⁺ = w − lr·d."""

    lr: Value = 1.0
    options: Sequence[Tensor] = ()

    @property
    def reads_direction(self) -> bool:
        return bool(self.options)

    def __call__(self, z: State, d: State) -> State:
        lr = self.lr
        if isinstance(lr, Tensor):
            return {n: x - lr * d[n] if n in d else x for n, x in z.items()}
        return {n: torch.sub(x, d[n], alpha=lr) if n in d else x for n, x in z.items()}

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        if self.options:
            return super().pull(z, d, a, wanted, end=end)
        with torch.no_grad():
            u = {n: x * -self.lr for n, x in a.items() if n in d}
            to = self(z, d) if end else {}
            return PulledUpdate(to, {n: x for n, x in a.items() if n in z}, u, [None] * len(wanted))


@dataclass
class DescentRule(UpdateRule):
    """Plain steps, at a rate that may depend on k."""

    rate: Rate | None
    count_once: CountOnce
    start: State = field(default_factory=dict[str, Tensor])
    _last: Descent | None = None

    @property
    def has_no_rate(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rate is None

    def at_step(self, k: int) -> Update:
        lr = 1.0 if self.rate is None else evaluate("bilevel.inner: lr", self.rate, k)
        if not (isinstance(lr, Tensor) and lr.requires_grad):
            lr = lr.detach().clone() if isinstance(lr, Tensor) else lr  # the tensor may be written to later
            if self._last is None or isinstance(lr, Tensor) or self._last.lr != lr:
                self._last = Descent(lr)  # otherwise it shares the update of the previous step
            return self._last
        return Descent(self.count_once(lr), (lr,))
