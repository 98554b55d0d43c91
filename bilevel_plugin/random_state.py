"""Random numbers and train/eval modes: what a call changes besides its result, noted and put back."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .binding import Binding
from .graph import same_bits

RandomStates = dict[torch.device | None, Tensor]  # None is the host


def random_states(devices: Iterable[torch.device]) -> RandomStates:
    """The state of torch's global generator, on the host and on these devices."""
    states: RandomStates = {None: torch.get_rng_state()}
    for d in devices:
        module = torch.get_device_module(d)
        states[d] = module.get_rng_state() if d.type == "mps" else module.get_rng_state(d)
    return states


def set_random_states(states: RandomStates | None) -> None:
    """Put back what `random_states` gave."""
    for d, state in (states or {}).items():
        if d is None:
            torch.set_rng_state(state)
        elif d.type == "mps":
            torch.get_device_module(d).set_rng_state(state)
        else:
            torch.get_device_module(d).set_rng_state(state, d)


def same_random_states(x: RandomStates, y: RandomStates) -> bool:
    """Whether nothing was drawn between the two."""
    return all(same_bits(state, y[d]) for d, state in x.items())


def set_modes(modules: tuple[nn.Module, ...], modes: list[bool]) -> None:
    """Give each module its train/eval mode."""
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


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
