"""loop.compute: values that the loop computes between its steps, judged by the plain loop's differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

ENGINES = {
    "reverse": bilevel.Reverse(),
    "sqrt": bilevel.Reverse("sqrt"),
    "every third": bilevel.Reverse(3),
    "all graphs": bilevel.Reverse(memory="1GiB"),
    "few graphs": bilevel.Reverse(memory=20_000),
    "unroll": bilevel.Unroll(),
    "forward": bilevel.Forward(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
}


class Problem:
    """A regressor with dropout and batch statistics; the outer variables enter in the value, in h, and in its batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)
        self.model = nn.Sequential(*layers).double()
        self.x, self.y = torch.randn(12, 3).double(), torch.randn(12, 1).double()
        self.lam = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
        self.shift = torch.zeros(12, dtype=torch.float64, requires_grad=True)

    def pace(self, model: nn.Module, x: Tensor, y: Tensor, before: Tensor | None) -> dict[str, Tensor]:
        losses = (model(x) - y).square().squeeze(1) + 0.1 * torch.rand(len(x)).double()
        weights = torch.sigmoid(self.lam[0] - losses + self.shift)
        return {"weights": weights if before is None else 0.5 * (weights + before), "hard": losses > 1}

    def h(self, model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (w * (model(x) - y).square().squeeze(1)).mean() + self.lam[1].exp() * 0.01 * sum(
            p.square().sum() for p in model.parameters()
        )

    def g(self, model: nn.Module) -> Tensor:
        return (model(self.x) - self.y).square().mean()

    def batches(self) -> tuple[Tensor, ...]:
        return torch.arange(12).split(4)

    @property
    def outer(self) -> list[Tensor]:
        return [self.lam, self.shift]

    def plain(self, optimizer: torch.optim.Optimizer) -> Tensor:
        torch.manual_seed(5)
        before = None
        for _ in range(3):
            self.model.eval()
            with torch.no_grad():
                before = self.pace(self.model, self.x, self.y, before)["weights"]
            self.model.train()
            for i in self.batches():
                optimizer.zero_grad()
                self.h(self.model, self.x[i], self.y[i], before[i]).backward()
                optimizer.step()
        self.model.eval()
        return self.g(self.model).detach()

    def train(self, loop: bilevel.Loop, *, step: Callable[[Tensor, Tensor], Any]) -> None:
        torch.manual_seed(5)
        before = None
        for _ in range(3):
            loop.eval()
            before = loop.compute(self.pace, self.x, self.y, before)["weights"]
            loop.train()
            for i in self.batches():
                step(i, before)
        loop.eval()


def differences(run: Callable[[Problem], Tensor], eps: float = 1e-5) -> list[Tensor]:
    """Central differences of run, with respect to each outer variable."""
    found: list[Tensor] = []
    for j, like in enumerate(Problem().outer):
        grad = torch.zeros_like(like)
        for i in range(like.numel()):
            values = []
            for sign in (1, -1):
                p = Problem()
                with torch.no_grad():
                    p.outer[j][i] += sign * eps
                values.append(run(p))
            grad[i] = (values[0] - values[1]) / (2 * eps)
        found.append(grad)
    return found


@pytest.fixture(scope="module")
def judged() -> dict[str, tuple[Tensor, list[Tensor]]]:
    def plain(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[Problem], Tensor]:
        return lambda p: p.plain(make(p.model))

    return {n: (plain(make)(Problem()), differences(plain(make))) for n, make in OPTIMIZERS.items()}


def assert_is(grads: list[Tensor], judge: list[Tensor]) -> None:
    for grad, other in zip(grads, judge, strict=True):
        assert float((grad - other).norm()) <= 1e-6 * float(other.norm())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_is_a_constant_for_steps_and_none_for_the_hypergradient(
    engine: str, optimizer: str, judged: dict[str, tuple[Tensor, list[Tensor]]]
) -> None:
    p = Problem()
    with bilevel.inner(
        p.model, p.h, p.g, solver="gd", optimizer=OPTIMIZERS[optimizer](p.model), engine=ENGINES[engine]
    ) as loop:
        p.train(loop, step=lambda i, w: loop.step(p.x[i], p.y[i], w[i]))
        value, grads = loop.value, loop.hypergrad(p.outer)
        loop.backward()
    expected, judge = judged[optimizer]
    assert float((value - expected).abs()) <= 1e-12
    assert_is(grads, judge)
    assert_is([x.grad for x in p.outer if x.grad is not None], judge)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_may_close_over_a_value(engine: str, judged: dict[str, tuple[Tensor, list[Tensor]]]) -> None:
    p = Problem()
    now: list[Tensor] = []
    h = lambda m, i: p.h(m, p.x[i], p.y[i], now[0][i])

    def step(i: Tensor, w: Tensor) -> None:
        now[:] = [w]
        loop.step(i, h=lambda m, i, w=w: p.h(m, p.x[i], p.y[i], w[i]))

    with bilevel.inner(
        p.model, h, p.g, solver="gd", optimizer=OPTIMIZERS["SGD"](p.model), engine=ENGINES[engine]
    ) as loop:
        p.train(loop, step=step)
        assert_is(loop.hypergrad(p.outer), judged["SGD"][1])


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_values_between_micro_batches_in_outer_losses_and_in_added_losses(engine: str) -> None:
    def objective(p: Problem, loop: bilevel.Loop | None, w: dict[str, Tensor]) -> Tensor:
        return (p.model(p.x).squeeze(1) * w["weights"]).sum()

    def wrapped(p: Problem, engine: bilevel.Engine, take: Callable[[bilevel.Loop], Any]) -> Any:
        p.model.eval()
        g = lambda m, w: (m(p.x).squeeze(1) * w).sum()
        with bilevel.inner(p.model, p.h, g, solver="gd", lr=0.3, engine=engine) as loop:
            torch.manual_seed(1)
            w = loop.compute(p.pace, p.x, p.y, None)["weights"]
            loop.accumulate(p.x[:6], p.y[:6], w[:6])
            v = loop.compute(p.pace, p.x, p.y, w)["weights"]
            loop.accumulate(p.x[6:], p.y[6:], v[6:])
            loop.step()
            loop.add_outer_loss(outer=(v,))
            loop.step(p.x, p.y, v)
            u = loop.compute(p.pace, p.x, p.y, v)["weights"]
            loop.add_outer_loss(outer=(u,), weight=0.5)
            return take(loop)

    judge = differences(lambda p: wrapped(p, bilevel.Reverse(), lambda loop: loop.value))
    p = Problem()
    assert_is(wrapped(p, ENGINES[engine], lambda loop: loop.hypergrad(p.outer)), judge)


def test_a_second_derivative_through_values() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    lam = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    h = lambda m, y: 0.5 * (m.weight - y).square().sum()
    with bilevel.inner(model, h, lambda m: m.weight.sum(), solver="gd", lr=1.0, engine="unroll") as loop:
        loop.step(loop.compute(lambda m: lam**3 + 0 * m.weight))
        first = loop.hypergrad(lam, create_graph=True)
    assert float(first.detach()) == pytest.approx(3 * 0.7**2)
    assert float(torch.autograd.grad(first, lam)[0]) == pytest.approx(6 * 0.7)


def small() -> tuple[nn.Module, Callable[..., Tensor], Callable[..., Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    return model, lambda m, y: (m.weight.square() * y).sum(), lambda m: m.weight.sum()


def block(engine: str | bilevel.Engine = "reverse", **options: Any) -> Any:
    model, h, g = small()
    return bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, **options)


def test_the_loop_takes_the_steps_of_the_plain_one_and_the_model_is_restored() -> None:
    model, h, g = small()
    before = model.weight.detach().clone()
    with bilevel.inner(model, h, g, solver="gd", lr=0.1) as loop:
        y = loop.compute(lambda m: m.weight * 2)
        loop.step(y)
        moved = model.weight.detach().clone()
    assert torch.equal(y.detach(), before * 2)
    assert torch.allclose(moved, before - 0.1 * 2 * before * 2 * before)
    assert torch.equal(model.weight, before)


def test_integers_and_booleans_have_no_derivative() -> None:
    with block() as loop:
        found = loop.compute(lambda m: [(m.weight > 0), m.weight.argmax(), {"y": m.weight.abs()}])
        assert [found[0].requires_grad, found[1].requires_grad, found[2]["y"].requires_grad] == [False, False, True]


@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_a_function_that_drops_its_graph_is_refused(how: str) -> None:
    def fn(m: nn.Module) -> Tensor:
        with torch.set_grad_enabled(how != "no_grad"):
            y = m(torch.ones(1, 2).double())
        return y.detach()

    with block() as loop, pytest.raises(ValueError, match=r"loop\.compute\(fn\).*no_grad"):
        loop.compute(fn)


def test_a_value_that_a_repetition_gives_differently_is_an_error_that_names_it() -> None:
    count = [0.0]

    def targets(m: nn.Module) -> Tensor:
        count[0] += 1
        return m.weight * count[0]

    with block() as loop:
        loop.step(loop.compute(targets))
        with pytest.raises(RuntimeError, match=r"the value of loop\.compute\(targets\) after step k = 0"):
            loop.hypergrad(list(small()[0].parameters()), allow_unused=True)


def test_a_value_that_was_changed_in_place_is_an_error() -> None:
    with block() as loop:
        y = loop.compute(lambda m: m.weight * 2)
        with torch.no_grad():
            y.mul_(2)
        loop.step(y)
        with pytest.raises(RuntimeError, match="was changed in place"):
            loop.backward()


def test_batch_statistics_that_a_value_would_move_are_refused() -> None:
    p = Problem()
    with bilevel.inner(p.model, p.h, p.g, solver="gd", lr=0.1) as loop:
        with pytest.raises(ValueError, match=r"pace\) changes the buffer '1\.running_mean'"):
            loop.compute(p.pace, p.x, p.y, None)


def test_what_has_no_such_place_is_refused_by_name() -> None:
    with block("cg") as loop, pytest.raises(ValueError, match=r"loop\.compute"):
        loop.compute(lambda m: m.weight)
    with block(tasks=2) as loop, pytest.raises(ValueError, match=r"loop\.compute is for one inner problem"):
        loop.compute(lambda m: m.weight)
    with block() as loop, pytest.raises(TypeError, match=r"loop\.compute takes a function"):
        loop.compute(torch.ones(1))  # pyright: ignore[reportArgumentType]


def test_a_tensor_that_was_computed_without_it_is_noticed() -> None:
    with block() as loop:
        with torch.no_grad():
            y = loop(torch.ones(1, 2).double())
        with pytest.raises(ValueError, match=r"loop\.compute\(fn, \*args\)"):
            loop.step(y)
        with pytest.raises(ValueError, match=r"loop\.compute\(fn"):
            loop.step(loop(torch.ones(1, 2).double()))
        loop.step(y.detach())  # meant to be a constant
