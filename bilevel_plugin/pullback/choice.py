"""Which modules of a model are differentiated one by one (blocks=)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

Which = str | type[nn.Module] | nn.Module | Sequence[type[nn.Module] | nn.Module]


def checked(which: Any) -> Which:
    """Return the choice of `blocks=`, or raise an error that lists what it takes."""
    several: list[Any] = list(which) if isinstance(which, (list, tuple, set, nn.ModuleList)) else [which]
    if which != "auto" and not (several and all(isinstance(x, nn.Module) or _is_class(x) for x in several)):
        raise TypeError(
            "bilevel.Reverse: blocks= takes 'auto', a class of modules, modules of the model, or several of either, "
            f"got {which!r:.80}."
        )
    return "auto" if which == "auto" else several


def _is_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, nn.Module)


def chosen(model: nn.Module, which: Which) -> list[nn.Module]:
    """Return the modules of the model that are blocks. A block inside another one runs as a part of it."""
    modules = list(model.modules())
    if which == "auto":
        return _repeated(modules)
    several = cast("list[Any]", which)
    found = [m for m in modules if any(m is x or (_is_class(x) and isinstance(m, x)) for x in several)]
    missing = [x for x in several if not any(m is x or (_is_class(x) and isinstance(m, x)) for m in found)]
    if missing:
        raise ValueError(
            f"bilevel.Reverse: blocks= names {getattr(missing[0], '__name__', type(missing[0]).__name__)}, but the "
            "model has no such module. Name a class of modules that the model has, or modules of the model."
        )
    return found


def _repeated(modules: list[nn.Module]) -> list[nn.Module]:
    """Return modules of several layers that are in a ModuleList or Sequential with another module of their class.

    Of nested ones, the smallest are returned, since a stage of a network is made of blocks.
    """
    found: dict[int, nn.Module] = {}
    for holder in modules:
        if isinstance(holder, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = list(holder.children())
            kinds = Counter(type(m) for m in children)
            found.update((id(m), m) for m in children if kinds[type(m)] > 1 and _has_layers(m))
    return [m for m in found.values() if not any(id(x) in found for x in m.modules() if x is not m)]


def _has_layers(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(p.requires_grad for p in module.parameters())
