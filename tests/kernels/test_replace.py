"""Kernels whose second derivative is missing or wrong are replaced, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_loop import Rows, Words, attempt, data, exact, losses, right_or_refused, start
from problems import relative, weighted
from torch import nn
from torch.nn.functional import embedding as by_its_own_name
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def test_fused_weight_norm_is_refused_where_it_can_not_be_replaced(parts):
    """Called by hand, the fused kernel of torch has a wrong second derivative; the parametrization is replaced."""
    model, _, g, lam, x, y = parts
    fused = lambda m, x, y: lam[0].exp() * g(m, x, y) + torch._weight_norm(m[0].weight, torch.ones(4, 1)).sum()
    with bilevel.inner(model, fused, g, solver="gd", lr=0.1) as loop:
        with pytest.raises(RuntimeError, match=r"uses torch's weight_norm and that has no second derivative"):
            loop.step(x, y, outer=(x, y))


def test_an_embedding_whose_gradient_is_scaled_by_frequency(engine):
    build = losses(lambda: Words(scale_grad_by_freq=True))
    assert not right_or_refused(build, engine, "scale_grad_by_freq")


class Padded(nn.Module):
    """An embedding one of whose rows is padding, called by the function, with a table that is the head as well."""

    def __init__(self, padding, embedding=F.embedding, table=nn.Embedding, checkpointed=False):
        super().__init__()
        self.words = table(2, 4, padding_idx=padding) if table is nn.Embedding else table(4, 2)
        self.padding, self.embedding, self.checkpointed = padding, embedding, checkpointed
        nn.init.normal_(self.words.weight)

    def look_up(self, x, table):
        return self.embedding((x > 0).long(), table, padding_idx=self.padding)

    def forward(self, x):
        table = self.words.weight
        found = checkpoint(self.look_up, x, table, use_reentrant=False) if self.checkpointed else self.look_up(x, table)
        return found.mean(1).tanh() @ table.T


@pytest.mark.parametrize("padding", [0, 1, -1, -2])
def test_a_row_of_padding_may_be_counted_from_the_end(padding, engine):
    exact(losses(lambda: Padded(padding)), engine)


@pytest.mark.parametrize("padding", [1, -2])
def test_a_row_of_padding_of_which_no_module_tells(padding, engine):
    """The table is a weight of another layer, and the call is found when a loss is first evaluated."""
    exact(losses(lambda: Padded(padding, by_its_own_name, nn.Linear)), engine)


@pytest.mark.parametrize("pullback", [{"memory": 10**8}, {"checkpoint": "sqrt"}, {"truncate": 9}])
def test_a_row_of_padding_of_which_no_module_tells_in_every_reverse_sweep(pullback):
    exact(losses(lambda: Padded(1, F.embedding, nn.Linear)), bilevel.Reverse(**pullback))


def test_a_row_of_padding_of_which_no_module_tells_under_checkpointing(engine):
    """It is refused, since it would run again in the backward pass after the first look, by torch's kernel."""
    build = losses(lambda: Padded(1, F.embedding, nn.Linear, checkpointed=True))
    assert not right_or_refused(build, engine, "nn.Embedding with padding_idx|activation checkpointing")
    exact(losses(lambda: Padded(1, checkpointed=True)), "reverse")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_under_tasks(kind):
    """They have no vmap: each task as in a block of its own."""
    model, lam = Rows(kind(1, 4, batch_first=True)), start()
    x, y = (torch.stack(parts) for parts in zip(data(), data(), strict=True))
    together = attempt(model, *weighted(lam), lam, (x, y), (x, y), 2, tasks=2)
    one, other = (attempt(model, *weighted(lam), lam, (x[i], y[i]), (x[i], y[i]), 2) for i in range(2))
    assert relative(together, one + other) < 1e-10
    assert relative(one, other) > 0.1
