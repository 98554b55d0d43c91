import math

import pytest
import torch
from problems import Ridge, differences, hypergrad, relative, value

import bilevel_plugin as bilevel
from bilevel_plugin.update.solvers import SOLVERS


def test_weights():
    assert bilevel.GD(0.3).weights(5) == (0.3, 0.0)
    assert bilevel.BiGSAM(0.3, 0.2, bilevel.constant(0.25)).weights(5) == pytest.approx((0.075, 0.15))
    assert bilevel.BiGSAM(0.3, alpha=0.25).weights(5) == pytest.approx((0.075, 0.225))  # s defaults to t
    assert bilevel.BiGSAM(0.3, alpha=0.25, every=2).weights(5) == (0.3, 0.0)
    assert bilevel.BDA(0.3, 0.2, bilevel.constant(0.25)).weights(5) == pytest.approx((0.225, 0.05))
    assert bilevel.BDA(1.0).weights(4) == (0.75, 0.25)  # α_k = 1/k
    assert bilevel.Penalty(0.3, c=0.5).weights(5) == pytest.approx((0.3, 0.15))
    assert bilevel.GD(lambda k: 1 / k).weights(4) == (0.25, 0.0)


def test_the_paper_schedule_is_the_default():
    assert bilevel.BiGSAM(1.0).weights(16) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("name", SOLVERS)
def test_lr_sets_the_rates_of_a_named_solver(name):
    ridge = Ridge.random()
    named = hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, solver=name, lr=0.2)
    built = hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, solver=SOLVERS[name](0.2))
    assert relative(named, built) < 1e-14  # the rate after the gradient, or before it


def test_the_default_rate_is_that_of_torch_sgd():
    ridge = Ridge.random()
    default = hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, solver="gd")
    assert torch.equal(default, hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, solver="gd", lr=1e-3))


def test_a_loss_of_weight_zero_is_not_evaluated():
    ridge, calls = Ridge.random(), []

    def g(model):
        calls.append("g")
        return ridge.g(model)

    with bilevel.inner(ridge.model(), ridge.h, g, solver=bilevel.BiGSAM(0.1, every=4)) as loop:
        losses = [loop.step() for _ in range(8)]
    assert calls == ["g", "g"]  # steps 4 and 8
    assert [x.g is None for x in losses] == [True, True, True, False] * 2
    assert all(x.h is not None for x in losses)


def test_h_of_weight_zero_is_not_evaluated():
    ridge, calls = Ridge.random(), []

    def h(model):
        calls.append("h")
        return ridge.h(model)

    solver = bilevel.BiGSAM(0.1, alpha=lambda k: k % 2)
    with bilevel.inner(ridge.model(), h, ridge.g, solver=solver, check=False) as loop:
        losses = [loop.step() for _ in range(4)]
    assert calls == ["h", "h"]  # steps 1 and 3
    assert [(x.h is None, x.g is None) for x in losses] == [(False, True), (True, False)] * 2


def test_rates_as_outer_variables_by_function_of_k():
    """One learnable rate a step: the gradient of w_K = w₀ − Σ t_k·∇h goes to each."""
    ridge = Ridge.random()
    rates = torch.full((3,), 0.2, dtype=torch.float64, requires_grad=True)
    solver = bilevel.GD(lambda k: rates[k - 1])
    got = hypergrad(ridge.model(), ridge.h, ridge.g, rates, solver=solver)
    end = lambda: value(ridge.model(), ridge.h, ridge.g, solver=solver)
    expected = torch.tensor([differences(end, rates, v) for v in torch.eye(3).to(rates)]).to(rates)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make", [bilevel.GD, bilevel.BiGSAM, lambda x: bilevel.BiGSAM(0.1, x), lambda x: bilevel.Penalty(1.0, x)]
)
def test_bad_rates(make, bad):
    with pytest.raises(ValueError, match=r"must be finite and at least 0, got"):
        make(bad)
    with pytest.raises(ValueError, match=r"must be finite and at least 0, got"):
        make(torch.tensor(bad))


def test_a_rate_that_turns_bad_names_its_step():
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=bilevel.GD(lambda k: 0.1 - 0.05 * k)) as loop:
        loop.run(2)
        with pytest.raises(ValueError, match=r"t must be finite and at least 0, got -0\.0\d+ at k = 3"):
            loop.step()


def test_alpha_must_be_a_share():
    with pytest.raises(ValueError, match=r"alpha must be finite and between 0 and 1, got 1.2"):
        bilevel.BiGSAM(0.1, alpha=1.2)
    with pytest.raises(ValueError, match=r"every must be at least 1"):
        bilevel.BiGSAM(0.1, every=0)


def test_a_rate_is_a_scalar():
    with pytest.raises(ValueError, match=r"t must be a scalar, got a tensor of shape \(2,\).*lambda k"):
        bilevel.GD(torch.ones(2))


def test_resolving():
    ridge, model = Ridge.random(), Ridge.random().model()
    with pytest.raises(ValueError, match=r"unknown solver 'sgd'. Known: 'gd', 'bigsam', 'bda', 'penalty'"):
        bilevel.inner(model, ridge.h, ridge.g, solver="sgd")
    with pytest.raises(ValueError, match=r"lr=0.1 and a solver object.*GD\(t=0.1\)"):
        bilevel.inner(model, ridge.h, ridge.g, solver=bilevel.GD(0.2), lr=0.1)
    with pytest.raises(ValueError, match=r"unknown solver <class.*Make an object of it: GD\(t=0.1\)"):
        bilevel.inner(model, ridge.h, ridge.g, solver=bilevel.GD)
    with pytest.raises(ValueError, match=r"lr=0.1 and optimizer= were both given"):
        bilevel.inner(model, ridge.h, ridge.g, lr=0.1, optimizer=torch.optim.SGD(model.parameters()))
