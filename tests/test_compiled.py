"""Reverse(compile=True): the same numbers, and an eager run with a reason where it can't be."""

import pytest
import torch
from problems import relative, weighted
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin import compiled

DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has some of its own


def problem(*layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), *layers, nn.Tanh(), nn.Linear(5, 3)).double()
    lam = torch.zeros(12, dtype=DOUBLE, requires_grad=True)
    x, y = torch.randn(12, 4, dtype=DOUBLE), torch.randint(3, (12,))

    h, g = weighted(lam)
    return model, h, g, lam, x, y


def test_the_same_numbers_and_compiled_once(monkeypatch):
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
        for mine, exact in zip(second(engine), plain, strict=True):
            assert relative(mine, exact) < 1e-12
    made = list(compiled._CACHE.values())
    with torch.no_grad():
        lam += 1
    refuse = lambda *a: pytest.fail("compiled a second time")
    monkeypatch.setattr(compiled, "lookup_backend", refuse)
    for mine, exact in zip(second(bilevel.Reverse(compile=True)), second("reverse"), strict=True):
        assert relative(mine, exact) < 1e-12
    assert list(compiled._CACHE.values()) == made


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
    fallback("optimizer", h, g, lam, x, y, model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    dropped, h_dropped, g_dropped, *rest = problem(nn.Dropout(0.3))
    fallback("random numbers", h_dropped, g_dropped, *rest, dropped, lr=0.1)
    encoded = torch.exp(lam)
    fallback("external grad_fn", lambda m, x, y: (encoded * h(m, x, y)).mean(), g, lam, x, y, model, lr=0.1)
    broken = lambda m, x, y: h(m, x, y) * (1.0 if x.sum().item() < 1e9 else 2.0)
    fallback(".", broken, g, lam, x, y, model, lr=0.1)
    with pytest.raises(ValueError, match="compiled steps have none"):
        bilevel.Reverse(compile=True, memory="1GiB")


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
