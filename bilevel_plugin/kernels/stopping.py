"""Tensors that are constants in the gradient of a step, and not in its derivative: `stop_gradient`."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..autograd.graph import FLAGGED
from ..autograd.trees import map_tensors

T = TypeVar("T")


class Differentiation:
    """The evaluation of losses at one point, with its derivatives: what it does at present, and what it has met."""

    def __init__(self) -> None:
        self.on = False  # the gradient of a step is being taken, in which stopped tensors are constants
        self.evaluating = False  # a loss runs, so stopped tensors are constants in the derivatives that it takes too
        self.losses = 0  # the number of losses that were evaluated so far
        self.stops = False  # `stop_gradient` was called
        self.unknown: tuple[str, str] | None = None  # why a derivative of running statistics is not known, and a fix
        self.eager_only = ""  # why the losses can't run as compiled code, where no function is replaced
        self.without_graphs = False  # a block runs on dual numbers, without a graph (pullback/blocks.py)
        self.replaying_block = False  # a block is run again in the backward pass, with its buffers
        self.derives = False  # a loss takes derivatives of its own
        self.behind: tuple[
            Tensor, ...
        ] = ()  # the weights, if there is a graph behind them that a derivative could enter
        self.flagged: list[Tensor] = []  # leaves that a loss has made require grad
        self.switched_off: list[Tensor] = []  # tensors that a loss has made not require grad, for a while

    def flag(self, x: Tensor) -> None:
        """Note a leaf that a loss has made require grad."""
        FLAGGED.add(id(x))
        self.flagged.append(x)

    def unflag(self) -> None:
        """Take back that a loss made these tensors require grad: they are no outer variables, and may be the user's."""
        for x in self.flagged:
            FLAGGED.discard(id(x))
            if x.is_leaf:
                x.requires_grad_(False)
        self.flagged.clear()


class _ConstantInStep(torch.autograd.Function):
    """The identity, with no gradient in the direction of a step, and the usual gradient in its derivative."""

    @staticmethod
    def forward(evaluation: Differentiation, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.evaluation = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None if ctx.evaluation.on or ctx.evaluation.evaluating else a

    @staticmethod
    def vmap(info: Any, in_dims: Any, evaluation: Differentiation, x: Tensor) -> Any:  # pyright: ignore
        return _ConstantInStep.apply(evaluation, x), in_dims[1]


def constant_in_step(evaluation: Differentiation, x: Tensor) -> Tensor:
    """Return x as a constant in the gradient of the step that is evaluated, and not in its derivative."""
    return _ConstantInStep.apply(evaluation, x)  # pyright: ignore


_EVALUATIONS: list[tuple[int, Differentiation]] = []  # the nested evaluations of losses, with their threads


def current_evaluation() -> Differentiation | None:
    """Return the evaluation of a loss that this call belongs to, or None."""
    if not _EVALUATIONS:
        return None
    thread, evaluation = _EVALUATIONS[-1]
    # on a GPU, a thread of autograd that runs a checkpointed part again belongs to the evaluation
    in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
    return evaluation if thread == threading.get_ident() or in_backward else None


@contextmanager
def evaluating(evaluation: Differentiation) -> Generator[None]:
    """Attribute calls of `stop_gradient` to this evaluation; EXCLUSIVE is held, so there is one at a time."""
    _EVALUATIONS.append((threading.get_ident(), evaluation))
    try:
        yield
    finally:
        _EVALUATIONS.pop()
        evaluation.unflag()


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
    evaluation = current_evaluation()
    if evaluation is None:
        return map_tensors(lambda y: y.detach(), x)
    evaluation.stops = True
    return map_tensors(lambda y: constant_in_step(evaluation, y), x)


def is_stopped(x: Tensor) -> bool:
    """Whether x is what `stop_gradient` returned."""
    return type(x.grad_fn).__name__ == "_ConstantInStepBackward"
