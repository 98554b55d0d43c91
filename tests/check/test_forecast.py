"""forecast: against closed forms, on what jumps, diverges or is random."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from trainings import half_squares, jumping, rows

import bilevel_plugin as bilevel


def test_promised_and_realised_of_a_quadratic():
    train, lam = half_squares()
    found = bilevel.forecast(train, lam, sizes=(0.1, 0.3, 1.0))
    assert found.value == pytest.approx(1 / 8)
    assert found.promised == pytest.approx((-0.025, -0.075, -0.25))
    assert found.realised == pytest.approx((-0.02375, -0.06375, -0.125))
    assert found.errors == pytest.approx((0.05, 0.15, 0.5))
    assert found.radius == 0.3
    assert found
    assert found.smoothness == 1.0
    assert found.sentence() == "Reliable up to a change of 0.3 times the size of the outer variable."
    assert [line.split()[-1] == "off" for line in str(found).splitlines()[2:5]] == [False, False, True]
    assert bilevel.forecast(train, lam, sizes=(0.1, 0.3, 1.0), tolerance=0.1).radius == 0.1


def test_a_direction_of_ones_own():
    train, lam = half_squares()
    fixed = bilevel.forecast(train, lam, direction=torch.tensor([2.0]).double(), sizes=(0.01, 0.1))
    assert fixed.promised == pytest.approx((-0.01, -0.1))
    by_size = bilevel.forecast(train, lam, direction=lambda size, gradient: [-gradient[0] * size], sizes=(0.1,),
                               unit="{:.0%} of the way")  # fmt: skip
    assert by_size.promised == pytest.approx((-0.1 * 0.25,))
    assert by_size.sentence() == "Reliable up to 10% of the way, the largest size that was tried."
    assert "times the direction" in fixed.sentence()


def test_training_that_jumps_is_not_worth_following():
    train, lam = jumping()
    found = bilevel.forecast(train, lam, sizes=(0.1, 1.0))
    assert not found
    assert found.radius == 0
    assert found.sentence().startswith("Not worth following: already a change of 0.1 times")


def test_training_that_diverges_has_no_finite_change():
    model, lam = nn.Linear(1, 1, bias=False), torch.tensor([1.0], requires_grad=True)

    def train(_):
        with bilevel.inner(model, lambda m: (lam * m.weight).square().sum(), lambda m: m.weight.square().sum(),
                           solver="gd", lr=0.1) as loop:  # fmt: skip
            loop.run(200)
            yield loop

    found = bilevel.forecast(train, lam, direction=torch.ones(1), sizes=(0.01, 100.0))
    assert found.realised[1] == math.inf
    assert found.errors[1] == math.inf
    assert found.radius < 100


def test_the_promise_is_the_derivative_and_everything_is_left_as_it_was():
    torch.set_default_dtype(torch.float64)
    try:
        train, weights, model = rows()
    finally:
        torch.set_default_dtype(torch.float32)
    before = weights.detach().clone(), [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    found = bilevel.forecast(train, weights, sizes=(1e-6, 1e-5))
    assert found.errors == pytest.approx((0, 0), abs=1e-4)
    assert torch.equal(weights, before[0])
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_training_that_is_random_is_noise():
    _, lam = half_squares()
    drawn = torch.Generator().manual_seed(0)

    def noisy(_):
        return float(torch.rand((), generator=drawn)), torch.ones(1)

    found = bilevel.forecast(noisy, lam, sizes=(1e-3,))
    assert not found
    assert found.sentence().startswith("Nothing can be said")
    assert "noise" in str(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": (0.3, 0.1)}, "ascending order"),
        ({"sizes": ()}, "ascending order"),
        ({"direction": torch.zeros(2)}, r"shapes \[\(1,\)\]; got \[\(2,\)\]"),
    ],
)
def test_what_is_refused(change, words):
    train, lam = half_squares()
    with pytest.raises(ValueError, match=words):
        bilevel.forecast(train, lam, **change)
