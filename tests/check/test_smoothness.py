"""metasmoothness: by its definition, and on smooth and rough trainings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from trainings import jumping, rows

import bilevel_plugin as bilevel


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


def test_a_training_that_turns_round():
    train, lam = jumping()
    assert bilevel.metasmoothness(train, lam, direction=torch.ones_like(lam), step=0.1) == -1.0


def test_a_training_that_ignores_its_outer_variable_has_none():
    lam = torch.ones(1, requires_grad=True)
    assert math.isnan(bilevel.metasmoothness(lambda lam: (0.0, lam, torch.ones(3)), lam))
    assert bilevel.metasmoothness(lambda lam: (0.0, lam, lam * torch.ones(3)), lam) == 1.0
