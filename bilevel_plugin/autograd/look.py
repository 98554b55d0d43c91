"""What the graph of a loss does not show: hooks on tensors, activation checkpointing, a loss scaled for float16."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_autograd: Any = torch._C._autograd  # pyright: ignore
hooks_on_saved: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def checkpointing() -> bool:
    """Whether the code that runs now is under activation checkpointing (torch.utils.checkpoint, not reentrant)."""
    if hooks_on_saved is None:
        return _called_by("torch.utils.checkpoint", sys.maxsize)  # torch 2.6 has no function for the hooks
    hooks = hooks_on_saved(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class FirstLook(TorchFunctionMode):
    """Checks the first evaluation of a loss for operations that its graph does not show.

    Hooks on tensors would be applied to second derivatives too, and are refused. So is activation checkpointing, if
    graphs outlive their step: it runs a part of the model again in the backward pass, when the model holds other
    weights. Leaves that do not require grad are recorded, in case `requires_grad` is set later.
    """

    def __init__(self, noted: dict[int, Any], *, graphs_are_kept: bool) -> None:
        super().__init__()
        self._noted, self._kept = noted, graphs_are_kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kept and checkpointing():
            raise RuntimeError(_RECOMPUTES)
        if func is Tensor.register_hook:
            raise RuntimeError(
                "bilevel.inner: a loss registers a hook on a tensor, and autograd would apply the hook to second "
                "derivatives as well. Write what the hook does to the gradient as an operation of the loss, or as a "
                "function of the direction (direction=)."
            )
        if func in (Tensor.mul, Tensor.__mul__) and _called_by("torch.amp.grad_scaler"):
            raise RuntimeError(
                "bilevel.inner: a loss is scaled by a GradScaler, and a block has no scaler.step() to undo it, so that "
                "every step would be too long by that factor. Return the loss unscaled, under torch.autocast(dtype="
                "torch.bfloat16), which needs no scaling. In float16, multiply the loss by a number in h, and divide "
                "by it in direction=: lambda d: {n: x / scale for n, x in d.items()}."
            )
        for x in args:
            if isinstance(x, Tensor) and not x.requires_grad and x.is_leaf and x.is_floating_point():
                self._noted[id(x)] = weakref.ref(x)
        return func(*args, **(kwargs or {}))


def _called_by(module: str, callers: int = 6) -> bool:
    """Whether a function of this module is among the last few callers."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None and depth < callers:
        if frame.f_globals.get("__name__") == module:
            return True
        frame, depth = frame.f_back, depth + 1
    return False


_RECOMPUTES = (
    "bilevel.inner: h or g uses activation checkpointing (torch.utils.checkpoint), which runs a part of the model "
    "again in the backward pass. With an engine that keeps graphs, the model holds other weights by then. Use "
    "engine='reverse' without memory= and tasks=, or switch checkpointing off, which saves little memory where the "
    "graphs of all steps are kept."
)
