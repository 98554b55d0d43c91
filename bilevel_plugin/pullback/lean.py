"""Double backward without the values of the gradient.

∇⟨∇ℓ, u⟩ needs the graph of ∇ℓ, and not its values, unless the update reads them and they can't be recovered from the
states before and after the step (for Adam they can). Where a weight enters ℓ as y = op(x, w), a linear layer or a
convolution, its gradient is a product of x and ∂ℓ/∂y. It costs as much as in a training step, and its values are not
needed. So it is not computed: `_WithoutValue` has its graph, ⟨a, ∇_w ℓ⟩ = ⟨op(x, a), ∂ℓ/∂y⟩, and zeros for its values.

Python's part in this takes as long as `LARGE` multiplications, so smaller products are computed. Losses without a
larger one are differentiated by `plain` from then on, on batches of the same shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..autograd.look import checkpointing
from ..autograd.trees import State
from ..kernels.stopping import Differentiation
from ..kernels.switches import full_precision
from ..model.losses import code_of
from ..model.model import Evaluation
from ..step.cotangent import CotangentOf, PulledPiece
from ..step.piece import Found, Piece
from . import plain
from .plain import differentiate

LARGE = 10**7  # multiplications
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def pull(piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]) -> PulledPiece:
    """Compute ∇⟨∇ℓ, u⟩ without the values of ∇ℓ, or by `plain` if the update needs them or the losses are vmapped."""
    if cotangent.known is None or (piece.row is None and piece.model.tasks.count is not None):
        return plain.pull(piece, z, cotangent, b, wanted)

    small, kind = piece.model.seen.small, kind_of(piece)
    if kind in small:
        return plain.pull(piece, z, cotangent, b, wanted)

    def run(evaluation: Evaluation) -> PulledPiece:
        with LeanProducts(evaluation.weights.values(), evaluation.taking) as lean:
            weighted, values = piece.losses(evaluation)
        piece.record.check_leaves(weighted)
        with lean.taking_gradient():
            d = piece.gradient(weighted, evaluation, True)
        if not lean.without_value:
            small.add(kind)
        left_out = frozenset(n for n, w in evaluation.weights.items() if id(w) in lean.without_value)
        found = Found([], values, d, evaluation.left())
        del weighted
        return differentiate(piece, evaluation, found, cotangent(piece, d, left_out), b, wanted)

    return piece.at(z, run, graph=True, follow=bool(piece.model.seen.moving))


def kind_of(piece: Piece) -> object:
    """Return what pieces with products of the same sizes have in common: losses, and shapes of what they use."""
    return tuple(code_of(t.loss) for t in piece.terms), tuple(x.shape for _, x, _ in piece.record.seals)


class _Op(ABC):
    """An operation y = op(x, w) + b that is linear in x and in w."""

    def fits(self, x: Tensor, w: Tensor) -> bool:
        return x.dtype == w.dtype and not x.is_nested

    def multiplications(self, x: Tensor, w: Tensor) -> int:
        """Return about how many multiplications the gradient for w takes."""
        return x.numel() // max(1, x.shape[-1]) * w.numel()

    @abstractmethod
    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def back(self, y: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool]) -> Grads:
        """Return the wanted gradients for x, w and b from the gradient for y, in differentiable operations."""


@dataclass
class _Linear(_Op):
    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x, w, b)

    def back(self, y: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool]) -> Grads:
        rows = y.reshape(-1, y.shape[-1])
        return (
            y @ w if wanted[0] else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


@dataclass
class _Convolution(_Op):
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def fits(self, x: Tensor, w: Tensor) -> bool:
        return super().fits(x, w) and x.dim() == w.dim() and not isinstance(self.padding, str)

    def multiplications(self, x: Tensor, w: Tensor) -> int:
        n = w.dim() - 2
        strides = self.stride if isinstance(self.stride, (tuple, list)) else (self.stride,) * n
        return x.numel() // max(1, x.shape[1]) * w.numel() // math.prod(strides)

    def _options(self, w: Tensor) -> tuple[Any, ...]:
        n = w.dim() - 2
        each = [
            list(v) if isinstance(v, (tuple, list)) else [v] * n for v in (self.stride, self.padding, self.dilation)
        ]
        return *each, False, [0] * n, self.groups

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.convolution(x, w, b, *self._options(w))

    def back(self, y: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool]) -> Grads:
        sizes = [w.shape[0]] if wanted[2] else None
        return torch.ops.aten.convolution_backward(y, x, w, sizes, *self._options(w), wanted)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, _Op]:
    return x, w, bias, _Linear()


def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *options: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor | None, _Op]:
    return x, w, bias, _Convolution(*options, **more)


_OPS: dict[object, Callable[..., tuple[Tensor, Tensor, Tensor | None, _Op]]] = {
    F.linear: _linear, F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution,
}  # fmt: skip


class LeanProducts(TorchFunctionMode):
    """A mode in which products with these weights have gradients `_WithoutValue` inside `taking_gradient`."""

    def __init__(self, weights: Collection[Tensor], taking: Differentiation) -> None:
        super().__init__()
        self._ids = {id(x) for x in weights}
        self._taking = taking
        self._casts: dict[object, Tensor] = {}
        self.leaving_out = False
        self.without_value: set[int] = set()  # ids of the weights whose gradient has a part without values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPS and len(args) > 1 and id(args[1]) in self._ids and torch.is_grad_enabled() and _is_plain():
            x, w, b, op = _OPS[func](*args, **kwargs)
            lower, low = _autocast_type(w), w
            if lower is not None:  # the casts of autocast, made here
                x, low = self._cast(x, lower), self._cast(w, lower)
                b = b if b is None else self._cast(b, lower)
            # under autocast the uses of a weight share its cast, so all of them are taken alike
            if op.fits(x, low) and (lower is not None or op.multiplications(x, w) >= LARGE):
                self.without_value.add(id(w))
                with full_precision():
                    return _Product.apply(self, op, x, low, b)
        return func(*args, **kwargs)

    def _cast(self, x: Tensor, lower: torch.dtype) -> Tensor:
        """Cast x to the lower dtype, once for all uses of a weight in a loss, as autocast does."""
        if x.dtype == torch.float64:
            return x
        if not (x.is_leaf and x.requires_grad and torch.is_autocast_cache_enabled()):
            return x.to(lower)
        key = id(x), lower, self._taking.losses
        if key not in self._casts:
            self._casts[key] = x.to(lower)
        return self._casts[key]

    @contextmanager
    def taking_gradient(self) -> Generator[None]:
        """Compute gradients of the weights `without_value` with a graph but without values, inside this context."""
        self.leaving_out = True
        try:
            yield
        finally:
            self.leaving_out = False


def _autocast_type(w: Tensor) -> torch.dtype | None:
    kind = w.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind) and w.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else None


def _is_plain() -> bool:
    """Whether neither functional transforms, nor forward mode, nor activation checkpointing are active."""
    outside = torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore
    forward = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()  # pyright: ignore
    return outside and not forward and not checkpointing()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lean: LeanProducts, op: _Op, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.lean, ctx.op = lean, op
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return op(x, w, b)

    @staticmethod
    def backward(ctx: Any, y: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if y is None:  # a stopped gradient is None, and not zeros
            return (None,) * 5
        x, w = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[2:])
        if not ctx.lean.leaving_out:
            return None, None, *ctx.op.back(y, x, w, wanted)
        to_x, _, to_b = ctx.op.back(y, x, w, (wanted[0], False, wanted[2]))
        return None, None, to_x, _WithoutValue.apply(ctx.op, x, y, w.shape), to_b


class _WithoutValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: _Op, x: Tensor, y: Tensor, shape: torch.Size) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(x, y)
        return y.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = ctx.saved_tensors
        to_x, _, _ = ctx.op.back(y, x, a, (ctx.needs_input_grad[1], False, False))
        return None, to_x, ctx.op(x, a), None
