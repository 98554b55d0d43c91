"""What an object of the user holds: the closure, the globals and the defaults of a function, entries, attributes."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

ENTRIES = 32  # of a list or a dict; a longer one holds data
OPAQUE = (type, types.ModuleType, torch.dtype, torch.device, torch.Size, types.BuiltinFunctionType)
Place = tuple[str, Any, Any]  # a name, the holder, and the key there (None: the holder is the cell of a closure)


def read(holder: Any, key: Any) -> Any:
    """Return what is at a place."""
    return holder.cell_contents if key is None else holder[key]


def places_in(x: Any) -> list[Place]:
    """Return where the things are that x holds. What torch or another library defines is not looked into."""
    if isinstance(x, functools.partial):
        keywords = x.keywords
        return [
            ("func", (x.func,), 0),
            *((f"[{i}]", x.args, i) for i in range(len(x.args))),
            *((n, keywords, n) for n in keywords),
        ]
    if isinstance(x, types.MethodType):
        return [("__func__", (x.__func__,), 0), ("self", (x.__self__,), 0)]
    if isinstance(x, types.FunctionType):
        return _of_function(x)
    if isinstance(x, (list, tuple)) and len(cast("list[Any]", x)) <= ENTRIES:
        return [(f"[{i}]", x, i) for i in range(len(cast("list[Any]", x)))]
    if isinstance(x, Mapping) and len(cast("Mapping[Any, Any]", x)) <= ENTRIES:
        return [(f"[{key!r}]", x, key) for key in cast("Mapping[Any, Any]", x)]
    if isinstance(x, (Tensor, str, bytes, int, float, complex, type(None))):
        return []
    home = type(x).__module__.partition(".")[0]
    if home in ("torch", "builtins", "numpy", "bilevel_plugin") and not isinstance(x, nn.Module):
        return []
    inside = cast("dict[str, Any]", getattr(x, "__dict__", {}))
    if not isinstance(x, nn.Module):
        return [(n, inside, n) for n in inside]
    holders = (inside, inside["_parameters"], inside["_buffers"], inside["_modules"])
    return [(n, at, n) for at in holders for n in at if not (at is inside and n.startswith("_"))]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a function, and the functions inside of it, use."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


def _of_function(f: types.FunctionType) -> list[Place]:
    found: list[Place] = []
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            _ = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        found.append((name, cell, None))
    found += [(n, f.__globals__, n) for n in sorted(names_in(f.__code__)) if n in f.__globals__]
    defaults = f.__defaults__ or ()
    names = f.__code__.co_varnames[: f.__code__.co_argcount][f.__code__.co_argcount - len(defaults) :]
    return [*found, *((n, defaults, i) for i, n in enumerate(names))]
