"""Rules of one's own: for a class of optimizers, and given to a block."""

import contextlib
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
from bilevel_plugin.update.proof import _PROVEN as RULE_WAS_PROVEN

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


@pytest.mark.parametrize("kind", [Unknown, *(getattr(torch.optim, n) for n in ("LBFGS", "SparseAdam"))])
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


# --- subclasses, and rules that are compared with step() ---


class Faster(torch.optim.AdamW):
    """A class that inherits its step."""

    def __init__(self, params):
        super().__init__(params, lr=0.05, weight_decay=0.2)


class Counted(torch.optim.Adam):
    """A step of its own, which is that of its parent."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        return super().step(closure)


class Regrouped(torch.optim.SGD):
    """It inherits its step, which calls a method that is its own."""

    def _init_group(self, group, params, grads, buffers):
        found = super()._init_group(group, params, grads, buffers)
        grads[:] = [g.sign() for g in grads]
        return found


class Own(torch.optim.Optimizer):
    """SGD with decoupled decay and momentum, for rules that are right or wrong."""

    def __init__(self, params, lr=0.05, decay=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    v = self.state[p].get("v")
                    self.state[p]["v"] = v = p.grad.clone() if v is None else group["momentum"] * v + p.grad
                    p.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * v)


def own(w, d, state, *, lr, decay, momentum, **_):
    v = momentum * state["v"] + d if state else d
    return w * (1 - lr * decay) - lr * v, {"v": v}


def without_decay(w, d, state, *, lr, momentum, **_):
    v = momentum * state["v"] + d if state else d
    return w - lr * v, {"v": v}


def without_momentum(w, d, state, *, lr, decay, **_):
    return w * (1 - lr * decay) - lr * d, {"v": d}


def another_name(w, d, state, **options):
    moved, after = own(w, d, {"v": state["velocity"]} if state else {}, **options)
    return moved, {"velocity": after["v"]}


def dampened(w, d, state, *, lr, decay, momentum, **_):
    v = momentum * state["v"] + (1 - 1e-4) * d if state else d
    return w * (1 - lr * decay) - lr * v, {"v": v}


def block_of(kind, engine="reverse", **options):
    """The block of the usual problem with an optimizer of this class, and the plain loop's end."""
    problem = Problem(Case("SGD"))
    problem.empty_optimizer = lambda model, **changed: kind(model.parameters(), **options)
    return problem, partial(problem.block, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Faster, Counted, Own])
def test_a_class_that_has_a_rule(kind, engine):
    """By its base class, by another class, by a function: the end of the plain loop, and differences of it."""
    if kind is Counted:
        bilevel.optimizer_rule(Counted)(torch.optim.Adam)
    elif kind is Own:
        bilevel.optimizer_rule(Own)(own)
    problem, block = block_of(kind)
    with block() as (model, loop, optimizer):
        assert distance(model.state_dict(), problem.plain()[0].state_dict()) < 1e-12
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
        assert kind is not Counted or optimizer.taken == 0
    assert relative(along, differences_along(problem.value, problem.lam, problem.directions(SAMPLES))) < 1e-6


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (without_decay, "the weight differs by .* after step 1.*Other options in use: decay, momentum"),
        (without_momentum, "the weight differs by .* after step 2"),
        (dampened, "after step 3"),
        (another_name, "the state 'velocity' differs"),
    ],
)
def test_a_rule_that_is_not_that_of_the_class(rule, what):
    bilevel.optimizer_rule(Own)(rule)
    with pytest.raises(ValueError, match=rf"rule of Own that was registered.*is not what Own.step\(\) does.*{what}"):
        with block_of(Own)[1]():
            pass
    bilevel.optimizer_rule(Own)(own)
    with block_of(Own)[1]() as (_, loop, _):
        assert loop.steps == STEPS


def test_a_rule_is_compared_again_when_an_option_comes_into_use():
    bilevel.optimizer_rule(Own)(without_decay)
    problem = Problem(Case("SGD"))
    optimizer = Own(problem.model.parameters(), decay=0.0)
    with bilevel.inner(problem.model, problem.h, problem.g, solver="gd", optimizer=optimizer) as loop:
        loop.step(*problem.batch(0))
        optimizer.param_groups[0]["decay"] = 0.1
        with pytest.raises(ValueError, match=r"Other options in use: decay"):
            loop.step(*problem.batch(1))
    bilevel.optimizer_rule(Own)(own)


def test_a_subclass_that_changes_what_its_step_calls():
    with pytest.raises(ValueError, match=r"Regrouped that it has from its base class, sgd, is not what Regrouped.step"):
        with block_of(Regrouped, lr=0.1)[1]():
            pass


class Averaged(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)


def test_a_step_of_its_own_has_to_be_declared():
    """The error says how, and what it says works."""
    with pytest.raises(TypeError, match=r"Averaged is not known.*optimizer_rule\(Averaged\)\(torch.optim.Adam\)"):
        block_of(Averaged)[1]().__enter__()
    bilevel.optimizer_rule(Averaged)(torch.optim.Adam)
    with block_of(Averaged)[1]() as (_, loop, _):
        assert loop.steps == STEPS
    with pytest.raises(TypeError, match=r"optimizer_rule: the rule of Unknown is not known"):
        bilevel.optimizer_rule(Averaged)(Unknown)


class Coupled(torch.optim.Optimizer):
    """Every weight is divided by the norm of all gradients, which a function of one weight can't say."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p -= 0.1 * p.grad / norm


def test_a_rule_of_one_weight_for_a_step_that_couples_them():
    bilevel.optimizer_rule(Coupled)(lambda w, d, state, *, lr, **_: (w - 0.1 * d / d.norm(), state))
    with pytest.raises(ValueError, match=r"rule of Coupled"):
        with block_of(Coupled)[1]():
            pass


class Wrapping(torch.optim.Optimizer):
    """It steps another optimizer, which holds the user's own weights."""

    def __init__(self, params):
        super().__init__(list(params), {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, weight_decay=0.5)

    def step(self, closure=None):
        self.base.step()


def test_a_comparison_moves_nothing_of_the_user():
    """Weights, gradients, states, random numbers, and what a wrapped optimizer reaches."""
    bilevel.optimizer_rule(Wrapping)(torch.optim.SGD)
    for kind in (Wrapping, torch.optim.AdamW):
        problem = Problem(Case("SGD"))
        optimizer = kind(problem.model.parameters())
        problem.h(problem.model, *problem.batch(0)).backward(inputs=list(problem.model.parameters()))
        optimizer.step() if kind is torch.optim.AdamW else None
        before = copy.deepcopy((problem.model.state_dict(), optimizer.state_dict()))
        gradients = [p.grad for p in problem.model.parameters()]
        random, held = torch.get_rng_state(), dict(vars(optimizer))
        RULE_WAS_PROVEN.clear()
        with contextlib.suppress(ValueError):
            bilevel.inner(problem.model, problem.h, solver="gd", optimizer=optimizer).__enter__().close()
        assert RULE_WAS_PROVEN or kind is Wrapping
        assert str((problem.model.state_dict(), optimizer.state_dict())) == str(before)
        assert all(p.grad is g for p, g in zip(problem.model.parameters(), gradients, strict=True))
        assert torch.equal(torch.get_rng_state(), random)
        assert vars(optimizer) == held


class Numbered(torch.optim.Optimizer):
    """A count of updates as a number in the state, and momentum that grows with it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=0, v=torch.zeros_like(p))
            state["step"] += 1
            state["v"].mul_(1 - 1 / state["step"]).add_(p.grad)
            p.sub_(group["lr"] * state["v"])


@pytest.mark.parametrize("setting", ["", "stepped before"])
def test_a_count_that_is_a_number(setting):
    """It is read where a block begins, and written where it ends."""
    bilevel.optimizer_rule(Numbered)(heavy_ball)
    problem = Problem(Case("SGD", setting=setting))
    problem.empty_optimizer = lambda model, **changed: Numbered(model.parameters())
    with problem.block() as (model, loop, optimizer):
        told = optimizer.state_dict()
        loop.commit_(optimizer=True)
    plain, theirs = problem.plain()
    same_state(optimizer, theirs)
    assert {s["step"] for s in told["state"].values()} == {s["step"] for s in theirs.state.values() if s}
    problem.plain_step(model, optimizer, 1)
    problem.plain_step(plain, theirs, 1)
    assert distance(model.state_dict(), plain.state_dict()) < 1e-12


# --- Lion, LBFGS ---


class PublicLion(Lion):
    """As packages have it."""

    def __init__(self, params):
        super().__init__(params, lr=0.05, weight_decay=0.2)


@pytest.mark.parametrize("how", ["registered", "given"])
def test_lion(how):
    """No hypergradient goes through signs; that of the decay is there."""
    bilevel.optimizer_rule(PublicLion)(bilevel.lion)
    problem, block = block_of(PublicLion)
    end = problem.plain()[0]
    given = {} if how == "registered" else {"optimizer": partial(bilevel.lion, weight_decay=0.2), "lr": 0.05}
    with block(**given) as (model, loop, _):
        held = {n: p for n, p in end.state_dict().items() if "side" not in n}
        assert distance({n: p for n, p in model.state_dict().items() if n in held}, held) < 1e-12
        assert not loop.hypergrad(problem.lam).any()


def test_what_the_error_of_lbfgs_advises():
    """LBFGS before the block, one step at its end with engine='cg': the slope of g at the minimum of h."""
    x, y, x_val, y_val = torch.randn(4, 12, 3, dtype=torch.float64)
    lam = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    model = torch.nn.Linear(3, 3, dtype=torch.float64)
    start = copy.deepcopy(model.state_dict())
    decay = lambda m: 0.1 * sum(p.square().sum() for p in m.parameters())
    h = lambda m: (lam.exp() * (m(x) - y).square().sum(1)).mean() + decay(m)
    g = lambda m: (m(x_val) - y_val).square().mean()

    def solved():
        model.load_state_dict(start)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15)

        def closure():
            lbfgs.zero_grad()
            loss = h(model)
            loss.backward(inputs=list(model.parameters()))
            return loss

        lbfgs.step(closure)
        return float(g(model).detach())

    v = torch.randn(12, dtype=torch.float64)
    true = differences(solved, lam, v)
    solved()
    with bilevel.inner(model, h, g, solver="gd", lr=0.05, engine="cg") as loop:
        loop.step()
        assert float(loop.hypergrad(lam) @ v) == pytest.approx(true, rel=1e-6)
