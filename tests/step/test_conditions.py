"""Train and eval modes and random numbers: each loss is run under those that it has in the plain loop."""

from __future__ import annotations

import pytest
import torch
from plain_loop import MODELS, RATE, SAMPLES, data, everything, losses, mlp, start, train_and_eval, unchanged, worn
from problems import differences, weighted
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.step.conditions import drawn_from, random_states, set_random_states

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_modes_that_the_body_set_are_put_back(engine):
    model, lam, batch, outer = worn("batchnorm and dropout"), start(), data(), data(5)
    before = everything(model)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
        loop.run(2, *batch, outer=outer)
        model.eval()
        loop.hypergrad(lam)
        assert not any(m.training for m in model.modules())
    unchanged(model, before)


def watch_modes(f, seen):
    def loss(model, *batch):
        seen.append(model.training)
        return f(model, *batch)

    return loss


def test_modes_that_g_sets_between_the_steps_do_not_reach_the_next_h(engine):
    build, lam, seen = losses(MODELS["batchnorm and dropout"], lambda h, g: (h, train_and_eval(h, g)[1])), start(), []
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(model, watch_modes(h, seen), g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        for _ in range(3):
            loop.step(*batch, outer=outer)
            _ = loop.value
            assert all(m.training for m in model.modules())
            loop.hypergrad(lam)
            assert all(m.training for m in model.modules())
            loop.backward()
            assert all(m.training for m in model.modules())
        assert all(seen)


def test_modes_that_g_sets_in_a_step_are_those_of_the_plain_loop(engine):
    """Of a BiG-SAM loop written by hand: g follows h, and what it leaves is what the next h finds."""
    build = losses(MODELS["batchnorm and dropout"], lambda h, g: (h, train_and_eval(h, g)[1]))
    lam, seen = start(), []

    def by_hand() -> float:
        torch.manual_seed(0)
        model, h, g, batch, outer = build(lam.detach())
        torch.manual_seed(1)
        for _ in range(3):
            seen.append(model.training)
            loss = RATE * (0.5 * h(model, *batch) + 0.5 * g(model, *outer))
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), grads, strict=True):
                    p -= d
        with torch.no_grad():
            return float(g(model, *outer))

    value, expected = by_hand(), list(seen)
    assert expected == [True, False, False]
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)
    seen.clear()
    torch.manual_seed(1)
    solver = bilevel.BiGSAM(RATE, alpha=0.5)
    with bilevel.inner(model, watch_modes(h, seen), g, solver=solver, engine=engine, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        assert seen == expected
        assert float(loop.value) == pytest.approx(value, rel=1e-12)
        grad = loop.hypergrad(lam)
    unchanged(model, before)
    v = torch.randn(SAMPLES)
    assert abs(float(grad @ v) - differences(by_hand, lam, v)) < 1e-6 * float(grad.norm())


def test_random_states_come_back_in_every_bit():
    """The seed takes more than 32 bits, and so does the normal number that torch keeps for the next call."""
    torch.manual_seed(2**40 + 1)
    torch.randn(3)
    before = random_states([])
    expected = torch.randn(5), torch.rand(700)
    packed = drawn_from(before, random_states([]))
    assert drawn_from(before, before) is None
    torch.manual_seed(0)
    set_random_states(packed)
    assert torch.equal(torch.get_rng_state(), before[None])
    assert all(map(torch.equal, (torch.randn(5), torch.rand(700)), expected))


def test_looking_at_the_value_draws_nothing_from_the_loop(engine):
    """g has dropout too, and is evaluated between the steps, or is not."""
    weights = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, lam = mlp(nn.Dropout(0.5)), start()
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, engine=engine, check=False) as loop:
            for _ in range(3):
                loop.step(*data(), outer=data(5))
                if looks:
                    assert loop.value == loop.value
                    loop.hypergrad(lam)
            weights.append([w.detach().clone() for w in loop.weights.values()])
    assert all(map(torch.equal, *weights))
