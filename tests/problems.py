"""Problems whose answers are known, and the differences that judge all others."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel


class Vector(nn.Module):
    """The plainest model: a vector of weights."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@dataclass
class Ridge:
    """h = ‖Xw − y‖²/2 + e^λ·‖w‖²/2, g = ‖Vw − u‖²/2: everything in closed form."""

    X: Tensor
    y: Tensor
    V: Tensor
    u: Tensor
    lam: Tensor

    @staticmethod
    def random(n: int = 6, d: int = 3) -> Ridge:
        f = {"dtype": torch.float64}
        X, V = torch.randn(n, d, **f) / n**0.5, torch.randn(n, d, **f) / n**0.5
        return Ridge(X, torch.randn(n, **f), V, torch.randn(n, **f), torch.tensor(-0.5, requires_grad=True, **f))

    def h(self, model: nn.Module) -> Tensor:
        return (self.X @ model.w - self.y).square().sum() / 2 + self.lam.exp() * model.w.square().sum() / 2

    def g(self, model: nn.Module) -> Tensor:
        return (self.V @ model.w - self.u).square().sum() / 2

    def hessian(self, c: float = 0.0) -> Tensor:
        """∇²(h + c·g)"""
        eye = torch.eye(self.X.shape[1], dtype=self.X.dtype)
        return (self.X.T @ self.X + self.lam.exp() * eye + c * self.V.T @ self.V).detach()

    def solution(self, c: float = 0.0) -> Tensor:
        """argmin h + c·g"""
        return torch.linalg.solve(self.hessian(c), self.X.T @ self.y + c * self.V.T @ self.u)

    def hypergradient(self, c: float = 0.0) -> Tensor:
        """dg(w*(λ))/dλ = −∇g·(∇²(h + c·g))⁻¹·e^λ·w*"""
        w = self.solution(c)
        return -(self.V.T @ (self.V @ w - self.u)) @ torch.linalg.solve(self.hessian(c), self.lam.exp().detach() * w)

    def model(self) -> Vector:
        return Vector(torch.zeros(self.X.shape[1], dtype=self.X.dtype))


class Line:
    """h = (w₁ + w₂ − λ)²/2 has a whole line of minimisers; g = ‖w − c‖²/2 picks one of them (Eq. 3)."""

    def __init__(self, lam: float = 1.0, c: tuple[float, float] = (2.0, 0.5)):
        self.lam = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
        self.c = torch.tensor(c, dtype=torch.float64)

    def h(self, model: nn.Module) -> Tensor:
        return (model.w.sum() - self.lam).square() / 2

    def g(self, model: nn.Module) -> Tensor:
        return (model.w - self.c).square().sum() / 2

    def projection(self, w: Tensor) -> Tensor:
        """The point of the line that is nearest to w; at w = c, the solution of Eq. 3."""
        return w - (w.sum() - self.lam.detach()) / 2

    def model(self, start: tuple[float, float] = (-1.0, 1.0)) -> Vector:
        return Vector(torch.tensor(start, dtype=torch.float64))


def differences(f: Callable[[], float], x: Tensor, v: Tensor, eps: float = 2e-4) -> float:
    """df(x + ε·v)/dε by central differences of fourth order; x is put back."""
    there = x.detach().clone()

    def at(step: float) -> float:
        with torch.no_grad():
            x.copy_(there + step * v)
        try:
            return f()
        finally:
            with torch.no_grad():
                x.copy_(there)

    return (8 * (at(eps) - at(-eps)) - (at(2 * eps) - at(-2 * eps))) / (12 * eps)


def hypergrad(model, h, g, inputs, batch=(), outer=(), steps=3, seed=0, **options):
    """The hypergradients of a loop of some steps, under a fixed seed."""
    torch.manual_seed(seed)
    with bilevel.inner(model, h, g, **options) as loop:
        if steps:
            loop.run(steps, *batch, outer=outer)
        return loop.hypergrad(inputs, outer=outer)


def value(model, h, g, batch=(), outer=(), steps=3, seed=0, **options) -> float:
    """g(w_K) of the same loop."""
    torch.manual_seed(seed)
    if steps == 0:
        return float(g(copy.deepcopy(model), *outer).detach())
    with bilevel.inner(model, h, g, **options) as loop:
        loop.run(steps, *batch, outer=outer)
        return float(loop.value)


def relative(got: Tensor, expected: Tensor) -> float:
    size = max(float(got.norm()), float(expected.norm()))
    return float((got - expected).norm()) / size if size else 0.0


def weighted(lam: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """h = mean of σ(λ_i)·ℓ_i and g = mean of ℓ_i, the losses of data cleaning."""

    def h(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return h, g


REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError)


def says(error: BaseException, words: tuple[str, ...]) -> None:
    assert re.match(r"bilevel\.\w+: ", str(error)), f"a bare {type(error).__name__}: {error}"
    for word in words:
        assert re.search(word, str(error), re.IGNORECASE), f"{word!r} is not in: {error}"


@contextlib.contextmanager
def refused(*words: str):
    """Refused: one of ours, that names the mistake and what to do."""
    with pytest.raises(REFUSALS) as caught:
        yield
    says(caught.value, words)


def refused_if(is_refused: bool, *words: str) -> AbstractContextManager[None]:
    """`refused`, or a context in which nothing is."""
    return refused(*words) if is_refused else contextlib.nullcontext()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class OnceModule(nn.Module):
    def forward(self, x):
        return Once.apply(x)


class Cut(torch.autograd.Function):
    """Its backward is right, and cuts the graph without the mark of once_differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].detach().cos()


class WrongModule(nn.Module):
    def forward(self, x):
        return Cut.apply(x)


N, M = 12, 5  # parts of 3, 3, 2, 2 and 2 samples


class Cleaning:
    """Data cleaning with a small network in float64: λ has a weight for each sample, and a scale."""

    def __init__(self, seed=0, n=N):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.x, self.y = torch.randn(n, 4).double(), torch.randint(3, (n,))
        self.xv, self.yv = torch.randn(7, 4).double(), torch.randint(3, (7,))
        self.rows = torch.randperm(20)[:n]
        self.lam = torch.randn(20).double().requires_grad_()
        self.scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def h(self, model, x, y, rows):
        losses = F.cross_entropy(model(x), y, reduction="none")
        decay = sum(p.square().sum() for p in model.parameters())
        return (self.lam[rows].sigmoid() * losses).mean() + 0.05 * self.scale.exp() * decay

    def g(self, model, x, y):
        return F.cross_entropy(model(x) * (1 + self.scale.sin()), y)

    @property
    def inputs(self):
        return [self.lam, self.scale]

    def run(self, micro, steps=3, inputs=None, **options):
        """The losses of the steps, the hypergradients, and the weights."""
        torch.manual_seed(1)
        options = {"lr": 0.2, **options}
        with bilevel.inner(self.model, self.h, self.g, check=False, **options) as loop:
            for _ in range(steps):
                losses = loop.step(self.x, self.y, self.rows, outer=(self.xv, self.yv), micro=micro)
            grads = loop.hypergrad(self.inputs if inputs is None else inputs)
            return [*(x for x in losses[:2] if x is not None), *grads, *(w.detach() for w in loop.weights.values())]


def step(data, h, *batch, **options):
    with bilevel.inner(data.model, h, data.g, solver="gd", lr=0.1, check=False) as loop:
        return loop.step(*(batch or (data.x, data.y)), micro=4, **options)


def snapshot(model):
    tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return tensors, [m.training for m in model.modules()], [p.grad for p in model.parameters()]


def same(model, before):
    tensors, modes, grads = snapshot(model)
    return (
        all(torch.equal(tensors[n], t) for n, t in before[0].items())
        and modes == before[1]
        and all(a is b for a, b in zip(grads, before[2], strict=True))
        and all(isinstance(p, nn.Parameter) for p in model.parameters())
    )
