"""micro=: whether a loss is a mean or a sum of what it is on the parts, and what can't be split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from problems import Cleaning, N, relative, step
from torch import nn

import bilevel_plugin as bilevel

# --- mean or sum ---


def contrastive(model, x, y):
    f = F.normalize(model(x), dim=1)
    return F.cross_entropy(f @ f.T, torch.arange(len(x)))


REFUSED = {
    "contrastive": contrastive,
    "class weights": lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 5.0]).double()),
    "padding": lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0),
    "a regularised sum": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="sum") + 1e-10 * sum(p.square().sum() for p in m.parameters())
    ),
    "standardised": lambda m, x, y: ((m(x) - m(x).mean(0)) / (1 + m(x).std(0))).square().sum(1).sqrt().mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_refused(name):
    data = Cleaning()
    with pytest.raises(ValueError, match="neither the mean nor the sum"):
        step(data, REFUSED[name])
    step(data, REFUSED[name], reduction="mean")  # it was said


def test_dropout_is_compared_in_eval_mode():
    data = Cleaning()
    data.model.insert(2, nn.Dropout(0.5))
    torch.manual_seed(0)
    mean = step(data, lambda m, x, y: F.cross_entropy(m(x), y))
    torch.manual_seed(0)
    total = step(data, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"))
    assert relative(total.h, mean.h * N) < 1e-12
    assert data.model.training
    torch.manual_seed(0)
    forced = lambda m, x, y: F.cross_entropy(F.dropout(m(x)), y)
    with pytest.raises(ValueError, match="draws random numbers in eval mode"):
        step(data, forced)
    step(data, forced, reduction="mean")
    with pytest.raises(ValueError, match="neither"):
        step(data, contrastive)


def test_the_comparison_draws_no_random_numbers_from_the_loop():
    data = Cleaning()
    data.model.insert(2, nn.Dropout(0.5))
    torch.manual_seed(0)
    one = step(data, lambda m, x, y: F.cross_entropy(m(x), y))
    torch.manual_seed(0)
    other = step(data, lambda m, x, y: F.cross_entropy(m(x), y), reduction="mean")
    assert torch.equal(one.h, other.h)


def test_a_loss_that_is_not_finite_on_some_samples_is_refused():
    """All of a part may be padding: 0 / 0 there, and finite on the batch."""
    data = Cleaning()
    data.y[:] = torch.tensor([0] * (N - 2) + [1, 2])
    with pytest.raises(ValueError, match=r"neither the mean nor the sum.* is nan and"):
        step(data, REFUSED["padding"])


def test_a_loss_that_is_finite_on_the_batch_and_not_on_a_group_of_samples_is_refused():
    data = Cleaning()
    h = lambda m, x, y, i: F.cross_entropy(m(x), y) / float(len(i) == N or 0 not in i)
    with pytest.raises(ValueError, match="h is not finite on some of the samples alone, and finite on others"):
        step(data, h, data.x, data.y, torch.arange(N))


def test_a_loss_of_zero_has_to_be_said():
    data = Cleaning()
    with pytest.raises(ValueError, match="h is 0 on these samples"):
        step(data, lambda m, x, y: m(x).sum() * 0)


@pytest.mark.parametrize("labels", [True, False])
def test_a_loss_that_closes_over_the_batch_is_refused(labels):
    data = Cleaning()
    weights = torch.rand(N).double()
    over_labels = lambda m, x, y: F.cross_entropy(m(x), data.y)
    over_weights = lambda m, x, y: (weights * F.cross_entropy(m(x), y, reduction="none")).mean()
    with pytest.raises(ValueError, match="closes over a tensor with an entry for each sample"):
        step(data, over_labels if labels else over_weights)


def test_a_loss_with_a_gradient_inside_has_to_be_said():
    data = Cleaning()

    def penalised(model, x, y):
        (d,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model[0].weight, create_graph=True)
        return F.cross_entropy(model(x), y) + d.square().sum()

    with pytest.raises(ValueError, match="takes a derivative itself"):
        step(data, penalised)


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_in_training_mode_is_refused(reduction, tracks):
    data = Cleaning()
    data.model.insert(1, nn.BatchNorm1d(6, track_running_stats=tracks).double())
    h = lambda m, x, y: F.cross_entropy(m(x), y)
    with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
        step(data, h, reduction=reduction)
    data.model.eval()
    if tracks:
        step(data, h, reduction=reduction)
    else:  # it normalises by the batch in either mode
        with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
            step(data, h, reduction=reduction)


def test_a_loss_that_changes_a_buffer_is_refused():
    data = Cleaning()
    data.model.register_buffer("calls", torch.zeros(()))

    def h(model, x, y):
        model.calls += 1
        return F.cross_entropy(model(x), y)

    with pytest.raises(ValueError, match="changes the buffer 'calls'"):
        step(data, h)
    data.model.insert(1, nn.InstanceNorm1d(1, track_running_stats=True).double())


# --- what can't be split ---


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (lambda d: (d.x, d.y, slice(None)), TypeError, "can't split a slice"),
        (lambda d: (d.x, d.y, torch.ones(3)), ValueError, r"shapes \(12, 4\) and \(3,\)"),
        (lambda d: (d.x.to_sparse(), d.y), TypeError, "not dense"),
        (lambda d: (), TypeError, "no tensor with samples"),
        (lambda d: (torch.tensor(1.0), 3), TypeError, "no tensor with samples"),
        (lambda d: (d.x, {0, 1}), TypeError, "how to split a set"),
    ],
)
def test_batches_that_are_refused(batch, error, match):
    data = Cleaning()
    with (
        pytest.raises(error, match=match),
        bilevel.inner(data.model, lambda m, *_: m(data.x).square().mean(), data.g, check=False) as loop,
    ):
        loop.step(*batch(data), outer=(data.xv, data.yv), micro=2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro": 0}, "at least 1, got 0"),
        ({"micro": True}, "at least 1, got True"),
        ({"micro": 2.0}, "at least 1, got 2.0"),
        ({"micro": 2, "reduction": "none"}, "takes 'mean' or 'sum'"),
        ({"reduction": "mean"}, "micro= was not given"),
    ],
)
def test_arguments_that_are_refused(options, match):
    data = Cleaning()
    with bilevel.inner(data.model, data.h, data.g) as loop, pytest.raises(ValueError, match=match):
        loop.step(data.x, data.y, data.rows, outer=(data.xv, data.yv), **options)
