"""All the ways to write a function that trains, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from trainings import rows

import bilevel_plugin as bilevel


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
