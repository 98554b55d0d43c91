"""Plain steps w⁺ = w − lr·d: rates that are tensors, of value 0, of a shape, and written to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_loop import (
    RATE,
    attempt,
    block,
    losses,
    mlp,
    plain,
    start,
)
from problems import differences

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("rule", ["penalty", "bigsam", "gd"])
def test_rates_that_are_tensors_of_value_0(rule, engine):
    zero, lam = torch.zeros((), requires_grad=True), start().detach()
    solver = {
        "penalty": lambda: bilevel.Penalty(RATE, zero),
        "bigsam": lambda: bilevel.BiGSAM(RATE, s=zero, alpha=0.5),
        "gd": lambda: bilevel.GD(zero),
    }[rule]()
    torch.manual_seed(0)
    model, h, g, batch, outer = losses(mlp)(lam)

    def by_hand() -> float:
        z, one = float(zero.detach()), copy.deepcopy(model)
        c_h, c_g = {"penalty": (RATE, RATE * z), "bigsam": (RATE / 2, z / 2), "gd": (z, 0.0)}[rule]
        for _ in range(3):
            grads = torch.autograd.grad(c_h * h(one, *batch) + c_g * g(one, *outer), list(one.parameters()))
            with torch.no_grad():
                for p, d in zip(one.parameters(), grads, strict=True):
                    p -= d
        return float(g(one, *outer).detach())

    got = attempt(model, h, g, zero, batch, outer, 3, solver=solver, lr=None, engine=engine)
    assert abs(float(got)) > 1e-6
    assert float(got) == pytest.approx(differences(by_hand, zero, torch.ones(())), rel=1e-6)


@pytest.mark.parametrize("of", ["lr=", "a solver", "an optimizer"])
def test_a_rate_of_shape_1(of, engine):
    """It counts as a scalar, and its gradient has its shape."""
    build = lambda _: losses(mlp)(start().detach())
    rate = torch.tensor([RATE], requires_grad=True)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(None)
    how: dict[str, Any] = {
        "lr=": {"lr": rate},
        "a solver": {"solver": bilevel.GD(rate), "lr": None},
        "an optimizer": {"optimizer": torch.optim.SGD(model.parameters(), rate), "lr": None},
    }[of]
    by_number = lambda: (
        plain(build, rate, optimizer=lambda m: torch.optim.SGD(m.parameters(), float(rate.detach()))).value
    )
    got = attempt(model, h, g, rate, batch, outer, engine=engine, **how)
    assert got.shape == (1,)
    assert float(got) == pytest.approx(differences(by_number, rate, torch.ones(1)), rel=1e-6)


def test_a_rate_that_is_written_to_between_the_steps(engine):
    """As a scheduler of one's own does: each step keeps the rate that it had."""
    rate = torch.tensor(RATE)
    written = block(losses(mlp), start(), engine, optimizer=None, lr=rate, between=lambda k, m, o: rate.mul_(0.5))
    expected = block(losses(mlp), start(), engine, optimizer=None, lr=lambda k: RATE * 0.5 ** (k - 1))
    assert written.value == pytest.approx(expected.value, rel=1e-12)
    torch.testing.assert_close(written.grad, expected.grad, rtol=1e-10, atol=1e-14)
