"""Derivatives by autograd: gradients, products with Jacobians, their sums, and norms of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .missing import explained
from .trees import Pairs, State
from .weak import with_computed


class Gradients:
    """Sums of gradients: `direct` for tensors that the losses use, `cut` for those that a leaf stands in for."""

    def __init__(self) -> None:
        self.direct: dict[int, tuple[Tensor, Tensor]] = {}
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def add(sums: dict[int, tuple[Tensor, Tensor]], tensor: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            known = sums.get(id(tensor))
            if known is None:
                sums[id(tensor)] = (tensor, grad.clone())
            elif known[1].layout == grad.layout:
                known[1].add_(grad)
            else:  # the gradient of a sparse tensor may be sparse from one operation and dense from another
                sums[id(tensor)] = (tensor, known[1].to_dense() + grad.to_dense())

    def collect(self, cut: Pairs, wanted: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add the first gradients to those of the pairs of `cut`, and the others to those of the wanted tensors."""
        for (tensor, _), grad in zip(cut, grads, strict=False):
            self.add(self.cut, tensor, grad)
        for tensor, grad in zip(wanted, grads[len(cut) :], strict=True):
            self.add(self.direct, tensor, grad)

    def values(self) -> list[Tensor]:
        return [grad for _, grad in (*self.direct.values(), *self.cut.values())]


@dataclass
class Traced:
    """The value `to` of a function at the point `at`, together with its graph."""

    at: State
    to: State
    cut: Pairs
    leaves: Sequence[Tensor]
    share: float = 1.0  # the share of this process in a mean over several processes
    retain_graph: bool = True  # whether the graph is used again, or is connected to a graph outside the loop

    def vjp(self, a: State, inputs: Sequence[Tensor] | None, into: Gradients) -> State:
        """Return a·∂to/∂at, and add a·∂to/∂λ to the sums, for `inputs`, or for every leaf if they are None."""
        wanted = with_computed(inputs, self.leaves)
        grads = vjp(self.to, a, [*self.at.values(), *(x for _, x in self.cut), *wanted], self.share, self.retain_graph)
        into.collect(self.cut, wanted, grads[len(self.at) :])
        return {n: grad for n, grad in zip(self.at, grads, strict=False) if grad is not None}


IN_BACKWARD: list[Callable[[], AbstractContextManager[Any]]] = []  # the function mode of a part that runs again


def vjp(
    to: State, a: State, inputs: Sequence[Tensor], share: float = 1.0, retain_graph: bool = True
) -> Sequence[Tensor | None]:
    """Return share·a·∂to for every input; None where nothing depends on it.

    The graph is retained by default, since it may be connected to a graph outside the loop, such as that of an encoder.
    """
    keys = [n for n in a if n in to and to[n].requires_grad]
    if not keys:
        return [None] * len(inputs)
    along = [a[n] if share == 1 else a[n] * share for n in keys]
    with explained():
        grads = grad([to[n] for n in keys], inputs, along, retain_graph=retain_graph)
    return [None if g is None else g.detach() for g in grads]  # a custom backward may leave a graph


def grad(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    along: Sequence[Tensor | None],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute torch.autograd.grad while function modes stay on.

    Activation checkpointing runs parts of the model again during the backward pass, and must use the same kernels as
    in the forward pass. torch.autograd.grad itself is a function that modes override, and it runs with the modes off.
    Hooks on the inputs do not run: the result is a part of a gradient, and they are for the whole of it.
    """
    along = [torch.ones_like(x) if a is None else a for x, a in zip(outputs, along, strict=True)]
    run: Any = torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]
    with without_hooks(inputs), IN_BACKWARD[-1]() if IN_BACKWARD else nullcontext():
        return run(tuple(outputs), tuple(along), retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Generator[None]:
    """Switch off the hooks on the gradients of these tensors (register_hook)."""
    hooks = [x._backward_hooks for x in tensors if x._backward_hooks]
    kept = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, items in zip(hooks, kept, strict=True):
            h.update(items)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(x.device.type == "meta" or bool(torch.isfinite(x).all()) for x in tensors)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of several tensors as one vector."""
    return torch.stack([torch.linalg.vector_norm(x) for x in tensors]).norm()
