"""Attention over long sequences, in memory that is linear in the length, and differentiable to any order.

softmax(QKᵀ/√d + M)·V has a matrix of L×S scores, and each of its derivatives has several such matrices. But row i of
the result depends only on row i of Q and of M, and on all of K and V. So the result is computed for a few rows of Q at
a time, and their scores are not kept. Its derivative is a function of the same kind: the gradient for Q or M is made
row by row, and that for K or V is a sum over all rows. The same holds for the derivative of that, in reverse and in
forward mode. So one `torch.autograd.Function`, `_InChunks`, is its own derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

MATH_KERNEL = torch._C._nn.scaled_dot_product_attention  # pyright: ignore  # by the switches that `kernels` sets
# In float32 these scores take 32 MiB. Larger matrices are allocated by the system each time, which slows the plain
# kernel; for smaller ones, chunks take up to twice as long and save little memory (`python -m benchmarks.attention`).
LONG = 2**23  # scores, from which on rows are taken in chunks
CHUNK = 2**20  # scores in a chunk
_LOW = torch.float16, torch.bfloat16

Part = Callable[[slice, Sequence[Tensor]], Sequence[Tensor]]  # (rows, inputs) ↦ outputs


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
    if _is_autocast(query):
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


def _is_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


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
    (out,) = _apply(_Plan(part, rows, chunk, cut, (True,)), *high)
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


# --- functions of rows, and their derivatives ---


@dataclass(frozen=True)
class _Plan:
    """A function of matrices that is computed for some rows at a time."""

    part: Part
    rows: int
    chunk: int
    cut: tuple[bool, ...]  # for each input: whether a chunk takes some of its rows, or all
    joined: tuple[bool, ...]  # for each output: whether a chunk computes some of its rows, or a summand

    def pull(self, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> _Plan:
        """Return the function (inputs, cotangents of the given outputs) ↦ gradients for the wanted inputs."""
        cut = (*self.cut, *_selected(self.joined, given))
        return _Plan(_Pull(self.part, given, wanted), self.rows, self.chunk, cut, tuple(_selected(self.cut, wanted)))

    def push(self, moving: tuple[bool, ...]) -> _Plan:
        """Return the function (inputs, tangents of the moving inputs) ↦ tangents of the outputs."""
        cut = (*self.cut, *_selected(self.cut, moving))
        part = _PushOfPull(self.part, moving) if isinstance(self.part, _Pull) else _Push(self.part, moving)
        return _Plan(part, self.rows, self.chunk, cut, self.joined)


@dataclass(frozen=True)
class _Pull:
    """The summand of one chunk in the gradients ∇⟨y(x), a⟩; y is recomputed, with a graph that is freed at once."""

    part: Part
    given: tuple[bool, ...]
    wanted: tuple[bool, ...]

    def __call__(self, rows: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        n, create_graph = len(self.wanted), torch.is_grad_enabled()
        xs, along = _leaves(inputs[:n], self.wanted), inputs[n:]
        with torch.enable_grad():
            ys = _selected(self.part(rows, xs), self.given)
            return _filled(_grad(ys, _selected(xs, self.wanted), along, create_graph), _selected(xs, self.wanted))


@dataclass(frozen=True)
class _Push:
    """The summand of one chunk in the tangents ∂y/∂x·ẋ = ∂⟨∇⟨y(x), c⟩, ẋ⟩/∂c, since ∇⟨y(x), c⟩ is linear in c.

    (Forward mode proper would need a level for each chunk: a level holds on to what is computed in it with a graph.)
    """

    part: Part
    moving: tuple[bool, ...]

    def __call__(self, rows: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        n, create_graph = len(self.moving), torch.is_grad_enabled()
        xs, tangents = _leaves(inputs[:n], self.moving), inputs[n:]
        with torch.enable_grad():
            ys = self.part(rows, xs)
            cs = [torch.zeros_like(y).requires_grad_() for y in ys]
            pulled = _grad(ys, _selected(xs, self.moving), cs, True)
            return _filled(_grad(pulled, cs, tangents, create_graph), cs)


@dataclass(frozen=True)
class _PushOfPull:
    """The summand of one chunk in the tangents of ∇⟨y(x), a⟩ along (ẋ, ȧ).

    Since a Hessian is symmetric, it is ∇[⟨∇⟨y(x), a⟩, ẋ⟩ + ⟨y(x), ȧ⟩]: forward over reverse at the cost of double
    backward.
    """

    pull: _Pull
    moving: tuple[bool, ...]

    def __call__(self, rows: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        wanted, create_graph = self.pull.wanted, torch.is_grad_enabled()
        n, m = len(wanted), len(self.moving)
        moving, given_moving = self.moving[:n], self.moving[n:]
        xs = _leaves(inputs[:n], [w or x for w, x in zip(wanted, moving, strict=True)])
        along, tangents = inputs[n:m], inputs[m:]
        with torch.enable_grad():
            ys = _selected(self.pull.part(rows, xs), self.pull.given)
            pulled = _grad(ys, _selected(xs, moving), along, True) if any(moving) else []
            outputs = [*pulled, *_selected(ys, given_moving)]
            return _filled(_grad(outputs, _selected(xs, wanted), tangents, create_graph), _selected(xs, wanted))


def _leaves(xs: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the inputs with new leaves in place of the chosen ones, unless these are part of a graph that is made."""
    create_graph = torch.is_grad_enabled()
    return [
        x.detach().requires_grad_() if c and not (create_graph and x.requires_grad) else x
        for x, c in zip(xs, chosen, strict=True)
    ]


def _grad(
    ys: Sequence[Tensor | None], xs: Sequence[Tensor], along: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    pairs = [(y, a) for y, a in zip(ys, along, strict=True) if y is not None and y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    outputs, along = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, xs, along, create_graph=create_graph, allow_unused=True)


def _filled(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, like, strict=True)]


class _InChunks(torch.autograd.Function):
    """The function of a plan, computed for one chunk of rows after the other; it saves only its inputs."""

    @staticmethod
    def forward(plan: _Plan, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if _is_autocast(inputs[0]):  # a recomputation must use the original dtypes
            with torch.autocast(inputs[0].device.type, enabled=False):
                return _InChunks.forward(plan, *inputs)
        totals: list[Tensor] = []
        inputs = tuple(x.detach() for x in inputs)
        for start in range(0, plan.rows, plan.chunk):
            rows = slice(start, min(start + plan.chunk, plan.rows))
            size = rows.stop - start
            xs = [x.narrow(-2, start, size) if cut else x for x, cut in zip(inputs, plan.cut, strict=True)]
            parts = plan.part(rows, xs)
            if not totals:
                totals = [
                    _empty(y, plan.rows) if joined else _zeros(y) for y, joined in zip(parts, plan.joined, strict=True)
                ]
            for total, part, joined in zip(totals, parts, plan.joined, strict=True):
                if joined:
                    total.narrow(-2, start, size).copy_(part)
                else:
                    total.add_(part)
        return tuple(totals)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.plan, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        given, wanted = tuple(a is not None for a in cotangents), tuple(ctx.needs_input_grad[1:])
        if not any(given):
            return (None,) * (1 + len(wanted))
        found = iter(_apply(ctx.plan.pull(given, wanted), *ctx.saved_tensors, *_selected(cotangents, given)))
        return None, *(next(found) if w else None for w in wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        moving = tuple(t is not None for t in tangents)
        primals = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
        return _apply(ctx.plan.push(moving), *primals, *_selected(tangents, moving))


def _apply(plan: _Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
    return _InChunks.apply(plan, *inputs)  # pyright: ignore


def _selected(xs: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [x for x, c in zip(xs, chosen, strict=True) if c]


def _empty(rows: Tensor, n: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-2], n, rows.shape[-1])


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)
