"""All the ways to write a function that trains, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from trainings import rows

import bilevel_plugin as bilevel
from bilevel_plugin.check.trainings import at_end


def test_all_ways_to_train_give_the_same():
    train, weights, _ = rows()

    def took(lam):
        loop = next(training := train(lam))
        assert loop is not training
        return loop.hypergrad(lam)

    def told(lam):
        """What a training tells that knows nothing of the block."""
        return at_end(train, lam, lambda loop, *_: (loop.value, loop.hypergrad(lam), dict(loop.weights)))

    def after(function):
        torch.manual_seed(3)
        return bilevel.forecast(function, weights)

    yielded = after(train)
    assert after(took) == after(lambda: took(weights)) == after(told) == yielded
    pair = after(lambda lam: told(lam)[:2])
    assert math.isnan(pair.smoothness)
    assert pair.realised == yielded.realised
    by_loss = bilevel.forecast(train, weights, loss=lambda loop: loop.weights["0.bias"].square().sum())
    assert by_loss.radius > 0
    assert by_loss.value != yielded.value


def test_outer_and_loss_of_the_call_are_used():
    model, lam = nn.Linear(1, 1, bias=False), torch.tensor([0.5], requires_grad=True)

    def train(**how):
        with bilevel.inner(model, lambda m: (m.weight - lam).square().sum(), lambda m, c: (m.weight - c).square().sum(),
                           solver="gd", lr=0.5) as loop:  # fmt: skip
            loop.step()
            loop.backward(**{k: v(loop) for k, v in how.items()})

    outer = bilevel.forecast(lambda: train(outer=lambda loop: 2.0), lam, sizes=(0.01,))
    assert outer.value == pytest.approx(1.5**2)
    assert outer.promised == pytest.approx((-0.01 * 0.5 * 3,))
    loss = bilevel.forecast(lambda: train(loss=lambda loop: 3 * loop.weights["weight"].sum()), lam, sizes=(0.01,))
    assert loss.value == pytest.approx(1.5)
    assert loss.realised == pytest.approx((-0.015,), rel=1e-3)
    assert model.weight.grad is None
    assert lam.grad is None


def test_a_function_that_tells_too_little_is_refused():
    lam = torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="took no hypergradient"):
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
