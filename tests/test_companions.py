"""companions=: modules that follow the weights, judged by the plain loop's central differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

ENGINES = {
    "reverse": bilevel.Reverse(),
    "sqrt": bilevel.Reverse("sqrt"),
    "all graphs": bilevel.Reverse(memory="1GiB"),
    "few graphs": bilevel.Reverse(memory=20_000),
    "unroll": bilevel.Unroll(),
    "forward": bilevel.Forward(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
}
State = dict[str, Tensor]


class Problem:
    """A student that agrees with a teacher; the outer variable weighs what it learns, and is used by one rule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).double()
        self.teacher = copy.deepcopy(self.model)
        self.x, self.y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
        self.lam = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def rules(self) -> dict[str, Callable[[State, State], State]]:
        def own(s: State, w: State) -> State:
            return {n: x + 0.3 * torch.tanh(self.lam[1] * (w[n] - x)) for n, x in s.items()}

        return {"ema": bilevel.ema(0.8), "copy": bilevel.copy(every=2), "own": own}

    def h(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        agree = (model(x) - self.teacher(x)).square().mean()
        return self.lam[0].exp() * agree + self.lam[1].exp() * (model(x) - y).square().mean()

    def g(self, model: nn.Module) -> Tensor:
        return ((0.5 * model(self.x) + self.teacher(self.x)) - self.y).square().mean()

    def plain(self, optimizer: str, rule: str) -> Tensor:
        o, follow = OPTIMIZERS[optimizer](self.model), self.rules()[rule]
        self.teacher.requires_grad_(False)
        torch.manual_seed(3)
        for k in range(1, 6):
            o.zero_grad()
            self.h(self.model, self.x, self.y).backward()
            o.step()
            if rule != "copy" or k % 2 == 0:
                with torch.no_grad():
                    new = follow(dict(self.teacher.named_parameters()), dict(self.model.named_parameters()))
                    for n, p in self.teacher.named_parameters():
                        p.copy_(new[n])
        self.model.eval()
        self.teacher.eval()
        return self.g(self.model).detach()

    def block(self, rule: str, **options: Any) -> Any:
        return bilevel.inner(
            self.model, self.h, self.g, solver="gd", companions={self.teacher: self.rules()[rule]}, **options
        )

    def judged(self, loop: bilevel.Loop) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        for _ in range(5):
            loop.step(self.x, self.y)
        loop.eval()
        self.teacher.eval()
        return loop.value, loop.hypergrad(self.lam)


def differences(optimizer: str, rule: str, eps: float = 1e-5) -> Tensor:
    grad = torch.zeros(2, dtype=torch.float64)
    for i in range(2):
        values = []
        for sign in (1, -1):
            p = Problem()
            with torch.no_grad():
                p.lam[i] += sign * eps
            values.append(p.plain(optimizer, rule))
        grad[i] = (values[0] - values[1]) / (2 * eps)
    return grad


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["ema", "copy", "own"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_companion_is_a_constant_for_steps_and_none_for_the_hypergradient(
    engine: str, rule: str, optimizer: str
) -> None:
    p, judge = Problem(), differences(optimizer, rule)
    with p.block(rule, optimizer=OPTIMIZERS[optimizer](p.model), engine=ENGINES[engine]) as loop:
        value, grad = p.judged(loop)
    assert float((value - Problem().plain(optimizer, rule)).abs()) <= 1e-12
    assert float((grad - judge).norm()) <= 1e-6 * float(judge.norm())


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_values_that_a_companion_gives(engine: str) -> None:
    """h sees the teacher's answers only as values of loop.compute, and micro-batches come between."""

    def run(p: Problem, engine: bilevel.Engine, take: Callable[[bilevel.Loop], Tensor]) -> Tensor:
        p.model.eval()
        p.teacher.eval()
        h = lambda m, x, t: p.lam[0].exp() * (m(x) - t).square().mean()
        follow = {p.teacher: bilevel.ema(0.5)}
        with bilevel.inner(p.model, h, p.g, solver="gd", lr=0.3, engine=engine, companions=follow) as loop:
            for _ in range(3):
                t = loop.compute(lambda m, x: p.teacher(x) + p.lam[1] * m(x), p.x)
                loop.accumulate(p.x[:4], t[:4])
                loop.accumulate(p.x[4:], t[4:])
                loop.step()
            return take(loop)

    judge = torch.zeros(2, dtype=torch.float64)
    for i in range(2):
        values = []
        for sign in (1, -1):
            p = Problem()
            with torch.no_grad():
                p.lam[i] += sign * 1e-5
            values.append(run(p, bilevel.Reverse(), lambda loop: loop.value))
        judge[i] = (values[0] - values[1]) / 2e-5
    p = Problem()
    grad = run(p, ENGINES[engine], lambda loop: loop.hypergrad(p.lam))
    assert float((grad - judge).norm()) <= 1e-6 * float(judge.norm())


@pytest.mark.parametrize("keep", [False, True])
def test_the_companion_is_restored_or_kept(keep: bool) -> None:
    p = Problem()
    before = [x.detach().clone() for x in p.teacher.parameters()]
    p.teacher.train()
    with p.block("ema", lr=0.1) as loop:
        p.judged(loop)
        inside = [x.detach().clone() for x in p.teacher.parameters()]
        if keep:
            loop.commit_()
    assert not torch.equal(before[0], inside[0])
    for x, y in zip(p.teacher.parameters(), inside if keep else before, strict=True):
        assert torch.equal(x, y)
        assert x.requires_grad
    assert p.teacher.training


def test_a_companion_that_is_moved_by_hand_is_an_error_that_names_it() -> None:
    p = Problem()
    with p.block("ema", lr=0.1) as loop:
        loop.step(p.x, p.y)
        with torch.no_grad():
            next(p.teacher.parameters()).mul_(0.9)
        with pytest.raises(RuntimeError, match=r"companions\[0\]\.0\.weight.* by its rule"):
            loop.step(p.x, p.y)


def test_what_is_refused() -> None:
    p = Problem()
    with pytest.raises(ValueError, match=r"is the model's own parameter '0\.weight'"):
        bilevel.inner(p.model, p.h, lr=0.1, solver="gd", companions={p.model: bilevel.ema(0.9)})
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has no counterpart"):
        bilevel.inner(p.model, p.h, lr=0.1, solver="gd", companions={other: bilevel.copy()})
    with pytest.raises(TypeError, match="takes a rule for each module"):
        bilevel.inner(p.model, p.h, lr=0.1, solver="gd", companions={p.teacher: 0.9})  # pyright: ignore
    with pytest.raises(ValueError, match="one inner problem on one process"):
        bilevel.inner(p.model, p.h, lr=0.1, solver="gd", tasks=2, companions={p.teacher: bilevel.ema(0.9)})
    with pytest.raises(ValueError, match="every must be"):
        bilevel.copy(every=0)
    with pytest.raises(ValueError, match="decay must be"):
        bilevel.ema(1.5)
