"""Replacements of functions whose second derivative is missing or wrong, which are in effect while a loss runs.

One function mode with a table is on. What passes no mode is patched meanwhile (switches.py).

- Fused attention has no second derivative, on any device. Attention by plain products takes its place, in chunks for
  long sequences (`attention`). Where only a gradient is needed, on the CPU, the fused kernel stays.
- The fused kernel of `torch.nn.utils.parametrizations.weight_norm` fails gradgradcheck. Its formula takes its place.
- An embedding with padding_idx drops the gradient of that row. This is right for the direction of a step, and wrong in
  every other derivative, where an embedding without padding_idx takes its place. With sparse=True, its gradient has no
  derivative; a dense one takes its place.
- cuDNN's recurrent layers have no second derivative. The layers of torch take their place.
- Reentrant activation checkpointing can't be differentiated by torch.autograd.grad. The non-reentrant kind takes its
  place.
- torch.cond has a wrong second derivative. An `if` takes its place.
- BatchNorm and InstanceNorm update their running statistics outside of autograd (statistics.py).
- A hook on a tensor that changes a gradient would be applied to second derivatives too, and is refused when it does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..autograd.derive import IN_BACKWARD
from ..autograd.graph import nodes
from ..autograd.look import called_by, checkpointing
from ..autograd.trees import tensors_of
from .attention import MATH_KERNEL
from .statistics import RunningStatistics
from .stopping import Differentiation, constant_in_step
from .switches import Patched, attention_in_block


def replaced(
    kernels: Kernels | None = None, *, fused: bool = False, recurrent_on_gpu: bool = False
) -> AbstractContextManager[Any]:
    """Replace what has no second derivative, or a wrong one. With `fused`, attention is that of the plain loop.

    The mode is on in this context. If it is given, it is on only where the caller enters it around a loss, and in
    backward passes that run a part of a loss again, since it costs about a microsecond an operation.
    """
    return _replaced(kernels, Patched(fused), recurrent_on_gpu)


@contextmanager
def _replaced(kernels: Kernels | None, patched: Patched, recurrent_on_gpu: bool) -> Generator[None]:
    no_cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent_on_gpu else nullcontext()
    with patched, no_cudnn, Kernels(Differentiation()) if kernels is None else nullcontext():
        IN_BACKWARD.append(lambda: kernels if kernels is not None and kernels.recomputes else nullcontext())
        try:
            yield
        finally:
            IN_BACKWARD.pop()


class Kernels(TorchFunctionMode):
    """The mode that is on while losses are evaluated and differentiated; it replaces the functions of a table.

    With `differentiated`, a derivative is taken of more than the direction of a step. `noted` collects the leaves that
    losses use and that do not require grad, by their ids. With `graphs_are_kept`, activation checkpointing is refused:
    it runs a part of the model again in the backward pass, when the model holds other weights.
    """

    def __init__(
        self,
        evaluation: Differentiation,
        *,
        differentiated: bool = True,
        statistics: RunningStatistics | None = None,
        noted: dict[int, Any] | None = None,
        graphs_are_kept: bool = False,
    ) -> None:
        super().__init__()
        self.evaluation, self.differentiated, self.statistics = evaluation, differentiated, statistics
        self._noted, self._kept = noted, graphs_are_kept
        self.recomputes = False  # a part of a loss is under activation checkpointing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.recomputes = self.recomputes or checkpointing()
        if self._noted is not None and self.evaluation.evaluating:
            self._look_at(args, self._noted)
        replacement = _TABLE.get(func)
        if replacement is not None:
            return replacement(self, func, *args, **(kwargs or {}))
        if not kwargs:
            return func(*args)
        made = func(*args, **kwargs)
        if kwargs.get("requires_grad") is True:  # torch.rand(..., requires_grad=True)
            self.flagged(made)
        return made

    def _look_at(self, args: tuple[Any, ...], noted: dict[int, Any]) -> None:
        if self._kept and checkpointing():
            raise RuntimeError(
                "bilevel.inner: h or g uses activation checkpointing (torch.utils.checkpoint), which runs a part of "
                "the model again in the backward pass. With an engine that keeps graphs, the model holds other weights "
                "by then. Use engine='reverse' without memory= and tasks=, or switch checkpointing off, which saves "
                "little memory where the graphs of all steps are kept."
            )
        for x in args:
            if isinstance(x, Tensor) and not x.requires_grad and x.is_leaf and x.is_floating_point():
                noted[id(x)] = weakref.ref(x)

    def flagged(self, x: Tensor) -> None:
        """Note a leaf that a loss makes require grad. A parameter is none: a loss may build a part of a model."""
        if self.evaluation.evaluating and not isinstance(x, nn.Parameter) and _is_outside_transforms():
            self.evaluation.flag(x)


def _is_outside_transforms() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore


# --- the table: a replacement is called with the mode, the function and its arguments, while the mode is off ---


def _attention(kernels: Kernels, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return attention_in_block(*args, **kwargs)


def _weight_norm(kernels: Kernels, func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    kernels.evaluation.eager_only = "the model has weight_norm, whose compiled second derivative is wrong"
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    kernels: Kernels, func: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Compute an embedding; a row of padding is constant in the direction of a step, and not in its derivative."""
    if padding_idx is not None or sparse:
        what = "sparse=True" if padding_idx is None else "padding_idx"
        kernels.evaluation.eager_only = f"an embedding has {what}, whose compiled second derivative is wrong"
    if not kernels.differentiated:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    found = func(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return found
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, constant_in_step(kernels.evaluation, found), found)


def _normalisation(kernels: Kernels, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return (func if kernels.statistics is None else functools.partial(kernels.statistics, func))(*args, **kwargs)


def _add_in_place(kernels: Kernels, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kernels.statistics is not None and kernels.statistics.leaves_alone(x):
        return x
    return func(x, *args, **kwargs)


def _batch_norm(
    kernels: Kernels, func: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Compute torch.batch_norm or torch.instance_norm, which the functions of F call, called by hand."""
    of = F.batch_norm if func is torch.batch_norm else F.instance_norm
    return _normalisation(kernels, of, input, running_mean, running_var, weight, bias, training, momentum, eps)


def _require_grad(kernels: Kernels, func: Any, x: Tensor, requires_grad: bool = True) -> Tensor:
    before = x.requires_grad
    found = func(x, requires_grad)
    if before and not requires_grad:
        kernels.evaluation.switched_off.append(x)
    elif requires_grad and not before and all(x is not y for y in kernels.evaluation.switched_off):
        kernels.flagged(x)
    return found


def _set_requires_grad(kernels: Kernels, func: Any, x: Tensor, requires_grad: bool) -> None:
    _require_grad(kernels, func, x, requires_grad)


def _derivative(kernels: Kernels, func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute torch.autograd.grad; refuse a derivative that goes through the weights into earlier steps."""
    kernels.evaluation.derives = True
    if kernels.evaluation.behind:
        weights = {x.grad_fn for x in kernels.evaluation.behind}
        earlier = set(nodes(kernels.evaluation.behind)) - weights
        if any(x.requires_grad and _node_of(x) in earlier for x in tensors_of(inputs)):
            raise RuntimeError(
                "bilevel.inner: a loss begins after the first step to take derivatives of its own (torch.autograd.grad)"
                " with respect to a tensor that earlier steps have used. With an engine that keeps one graph, they "
                "would go through the weights into those steps. Take them with respect to x.detach().requires_grad_(), "
                "or use engine='reverse'."
            )
    return func(outputs, inputs, *args, **kwargs)


def _register_hook(kernels: Kernels, func: Any, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    def looking_on(grad: Tensor) -> None:
        version = grad._version
        if hook(grad) is not None or grad._version != version:
            raise RuntimeError(
                "bilevel.inner: a loss registers a hook on a tensor that changes a gradient, and autograd would apply "
                "the hook to second derivatives as well. Write what the hook does to the gradient as an operation of "
                "the loss, or as a function of the direction (direction=)."
            )

    return func(x, looking_on)


def _product(kernels: Kernels, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.dim() == 0 and args and isinstance(args[0], Tensor) and called_by("torch.amp.grad_scaler"):
        raise RuntimeError(
            "bilevel.inner: a loss is scaled by a GradScaler, and a block has no scaler.step() to undo it, so that "
            "every step would be too long by that factor. Return the loss unscaled, under torch.autocast(dtype="
            "torch.bfloat16), which needs no scaling. In float16, multiply the loss by a number in h, and divide "
            "by it in direction=: lambda d: {n: x / scale for n, x in d.items()}."
        )
    return func(x, *args, **kwargs)


_flag: Any = Tensor.requires_grad
_TABLE: dict[Any, Callable[..., Any]] = {
    MATH_KERNEL: _attention,
    F.embedding: _embedding,
    F.batch_norm: _normalisation,
    F.instance_norm: _normalisation,
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _batch_norm,
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    Tensor.add_: _add_in_place,
    Tensor.mul: _product,
    Tensor.__mul__: _product,
    Tensor.register_hook: _register_hook,
    torch.autograd.grad: _derivative,
    Tensor.requires_grad_: _require_grad,
    _flag.__set__: _set_requires_grad,
}


def _node_of(x: Tensor) -> Any:
    """Return the node of x in the graph, or None for a leaf of a functional transform, which has none."""
    if x.grad_fn is not None or torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        return x.grad_fn
    return get_gradient_edge(x).node
