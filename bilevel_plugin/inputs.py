"""The arguments of a block, of its steps and of its hypergradients: checked, and in the form that the block uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .kernels.switches import EXCLUSIVE
from .model.model import Model
from .update.solvers import Value
from .update.update import UpdateRule

Inputs = Tensor | Iterable[Tensor] | Mapping[str, Tensor] | nn.Module
Only = torch.optim.Optimizer | nn.Module | Tensor | Iterable[Tensor]


def as_weight(c: Value) -> Value:
    """Check the weight of an outer loss. A tensor that does not require grad is copied, as it may be written to."""
    if isinstance(c, Tensor) and c.shape == () and c.is_floating_point():
        return c if c.requires_grad else c.clone()
    if isinstance(c, (int, float)) and math.isfinite(c):
        return float(c)
    raise ValueError(f"bilevel.inner: weight= of add_outer_loss is a finite number or a scalar tensor, got {c!r:.80}.")


def as_tuple(outer: Any) -> tuple[Any, ...]:
    """Return the arguments of g after the model: the entries of a tuple or list, or anything else as the only one."""
    return tuple(outer) if isinstance(outer, (tuple, list)) else (outer,)


def flatten(inputs: Inputs) -> dict[str, Tensor]:
    """Check the inputs of `hypergrad`, and return them as tensors by name."""
    tensors: dict[str, Tensor] = {}
    if isinstance(inputs, Tensor):
        tensors[""] = inputs
    elif isinstance(inputs, nn.Module):
        with EXCLUSIVE:
            tensors.update((n, p) for n, p in inputs.named_parameters() if p.requires_grad)
    elif isinstance(inputs, Mapping):
        tensors.update(cast("Mapping[str, Tensor]", inputs))
    else:
        tensors.update((str(i), x) for i, x in enumerate(inputs))
    if not tensors:
        raise ValueError("bilevel.inner: there is nothing to differentiate for: the inputs are empty.")
    for n, x in tensors.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"bilevel.inner: the inputs must be tensors, got {type(x).__name__} for {n or 'it'!r}.")
        if not x.requires_grad:
            raise ValueError(
                f"bilevel.inner: the input {n or 'given'} (shape {tuple(x.shape)}, {x.dtype}) does not require grad. "
                "Set requires_grad_() on it before the first step; only floating-point tensors can have it."
            )
    return tensors


def leaves(inputs: Inputs, caller: str) -> dict[str, Tensor]:
    """Return the inputs as tensors by name, all of them leaves, which `caller` can move to take differences."""
    tensors = flatten(inputs)
    for name, x in tensors.items():
        if not x.is_leaf:
            raise ValueError(
                f"bilevel.{caller}: the input{name and f' {name}'} (shape {tuple(x.shape)}) is not a leaf, so it "
                "can't be moved to take differences. Give the leaf that it is computed from."
            )
    return tensors


def names_of(only: Only | None, model: Model, update: UpdateRule) -> frozenset[str] | None:
    """Return the names of the weights that `only=` selects."""
    if only is None:
        return None
    if isinstance(only, torch.optim.Optimizer):
        names = update.names_held_by(only)
        if names is None:
            raise ValueError(
                "bilevel.inner: only= got an optimizer that is not one of this loop's. Give it to the block: "
                "bilevel.inner(..., optimizer=[one, other])."
            )
        return frozenset(names)
    wanted: list[Any] = []
    if isinstance(only, nn.Module):
        wanted = list(only.parameters())
    elif isinstance(only, Tensor):
        wanted = [only]
    elif isinstance(only, Iterable) and not isinstance(only, (str, Mapping)):  # pyright: ignore
        wanted = list(only)
    ids = {id(p): n for n, p in model.parameters.items()}
    held = [p for p in wanted if id(p) in ids or not isinstance(only, nn.Module)]
    strangers = [p for p in held if id(p) not in ids]
    if strangers or not held:
        stranger = strangers[0] if strangers else only
        got = f"a tensor of shape {tuple(stranger.shape)}" if isinstance(stranger, Tensor) else f"{stranger!r:.40}"
        raise ValueError(
            "bilevel.inner: only= takes an optimizer of this loop, a part of the model, or parameters that the "
            f"loop trains, got {got}."
        )
    return frozenset(ids[id(p)] for p in held)
