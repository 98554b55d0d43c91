"""Switches and stand-ins of the process, for what passes no function mode, and the lock that is held meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import checkpoint

from .attention import MATH_KERNEL, attention
from .stopping import current_evaluation

# This lock is held while a loss runs, since the switches of attention and cuDNN, and the random states, belong to the
# process and not to the thread. It is re-entrant, for a loop inside a loss.
EXCLUSIVE = threading.RLock()


class Patched(AbstractContextManager[None]):
    """A context with stand-ins for what no mode sees, and the one kernel of attention that has a second derivative.

    F.multi_head_attention_forward is one function to a mode, which is off inside of it, and so is what it calls. A
    module's code reads CheckpointFunction and torch.cond as attributes, and no mode is asked about them. The
    kernel of attention is chosen by switches of the process, so EXCLUSIVE is held; they are set at a sixth of the
    overhead of sdpa_kernel(MATH). With `fused`, they stay.
    """

    on: list[bool] = []  # noqa: RUF012  # of each context that is on, as a loop may be inside a loss: whether it is fused

    def __init__(self, fused: bool) -> None:
        self._fused = fused

    def __enter__(self) -> None:
        EXCLUSIVE.acquire()
        Patched.on.append(self._fused)
        # what is not the original is a stand-in already, or that of another library
        self._mine = [p for p in _PATCHES if getattr(p[0], p[1]) is p[2]]
        for owner, name, _, stand_in in self._mine:
            setattr(owner, name, stand_in)
        self._before = [] if self._fused else [enabled() for enabled, _, _ in _ATTENTION]
        if not self._fused:
            _choose([wanted for _, _, wanted in _ATTENTION])

    def __exit__(self, *error: object) -> None:
        _choose(self._before)
        for owner, name, original, _ in self._mine:
            setattr(owner, name, original)
        Patched.on.pop()
        EXCLUSIVE.release()


_ATTENTION = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
]


def _choose(kernels: list[bool]) -> None:
    for (_, enable, _), on in zip(_ATTENTION, kernels, strict=False):
        enable(on)


def attention_in_block(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Stand in for F.scaled_dot_product_attention while a loss runs, or later in modules first imported meanwhile.

    Attention with dropout, and attention in low precision, use the same kernel as where the step is differentiated,
    since others draw other random numbers and round differently.
    """
    precise = query.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if not Patched.on or (Patched.on[-1] and dropout_p == 0 and precise):
        return MATH_KERNEL(query, key, value, attn_mask, dropout_p, *args, **kwargs)
    with Patched(False) if Patched.on[-1] else _NOTHING:
        return attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)


class _NonReentrant:
    """Activation checkpointing by saved-tensor hooks, since torch.autograd.grad does not support the reentrant kind."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _branch(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """Stand in for torch.cond."""
    if (evaluation := current_evaluation()) is None:
        return _COND(pred, true_fn, false_fn, operands)
    evaluation.eager_only = "a loss calls torch.cond, whose compiled second derivative is wrong"
    return (true_fn if pred else false_fn)(*operands)


_COND = torch.cond
_PATCHES: list[tuple[Any, str, Any, Any]] = [
    (F, "scaled_dot_product_attention", MATH_KERNEL, attention_in_block),
    (checkpoint, "CheckpointFunction", checkpoint.CheckpointFunction, _NonReentrant),
    (torch, "cond", _COND, _branch),
]

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
