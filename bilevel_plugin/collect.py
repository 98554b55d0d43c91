"""The gradients of a hypergradient in the order of its inputs, also through graphs that lead to batches and to w_0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .autograd import rows
from .autograd.derive import Gradients, grad
from .autograd.missing import explained
from .autograd.trees import State
from .engine import Engine
from .model.model import Model
from .run import Run


def collected(
    run: Run,
    wanted: list[Tensor],
    found: Gradients,
    start: State,
    allow_unused: bool,
    retain_graph: bool,
    count: int | None = None,
) -> list[Tensor]:
    """Return the gradients for the wanted tensors, also through the graphs that lead to cut tensors and to w_0.

    `count` is the number of rows that each of them has, if any.
    """
    behind = [*found.cut.values(), *((run.origin[n], d) for n, d in start.items() if n in run.origin)]
    through: Sequence[Tensor | None] = [None] * len(wanted)
    if behind:  # one backward pass for all cut tensors and w_0
        with explained():
            through = grad([x for x, _ in behind], wanted, [d for _, d in behind], retain_graph=retain_graph)
    parts: list[Tensor | None] = []
    for x, extra in zip(wanted, through, strict=True):
        both = [d for d in (found.direct.get(id(x), (x, None))[1], extra) if d is not None]
        parts.append(sum(both[1:], both[0]) if both else None)
    grads: list[Tensor] = []
    for i, (x, part) in enumerate(zip(wanted, run.model.ranks.gather(wanted, parts), strict=True)):
        if part is None and not allow_unused:
            before = " No step was taken yet, so h plays no part." if run.k == 0 else ""
            raise ValueError(
                f"bilevel.inner: neither loss depends on input {i} (shape {tuple(x.shape)}), so it has no "
                f"hypergradient.{before} Check that h or g uses this very tensor, and not behind a .detach() "
                "(bilevel.stop_gradient is the one that keeps a derivative), or pass allow_unused=True for zeros."
            )
        zeros = torch.zeros_like(x) if count is None else x.new_zeros((count, *x.shape))
        grads.append(zeros if part is None else part)
    return grads


def in_sweeps(
    gradients: Callable[[slice, bool], tuple[list[Tensor], int | None]],
    engine: Engine,
    queries: int | None,
    retain_graph: bool,
) -> list[Tensor]:
    """Return the gradients of a scalar, or the rows of a vector by sweeps over at most `queries` of its entries each.

    `gradients` returns those of some entries, and how many there are. It is told whether to retain graphs.
    """
    rows.forget()
    if queries is None:
        return gradients(slice(None), retain_graph)[0]
    if isinstance(queries, bool) or not isinstance(queries, int) or queries < 1:  # pyright: ignore
        raise ValueError(f"bilevel.inner: queries is how many rows go through one sweep, at least 1, got {queries!r}.")
    if getattr(engine, "resume", False):
        raise ValueError(
            "bilevel.inner: queries= takes several sweeps, and the journal of resume=True belongs to one. Leave out "
            "queries=, or resume=."
        )
    parts, count = gradients(slice(0, queries), True)
    each = [parts]
    for begin in range(queries, count or 0, queries):
        end = begin + queries
        each.append(gradients(slice(begin, end), retain_graph or end < (count or 0))[0])
    return parts if len(each) == 1 else [torch.cat(of_input) for of_input in zip(*each, strict=True)]


def after_hooks(model: Model, inputs: list[Tensor], grads: list[Tensor], create_graph: bool) -> list[Tensor]:
    """Apply the hooks on outer variables once, as torch.autograd.grad does. Those on the weights are for steps."""

    def hooked_grad(x: Tensor, grad: Tensor) -> Tensor:
        if grad.dim() > x.dim():  # a hook sees a row at a time
            return torch.stack([hooked_grad(x, row) for row in grad])
        return torch.autograd.grad(x, x, grad, create_graph=create_graph)[0]

    inner = {id(p) for p in model.parameters.values()}
    hooked = [bool(x._backward_hooks) and id(x) not in inner for x in inputs]
    return [hooked_grad(x, grad) if has_hook else grad for x, grad, has_hook in zip(inputs, grads, hooked, strict=True)]
