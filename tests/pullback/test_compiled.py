"""Reverse(compile=True): the same numbers, and an eager run with a reason where it can't be."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from handle import HALVES, agree, draw, weighted_samples
from plain_loop import COMPILER, attempt, data, exact, losses, mlp, start
from problems import relative, weighted
from torch import nn
from torch.nn.utils import parametrizations

import bilevel_plugin as bilevel
from bilevel_plugin.engine.schedule import fewest_reruns
from bilevel_plugin.pullback import compiled

DOUBLE = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler has some of its own
    pytest.mark.usefixtures("compiler"),
]


def problem(*layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), *layers, nn.Tanh(), nn.Linear(5, 3)).double()
    lam = torch.zeros(12, dtype=DOUBLE, requires_grad=True)
    x, y = torch.randn(12, 4, dtype=DOUBLE), torch.randint(3, (12,))

    h, g = weighted(lam)
    return model, h, g, lam, x, y


def test_the_same_numbers_and_compiled_once(inductor, monkeypatch):
    model, h, g, lam, x, y = problem(nn.BatchNorm1d(5))
    shift = torch.randn(12, 4, dtype=DOUBLE, requires_grad=True)
    moved = shift * 0.1  # in the batch, with a graph of its own: cut

    both = lambda m, x, s, y: h(m, x + s, y)

    def second(engine):
        with bilevel.inner(model, both, g, lr=0.3, engine=engine) as loop:
            loop.run(4, x, moved, y, outer=(x, y))
            return loop.hypergrad([lam, shift], retain_graph=True)

    plain = second("reverse")
    for engine in (bilevel.Reverse(compile=True), bilevel.Reverse(compile=True, checkpoint="sqrt")):
        for mine, theirs in zip(second(engine), plain, strict=True):
            assert relative(mine, theirs) < 1e-12
    made = list(compiled._CACHE.values())
    with torch.no_grad():
        lam += 1
    refuse = lambda *a: pytest.fail("compiled a second time")
    monkeypatch.setattr(compiled, "lookup_backend", refuse)
    for mine, theirs in zip(second(bilevel.Reverse(compile=True)), second("reverse"), strict=True):
        assert relative(mine, theirs) < 1e-12
    assert list(compiled._CACHE.values()) == made


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.02),
    "clipped": None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_every_optimizer(name):
    """The gradient is compiled, the update stays eager; without a warning, so that it was compiled indeed."""
    model, h, g, lam, x, y = problem()
    make = OPTIMIZERS[name]
    for checkpoint in (1, "sqrt"):
        grads = []
        for engine in (bilevel.Reverse(checkpoint), bilevel.Reverse(checkpoint, compile=True)):
            options = {"lr": 0.3, "clip": 0.05} if make is None else {"optimizer": make(model.parameters())}
            with bilevel.inner(model, h, g, engine=engine, **options) as loop:
                loop.run(5, x, y, outer=(x, y))
                grads.append(torch.cat([d.flatten() for d in loop.hypergrad([lam, *model.parameters()])]))
        assert relative(*grads) < 1e-12


def test_a_rate_that_is_an_outer_variable():
    """It belongs to the update, which is not compiled."""
    model, h, g, lam, x, y = problem()
    rate = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    grads = []
    for engine in ("reverse", bilevel.Reverse(compile=True)):
        with bilevel.inner(model, h, g, engine=engine, lr=rate) as loop:
            loop.run(4, x, y, outer=(x, y))
            grads.append(torch.cat([d.flatten() for d in loop.hypergrad([lam, rate])]))
    assert relative(*grads) < 1e-12


# As in a script: the names that the losses use are the module's, for which torch's compiler lacks a guard that it has
# for those of a function around the loss.
LAM = torch.zeros(12, dtype=DOUBLE, requires_grad=True)
SCALE = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
UNUSED = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
X = torch.linspace(-1, 1, 48, dtype=DOUBLE).reshape(12, 4)


def scaled(m, x):
    return SCALE.exp() * (LAM.sigmoid() * (m(x) - 1).square().mean(1)).mean()


def both(m, x):
    return (LAM.sigmoid() * m(X).square().mean(1) * x.square().mean(1)).mean()


def test_another_outer_variable_is_asked_for():
    """What was compiled for one outer variable is not taken for another's derivative."""
    model, *_, x, _ = problem()
    g = lambda m: m(x).square().mean()
    found = []
    for engine in ("reverse", bilevel.Reverse(compile=True)):
        with bilevel.inner(model, scaled, g, lr=0.3, engine=engine) as loop:
            loop.run(3, x)
            wanted = [SCALE], [LAM], [UNUSED], [LAM, SCALE], [SCALE, LAM]
            found.append([grad for tensors in wanted for grad in loop.hypergrad(tensors, allow_unused=True)])
    for mine, theirs in zip(*reversed(found), strict=True):
        assert mine.shape == theirs.shape
        assert relative(mine, theirs) < 1e-12


def test_a_batch_that_is_at_first_what_the_loss_reads_anyway():
    """The step on another batch is another step."""
    model, *_, x, _ = problem()
    g = lambda m: m(x).square().mean()
    found = []
    for engine in ("reverse", bilevel.Reverse(compile=True)):
        with bilevel.inner(model, both, g, lr=0.3, engine=engine) as loop:
            loop.run(3, X)
            loop.run(3, x)
            found.append(torch.cat([loop.hypergrad(LAM), loop.value[None]]))
    assert relative(*found) < 1e-12


def test_more_models_than_the_compiler_counts():
    """Torch gives up at the ninth version of a function. Every model has functions of its own, and eight are kept."""
    _, h, g, lam, x, y = problem()
    small, watched = nn.Linear(4, 3).double(), []

    def run(m, engine):
        with bilevel.inner(m, h, g, solver="gd", lr=0.3, engine=engine) as loop:
            loop.run(3, x, y, outer=(x, y))
            return loop.hypergrad(lam)

    compiled._CACHE.clear()
    for _ in range(10):
        mine = copy.deepcopy(small)
        with torch.no_grad():
            mine.weight.normal_()
        assert relative(run(mine, bilevel.Reverse(compile=True)), run(mine, "reverse")) < 1e-12
        watched.append(weakref.ref(mine))
        assert len(compiled._CACHE) <= 8
    del mine
    compiled._CACHE.clear()
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in watched)  # what the cache has let go of is gone


def test_tasks():
    model, *_ = problem()
    lam = torch.zeros(7, dtype=DOUBLE, requires_grad=True)
    x, y = torch.randn(3, 7, 4, dtype=DOUBLE), torch.randint(3, (3, 7))
    h, g = weighted(lam)

    def run(engine):
        with bilevel.inner(model, h, g, solver="gd", lr=0.3, engine=engine, tasks=3) as loop:
            loop.run(3, x, y, outer=(x, y))
            return loop.hypergrad(lam)

    assert relative(run(bilevel.Reverse(compile=True)), run("reverse")) < 1e-12


def fallback(why, h, g, lam, x, y, model, **options):
    def run(engine):
        torch.manual_seed(1)
        with bilevel.inner(model, h, g, engine=engine, **options) as loop:
            loop.run(3, x, y, outer=(x, y))
            return loop.hypergrad(lam)

    with pytest.warns(UserWarning, match=f"compile=True is off for this loop, which runs eagerly: .*{why}"):
        mine = run(bilevel.Reverse(compile=True))
    assert torch.equal(mine, run("reverse"))


def test_what_can_not_be_compiled_runs_eagerly_and_says_so():
    model, h, g, lam, x, y = problem()
    normed, h_normed, g_normed, *rest = problem(nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)))
    fallback("weight_norm", h_normed, g_normed, *rest, normed, lr=0.1)
    dropped, h_dropped, g_dropped, *rest = problem(nn.Dropout(0.3))
    fallback("random numbers", h_dropped, g_dropped, *rest, dropped, lr=0.1)
    rate = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
    fallback("external grad_fn", h, g, rate, x, y, model, solver=bilevel.BiGSAM(rate))  # t·α_k has a graph of its own
    encoded = torch.exp(lam)
    fallback("external grad_fn", lambda m, x, y: (encoded * h(m, x, y)).mean(), g, lam, x, y, model, lr=0.1)
    broken = lambda m, x, y: h(m, x, y) * (1.0 if x.sum().item() < 1e9 else 2.0)
    fallback(r"data-dependent|\.item\(\)|[Gg]raph break", broken, g, lam, x, y, model, lr=0.1)


def test_with_a_memory_budget_states_are_kept_and_no_graphs():
    model, h, g, lam, x, y = problem()
    state = sum(p.nbytes for p in model.parameters())

    def run(**options):
        engine = bilevel.Reverse(compile=True, **options)
        with bilevel.inner(model, h, g, solver="gd", lr=0.3, engine=engine) as loop:
            loop.run(12, x, y, outer=(x, y))
            return loop.plan, loop.hypergrad(lam)

    plan, everything = run(memory="1GB")
    assert (plan.graphs, plan.states, plan.reruns) == (0, 12, 12)
    plan, some = run(memory=plan.graph + 11 * state)
    assert (plan.graphs, plan.states) == (0, 3)
    assert plan.reruns == 12 + fewest_reruns(12, 3)
    torch.testing.assert_close(some, everything, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(everything, run()[1], rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match="it takes at least"):
        run(memory=9 * state)


def test_a_changed_number_is_noticed():
    model, h, g, lam, x, y = problem()
    scale = [1.0]
    with bilevel.inner(
        model, lambda m, x, y: scale[0] * h(m, x, y), g, solver="gd", lr=0.3, engine=bilevel.Reverse(compile=True)
    ) as loop:
        loop.run(3, x, y, outer=(x, y))
        scale[0] = 2.0
        with pytest.raises(RuntimeError, match="ended elsewhere"):
            loop.hypergrad(lam)


# --- weight norm, many models, losses that return more ---


@pytest.mark.usefixtures("double")
@COMPILER
def test_weight_norm_under_compile(compiler):
    build = losses(lambda: mlp(parametrizations.weight_norm(nn.Linear(4, 4))))
    exact(build, bilevel.Reverse(compile=True), bits=False, optimizer=None)


@pytest.mark.usefixtures("double")
@COMPILER
def test_the_ninth_compiled_model(compiler):
    """torch's compiler gives up after eight: that is caught, and the numbers stay right."""
    torch._dynamo.reset()
    for width in range(3, 12):
        lam, batch, outer = start(), data(), data(5)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        h, g = weighted(lam)
        got = attempt(model, h, g, lam, batch, outer, 2, engine=bilevel.Reverse(compile=True))
        assert relative(got, attempt(model, h, g, lam, batch, outer, 2)) < 1e-10


@pytest.mark.usefixtures("double")
def test_compiled_with_something_beside(compiler):
    """It runs eagerly, says so, and is right."""
    case = weighted_samples(lambda *_: None)
    loss, kept = case.h, []
    case.model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2))
    case.h = lambda model, x, i: (loss(model, x, i), model[1].weight * 1.0)
    case.body = lambda loop, model, made: kept.extend(loop.step(draw(HALVES[0]), HALVES[0]).aux for _ in range(3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bilevel.Reverse: compile=True is off.*more than its value")
        agree(case, bilevel.Reverse(compile=True))
    plain, block = kept[:3], kept[3:6]
    torch.testing.assert_close(block, [x.detach() for x in plain], rtol=1e-12, atol=1e-14)
