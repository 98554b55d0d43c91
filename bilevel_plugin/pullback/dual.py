"""Dual numbers (x, ẋ) of forward mode, on which the losses of a step run block by block."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..autograd.look import hooks_on_saved
from ..kernels.stopping import Differentiation

tangents_enabled = forward_ad._set_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage]


class Unsuited(RuntimeError):
    """The reason why a step can't be differentiated block by block."""


@functools.cache
def load_forward_mode() -> None:
    """Import what torch imports at the first dual number, without its warning about torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def tangent_of(x: Tensor) -> Tensor | None:
    """Return the tangent of a dual number, without a graph."""
    tangent = forward_ad.unpack_dual(x).tangent
    return None if tangent is None else tangent.detach()


def primal_of(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x).primal


def as_dual(x: Tensor, tangent: Tensor | None) -> Tensor:
    """Return the dual number (x, tangent), or x itself if the tangent is None."""
    return x if tangent is None else forward_ad.make_dual(x, tangent)


def is_real(x: Any) -> bool:
    """Whether x is a tensor that can have a derivative."""
    return isinstance(x, Tensor) and x.is_floating_point()


def is_tracked(x: Any) -> bool:
    """Whether x is a tensor with a derivative: it depends on a weight or on a wanted tensor."""
    return is_real(x) and (x.requires_grad or tangent_of(x) is not None)


class OnDualNumbers(TorchFunctionMode):
    """A mode in which the losses of a step run on dual numbers.

    Tensors that a loss computes under torch.no_grad are constants in the direction and in its derivative. Double
    backward treats them so by itself. Forward mode ignores torch.no_grad, so this mode stops tangents there. In a
    block, operations run without a graph, while grad mode stays as the block expects it.
    """

    def __init__(self, taking: Differentiation) -> None:
        super().__init__()
        self._on, self._taking, self.in_block = True, taking, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on and not self.in_block and hooks_on_saved is not None and hooks_on_saved(True) is not None:
            raise Unsuited(
                "a part of a loss outside the blocks runs under activation checkpointing, or other hooks on saved "
                "tensors, which drop tangents; make that part a block"
            )
        if func is torch._C._set_grad_enabled:  # pyright: ignore[reportPrivateUsage]
            if self._on:
                torch._C._set_fwd_grad_enabled(args[0])  # pyright: ignore
        elif func is F.embedding and self._on:
            func = _embedding
        if self._taking.without_graphs:
            with torch.no_grad():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def without_graphs(self) -> Generator[None]:
        """Record no graph inside this context."""
        self._taking.without_graphs = True
        try:
            yield
        finally:
            self._taking.without_graphs = False

    @contextmanager
    def off(self) -> Generator[None]:
        """Propagate no tangents inside this context."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Compute F.embedding with a tangent of 0 in the row `padding_idx`, which a step does not change.

    Dropping the gradient of that row makes the derivative of the gradient unsymmetric. So the row keeps its gradient
    here, and only its tangent is 0, which makes the tangents of all gradients right.
    """
    tangent = tangent_of(weight)
    if padding_idx is not None and tangent is not None:
        tangent = tangent.clone()
        tangent[padding_idx] = 0
        weight = as_dual(primal_of(weight), tangent)
    return F.embedding(input, weight, None, *args, **kwargs)


@contextmanager
def unsuited(what: str) -> Generator[None]:
    """Turn an error on dual numbers, of code that runs on plain numbers, into an `Unsuited`."""
    try:
        yield
    except (Unsuited, MemoryError):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unsuited(f"{what} does not run on dual numbers, or not a second time ({why[:160]})") from error
