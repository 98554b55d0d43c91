"""Functions of the rows of matrices, computed for some rows at a time, and their derivatives of every order.

The derivative of such a function is one of the same kind: the gradient with respect to an input that is cut is made row
by row, and that with respect to any other input is a sum over all rows. The same holds for the derivative of that, in
reverse and in forward mode. So one `torch.autograd.Function`, `_InChunks`, is its own derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Part = Callable[[slice, Sequence[Tensor]], Sequence[Tensor]]  # (rows, inputs) ↦ outputs


def is_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@dataclass(frozen=True)
class Plan:
    """A function of matrices that is computed for some rows at a time."""

    part: Part
    rows: int
    chunk: int
    cut: tuple[bool, ...]  # for each input: whether a chunk takes some of its rows, or all
    joined: tuple[bool, ...]  # for each output: whether a chunk computes some of its rows, or a summand

    def pull(self, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> Plan:
        """Return the function (inputs, cotangents of the given outputs) ↦ gradients for the wanted inputs."""
        cut = (*self.cut, *_selected(self.joined, given))
        return Plan(_Pull(self.part, given, wanted), self.rows, self.chunk, cut, tuple(_selected(self.cut, wanted)))

    def push(self, moving: tuple[bool, ...]) -> Plan:
        """Return the function (inputs, tangents of the moving inputs) ↦ tangents of the outputs."""
        cut = (*self.cut, *_selected(self.cut, moving))
        part = _PushOfPull(self.part, moving) if isinstance(self.part, _Pull) else _Push(self.part, moving)
        return Plan(part, self.rows, self.chunk, cut, self.joined)


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
    def forward(plan: Plan, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if is_autocast(inputs[0]):  # a recomputation must use the original dtypes
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
        found = iter(apply_plan(ctx.plan.pull(given, wanted), *ctx.saved_tensors, *_selected(cotangents, given)))
        return None, *(next(found) if w else None for w in wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        moving = tuple(t is not None for t in tangents)
        primals = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
        return apply_plan(ctx.plan.push(moving), *primals, *_selected(tangents, moving))


def apply_plan(plan: Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute the function of a plan, one chunk of rows after the other."""
    return _InChunks.apply(plan, *inputs)  # pyright: ignore


def _selected(xs: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [x for x, c in zip(xs, chosen, strict=True) if c]


def _empty(rows: Tensor, n: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-2], n, rows.shape[-1])


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)
