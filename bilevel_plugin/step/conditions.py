"""The conditions that a loss runs under: modes, autocast and random states, which are saved and restored."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.trees import same_bits
from ..kernels.switches import EXCLUSIVE
from ..model.model import Model

RandomStates = dict[object, Any]  # by device (None is the host), "python" and "numpy"


def random_states(devices: Iterable[torch.device], *, others: bool = False) -> RandomStates:
    """Return the state of torch's global generator, on the host and on these devices.

    With `others`, the states of Python's `random` and of NumPy's global generator (if it is imported) are added.
    """
    states: RandomStates = {None: torch.get_rng_state()}
    for d in devices:
        module = torch.get_device_module(d)
        states[d] = module.get_rng_state() if d.type == "mps" else module.get_rng_state(d)
    if others:
        version, words, gauss = random.getstate()
        states["python"] = version, array("I", words).tobytes(), gauss
        if (numpy := sys.modules.get("numpy.random")) is not None:
            states["numpy"] = _packed_numpy(numpy.get_state(legacy=False))
    return states


def _packed_numpy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of NumPy's generator without arrays, so that two states can be compared."""
    inner = {n: x.tobytes() if n == "key" else x for n, x in state["state"].items()}
    return {**state, "state": inner}


def _unpacked_numpy(state: dict[str, Any]) -> dict[str, Any]:
    numpy = sys.modules["numpy"]
    inner = {n: numpy.frombuffer(x, dtype=numpy.uint32) if n == "key" else x for n, x in state["state"].items()}
    return {**state, "state": inner}


def set_random_states(states: RandomStates | None) -> None:
    """Restore the states that `random_states` returned."""
    for d, state in (states or {}).items():
        if d is None:
            torch.set_rng_state(state.unpacked() if isinstance(state, _Packed) else state)
        elif d == "python":
            version, words, gauss = state
            random.setstate((version, tuple(array("I", words)), gauss))
        elif d == "numpy":
            sys.modules["numpy.random"].set_state(_unpacked_numpy(state))
        elif not isinstance(d, torch.device):
            raise TypeError(f"bilevel.inner: {d!r} is not a generator of random numbers.")
        elif d.type == "mps":
            torch.get_device_module(d).set_rng_state(state)
        else:
            torch.get_device_module(d).set_rng_state(state, d)


def drawn_from(before: RandomStates, now: RandomStates) -> RandomStates | None:
    """Return the earlier states, packed, of the generators that were drawn from since; None if there are none."""
    moved = {d: x for d, x in before.items() if d in now and not _is_same(x, now[d])}
    if None in moved:
        moved[None] = _Packed(moved[None])
    return moved or None


def _is_same(x: Any, y: Any) -> bool:
    return same_bits(x, y) if isinstance(x, Tensor) else x == y


class _Packed:
    """A state of torch's generator on the host in half the bytes: most of its 64-bit words use only 32 bits.

    A loop may hold one such state for every step.
    """

    __slots__ = ("_low", "_others")

    def __init__(self, state: Tensor) -> None:
        words = state.view(torch.int64)
        self._low = words.to(torch.int32)
        differ = (self._widened() != words).nonzero().flatten().tolist()
        self._others = tuple((i, int(words[i])) for i in differ)

    def _widened(self) -> Tensor:
        return self._low.to(torch.int64) & 0xFFFFFFFF

    def unpacked(self) -> Tensor:
        words = self._widened()
        for i, word in self._others:
            words[i] = word
        return words.view(torch.uint8)


def set_modes(modules: tuple[nn.Module, ...], modes: list[bool]) -> None:
    """Set each module to its train/eval mode."""
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


@contextmanager
def undisturbed(model: Model) -> Generator[None]:
    """Restore modes and random states at the end, so that later code draws the same random numbers as without this.

    So evaluating g changes nothing, and `hypergrad` differentiates exactly the value that `loop.value` has.
    """
    modes, random = [m.training for m in model.modules], random_states(model.devices, others=True)
    try:
        yield
    finally:
        set_modes(model.modules, modes)
        set_random_states(random)


class Conditions:
    """The conditions of a call besides its arguments: train/eval modes, autocast, random states."""

    def __init__(self, model: Model, *, others: bool = False) -> None:
        self._model, self._others = model, others  # also the generators of Python and NumPy
        self._modes = [m.training for m in model.modules]
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in model.device_types}
        self._random: RandomStates | None = random_states(model.devices, others=others)

    def __eq__(self, other: object) -> bool:
        """Return whether two calls that drew no random numbers had the same modes and autocast settings."""
        if not isinstance(other, Conditions) or self.draws or other.draws or self._model is not other._model:
            return False
        return self._modes == other._modes and self._autocast == other._autocast

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def draws(self) -> bool:
        """Whether the call drew random numbers."""
        return self._random is not None

    @property
    def autocast(self) -> bool:
        return any(on for on, _ in self._autocast.values())

    def share_with(self, before: Conditions) -> None:
        """Share equal modes with another call, which saves memory if a model has hundreds of modules."""
        if self._modes == before._modes and self._autocast == before._autocast:
            self._modes, self._autocast = before._modes, before._autocast

    def end_of_call(self) -> None:
        """Drop the random states from which nothing was drawn."""
        if self._random is not None:
            self._random = drawn_from(self._random, random_states(self._model.devices, others=self._others))

    @property
    def precision(self) -> float:
        """The rounding unit of the least precise type that the call computed in."""
        types = [p.dtype for p in self._model.parameters.values()]
        types += [dtype for on, dtype in self._autocast.values() if on]
        return max(torch.finfo(t).eps for t in types)

    @property
    def unit(self) -> float:
        """The largest relative difference to allow between two ways to compute the same loss."""
        root = self.precision**0.5
        return root if self._model.devices else min(1000 * self.precision, root)

    @contextmanager
    def replaying(self, *, autocast: bool = True) -> Generator[None]:
        """Restore the conditions of the call inside this context, and those of the caller at its end."""
        modules = self._model.modules
        with EXCLUSIVE, ExitStack() as stack:
            modes = [m.training for m in modules]
            random = None if self._random is None else random_states(self._model.devices, others=self._others)
            for kind, (on, dtype) in self._autocast.items():
                on = on and autocast
                if (on, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            try:
                set_modes(modules, self._modes)
                set_random_states(self._random)
                yield
            finally:
                set_modes(modules, modes)
                set_random_states(random)
