"""Functions of the direction, which an update applies first: clipping, `direction=`, and hooks on parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.trees import State
from .solvers import Value
from .update import PulledUpdate, Update, add

Transform = Callable[[State], State]


def clip_norm(max_norm: Value, norm_type: float = 2.0) -> Transform:
    """Clip the direction to a norm: d·min(1, max_norm / (‖d‖ + 10⁻⁶)), as torch.nn.utils.clip_grad_norm_ does it.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.clip_norm(1.0)({"weight": torch.tensor([3.0, 4.0])})
        {'weight': tensor([0.6000, 0.8000])}
    """
    if not max_norm > 0:
        raise ValueError(f"bilevel.clip_norm: max_norm must be positive, got {max_norm}.")

    def clip(d: State) -> State:
        norms = torch.stack([torch.linalg.vector_norm(x, norm_type) for x in d.values()])
        factor = (max_norm / (torch.linalg.vector_norm(norms, norm_type) + 1e-6)).clamp(max=1.0)
        return {n: x * factor for n, x in d.items()}

    clip.may_close_over = isinstance(max_norm, Tensor)  # pyright: ignore[reportFunctionMemberAccess]
    return clip


def clip_value(value: Value) -> Transform:
    """Clip every entry of the direction to [−value, value], as torch.nn.utils.clip_grad_value_ does it.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.clip_value(1.0)({"weight": torch.tensor([3.0, -0.5])})
        {'weight': tensor([ 1.0000, -0.5000])}
    """
    if not value > 0:
        raise ValueError(f"bilevel.clip_value: value must be positive, got {value}.")

    def clip(d: State) -> State:
        return {n: torch.clamp(x, -value, value) for n, x in d.items()}  # pyright: ignore

    clip.may_close_over = isinstance(value, Tensor)  # pyright: ignore[reportFunctionMemberAccess]
    return clip


def hooks_of(parameters: State) -> Transform | None:
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

    return apply


@dataclass(frozen=True)
class Transformed(Update):
    """An update that applies functions to the direction first."""

    transforms: Sequence[Transform]
    update: Update
    closes_over: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def options(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update.options

    def moves(self, z: State, d: State) -> Iterable[str]:
        return self.update.moves(z, d)

    def _transformed(self, d: State) -> State:
        for transform in self.transforms:
            d = transform(d)
        return d

    def __call__(self, z: State, d: State) -> State:
        return self.update(z, self._transformed(d))

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        leaves = {n: x.detach().requires_grad_() for n, x in d.items()}
        with torch.enable_grad():
            new = self._transformed(leaves)
        pulled = self.update.pull(z, {n: x.detach() for n, x in new.items()}, a, wanted, end=end)
        keys = [n for n in pulled.cotangent if new[n].requires_grad]
        grads: Sequence[Tensor | None] = [None] * (len(leaves) + len(wanted))
        if keys:
            along = [pulled.cotangent[n] for n in keys]
            grads = grad([new[n] for n in keys], [*leaves.values(), *wanted], along, retain_graph=self.closes_over)
        return replace(
            pulled,
            cotangent={n: g for n, g in zip(leaves, grads, strict=False) if g is not None},
            wanted=[add(x, y) for x, y in zip(pulled.wanted, grads[len(leaves) :], strict=True)],
        )


def checked_direction(function: Transform | None, name: str = "direction=") -> Transform | None:
    """Return the function of `direction=` or `clip=` with a check of its result."""
    if function is None:
        return None
    if not callable(function):
        raise TypeError(
            f"bilevel.inner: {name} takes a function of the direction, a dict of tensors by the names of the "
            f"weights, that returns another such dict, got {type(function).__name__}."
        )

    def checked(d: State) -> State:
        new = function({n: x.clone() for n, x in d.items()})  # the function may change them in place
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

    return checked


def resolve_clip(clip: float | Transform | None) -> Transform | None:
    """Return the function of the direction that `clip=` stands for."""
    if clip is None or hasattr(clip, "may_close_over"):
        return cast("Transform | None", clip)
    if callable(clip):
        return checked_direction(clip, "clip=")
    if isinstance(clip, bool) or not isinstance(clip, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "bilevel.inner: clip= takes the largest norm as a number, or a function of the direction (a dict of "
            f"tensors), such as bilevel.clip_value(0.1), got {type(clip).__name__}."
        )
    return clip_norm(clip)
