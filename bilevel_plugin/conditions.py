"""What a loss sees besides its arguments and the weights: train/eval modes and random numbers, read and put back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .binding import Binding

RandomStates = dict[torch.device | None, Tensor]


@contextmanager
def undisturbed(binding: Binding) -> Generator[None]:
    """Modes that a loss sets inside do not stay, and random numbers that it draws are drawn again by what comes after.

    So a look at g changes nothing, and `hypergrad` differentiates the very value that `loop.value` has.
    """
    modes, random = [m.training for m in binding.modules], random_states(binding.devices)
    try:
        yield
    finally:
        set_modes(binding.modules, modes)
        set_random_states(random)


def set_modes(modules: tuple[nn.Module, ...], modes: list[bool]) -> None:
    """Set each module to training (True) or evaluation mode."""
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


def random_states(devices: set[torch.device]) -> RandomStates:
    """The states of the random number generators of the host (None) and of these devices."""
    states: RandomStates = {None: torch.get_rng_state()}
    for d in devices:
        module = torch.get_device_module(d)
        states[d] = module.get_rng_state() if d.type == "mps" else module.get_rng_state(d)
    return states


def set_random_states(states: RandomStates | None) -> None:
    """Put the generators into these states; None leaves them as they are."""
    for d, state in (states or {}).items():
        if d is None:
            torch.set_rng_state(state)
        elif d.type == "mps":
            torch.get_device_module(d).set_rng_state(state)
        else:
            torch.get_device_module(d).set_rng_state(state, d)
