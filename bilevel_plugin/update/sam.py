"""Sharpness-aware minimisation as a loss: its gradient is that of h at the perturbed weights."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from ..kernels.stopping import stop_gradient
from .direction import not_held
from .solvers import Value


@contextmanager
def _replaced(model: nn.Module, tensors: dict[int, Tensor]) -> Generator[None]:
    """Put tensors into the places of those that are in the model now, by id; one may be in several places."""
    places = [(m._parameters, n, p) for m in model.modules() for n, p in m._parameters.items() if id(p) in tensors]
    try:
        for holder, n, p in places:
            holder[n] = cast("nn.Parameter", tensors[id(p)])
        yield
    finally:
        for holder, n, p in places:
            holder[n] = p


class Sam:
    """The loss that `sam` returns."""

    def __init__(
        self, h: Callable[..., Any], rho: Value, over: tuple[nn.Module, ...] | None, adaptive: bool, eps: float
    ) -> None:
        self.h, self.rho, self.over, self.adaptive, self.eps = h, rho, over, adaptive, eps
        self.__signature__ = inspect.signature(h.forward if isinstance(h, nn.Module) else h)

    def __call__(self, model: nn.Module, *batch: Any, **named: Any) -> Any:
        held = None if self.over is None else {id(p) for part in self.over for p in part.parameters()}
        weights = [p for p in model.parameters() if held is None or id(p) in held]
        vmapped = [p for p in weights if is_batchedtensor(p)]  # of tasks; these have no requires_grad
        weights = vmapped or [p for p in weights if p.requires_grad]

        def value(tensors: Sequence[Tensor]) -> Tensor:
            with _replaced(model, {id(p): x for p, x in zip(weights, tensors, strict=True)}):
                returned = self.h(model, *batch, **named)
            return returned[0] if isinstance(returned, tuple) else returned

        if vmapped:
            grads: Sequence[Tensor | None] = torch.func.grad(value)(weights)
        else:
            grads = torch.autograd.grad(value(weights), weights, create_graph=True, allow_unused=True)
        with _replaced(model, self._moved({p: g for p, g in zip(weights, grads, strict=True) if g is not None})):
            return self.h(model, *batch, **named)

    def _moved(self, grads: dict[Tensor, Tensor]) -> dict[int, Tensor]:
        """Return w + ρ·g/‖g‖, whose second part is constant in the gradient of a step, by the id of w."""
        if not grads:
            raise ValueError(
                "bilevel.sam: h does not depend on the weights that it perturbs. Compute h from the model that is its "
                "first argument, or name the part of the model by over=."
            )
        grads = {w: g.to_dense() if g.is_sparse else g for w, g in grads.items()}
        norms = [torch.linalg.vector_norm(w * g if self.adaptive else g) for w, g in grads.items()]
        scale = self.rho / (torch.linalg.vector_norm(torch.stack(norms)) + self.eps)
        along = {w: w.square() * g if self.adaptive else g for w, g in grads.items()}
        return {id(w): w + stop_gradient(scale * x) for w, x in along.items()}


def sam(
    h: Callable[..., Any],
    rho: Value = 0.05,
    *,
    over: nn.Module | Iterable[nn.Module] | None = None,
    adaptive: bool = False,
    eps: float = 1e-12,
) -> Callable[..., Any]:
    """Return the loss whose gradient is that of sharpness-aware minimisation: ∇h(w + ρ·∇h(w)/‖∇h(w)‖).

    A step of SAM is two gradients and an update, which is a step on this loss with the optimizer that SAM wraps. The
    perturbation is a constant in the gradient of the step, and has its derivative in the hypergradient. h is evaluated
    twice, so dropout and running statistics do what they do in the plain loop. The value is that at the perturbed
    weights.

    Args:
        h: the inner loss, h(model, *batch).
        rho: the length of the perturbation, a number or a scalar tensor, which may be an outer variable.
        over: the part of the model that is perturbed, a module or several; by default all that requires grad. Where
            the optimizer holds a part of that, name the part.
        adaptive: perturb along w²·∇h(w), of length ρ in units of |w| (ASAM, Kwon et al. 2021).
        eps: what is added to the norm.

    Reference: Foret et al. 2021, Sharpness-aware minimization for efficiently improving generalization.

    Examples:
        For h = w²/2 the gradient of h is w. At w + ρ it is w + ρ, and a step of rate 1 ends at −ρ.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> h = lambda m: m.weight.square().sum() / 2
        >>> with bilevel.inner(model, bilevel.sam(h, rho=0.25), solver="gd", lr=1.0) as loop:
        ...     _ = loop.step()
        ...     print(model.weight.item())
        -0.25
    """
    if not callable(h):
        raise TypeError(f"bilevel.sam: h must be a loss, a function of (model, *batch), got {type(h).__name__}.")
    parts = None if over is None else (over,) if isinstance(over, nn.Module) else tuple(over)
    if parts is not None and not all(isinstance(m, nn.Module) for m in parts):  # pyright: ignore
        raise TypeError("bilevel.sam: over= takes a module of the model, or several of them.")
    return Sam(h, rho, parts, adaptive, eps)


def refuse_unclear(h: object, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if h perturbs weights that no optimizer of the block holds, without saying so."""
    if isinstance(h, Sam) and h.over is None and (others := not_held(model, optimizers)):
        raise ValueError(
            "bilevel.inner: which weights does bilevel.sam perturb? The optimizer holds a part of what requires grad "
            f"in the model; {others} it does not hold. Name the part: bilevel.sam(h, rho, over=model.head); "
            "over=model perturbs all of the model."
        )
