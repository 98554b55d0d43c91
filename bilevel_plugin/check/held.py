"""What a function of the user holds: what it closes over, the globals that it reads, and the attributes of these."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

_DEPTH = 4
_ENTRIES = 32  # of a list or a dict; a longer one holds data
_OPAQUE = (type, types.ModuleType, torch.dtype, torch.device, torch.Size, torch.Generator, types.BuiltinFunctionType)


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
        if isinstance(value, _OPAQUE):
            continue
        yield from held(value, f"{name}{key}" if key.startswith("[") else f"{name}.{key}".lstrip("."), depth - 1, seen)


def _contents(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, functools.partial):
        return [("func", x.func), *((f"[{i}]", y) for i, y in enumerate(x.args)), *x.keywords.items()]
    if isinstance(x, types.MethodType):
        return [("__func__", x.__func__), ("self", x.__self__)]
    if isinstance(x, types.FunctionType):
        return _of_function(x)
    if isinstance(x, (list, tuple)) and len(cast("list[Any]", x)) <= _ENTRIES:
        return [(f"[{i}]", y) for i, y in enumerate(cast("list[Any]", x))]
    if isinstance(x, Mapping) and len(cast("Mapping[Any, Any]", x)) <= _ENTRIES:
        return [(f"[{key!r}]", y) for key, y in cast("Mapping[Any, Any]", x).items()]
    if isinstance(x, (Tensor, str, bytes, int, float, complex, type(None))):
        return []
    home = type(x).__module__.partition(".")[0]
    if home in ("torch", "builtins", "numpy", "bilevel_plugin") and not isinstance(x, nn.Module):
        return []
    inside = dict(cast("dict[str, Any]", getattr(x, "__dict__", {})))
    if isinstance(x, nn.Module):
        inside |= {**inside.pop("_parameters"), **inside.pop("_buffers"), **inside.pop("_modules")}
        inside = {n: y for n, y in inside.items() if not n.startswith("_")}
    return list(inside.items())


def _of_function(f: types.FunctionType) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    found += [(n, f.__globals__[n]) for n in f.__code__.co_names if n in f.__globals__]
    return [*found, *zip(f.__code__.co_varnames, f.__defaults__ or (), strict=False)]


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
