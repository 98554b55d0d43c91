"""Functions that train, for the tests of forecast and metasmoothness."""

from __future__ import annotations

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
