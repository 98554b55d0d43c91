"""forecast and metasmoothness: against closed forms, on smooth and rough trainings, in all the ways to train."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel


def half_squares(start=0.5):
    """One step goes to λ itself, and the outer loss is (λ − 1)²/2."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    lam = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    h = lambda m: (m.weight - lam).square().sum()
    g = lambda m: 0.5 * (m.weight - 1).square().sum()

    def train(_):
        with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
            loop.step()
            yield loop

    return train, lam


def jumping():
    """The trained weight follows λ, and jumps at λ = 0.51."""
    _, lam = half_squares()
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    h = lambda m: (m.weight - torch.where(lam > 0.51, 3 - lam, lam)).square().sum()
    g = lambda m: 0.5 * (m.weight - 1).square().sum()

    def train(_):
        with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
            loop.step()
            yield loop

    return train, lam


def rows(activation=nn.Tanh, lr=0.1):
    torch.manual_seed(0)
    x, y = torch.randn(60, 5), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(5, 16), activation(), nn.Linear(16, 3))
    weights = torch.ones(60, requires_grad=True)
    h = lambda m, i: (weights[i] * cross_entropy(m(x[i]), y[i], reduction="none")).mean()
    g = lambda m: cross_entropy(m(x[:20]), (y[:20] + 1) % 3)

    def train(_):
        with bilevel.inner(model, h, g, solver="gd", lr=lr) as loop:
            for _ in range(5):
                for i in torch.randperm(60).split(20):  # in the same order each time, though nobody sets a seed
                    loop.step(i)
            yield loop

    return train, weights, model


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
    assert bilevel.metasmoothness(train, lam, direction=torch.ones_like(lam), step=0.1) == -1.0


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


def test_all_ways_to_train_give_the_same():
    train, weights, _ = rows()

    def returned(lam):
        training = train(lam)
        loop = next(training)
        result = loop.value.item(), loop.hypergrad(lam), dict(loop.weights)
        assert next(training, None) is None
        return result

    torch.manual_seed(3)
    yielded = bilevel.forecast(train, weights)
    torch.manual_seed(3)
    assert bilevel.forecast(returned, weights) == yielded
    torch.manual_seed(3)
    pair = bilevel.forecast(lambda lam: returned(lam)[:2], weights)
    assert math.isnan(pair.smoothness)
    assert pair.realised == yielded.realised
    torch.manual_seed(3)
    by_loss = bilevel.forecast(train, weights, loss=lambda loop: loop.weights["0.bias"].square().sum())
    assert by_loss.radius > 0
    assert by_loss.value != yielded.value


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


def test_smooth_and_rough_training_of_rows():
    smooth = bilevel.metasmoothness(*rows()[:2])
    rough = bilevel.metasmoothness(*rows(nn.ReLU, lr=3.0)[:2])
    assert smooth > 0.9 > rough


def test_metasmoothness_is_definition_two():
    """Two weights move on, one turns back: the share of their movement decides."""
    ends = {0.0: (0.0, 0.0, 0.0), 0.1: (1.0, 2.0, 1.0), 0.2: (3.0, 2.5, 0.5)}
    lam = torch.zeros((), requires_grad=True)

    def train(lam):
        return 0.0, torch.zeros(()), torch.tensor(ends[round(lam.item(), 6)])

    assert bilevel.metasmoothness(train, lam, direction=torch.ones(())) == pytest.approx((3 + 2.5 - 0.5) / 6)


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


def test_a_function_that_tells_too_little_is_refused():
    lam = torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="without its gradient"):
        bilevel.forecast(lambda lam: 1.0, lam)
    with pytest.raises(TypeError, match="yielded int, and not its loop"):
        bilevel.forecast(lambda lam: iter([1]), lam)
    with pytest.raises(ValueError, match="did not tell its weights"):
        bilevel.metasmoothness(lambda lam: (1.0, lam), lam)
    with pytest.raises(ValueError, match="the norm of the gradient is 0"):
        bilevel.forecast(lambda lam: (1.0, torch.zeros(1)), lam)


def test_an_error_in_the_training_puts_back_what_was_changed():
    lam = torch.ones(1, requires_grad=True)

    def train(lam):
        if lam.item() != 1:
            raise KeyError("a row is missing")
        return 1.0, torch.ones(1)

    with pytest.raises(KeyError):
        bilevel.forecast(train, lam)
    assert lam.item() == 1
