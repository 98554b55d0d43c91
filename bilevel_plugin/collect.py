"""The gradients of a hypergradient in the order of its inputs, also through graphs that lead to batches and to w_0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .autograd.derive import Gradients, without_hooks
from .autograd.missing import explained
from .autograd.trees import State
from .model.model import Model
from .run import Run


def collected(
    run: Run, wanted: list[Tensor], found: Gradients, start: State, allow_unused: bool, retain_graph: bool
) -> list[Tensor]:
    """Return the gradients for the wanted tensors, also through the graphs that lead to cut tensors and to w_0."""
    behind = [*found.cut.values(), *((run.origin[n], d) for n, d in start.items() if n in run.origin)]
    through: Sequence[Tensor | None] = [None] * len(wanted)
    if behind:  # one backward pass for all cut tensors and w_0
        with explained(), without_hooks(wanted):
            through = torch.autograd.grad(
                [x for x, _ in behind], wanted, [d for _, d in behind], allow_unused=True, retain_graph=retain_graph
            )
    parts: list[Tensor | None] = []
    for x, extra in zip(wanted, through, strict=True):
        both = [d for d in (found.direct.get(id(x), (x, None))[1], extra) if d is not None]
        parts.append(sum(both[1:], both[0]) if both else None)
    grads: list[Tensor] = []
    for i, (x, grad) in enumerate(zip(wanted, run.model.ranks.gather(wanted, parts), strict=True)):
        if grad is None and not allow_unused:
            before = " No step was taken yet, so h plays no part." if run.k == 0 else ""
            raise ValueError(
                f"bilevel.inner: neither loss depends on input {i} (shape {tuple(x.shape)}), so it has no "
                f"hypergradient.{before} Check that h or g uses this very tensor, and not behind a .detach() "
                "(bilevel.stop_gradient is the one that keeps a derivative), or pass allow_unused=True for zeros."
            )
        grads.append(torch.zeros_like(x) if grad is None else grad)
    return grads


def after_hooks(model: Model, inputs: list[Tensor], grads: list[Tensor], create_graph: bool) -> list[Tensor]:
    """Apply the hooks on outer variables once, as torch.autograd.grad does. Those on the weights are for steps."""
    inner = {id(p) for p in model.parameters.values()}
    hooked = [bool(x._backward_hooks) and id(x) not in inner for x in inputs]
    return [
        torch.autograd.grad(x, x, grad, create_graph=create_graph)[0] if has_hook else grad
        for x, grad, has_hook in zip(inputs, grads, hooked, strict=True)
    ]
