"""What a block does between the gradient and Υ: zeros for unused weights, hooks, `direction=` and `clip=`.

These functions are the user's, so what the derivative needs of them is measured. A function that is called again with
the same gradient has to return the same: the first call in a step is repeated. Its random numbers are those of the
first call whenever the step is run again. And its derivative is compared with differences, in steps 1, 2, 4, 8, ….
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State
from .direction import DirectionFunction, hooks_of
from .proof import CAUSES, TOLERANCE, derivative_error
from .update import PulledUpdate, Update, add

Each = Callable[[Callable[[Any], State], Any], State]  # maps a function of states over the tasks


class Call:
    """A function of the direction in one step, which returns the same whenever the step is run again."""

    def __init__(self, function: DirectionFunction, each: Each, k: int, checks: bool) -> None:
        self.function, self._each, self._k, self._checks = function, each, k, checks
        self._taken, self._random = False, None

    def __call__(self, d: State, w: State) -> State:
        if not d or not self.function.own:
            return self._run(d, w)
        devices = {x.device for x in d.values() if x.device.type not in ("cpu", "meta")}
        before = _random_states(devices)
        if self._taken:
            if self._random is None:
                return self._run(d, w)
            try:
                _set_random_states(self._random)
                return self._run(d, w)
            finally:
                _set_random_states(before)
        new = self._run(d, w)
        after = _random_states(devices)
        if any(not torch.equal(x, after[place]) for place, x in before.items()):
            self._random = before
        self._taken = True
        if self._k == 1 or not devices:  # on a device, reading values makes the host wait
            self._check(d, w, new)
        return new

    def _run(self, d: State, w: State) -> State:
        return self._each(lambda both: self.function(*both), (d, w)) if d else d

    def _check(self, d: State, w: State, new: State) -> None:
        """Raise if the function returns something else in a second call; warn if its derivative is not its own."""
        d, w = ({n: x.detach() for n, x in s.items()} for s in (d, w))
        with torch.no_grad():
            again = self(d, w)
        for n, x in new.items():
            if not (x.is_meta or torch.equal(again[n], x) or _is_close(again[n], x)):
                raise RuntimeError(
                    f"bilevel.inner: {self.function.name} returned another direction when it was called again with the "
                    f"same gradient, at step k = {self._k} (for {n!r}): it has a state of its own, such as a momentum "
                    "or a counter, or draws random numbers that are not torch's. A rule has a state: write it as "
                    "optimizer=rule, with rule(w, d, state, *, lr, count). Draw with torch."
                )
        if self._checks and self._k & (self._k - 1) == 0:  # steps 1, 2, 4, …
            error = derivative_error(self, d, w)
            if error is not None and error > TOLERANCE:
                warnings.warn(
                    f"bilevel.inner: the derivative of {self.function.name} is not that of what it does, at step k = "
                    f"{self._k}: it differs by {error:.2%} from central differences, so the hypergradient may be "
                    f"wrong. {CAUSES}",
                    DerivativeWarning,
                    stacklevel=2,
                )


def _is_close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e3 * torch.finfo(y.dtype).eps, equal_nan=True)


def _random_states(devices: Iterable[torch.device]) -> dict[torch.device | None, Tensor]:
    found: dict[torch.device | None, Tensor] = {None: torch.get_rng_state()}
    return {**found, **{d: torch.get_device_module(d).get_rng_state(d) for d in devices}}


def _set_random_states(states: Mapping[torch.device | None, Tensor]) -> None:
    for d, state in states.items():
        if d is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(d).set_rng_state(state, d)


@dataclass(frozen=True)
class Prepared(Update):
    """z⁺ = Υ(z, f(d, w)): an update after functions of the direction.

    `zeros` are the weights that have a gradient of zeros if the losses do not use them.
    """

    calls: Sequence[Call]
    update: Update
    zeros: frozenset[str] = frozenset()

    @property
    def options(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update.options

    @property
    def reads_direction(self) -> bool:
        return bool(self.calls) or self.update.reads_direction

    @property
    def closes_over(self) -> bool:
        return self.update.closes_over or any(call.function.own for call in self.calls)

    @property
    def base(self) -> Update:
        return self.update.base

    def given(self, z: State, d: State) -> State:
        return self.update.given(z, self._before(z, d))

    def moves(self, z: State, d: State) -> Iterable[str]:
        return self.update.moves(z, self._whole(z, d))

    def direction_between(self, z: State, to: State, names: Iterable[str]) -> State | None:
        return None if self.calls else self.update.direction_between(z, to, names)

    def __call__(self, z: State, d: State) -> State:
        return self.update(z, self._before(z, d))

    def _before(self, z: State, d: State) -> State:
        d = self._whole(z, d)
        return self._applied(d, self._weights(z, d))

    def _whole(self, z: State, d: State) -> State:
        missing = [n for n in self.zeros if n not in d]
        return {**d, **{n: torch.zeros_like(z[n]) for n in missing}} if missing else d

    def _weights(self, z: State, d: State) -> State:
        return {n: z[n] for n in d} if any(call.function.reads_weights for call in self.calls) else {}

    def _applied(self, d: State, w: State) -> State:
        for call in self.calls:
            d = call(d, w)
        return d

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        whole = self._whole(z, d)
        if not self.calls:
            pulled = self.update.pull(z, whole, a, wanted, end=end)
            return replace(pulled, cotangent={n: x for n, x in pulled.cotangent.items() if n in d})
        direction, weights = (
            {n: x.detach().requires_grad_() for n, x in s.items()} for s in (whole, self._weights(z, whole))
        )
        with torch.enable_grad():
            new = self._applied(direction, weights)
        pulled = self.update.pull(z, {n: x.detach() for n, x in new.items()}, a, wanted, end=end)
        keys = [n for n in pulled.cotangent if new[n].requires_grad]
        inputs = [*direction.values(), *weights.values(), *wanted]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if keys:
            along = [pulled.cotangent[n] for n in keys]
            grads = grad([new[n] for n in keys], inputs, along, retain_graph=self.closes_over)
        through = dict(zip(weights, grads[len(direction) :], strict=False))
        adjoint = {n: add(pulled.adjoint.get(n), through.get(n)) for n in {**pulled.adjoint, **through}}
        return replace(
            pulled,
            adjoint={n: x for n, x in adjoint.items() if x is not None},
            cotangent={n: g for n, g in zip(direction, grads, strict=False) if g is not None and n in d},
            wanted=[add(x, y) for x, y in zip(pulled.wanted, grads[len(inputs) - len(wanted) :], strict=True)],
        )


class Preparation:
    """What a block puts before its updates: `direction=` and `clip=`, hooks on parameters, and zeros.

    `each` maps a function over the tasks. `zeros`: a weight that had a gradient once has one of zeros in a step that
    does not use it, as after zero_grad(set_to_none=False). `has_no_rate`: the direction contains the rate.
    """

    def __init__(
        self,
        parameters: State,
        each: Each,
        functions: Sequence[DirectionFunction],
        *,
        zeros: bool = False,
        checks: bool = True,
        has_no_rate: bool = False,
    ) -> None:
        self._parameters, self._each, self._functions = parameters, each, functions
        self._checks, self._has_no_rate = checks, has_no_rate
        self._used = {n for n, p in parameters.items() if zeros and p.grad is not None}
        self._zeros = zeros

    def __call__(self, update: Update, k: int, only: frozenset[str] | None = None) -> Update:
        """Return the update of step k, which may be restricted to some weights, with what comes before it."""
        zeros = frozenset(self._used if only is None else self._used & only)
        calls = [Call(f, self._each, k, self._checks) for f in self._functions]
        return Prepared(calls, update, zeros) if calls or zeros else update

    def hooks(self, k: int) -> Call | None:
        """Return the hooks on parameters, which see the gradient of each backward pass, or None if there are none."""
        hooks = hooks_of(self._parameters)
        if hooks is None:
            return None
        if self._has_no_rate:
            raise ValueError(
                "bilevel.inner: a parameter has a hook on its gradient, and the rates are the solver object's: the "
                "hook would see the gradient times the rate. Give the rate by lr= or optimizer=, and the solver by "
                "name."
            )
        return Call(hooks, self._each, k, self._checks)

    def count(self, moved: Iterable[str]) -> None:
        """Note the weights that had a gradient in a step."""
        if self._zeros:
            self._used.update(moved)
