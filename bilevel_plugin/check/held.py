"""What a function of the user holds: what it closes over, the globals that it reads, and the attributes of these."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.contents import OPAQUE, places_in, read

_DEPTH = 4


def held(x: Any, name: str = "", depth: int = _DEPTH, seen: set[int] | None = None) -> Generator[tuple[str, Any]]:
    """Yield the name and value of everything that a function, or another object, holds: the object itself first.

    A module is yielded, and what its attributes hold; so are functions with their closures, and other objects of the
    user's own classes. What torch or another library defines is yielded without a look inside.
    """
    seen = set[int]() if seen is None else seen
    yield name, x
    if depth == 0 or id(x) in seen:
        return
    seen.add(id(x))
    for key, value in _contents(x):
        if isinstance(value, (*OPAQUE, torch.Generator)):
            continue
        yield from held(value, f"{name}{key}" if key.startswith("[") else f"{name}.{key}".lstrip("."), depth - 1, seen)


def _contents(x: Any) -> list[tuple[str, Any]]:
    return [(key, read(holder, index)) for key, holder, index in places_in(x)]


def switches(x: Any) -> object:
    """Return a key that changes where a function may take another path: code, flags, types, and whether a number is 0.

    The values of tensors and numbers do not matter, nor do the objects themselves, so that the key is the same for a
    function that is defined anew, and after each step.
    """
    return tuple(_switch(value) for _, value in held(x))


def _switch(x: Any) -> object:
    if isinstance(x, (bool, str, type(None))):
        return x
    if isinstance(x, (int, float)):
        return x != 0
    if isinstance(x, nn.Module):
        return type(x), x.training
    if isinstance(x, Tensor):
        return x.requires_grad
    return getattr(x, "__code__", type(x))
