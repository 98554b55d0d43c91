"""Rules of one's own: for a class of optimizers, and given to a block."""

import copy
import re
from functools import partial

import pytest
import torch
from optimizers import (
    ENGINES,
    OPTIONS,
    SAMPLES,
    STEPS,
    Case,
    Problem,
    differences_along,
    distance,
    same_state,
)
from problems import differences, relative

import bilevel_plugin as bilevel

# Rules of one's own


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), w − lr·sign(β₁·m + (1 − β₁)·d); with soft > 0 the sign is a tanh."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0, soft=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "soft": soft})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    moved, average = lion(p, p.grad, {"exp_avg": average}, count=None, **group)
                    p.copy_(moved)
                    self.state[p].update(average)


def lion(w, d, state, *, lr, count, betas=(0.9, 0.99), weight_decay=0.0, soft=0.0, **_):
    m = state.get("exp_avg", torch.zeros_like(w))
    mixed = betas[0] * m + (1 - betas[0]) * d
    moved = w * (1 - lr * weight_decay) - lr * (torch.tanh(mixed / soft) if soft else torch.sign(mixed))
    return moved, {"exp_avg": betas[1] * m + (1 - betas[1]) * d}


def heavy_ball(w, d, state, *, lr, count):
    """A rule with a count: the momentum grows as 1 − 1/k."""
    assert isinstance(count, int)
    v = (1 - 1 / count) * state["v"] + d if state else d
    return w - lr * v, {"v": v}


@pytest.fixture(scope="module")
def _registered():
    assert bilevel.optimizer_rule(Lion)(lion) is lion


class LionProblem(Problem):
    """The problem with an optimizer that torch does not have."""

    def empty_optimizer(self, model, **changed):
        held = [{"params": model.first.parameters(), "weight_decay": 0.2}, {"params": model.last.parameters()}]
        return Lion(held, lr=0.05, soft=self.soft, **changed)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("soft", [0.3, 0.0])
@pytest.mark.parametrize("setting", ["", "stepped before", "scheduler"])
def test_a_rule_that_is_registered_for_a_class(setting, soft, engine):
    problem = LionProblem(Case("SGD", setting=setting))
    problem.soft = soft
    with problem.block(engine) as (model, loop, _):
        assert distance(model.state_dict(), problem.plain()[0].state_dict()) < 1e-12
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
    eps = 2e-4 if soft else 1e-6  # signs jump
    true = differences_along(problem.value, problem.lam, problem.directions(SAMPLES), eps)
    assert relative(along, true) < 1e-6
    assert bool(true.any()) == bool(soft)
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    true = differences(lambda: problem.value(factor=factor.item()), factor, torch.ones((), dtype=torch.float64), eps)
    with problem.block(engine, lr=factor) as (_, loop, _):
        assert loop.hypergrad(factor).item() == pytest.approx(true, rel=1e-6)


@pytest.mark.usefixtures("_registered")
def test_the_state_of_a_registered_rule_is_committed():
    problem = LionProblem(Case("SGD", setting="stepped before"))
    problem.soft = 0.3
    with problem.block() as (model, loop, optimizer):
        loop.commit_(optimizer=True)
    plain, theirs = problem.plain()
    same_state(optimizer, theirs)
    for k in range(3):
        problem.plain_step(model, optimizer, k)
        problem.plain_step(plain, theirs, k)
    assert distance(model.state_dict(), plain.state_dict()) < 1e-12


@pytest.mark.usefixtures("_registered")
def test_a_subclass_is_not_taken_for_its_parent():
    """A subclass may have another step, so it is known only if it is registered."""

    class Other(Lion):
        pass

    class Faster(torch.optim.SGD):
        pass

    problem = Problem(Case("SGD"))
    for kind in (Other, Faster):
        with pytest.raises((TypeError, ValueError), match=rf"^bilevel\.(.|\n)*{kind.__name__}"):
            with bilevel.inner(problem.model, problem.h, problem.g, optimizer=kind(problem.model.parameters())):
                pass


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", [heavy_ball, partial(lion, soft=0.3, weight_decay=0.1)], ids=["count", "partial"])
def test_a_rule_that_is_passed(rule, engine):
    problem = Problem(Case("SGD"))
    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)

    def value():
        model = copy.deepcopy(problem.model)
        held = [p for n, p in model.named_parameters() if "side" not in n]
        states = [{} for _ in held]
        for k in range(STEPS):
            directions = torch.autograd.grad(problem.h(model, *problem.batch(k)), held)
            with torch.no_grad():
                for i, (w, d) in enumerate(zip(held, directions, strict=True)):
                    moved, states[i] = rule(w, d, states[i], lr=rate.item(), count=k + 1)
                    w.copy_(moved)
        value.end = model.state_dict()
        return float(problem.g(model).detach())

    model = copy.deepcopy(problem.model)
    given = {"solver": "gd", "optimizer": rule, "lr": rate, "engine": ENGINES[engine], "check": False}
    with bilevel.inner(model, problem.h, problem.g, **given) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k))
        value()
        assert distance(model.state_dict(), value.end) < 1e-12
        got = [problem.directions(SAMPLES) @ loop.hypergrad(problem.lam), loop.hypergrad(rate)]
    assert relative(got[0], differences_along(value, problem.lam, problem.directions(SAMPLES))) < 1e-6
    assert got[1].item() == pytest.approx(differences(value, rate, torch.ones((), dtype=torch.float64)), rel=1e-6)


@pytest.mark.parametrize(
    "wrong", [lambda w, d, state, *, lr, count: w - lr * d, lambda w, d, state, *, lr, count: (w[:1], {})]
)
def test_a_rule_that_returns_something_else_is_named(wrong):
    problem = Problem(Case("SGD"))
    with pytest.raises((TypeError, ValueError), match=r"^bilevel\."):
        with bilevel.inner(problem.model, problem.h, problem.g, solver="gd", optimizer=wrong, lr=0.1) as loop:
            loop.step(*problem.batch(0))


class Unknown(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})


@pytest.mark.parametrize("kind", [Unknown, *(getattr(torch.optim, n) for n in ("Adafactor", "LBFGS", "SparseAdam"))])
def test_an_unknown_class(kind):
    """The error names the class, lists those that are known, and shows how to register a rule."""
    problem = Problem(Case("SGD"))
    with pytest.raises((TypeError, ValueError), match=r"^bilevel\.") as caught:
        with bilevel.inner(
            problem.model, problem.h, problem.g, solver="gd", optimizer=kind(problem.model.parameters())
        ):
            pass
    said = str(caught.value)
    assert kind.__name__ in said
    assert all(re.search(rf"\b{name}\b", said) for name in OPTIONS)
    assert "@bilevel.optimizer_rule(" in said
    assert re.search(r"def \w+\(w, d, state, \*, lr, count", said)
