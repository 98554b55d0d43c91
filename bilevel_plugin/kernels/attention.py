"""Attention over long sequences, in memory that is linear in the length, and differentiable to any order.

softmax(QKᵀ/√d + M)·V has a matrix of L×S scores, and each of its derivatives has several such matrices. But row i of
the result depends only on row i of Q and of M, and on all of K and V. So the result is computed for a few rows of Q at
a time, and their scores are not kept; chunks.py differentiates such functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from .chunks import Plan, apply_plan, is_autocast

MATH_KERNEL = torch._C._nn.scaled_dot_product_attention  # pyright: ignore  # by the switches that `kernels` sets
# In float32 these scores take 32 MiB. Larger matrices are allocated by the system each time, which slows the plain
# kernel; for smaller ones, chunks take up to twice as long and save little memory (`python -m benchmarks.attention`).
LONG = 2**23  # scores, from which on rows are taken in chunks
CHUNK = 2**20  # scores in a chunk
_LOW = torch.float16, torch.bfloat16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` by its plain formula, in chunks if the sequences are long.

    Functional transforms (`tasks=`) and torch.compile use the plain kernel, as do arguments that it would refuse.
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if torch.compiler.is_compiling() or not _are_plain(tensors) or not is_long(query, key):
        return MATH_KERNEL(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if has_torch_function(tensors):  # modes must be able to override it
        args = query, key, value, attn_mask, dropout_p, is_causal
        return handle_torch_function(attention, tensors, *args, **options)
    if is_autocast(query):
        low = torch.get_autocast_dtype(query.device.type)
        lowered = [x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
        with torch.autocast(query.device.type, enabled=False):
            return attention(*lowered, dropout_p=dropout_p, is_causal=is_causal, **options)
    if not _supports_chunks(query, key, value, attn_mask, dropout_p, is_causal):
        return MATH_KERNEL(query, key, value, attn_mask, dropout_p, is_causal, **options)
    # drawn from torch's global generator, whose state a replay restores
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout_p > 0 else 0
    rows = query.shape[-2]
    # with as many rows as a key has entries, the scores of a chunk take no more memory than the keys
    chunk = min(rows, max(query.shape[-1], rows * CHUNK // _number_of_scores(query, key)))
    return in_chunks(tensors, _Attention(dropout_p, is_causal, scale, enable_gqa, seed), chunk)


def is_long(query: Tensor, key: Tensor) -> bool:
    """Whether the matrix of scores is large, so that chunks save much memory."""
    return query.dim() > 1 and key.dim() > 1 and _number_of_scores(query, key) >= LONG


def _number_of_scores(query: Tensor, key: Tensor) -> int:
    return max(query.shape[:-2].numel(), key.shape[:-2].numel()) * query.shape[-2] * key.shape[-2]


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are ordinary dense tensors, outside functional transforms."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_nested for x in tensors)


def _supports_chunks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool) -> bool:
    """Whether the plain kernel takes these arguments, and computing in chunks gives the same result."""
    if mask is not None:
        rows = mask.shape[-2] if mask.dim() > 1 else 0
        if is_causal or rows not in (1, q.shape[-2]) or mask.dtype not in (torch.bool, torch.float32, q.dtype):
            return False
    return q.is_floating_point() and q.dtype == k.dtype == v.dtype and q.shape[-1] > 0 and 0 <= dropout_p < 1


def in_chunks(tensors: Sequence[Tensor], part: _Attention, chunk: int) -> Tensor:
    """Compute attention of (Q, K, V) or (Q, K, V, M), for `chunk` rows of Q at a time."""
    q, rows = tensors[0], tensors[0].shape[-2]
    cut = (True, False, False, *(m.shape[-2] == rows > 1 for m in tensors[3:]))
    # scores and sums over chunks are at least in float32, as in the plain kernel
    high = [x.float() if x.dtype in _LOW else x for x in tensors[:3]]
    high += [m.float() if m.dtype in _LOW and not cut[3] else m for m in tensors[3:]]
    (out,) = apply_plan(Plan(part, rows, chunk, cut, (True,)), *high)
    return out.to(q.dtype)


@dataclass(frozen=True)
class _Attention:
    """The function softmax(qKᵀ/√d + m)·V of some rows q of Q and m of M."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    seed: int = 0

    def __call__(self, rows: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v, *masks = inputs
        mask = masks[0] if masks else None
        if self.is_causal:  # row i attends to the keys 0 … i, so the others are not needed
            seen = min(rows.stop, k.shape[-2])
            k, v = k.narrow(-2, 0, seen), v.narrow(-2, 0, seen)
            mask = torch.ones(q.shape[-2], seen, dtype=torch.bool, device=q.device).tril(rows.start)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        # on every device: products and a softmax, which have derivatives of every order
        kernel = torch.ops.aten._scaled_dot_product_attention_math
        options = {"scale": self.scale, "enable_gqa": self.enable_gqa}
        if self.dropout_p == 0:
            return kernel(q, k, v, mask, **options)[:1]
        weights = kernel(q, k, v[..., :1], mask, **options)[1]
        if self.enable_gqa:
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        return [(weights * self._dropout_mask(rows, q, k) / (1 - self.dropout_p)) @ v]

    def _dropout_mask(self, rows: slice, q: Tensor, k: Tensor) -> Tensor:
        """Return where dropout keeps a score; the result for the same rows is always the same."""
        heads = q.shape[:-2] if self.enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        kept = torch.empty(*heads, q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        generator = None if kept.is_meta else torch.Generator(q.device).manual_seed(self.seed + rows.start)
        return kept.bernoulli_(1 - self.dropout_p, generator=generator)
