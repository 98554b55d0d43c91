"""The conditions that a loss runs under: train/eval modes and random states, which are saved and restored."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.trees import same_bits
from ..model.model import Binding

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
def undisturbed(binding: Binding) -> Generator[None]:
    """Restore modes and random states at the end, so that later code draws the same random numbers as without this.

    So evaluating g changes nothing, and `hypergrad` differentiates exactly the value that `loop.value` has.
    """
    modes, random = [m.training for m in binding.modules], random_states(binding.devices)
    try:
        yield
    finally:
        set_modes(binding.modules, modes)
        set_random_states(random)
