"""Replacements of kernels whose second derivative is missing or wrong, which are in effect while a loss runs.

- Fused attention has no second derivative, on any device. Attention by plain products takes its place, in chunks for
  long sequences (`attention`). Where only a gradient is needed, on the CPU, the fused kernel stays.
- The fused kernel of `torch.nn.utils.parametrizations.weight_norm` fails gradgradcheck. Its formula takes its place.
- An embedding with padding_idx drops the gradient of that row. This is right for the direction of a step, and wrong in
  every other derivative, where an embedding without padding_idx takes its place.
- cuDNN's recurrent layers have no second derivative. The layers of torch take their place.
- Reentrant activation checkpointing can't be differentiated by torch.autograd.grad. The non-reentrant kind takes its
  place.
- BatchNorm and InstanceNorm update their running statistics outside autograd. Where the statistics are part of the
  differentiated state, differentiable operations update them, and use them in eval mode.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..autograd.look import checkpointing
from ..autograd.trees import map_tensors
from .attention import MATH_KERNEL, attention

T = TypeVar("T")

# This lock is held while a loss runs, since the switches of attention and cuDNN, and the random states, belong to the
# process and not to the thread. It is re-entrant, for a loop inside a loss.
EXCLUSIVE = threading.RLock()
NORMALISATIONS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)  # pyright: ignore[reportPrivateUsage]


def twice_differentiable(
    *,
    recurrent_on_gpu: bool = False,
    weight_norm: bool = False,
    long_attention: bool = False,
    statistics: TakingDirection | None = None,
    padded: TakingDirection | None = None,
) -> AbstractContextManager[Any]:
    """Replace the kernels whose second derivative is missing or wrong, as far as the model uses them."""
    if recurrent_on_gpu or weight_norm or long_attention or statistics is not None or padded is not None:
        return _several(recurrent_on_gpu, weight_norm, long_attention, statistics, padded)
    return _PLAIN_ATTENTION


@contextmanager
def _several(
    recurrent_on_gpu: bool,
    weight_norm: bool,
    long_attention: bool,
    statistics: TakingDirection | None,
    padded: TakingDirection | None,
) -> Generator[None]:
    no_cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent_on_gpu else nullcontext()
    plain = _PlainWeightNorm() if weight_norm else nullcontext()
    written_out = nullcontext() if statistics is None else RunningStatistics(statistics)
    by_name = LongAttention() if long_attention else nullcontext()
    rows = nullcontext() if padded is None else PaddedEmbedding(padded)
    with _PLAIN_ATTENTION, no_cudnn, plain, written_out, by_name, rows:
        yield


class _PlainAttention(AbstractContextManager[None]):
    """A context in which attention and activation checkpointing have second derivatives.

    Attention uses the one kernel that has a second derivative, like sdpa_kernel(MATH) at a sixth of its overhead, and
    works in chunks for long sequences. Activation checkpointing is non-reentrant.

    The switches belong to the process, so EXCLUSIVE is held. The attention function is replaced where torch and most
    models look it up, which costs nothing if there is no attention. A mode would slow down every operation, and would
    miss the calls of `F.multi_head_attention_forward`.
    """

    def __init__(self) -> None:
        self._before: list[list[bool]] = []  # a loop may be inside a loss

    def __enter__(self) -> None:
        EXCLUSIVE.acquire()
        _REPLACED.enter(_attention_in_block)
        self._before.append([enabled() for enabled, _, _ in _ATTENTION])
        for _, enable, wanted in _ATTENTION:
            enable(wanted)

    @property
    def is_on(self) -> bool:
        return bool(self._before)

    def __exit__(self, *error: object) -> None:
        for (_, enable, _), on in zip(_ATTENTION, self._before.pop(), strict=True):
            enable(on)
        _REPLACED.leave()
        EXCLUSIVE.release()


class _Replaced:
    """The functions of torch that are replaced while a loss runs; replacements can be nested."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []

    def enter(self, attention_in_block: Any) -> None:
        self._before.append((checkpoint.CheckpointFunction, F.scaled_dot_product_attention))
        checkpoint.CheckpointFunction = _NonReentrant  # pyright: ignore[reportAttributeAccessIssue]
        if F.scaled_dot_product_attention in (MATH_KERNEL, _attention_in_block, _fused_attention):
            F.scaled_dot_product_attention = attention_in_block  # otherwise another library has replaced the function

    def leave(self) -> None:
        function, kernel = self._before.pop()
        checkpoint.CheckpointFunction = function  # pyright: ignore[reportAttributeAccessIssue]
        if F.scaled_dot_product_attention in (_attention_in_block, _fused_attention):
            F.scaled_dot_product_attention = kernel


_REPLACED = _Replaced()


class _FirstOrder(AbstractContextManager[None]):
    """A context with the kernels of the plain loop, for a gradient that is not differentiated again.

    Activation checkpointing is non-reentrant here too. Attention with dropout, and attention in low precision, use the
    same kernel as where the step is differentiated, since others draw other random numbers and round differently.
    """

    def __init__(self) -> None:
        self._depth = 0  # a loop may be inside a loss

    def __enter__(self) -> None:
        EXCLUSIVE.acquire()
        _REPLACED.enter(_fused_attention)
        self._depth += 1

    @property
    def is_on(self) -> bool:
        return self._depth > 0

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        _REPLACED.leave()
        EXCLUSIVE.release()


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Stand in for F.scaled_dot_product_attention where no second derivative is needed."""
    precise = query.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if (dropout_p == 0 and precise) or not FIRST_ORDER.is_on:
        return MATH_KERNEL(query, key, value, attn_mask, dropout_p, *args, **kwargs)
    with _PLAIN_ATTENTION:
        return attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)


FIRST_ORDER = _FirstOrder()


class _NonReentrant:
    """Activation checkpointing by saved-tensor hooks, since torch.autograd.grad does not support the reentrant kind."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


_ATTENTION = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
]
_PLAIN_ATTENTION = _PlainAttention()


def _attention_in_block(*args: Any, **kwargs: Any) -> Tensor:
    """Stand in for F.scaled_dot_product_attention while a loss runs, or later in modules first imported meanwhile."""
    return (attention if _PLAIN_ATTENTION.is_on else MATH_KERNEL)(*args, **kwargs)


class LongAttention(TorchFunctionMode):
    """A mode for long attention in chunks where a model has imported the function under a name of its own.

    A mode costs time. So this one is on in the first evaluation of a loss, and later only if that found such a call.
    Code under activation checkpointing must run again, after the first evaluation, as it did at first. So it uses the
    plain kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = attention.__code__, _fused_attention.__code__  # the two functions that call the kernel themselves
        if func is MATH_KERNEL and sys._getframe(1).f_code not in ours and not checkpointing():  # pyright: ignore
            self.seen = True
            with _PLAIN_ATTENTION:
                return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _PlainWeightNorm(TorchFunctionMode):
    """A mode that computes weight_norm by its formula, w = g·v/‖v‖."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            v, g, dim = args
            return v * (g / torch.norm_except_dim(v, 2, dim))
        return func(*args, **(kwargs or {}))


class TakingDirection:
    """Whether the direction of a step is being computed, in which running statistics are constants."""

    def __init__(self) -> None:
        self.on = False
        self.evaluating = False  # a loss is being evaluated, so `stop_gradient` applies to gradients inside it too
        self.losses = 0  # the number of losses that were evaluated so far
        self.stops = False  # `stop_gradient` was called
        self.without_graph = False  # a statistic was updated under activation checkpointing
        self.replaying_block = False  # a block is run again in the backward pass, with its buffers (pullback/blocks.py)


class _ConstantInStep(torch.autograd.Function):
    """The identity, with no gradient in the direction of a step, and the usual gradient in its derivative."""

    @staticmethod
    def forward(taking: TakingDirection, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.taking = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None if ctx.taking.on or ctx.taking.evaluating else a

    @staticmethod
    def vmap(info: Any, in_dims: Any, taking: TakingDirection, x: Tensor) -> Any:  # pyright: ignore
        return _ConstantInStep.apply(taking, x), in_dims[1]


class PaddedEmbedding(TorchFunctionMode):
    """A mode for an embedding with padding_idx=i: row i is constant in the direction of a step, not in its derivative.

    torch's kernel drops that row from second derivatives as well, and from the gradient of g.

    A mode costs time. So without an nn.Embedding(padding_idx=i) in the model, this one is on in the first evaluation of
    a loss, and later only if that found such a call (`seen`).
    """

    def __init__(self, taking: TakingDirection, *, first_look: bool = False) -> None:
        super().__init__()
        self._taking, self._first_look = taking, first_look
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._embedding if func is F.embedding else func)(*args, **(kwargs or {}))

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        found = F.embedding(input, weight, None, *args, **kwargs)
        if padding_idx is None:
            return found
        self.seen = True
        if self._first_look and checkpointing():  # it would run again, after the first look, by torch's kernel
            raise RuntimeError(
                "bilevel.inner: h or g calls F.embedding(..., padding_idx=...) under activation checkpointing, and the "
                "model has no nn.Embedding with padding_idx. Call it outside of the checkpointed part, or as an "
                "nn.Embedding(..., padding_idx=...)."
            )
        padding = (input == padding_idx % len(weight)).unsqueeze(-1)
        return torch.where(padding, _ConstantInStep.apply(self._taking, found), found)  # pyright: ignore


_EVALUATIONS: list[tuple[int, TakingDirection]] = []  # the nested evaluations of losses, with their threads


def _current_evaluation() -> TakingDirection | None:
    """Return the evaluation of a loss that this call belongs to, or None."""
    if not _EVALUATIONS:
        return None
    thread, taking = _EVALUATIONS[-1]
    # on a GPU, a thread of autograd that runs a checkpointed part again belongs to the evaluation
    in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
    return taking if thread == threading.get_ident() or in_backward else None


@contextmanager
def evaluating(taking: TakingDirection) -> Generator[None]:
    """Attribute calls of `stop_gradient` to this evaluation; EXCLUSIVE is held, so there is one at a time."""
    _EVALUATIONS.append((threading.get_ident(), taking))
    try:
        yield
    finally:
        _EVALUATIONS.pop()


def stop_gradient(x: T) -> T:
    """x as a constant in the gradient that a step takes, with its own derivative in the hypergradient.

    In a loss, `.detach()` says that a step's gradient does not go through x: a TD target, the other branch of SimSiam,
    `fake.detach()`. But the weights after the step still depend on x, and `.detach()` drops this dependence from the
    hypergradient. `stop_gradient` takes the same steps and keeps the dependence.

    A buffer that a loss leaves as `stop_gradient(...)` (the hidden state in truncated backpropagation through time, an
    EMA of the weights) is part of the state of the loop: the next step takes it as a constant, the hypergradient does
    not. x may be a tensor, or a list, tuple or dict of tensors. Outside of a block it is `x.detach()`.

    Examples:
        The gradient of this loss is 2, whatever w is, so that a step of rate 0.5 subtracts 1.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> h = lambda m: (m.weight - bilevel.stop_gradient(m.weight) + 1).square().sum()
        >>> with bilevel.inner(model, h, solver="gd", lr=0.5) as loop:
        ...     w = loop.weights["weight"].item()
        ...     _ = loop.step()
        ...     print(round(loop.weights["weight"].item() - w, 4))
        -1.0
    """
    taking = _current_evaluation()
    if taking is None:
        return map_tensors(lambda y: y.detach(), x)
    taking.stops = True
    return map_tensors(lambda y: _ConstantInStep.apply(taking, y), x)


def is_stopped(x: Tensor) -> bool:
    """Whether x is what `stop_gradient` returned."""
    return type(x.grad_fn).__name__ == "_ConstantInStepBackward"


class RunningStatistics(TorchFunctionMode):
    """A mode for differentiable running statistics: b⁺ = (1 − m)·b + m·(mean or unbiased variance of the batch).

    A call in training mode normalises as usual, and updates b by differentiable operations, in place. A call in eval
    mode, which normalises by b, uses differentiable operations, so that b has a derivative.
    """

    def __init__(self, taking: TakingDirection) -> None:
        super().__init__()
        self._taking = taking

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return self._instance_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is None or running_var is None:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if not training:
            return self._normalise(input, running_mean, running_var, weight, bias, eps)
        # the update comes first, since activation checkpointing ends a recomputation once all saved tensors are there
        self._update(running_mean, running_var, input, [i for i in range(input.dim()) if i != 1], momentum)
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is None or running_var is None:
            return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        if not use_input_stats:
            return self._normalise(input, running_mean, running_var, weight, bias, eps)
        self._update(running_mean, running_var, input, list(range(2, input.dim())), momentum)
        return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)

    def _normalise(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Compute (x − mean)/√(var + ε), differentiable for the statistics."""
        # a loss of the same step may have updated them
        mean, var = (_ConstantInStep.apply(self._taking, b) for b in (mean, var))  # pyright: ignore
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = (var + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        out = (x - mean.view(shape)) * scale.view(shape)
        return out if bias is None else out + bias.view(shape)

    def _update(self, mean: Tensor, var: Tensor, x: Tensor, dims: list[int], momentum: float) -> None:
        """Update the statistics by those of x over some dimensions; InstanceNorm averages over the samples."""
        in_backward = torch._C._current_graph_task_id() != -1 and not self._taking.replaying_block  # pyright: ignore
        if checkpointing() or in_backward:
            # once in the forward pass, and once in its recomputation
            self._taking.without_graph = True
            x = x.detach()
        x = x.to(mean.dtype)  # as in torch's kernel, a batch in bf16 is not rounded
        for running, batch in zip((var, mean), torch.var_mean(x, dims, correction=1), strict=True):
            batch = batch if batch.dim() == 1 else batch.mean(0)
            running.mul_(1 - momentum).add_(batch, alpha=momentum)


_DEVICE_TYPES = {"cpu"}
if torch.accelerator.is_available():
    _DEVICE_TYPES.add(torch.accelerator.current_accelerator().type)  # pyright: ignore[reportOptionalMemberAccess]
_NOTHING = nullcontext()


def full_precision() -> AbstractContextManager[Any]:
    """Switch autocast off for derivatives, which keep the dtypes of the operations in the forward pass."""
    on = [kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return _without_autocast(on) if on else _NOTHING


@contextmanager
def _without_autocast(kinds: list[str]) -> Generator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
