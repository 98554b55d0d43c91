"""Functions of the direction, which a block applies before Υ: `clip=`, `direction=`, and hooks on parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.trees import State
from .registry import RULES, Rule
from .solvers import Value

Transform = Callable[..., State]  # of d, or of (d, w)
Over = nn.Module | torch.optim.Optimizer | Iterable[Tensor]


@dataclass(frozen=True)
class DirectionFunction:
    """A function of (d, w) that returns the next d. `own`: it is the user's, and may use outer variables."""

    function: Callable[[State, State], State]
    name: str
    own: bool = True
    reads_weights: bool = False

    def __call__(self, d: State, w: State) -> State:
        return self.function(d, w)


def of_direction(function: Callable[[State], State], name: str, own: bool = True) -> DirectionFunction:
    """Return a function of d alone in the form that a block takes."""
    return DirectionFunction(lambda d, w: function(d), name, own)


# --- clip= ---


@dataclass(frozen=True)
class ClipNorm:
    """The function that `clip_norm` returns. A block replaces `over` by the names of those weights."""

    max_norm: Value
    norm_type: float = 2.0
    over: tuple[Tensor, ...] | None = None
    names: frozenset[str] | None = None

    def __call__(self, d: State) -> State:
        if self.over is not None and self.names is None:
            raise TypeError(
                "bilevel.clip_norm: over= names parameters, which a function of the direction does not see. Give "
                "clip_norm(..., over=...) as clip= of the block; in direction=, apply clip_norm(...) to a part of d."
            )
        norms = [
            torch.linalg.vector_norm(x, self.norm_type) for n, x in d.items() if self.names is None or n in self.names
        ]
        if not norms:
            return dict(d)
        norm = torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return {n: x * factor if self.names is None or n in self.names else x for n, x in d.items()}


def clip_norm(max_norm: Value, norm_type: float = 2.0, *, over: Over | None = None) -> ClipNorm:
    """Clip the direction to a norm: d·min(1, max_norm / (‖d‖ + 10⁻⁶)), as torch.nn.utils.clip_grad_norm_ does it.

    Args:
        max_norm: the largest norm, a number or a scalar tensor, which may be an outer variable.
        norm_type: the order of the norm.
        over: the weights whose norm it is, and that are clipped: a module, an optimizer, or parameters. It has to be
            given where the optimizers of a block hold a part of what requires grad in the model. The gradients of
            weights that no optimizer holds then count, as in `clip_grad_norm_(model.parameters(), ...)` after
            `model.zero_grad()`. Such weights stay as they are. To get their hypergradient, name them:
            `hypergrad(module)`, `backward(parameters)`.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.clip_norm(1.0)({"weight": torch.tensor([3.0, 4.0])})
        {'weight': tensor([0.6000, 0.8000])}
    """
    if not max_norm > 0:
        raise ValueError(f"bilevel.clip_norm: max_norm must be positive, got {max_norm}.")
    return ClipNorm(max_norm, norm_type, None if over is None else tuple(_parameters_of(over)))


def _parameters_of(over: Over) -> Iterable[Tensor]:
    if isinstance(over, nn.Module):
        return over.parameters()
    if isinstance(over, torch.optim.Optimizer):
        return [p for group in over.param_groups for p in group["params"]]
    found = [over] if isinstance(over, Tensor) else list(over)
    if not all(isinstance(p, Tensor) for p in found):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("bilevel.clip_norm: over= takes a module, an optimizer, or parameters.")
    return found


@dataclass(frozen=True)
class ClipValue:
    """The function that `clip_value` returns."""

    value: Value

    def __call__(self, d: State) -> State:
        return {n: torch.clamp(x, -self.value, self.value) for n, x in d.items()}  # pyright: ignore


def clip_value(value: Value) -> ClipValue:
    """Clip every entry of the direction to [−value, value], as torch.nn.utils.clip_grad_value_ does it.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.clip_value(1.0)({"weight": torch.tensor([3.0, -0.5])})
        {'weight': tensor([ 1.0000, -0.5000])}
    """
    if not value > 0:
        raise ValueError(f"bilevel.clip_value: value must be positive, got {value}.")
    return ClipValue(value)


def resolve_clip(
    clip: float | Transform | None, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> ClipNorm | DirectionFunction | None:
    """Return the function that `clip=` stands for. Raise if it is not clear over which weights the norm is."""
    if clip is None:
        return None
    if not isinstance(clip, (ClipNorm, ClipValue)):
        if callable(clip):
            return checked_direction(clip, "clip=")
        if isinstance(clip, bool) or not isinstance(clip, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "bilevel.inner: clip= takes the largest norm as a number, or a function of the direction (a dict of "
                f"tensors), such as bilevel.clip_value(0.1), got {type(clip).__name__}."
            )
        clip = clip_norm(clip)
    if isinstance(clip, ClipValue):
        return of_direction(clip, "clip=", isinstance(clip.value, Tensor))
    if clip.over is None:
        _refuse_unclear(clip, model, list(optimizers))
    return clip


def _refuse_unclear(clip: ClipNorm, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    if others := not_held(model, optimizers):
        raise ValueError(
            f"bilevel.inner: over which weights is the norm of clip= ({clip.max_norm})? The optimizer holds a part of "
            f"what requires grad in the model; {others} it does not hold. For clip_grad_norm_("
            "model.parameters(), ...) give clip=bilevel.clip_norm(..., over=model); for the optimizer's weights alone, "
            "clip=bilevel.clip_norm(..., over=optimizer)."
        )


def not_held(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Name what requires grad in the model and is held by none of the optimizers; "" if they hold all, or are none."""
    optimizers = list(optimizers)
    held = {id(p) for o in optimizers for p in _parameters_of(o)}
    others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if not (optimizers and others):
        return ""
    return repr(others[0]) + (f" and {len(others) - 1} more" if len(others) > 1 else "")


def bound_clip(clip: ClipNorm | DirectionFunction | None, parameters: State) -> DirectionFunction | None:
    """Return the function with the names of its weights in place of the parameters."""
    if not isinstance(clip, ClipNorm):
        return clip
    if clip.over is not None:
        names = {id(p): n for n, p in parameters.items()}
        clip = replace(clip, names=frozenset(names[id(p)] for p in clip.over if id(p) in names))
    return of_direction(clip, "clip=", isinstance(clip.max_norm, Tensor))


class Observed(torch.optim.Optimizer):
    """Weights that the norm of `clip=` counts and that no optimizer of the block holds. Its rule leaves them alone."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing."""


RULES[Observed] = Rule(lambda w, d, state, **_: (w, {}), elementwise=True, affine=True)


def observed(
    clip: ClipNorm | DirectionFunction | None, optimizers: tuple[torch.optim.Optimizer, ...]
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of a block, with one more for what its clip= counts and they do not hold."""
    if not isinstance(clip, ClipNorm) or clip.over is None or not optimizers:
        return optimizers
    held = {id(p) for o in optimizers for p in _parameters_of(o)}
    more = list({id(p): p for p in clip.over if p.requires_grad and id(p) not in held}.values())
    return (*optimizers, Observed(more)) if more else optimizers


# --- direction= ---


def checked_direction(function: Transform | None, name: str = "direction=") -> DirectionFunction | None:
    """Return the function of `direction=` or `clip=`, of d or of (d, w), with a check of its result."""
    if function is None:
        return None
    if not callable(function):
        raise TypeError(
            f"bilevel.inner: {name} takes a function of the direction, a dict of tensors by the names of the "
            f"weights, that returns another such dict, got {type(function).__name__}."
        )
    both = _takes_weights(function)

    def checked(d: State, w: State) -> State:
        given = {n: x.clone() for n, x in d.items()}  # the function may change them in place
        new = function(given, {n: x.clone() for n, x in w.items()}) if both else function(given)
        if not isinstance(new, Mapping) or new.keys() != d.keys():  # pyright: ignore[reportUnnecessaryIsInstance]
            got = sorted(new) if isinstance(new, Mapping) else type(new).__name__  # pyright: ignore
            raise TypeError(
                f"bilevel.inner: {name} must return a dict with the names that it was given, {sorted(d)}, got {got}."
            )
        for n, x in new.items():
            if not isinstance(x, Tensor) or x.shape != d[n].shape:  # pyright: ignore[reportUnnecessaryIsInstance]
                got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)  # pyright: ignore
                raise ValueError(
                    f"bilevel.inner: {name} must return a tensor of shape {tuple(d[n].shape)} for {n!r}, got {got}."
                )
        return dict(new)

    return DirectionFunction(checked, name, reads_weights=both)


def _takes_weights(function: Transform) -> bool:
    """Whether a function has two arguments without a default: the direction, and the weights."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p for p in signature.parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(taken) == 2


# --- hooks on parameters ---


def hooks_of(parameters: State) -> DirectionFunction | None:
    """Return the hooks on parameters (register_hook) as a function of the direction, or None if there are none."""
    hooked = {n: list(p._backward_hooks.values()) for n, p in parameters.items() if p._backward_hooks}
    if not hooked:
        return None

    def apply(d: State) -> State:
        new = dict(d)
        for n, hooks in hooked.items():
            for hook in hooks:
                if n in new:
                    changed = hook(new[n])
                    new[n] = new[n] if changed is None else changed
        return new

    return of_direction(apply, "a hook on a parameter")
