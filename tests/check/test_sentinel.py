"""The sentinel on a sample of the zoo; `make sentinel` runs all of it."""

import warnings

import pytest
import sentinel_study
import torch
import zoo

import bilevel_plugin as bilevel

HONEST = sentinel_study.spread(zoo.honest(), 40)
DISHONEST = sentinel_study.spread(zoo.dishonest(), 24)


@pytest.mark.parametrize("problem", HONEST, ids=lambda p: p.name)
def test_no_alarm_where_all_is_right(problem):
    row = sentinel_study.examine(problem, True, False)
    assert not row.alarm, row.message
    assert not row.refused
    assert not row.failed


@pytest.mark.parametrize("problem", DISHONEST, ids=lambda p: p.name)
def test_what_moves_the_hypergradient_is_told(problem):
    row = sentinel_study.examine(problem, False, False)
    assert row.caught or (row.moved is not None and row.moved < 0.05)


def semi_gradient(model, x):
    return (model(x) - (2 * model(x)).detach()).square().mean()


def told(check):
    """The warnings of a loop with a semi-gradient whose hypergradient is taken twice."""
    model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    lam = torch.tensor(0.1, requires_grad=True)
    h = lambda m, x: lam.exp() * semi_gradient(m, x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with bilevel.inner(model, h, lambda m, x: m(x).mean(), solver="gd", lr=0.1, check=check) as loop:
            loop.run(2, x, outer=(x,))
            loop.hypergrad(lam)
            loop.hypergrad(lam)
    return [str(w.message) for w in found if w.category is bilevel.DerivativeWarning]


def test_first_always_and_never():
    """Once for a model with its losses, in every hypergradient, or never."""
    assert len(told("always")) == 2
    (message,) = told("first")
    for part in ("the second derivative of h", "step k = 2", "it differs by", ".detach()", "bilevel.gradcheck"):
        assert part in message
    assert told("first") == []  # another model of the same make, and the same losses
    assert told(False) == []
    with pytest.raises(ValueError, match="check= takes 'first', 'always' or False"):
        told("sometimes")


@pytest.mark.parametrize("engine", ["unroll", "forward"])
@pytest.mark.parametrize("noise", [1e-8, 1e-6, 1e-2, 1.0])
def test_random_numbers_do_not_hide_a_wrong_derivative(engine, noise):
    """Numbers of a generator of its own differ at each evaluation, and their differences agree with no derivative."""
    model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    own, lam = torch.Generator().manual_seed(0), torch.tensor(0.1, requires_grad=True)

    def h(model, x):
        shaken = 1 + noise * torch.randn((), generator=own)
        return lam.exp() * shaken * semi_gradient(model, x)

    options = {"solver": "gd", "lr": 0.1, "engine": engine, "check": "always"}
    with bilevel.inner(model, h, lambda m, x: m(x).mean(), **options) as loop:
        loop.run(2, x, outer=(x,))
        with pytest.warns(bilevel.DerivativeWarning, match="a different value at each evaluation"):
            loop.hypergrad(lam)


@pytest.mark.parametrize("engine", ["unroll", "forward"])
def test_no_alarm_where_random_numbers_are_drawn_from_torch(engine):
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5)), torch.ones(4, 3)
    lam = torch.tensor(0.1, requires_grad=True)
    h = lambda m, x: lam.exp() * (m(x) + torch.randn(4, 8)).square().mean()
    options = {"solver": "gd", "lr": 0.1, "engine": engine, "check": "always"}
    with bilevel.inner(model, h, lambda m, x: m(x).abs().sum(), **options) as loop:
        loop.run(2, x, outer=(x,))
        assert loop.hypergrad(lam).isfinite()
