"""One inner problem after the other: the gradients of a block for each, in the memory of one graph."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import relative
from torch import nn

import bilevel_plugin as bilevel
from benchmarks.measure import live

pytestmark = pytest.mark.usefixtures("double")

TASKS = 3


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), *layers, nn.Tanh(), nn.Flatten(), nn.Linear(48, 2))


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def pictures(n=5):
    return torch.randn(TASKS, n, 1, 6, 6), torch.randint(2, (TASKS, n))


def adam(model):
    """With a state, from which the direction of a step is read."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
    loss(model, *(x[0] for x in pictures())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


OPTIMIZERS = {
    "rate": lambda model: {"lr": 0.3},
    "momentum": lambda model: {"optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)},
    "Adam": lambda model: {"optimizer": adam(model)},
    "RMSprop": lambda model: {"optimizer": torch.optim.RMSprop(model.parameters(), lr=0.05, eps=1e-3)},
    "clip": lambda model: {"lr": 0.3, "clip": 0.5},
}


@pytest.mark.parametrize("solver", ["gd", "bigsam"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_update(solver, optimizer, pullback):
    """λ weighs the loss, and the pictures come from an encoder."""
    model, encoder, lam = network(nn.BatchNorm2d(3)), nn.Conv2d(1, 1, 3, padding=1), torch.zeros((), requires_grad=True)
    options = {"solver": solver, "engine": pullback[1], "check": False, **OPTIMIZERS[optimizer](model)}
    (x, y), (x_val, y_val) = pictures(), pictures(4)
    x[1] += 2
    h, g = lambda m, *batch: lam.exp() * loss(m.train(), *batch), lambda m, *batch: loss(m.eval(), *batch)
    both = [lam, *encoder.parameters()]

    def run(batch, outer, **more):
        with warnings.catch_warnings(), bilevel.inner(model, h, g, **options, **more) as loop:
            warnings.simplefilter("ignore")  # blocks= and compile= say that they do not apply
            loop.run(3, *batch, outer=outer)
            return loop.hypergrad(both), loop.value

    encode = torch.func.vmap(encoder)
    together, value = run((encode(x), y), (encode(x_val), y_val), tasks=TASKS)
    apart = [run((encoder(x[i]), y[i]), (encoder(x_val[i]), y_val[i])) for i in range(TASKS)]
    for i, grad in enumerate(together):
        assert relative(grad, sum(grads[i] for grads, _ in apart)) < 1e-9
    torch.testing.assert_close(value, sum(v for _, v in apart))


@pytest.mark.parametrize("engine", [bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB"), "unroll"], ids=str)
def test_random_masks_are_those_of_the_step(engine):
    """Each task draws in both losses of a step, and in g after the last one; g is the value that is differentiated."""
    model, lam = network(nn.Dropout(0.3)), torch.zeros((), requires_grad=True)
    batch, outer = pictures(), pictures(4)

    def run(engine, solver):
        torch.manual_seed(1)
        h = lambda m, *batch: lam.exp() * loss(m, *batch)
        with bilevel.inner(model, h, loss, solver=solver, lr=0.3, tasks=TASKS, engine=engine, check=False) as loop:
            loop.run(4, *batch, outer=outer)
            weights = {n: x.detach().clone() for n, x in loop.weights.items()}
            return loop.hypergrad(lam), loop.value, weights

    grad, value, weights = run("reverse", "gd")
    other, same, ends = run(engine, "gd")
    assert relative(grad, other) < 1e-10
    torch.testing.assert_close((value, weights), (same, ends))
    masks = weights["0.weight"]
    assert not torch.allclose(masks[0], masks[1])
    if engine != "unroll":  # with two losses it draws for all tasks in the one, then in the other
        again = [run(e, "bigsam")[0] for e in ("reverse", bilevel.Reverse("sqrt"))]
        assert relative(*again) < 1e-10


def test_a_mode_that_one_task_has_set_is_not_that_of_the_next():
    """g puts the model into eval mode, and h leaves it as it is: in the first step all tasks train."""
    model, lam = network(nn.BatchNorm2d(3)), torch.zeros((), requires_grad=True)
    batch, outer = pictures(), pictures(4)
    h, g = lambda m, *batch: lam.exp() * loss(m, *batch), lambda m, *batch: loss(m.eval(), *batch)

    def run(batch, outer, **more):
        model.train()
        with bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.3, alpha=0.5), check=False, **more) as loop:
            loop.run(2, *batch, outer=outer)
            return loop.hypergrad(lam)

    together = run(batch, outer, tasks=TASKS)
    apart = [run([x[i] for x in batch], tuple(x[i] for x in outer)) for i in range(TASKS)]
    assert relative(together, sum(apart)) < 1e-10


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse("sqrt"), "unroll"], ids=str)
def test_outer_losses_on_the_way(engine):
    model, lam = network(), torch.zeros((), requires_grad=True)
    batch, outer = pictures(), pictures(4)
    h = lambda m, *batch: lam.exp() * loss(m, *batch)

    def run(batch, outer, **more):
        with bilevel.inner(model, h, loss, lr=0.3, engine=engine, check=False, **more) as loop:
            for k in range(3):
                loop.step(*batch, outer=outer)
                loop.add_outer_loss(weight=0.5**k)
            return loop.hypergrad(lam)

    together = run(batch, outer, tasks=TASKS)
    apart = [run([x[i] for x in batch], tuple(x[i] for x in outer)) for i in range(TASKS)]
    assert relative(together, sum(apart)) < 1e-10


@pytest.mark.usefixtures("single")
def test_memory_is_that_of_one_task():
    """The states of all tasks, and the graph of one."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    lam = torch.zeros((), requires_grad=True)
    h = lambda m, *batch: lam.exp() * loss(m, *batch)

    def peak(tasks, **more):
        x, y = torch.randn(tasks, 10, 1, 32, 32), torch.randint(2, (tasks, 10))

        def run():
            with bilevel.inner(model, h, loss, lr=0.1, tasks=tasks, check=False, **more) as loop:
                loop.run(3, x, y, outer=(x, y))
                loop.hypergrad(lam)

        run()
        return live(run)

    weights = 4 * sum(p.numel() for p in model.parameters())
    assert peak(8) < 1.1 * peak(2) + 6 * 20 * weights
    assert peak(8, engine="unroll") > 3 * peak(2, engine="unroll")


def test_what_a_loss_leaves_and_returns_has_all_tasks():
    model, (x, y) = network(nn.BatchNorm2d(3)), pictures()
    scored = lambda m, x, y: (loss(m, x, y), {"scores": m.eval()(x), "kind": "few-shot"})
    with bilevel.inner(model.train(), scored, loss, lr=0.1, tasks=TASKS, check=False) as loop:
        loop.step(x, y, outer=(x, y))
        aux = loop.step(x, y, outer=(x, y)).aux
        assert (aux["scores"].shape, aux["kind"]) == ((TASKS, 5, 2), "few-shot")
        with pytest.raises(ValueError, match="what a loss of this loop returned beside its value"):
            loop.step(x, aux["scores"], outer=(x, y))
    one = copy.deepcopy(model)
    with bilevel.inner(one, scored, loss, lr=0.1, check=False) as loop:
        loop.step(x[1], y[1], outer=(x[1], y[1]))
        torch.testing.assert_close(loop.step(x[1], y[1], outer=(x[1], y[1])).aux["scores"], aux["scores"][1])


def test_a_value_that_is_not_finite_is_told_with_its_step():
    model, (x, y) = network(), pictures()
    broken = lambda m, x, y: loss(m, x, y) / (x.sum() != 0)
    x[2] = 0
    with bilevel.inner(model, loss, broken, lr=0.1, solver="gd", tasks=TASKS, check=False) as loop:
        loop.step(x, y, outer=(x, y))
        with pytest.raises(FloatingPointError, match="g is inf at step k = 2"):
            loop.hypergrad(model)


@pytest.mark.usefixtures("single")
def test_the_sentinel_looks_at_one_task():
    """A constant in h is found by as many evaluations as one task takes."""
    model, (x, y), seen = network(), pictures(), []

    def h(model, x, y):
        seen.append(len(x))
        scores = model(x)
        return F.cross_entropy(scores * scores.detach().square().mean(), y)

    def evaluations(tasks, check):
        batch = x[:tasks], y[:tasks]
        with bilevel.inner(model, h, loss, solver="gd", lr=0.1, tasks=tasks, check=check) as loop:
            loop.step(*batch, outer=batch)
            seen.clear()
            loop.hypergrad(model)
        return len(seen)

    with pytest.warns(bilevel.DerivativeWarning, match="the second derivative of h is not the derivative"):
        more = [evaluations(n, "always") - evaluations(n, False) for n in (1, TASKS)]
    assert more[0] == more[1] > 0
