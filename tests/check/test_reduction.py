"""The probe of micro=: a loss whose parts have other derivatives together is refused, and no other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from problems import relative
from torch import nn

import bilevel_plugin as bilevel


def softmax(lam, model, x, y, i):
    return (lam[i].softmax(0) * F.cross_entropy(model(x), y, reduction="none")).sum()


def over_their_sum(lam, model, x, y, i):
    weights = torch.sigmoid(lam[i])
    return (weights / weights.sum() * F.cross_entropy(model(x), y, reduction="none")).sum()


def in_training_mode_alone(lam, model, x, y, i):
    out = model(x)
    loss = (torch.sigmoid(lam[i]) * F.cross_entropy(out, y, reduction="none")).mean()
    return loss + (0.1 * out.mean(0).square().sum() if model.training else 0.0)


def noise_and_a_term_in_training_mode_alone(lam, model, x, y, i):
    return in_training_mode_alone(lam, model, x + torch.randn_like(x) if model.training else x, y, i)


def mean(lam, model, x, y, i):
    x = x + 0.1 * torch.randn_like(x) if model.training else x
    return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()


def total(lam, model, x, y, i):
    return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).sum() / 12


def in_the_batch(lam, model, x, y, weights):
    return (torch.sigmoid(weights) * F.cross_entropy(model(x), y, reduction="none")).mean()


def hypergradient(loss, micro, dropout=0.0, dtype=torch.float32, pick=lambda lam: torch.arange(12), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).to(dtype)
    x, y = torch.randn(12, 4, dtype=dtype), torch.randint(3, (12,))
    lam = torch.zeros(12, dtype=dtype, requires_grad=True)
    h = lambda *args: loss(lam, *args)
    with bilevel.inner(model, h, lambda m: F.cross_entropy(m(x), y), solver="gd", lr=0.5, check=False) as loop:
        for _ in range(2):
            loop.step(x, y, pick(lam), micro=micro, **options)
        return loop.hypergrad(lam)


@pytest.mark.parametrize("loss", [softmax, over_their_sum])
def test_weights_that_are_normalised_over_the_batch(loss):
    """At a uniform λ, value and ∇_w are those of the mean of the parts."""
    with pytest.raises(ValueError, match=r"is not the mean over the samples in the gradient with respect to the outer"):
        hypergradient(loss, 3)
    assert relative(hypergradient(loss, 3, reduction="mean"), hypergradient(loss, None)) > 0.05


@pytest.mark.parametrize("loss", [in_training_mode_alone, noise_and_a_term_in_training_mode_alone])
def test_a_term_that_exists_in_training_mode_alone(loss):
    with pytest.raises(ValueError, match=r"h is (not the mean|neither the mean nor the sum) over the samples"):
        hypergradient(loss, 3, dropout=0.3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("loss", [mean, total])
def test_means_and_sums_are_taken(loss, dropout):
    assert hypergradient(loss, 3, dropout).isfinite().all()


def test_outer_variables_in_the_batch():
    pick = lambda lam: 2 * lam
    found = [hypergradient(in_the_batch, micro, dtype=torch.float64, pick=pick) for micro in (3, None)]
    assert relative(*found) < 1e-12
