"""Inner optimizers: the trajectory of torch.optim itself, and derivatives through it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handle import (
    HALVES,
    Plain,
    adamw,
    agree,
    both,
    draw,
    momentum,
    nadam,
    tasks_case,
    tasks_data,
    two_halves,
    weighted_samples,
)
from plain_loop import (
    RATE,
    Words,
    block,
    exact,
    judge,
    losses,
    mlp,
    start,
)
from problems import Vector, differences, hypergrad, refused, value
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.autograd.bytes import peak_bytes

pytestmark = pytest.mark.usefixtures("double")


RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.7, 0.8), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    "adam, maximize": lambda p: torch.optim.Adam(p, lr=0.1, maximize=True),
}


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    return model, x, y


def groups(model):
    return [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}]


def h(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("rule", RULES)
def test_same_trajectory_as_torch_optim(rule):
    model, x, y = problem()
    with bilevel.inner(model, h, h, solver="gd", optimizer=RULES[rule](groups(model))) as loop:
        loop.run(6, x, y)
        ours = {n: w.detach() for n, w in loop.weights.items()}
    optimizer = RULES[rule](groups(model))
    for _ in range(6):
        optimizer.zero_grad()
        h(model, x, y).backward()
        optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(ours[n], p.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_goes_on_from_the_state_that_the_optimizer_has(rule):
    """Half the steps by torch.optim, half by the loop: the same end. The optimizer is read, never stepped."""
    model, x, y = problem()
    optimizer = RULES[rule](groups(model))
    for _ in range(3):
        optimizer.zero_grad()
        h(model, x, y).backward()
        optimizer.step()
    before = {
        id(p): {k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for p, s in optimizer.state.items()
    }
    with bilevel.inner(model, h, h, solver="gd", optimizer=optimizer) as loop:
        loop.run(3, x, y)
        ours = {n: w.detach() for n, w in loop.weights.items()}
    for p, state in optimizer.state.items():
        for key, held in before[id(p)].items():
            assert torch.equal(state[key], held)
    for _ in range(3):
        optimizer.zero_grad()
        h(model, x, y).backward()
        optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(ours[n], p.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("single")
def test_a_scheduler_between_steps_is_followed_and_replayed():
    model, x, y = problem()
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    weighted = lambda m, x, y: lam.exp() * h(m, x, y)
    results = []
    for engine in ("reverse", bilevel.Reverse(checkpoint=2), bilevel.Reverse(memory="1GiB"), "unroll"):
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
        optimizer._opt_called = True  # torch warns of a scheduler without optimizer.step(), which is the point here
        with bilevel.inner(model, weighted, h, solver="gd", optimizer=optimizer, engine=engine) as loop:
            for _ in range(4):
                loop.step(x, y, outer=(x, y))
                scheduler.step()
            results.append((loop.weights["0.weight"].detach(), loop.hypergrad(lam)))
    for w, grad in results[1:]:
        torch.testing.assert_close(w, results[0][0], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-12, atol=0)
    steady = hypergrad(
        model, weighted, h, lam, (x, y), (x, y), 4, solver="gd",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    )  # fmt: skip
    assert not torch.allclose(steady, results[0][1])


@pytest.mark.parametrize("engine", ["reverse", "forward", "unroll"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_the_rate_of_an_optimizer_as_outer_variable(engine, kind):
    model, x, y = problem()
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    options = {"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=lr, **options)
    how = {"solver": "gd", "optimizer": optimizer}
    got = hypergrad(model, h, h, lr, (x, y), (x, y), 4, engine=engine, **how)
    expected = differences(lambda: value(model, h, h, (x, y), (x, y), 4, **how), lr, torch.ones_like(lr))
    assert float(got) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_where_the_gradient_is_zero(engine, amsgrad):
    """A weight with zero gradient: √v at 0. The derivative is finite, and that of lr·m̂/(√v̂ + ε) at 0: lr/ε."""
    model = Vector(torch.tensor([1.0, 2.0], dtype=torch.float64))
    lam = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    lr, eps = 0.1, 1e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=eps, amsgrad=amsgrad)
    got = hypergrad(
        model, lambda m: (lam * m.w).sum(), lambda m: m.w.sum(), lam, steps=1, solver="gd", optimizer=optimizer,
        engine=engine,
    )  # fmt: skip
    torch.testing.assert_close(got, torch.full((2,), -lr / eps, dtype=torch.float64))


def test_updates_are_differentiated_some_weights_at_a_time(monkeypatch):
    """As all at once, in less memory: nothing of the rate, or of a weight at rest, is lost."""
    names = [str(i) for i in range(8)]
    model = nn.ParameterDict({n: torch.linspace(0.1, 1, 1000) for n in names} | {"idle": torch.ones(3)})
    lam, lr = torch.tensor(0.3, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    h = lambda m: lam.exp() * sum(m[n].square().sum() for n in names)
    g = lambda m: sum(x.square().sum() for x in m.values())
    grads, peaks = [], []
    for part in (2**24, 2 * 8000):
        monkeypatch.setattr("bilevel_plugin.update.optimizer._PART_BYTES", part)
        adam = torch.optim.Adam(model.parameters(), lr=lr, eps=0.1)
        with bilevel.inner(model, h, g, solver="gd", optimizer=adam, check=False) as loop:
            loop.run(2)
            peaks.append(peak_bytes(lambda loop=loop: grads.append(loop.hypergrad([lam, lr, *model.values()]))))
    for at_once, in_parts in zip(*grads, strict=True):
        torch.testing.assert_close(in_parts, at_once, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads[1][-1], torch.full((3,), 2.0))
    assert peaks[1] < 0.9 * peaks[0]


def test_a_weight_that_the_loss_does_not_touch_is_left_alone_as_in_torch():
    """No gradient, no update: not even weight decay."""
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}).double()
    x = torch.ones(1, 2, dtype=torch.float64)
    loss = lambda m: m["used"](x).square().sum()
    for rule in RULES.values():
        with bilevel.inner(model, loss, loss, solver="gd", optimizer=rule(model.parameters())) as loop:
            before = {n: w.detach().clone() for n, w in loop.weights.items()}
            loop.run(3)
            assert torch.equal(loop.weights["unused.weight"], before["unused.weight"])
            assert not torch.equal(loop.weights["used.weight"], before["used.weight"])


def test_parameters_that_the_optimizer_does_not_hold_are_outer_variables():
    """Encoder and head in one module, the head trained inside: the encoder has a hypergradient."""
    model, x, y = problem()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2)
    how = {"solver": "gd", "optimizer": optimizer}
    with bilevel.inner(model, h, h, **how) as loop:
        assert set(loop.weights) == {"2.weight", "2.bias"}
        loop.run(3, x, y, outer=(x, y))
        grads = loop.hypergrad(model[0])
    v = torch.randn_like(model[0].weight)
    expected = differences(lambda: value(model, h, h, (x, y), (x, y), 3, **how), model[0].weight, v)
    assert float((grads["weight"] * v).sum()) == pytest.approx(expected, rel=1e-6)


def test_wrong_optimizers():
    model, _, _ = problem()
    with pytest.raises(ValueError, match=r"2 tensor.s. that are not parameters of the model"):
        bilevel.inner(model, h, h, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(
        TypeError, match=r"(?s)LBFGS is not known.*Known are ASGD, Adadelta, .*@bilevel.optimizer_rule\(LBFGS\)"
    ):
        bilevel.inner(model, h, h, optimizer=torch.optim.LBFGS(model.parameters()))


# --- options of value 0 ---


ZEROS = {
    "SGD": {"weight_decay": {}, "momentum": {}, "dampening": {"momentum": 0.9}, "lr": {}},
    "Adam": {"weight_decay": {"eps": 0.1}, "lr": {"eps": 0.1}},
    "AdamW": {"weight_decay": {"eps": 0.1}, "lr": {"eps": 0.1}},
}


@pytest.mark.parametrize(("kind", "option"), [(k, o) for k, options in ZEROS.items() for o in options])
def test_optimizer_options_that_are_tensors_of_value_0(kind, option, engine):
    """`if group["weight_decay"]:` is false, and yet the derivative is not 0."""
    more = {"lr": 0.1, **({} if kind == "SGD" else {"weight_decay": 0.0}), **ZEROS[kind][option]}
    make = lambda m, value: getattr(torch.optim, kind)(m.parameters(), **{**more, option: value})

    def by_number(model):
        optimizer = make(model, 0.0)
        optimizer.param_groups[0][option] = float(zero.detach())  # its constructor refuses what is below 0
        return optimizer

    build = lambda _: losses(mlp)(start().detach())
    zero = torch.zeros((), requires_grad=True)
    found = block(build, zero, engine, optimizer=lambda m: make(m, zero))
    judge(found, build, zero, bits=False, optimizer=by_number)


# --- sparse gradients, rates of a shape ---


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_embedding_with_sparse_gradients(engine, momentum):
    optimizer = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=momentum)
    exact(losses(lambda: Words(sparse=True)), engine, bits=False, optimizer=optimizer)


# --- lr= beside optimizer= ---


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("optimizer", [momentum, adamw, nadam, both], ids=["momentum", "adamw", "nadam", "both"])
@pytest.mark.parametrize("form", ["fixed", "function", "tensor", "function of a tensor"])
def test_a_factor_on_the_rates(engine, optimizer, form):
    learnable = torch.tensor(0.6, requires_grad=True)
    factor = {
        "fixed": torch.tensor(0.6),
        "function": lambda k: 0.8 / k,
        "tensor": learnable,
        "function of a tensor": lambda k: learnable / k,
    }[form]
    case = weighted_samples(two_halves, optimizer=optimizer, options={"lr": factor})
    if "tensor" in form:
        case.outer["factor"] = learnable
    agree(case, engine)


def test_a_learnable_factor_under_a_scheduler(engine):
    learnable = torch.tensor(0.6, requires_grad=True)

    def body(loop: Any, model: Any, made: Any) -> None:
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 4) for o in made]
        for _ in range(3):
            two_halves(loop, steps=1)
            for scheduler in schedulers:
                scheduler.step()

    case = weighted_samples(body, optimizer=both, options={"lr": learnable})
    case.outer["factor"] = learnable
    agree(case, engine)


# --- the optimizer's state after the block ---


@pytest.mark.parametrize("optimizer", [momentum, adamw, nadam, both], ids=["momentum", "adamw", "nadam", "both"])
def test_a_second_block_goes_on_where_the_first_ended(engine, optimizer):
    """Weights, buffers and the optimizers' state are written back: two blocks are one plain loop."""

    def body(loop: Any, model: Any, made: Any) -> None:
        two_halves(loop, steps=1)
        loop.step(draw(HALVES[0]), HALVES[0], only=model[0])

    case = weighted_samples(body, optimizer=optimizer)
    models = [copy.deepcopy(case.model) for _ in range(2)]
    made = [optimizer(model) for model in models]
    torch.manual_seed(1)
    plain = Plain(models[0], case.h, case.g, made[0])
    body(plain, models[0], made[0])
    body(plain, models[0], made[0])
    torch.manual_seed(1)
    for _ in range(2):
        with bilevel.inner(models[1], case.h, case.g, solver="gd", optimizer=made[1], engine=engine) as loop:
            body(loop, models[1], made[1])
            loop.commit_(optimizer=True)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-12, atol=1e-13)
    states = [[o.state_dict() for o in (m if isinstance(m, list) else [m])] for m in made]
    torch.testing.assert_close(states[1], states[0], rtol=1e-12, atol=1e-13, check_dtype=False)
    # and a plain loop goes on from there
    for model, stepper in zip(models, made, strict=True):
        torch.manual_seed(4)
        body(Plain(model, case.h, case.g, stepper), model, stepper)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-12, atol=1e-13)


def test_without_the_option_the_optimizer_is_left_alone():
    case = weighted_samples(two_halves)
    stepper = adamw(case.model)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", optimizer=stepper) as loop:
        two_halves(loop)
        loop.commit_()
    assert not stepper.state


def test_the_state_of_no_optimizer_or_of_tasks():
    case = tasks_case(None)
    stepper = adamw(case.model)
    x, y, _ = tasks_data()
    with bilevel.inner(case.model, case.h, case.g, solver="gd", optimizer=stepper, tasks=2) as loop:
        loop.step(x, y)
        with refused("commit_"):
            loop.commit_(optimizer=True)
    assert not stepper.state
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=0.1) as loop:
        loop.step(x[0], y[0])
        with refused("commit_", "optimizer"):
            loop.commit_(optimizer=True)
