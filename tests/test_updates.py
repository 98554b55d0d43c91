"""Inner optimizers: the trajectory of torch.optim itself, and derivatives through it."""

import pytest
import torch
import torch.nn.functional as F
from problems import Vector, differences, hypergrad, value
from torch import nn

import bilevel_plugin as bilevel

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
    with pytest.raises(ValueError, match=r"2 tensor.s. that are no parameters of the model"):
        bilevel.inner(model, h, h, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(
        TypeError, match=r"(?s)LBFGS is not known.*Known are ASGD, Adadelta, .*@bilevel.optimizer_rule\(LBFGS\)"
    ):
        bilevel.inner(model, h, h, optimizer=torch.optim.LBFGS(model.parameters()))
