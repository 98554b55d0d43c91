"""Modules whose second derivatives are wrong or missing are named, the deepest ones."""

import pytest
import torch
from problems import OnceModule, WrongModule
from torch import nn

from bilevel_plugin.check.modules import failing_modules
from bilevel_plugin.model.model import Model


def failing(*layers):
    model, x = nn.Sequential(nn.Linear(3, 4), *layers), torch.randn(5, 3)
    return failing_modules(Model(model, dict(model.named_parameters())), lambda: model(x).sum(), 0)


@pytest.mark.parametrize("layer", [nn.Tanh, nn.Softplus, lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4)])
def test_right_modules_are_not_named(layer):
    assert failing(layer()) == []


def test_the_deepest_is_named():
    inside = nn.Sequential(nn.Tanh(), WrongModule())
    assert failing(inside) == ["'1.1' (WrongModule): wrong values"]


def test_a_missing_derivative_has_its_reason():
    (text,) = failing(OnceModule())
    assert text.startswith("'1' (OnceModule): no second derivative: ")
