"""Kernels whose second derivative is missing or wrong are replaced, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contract import OWN
from plain_loop import Rows, Words, attempt, data, exact, losses, mlp, right_or_refused, start
from problems import relative, weighted
from torch import nn
from torch.nn.functional import embedding as by_its_own_name
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def test_fused_weight_norm_called_by_hand(engine):
    """The fused kernel of torch has a wrong second derivative; no module tells of this call."""

    def wrap(h, g):
        return (lambda m, *b: h(m, *b) + torch._weight_norm(m[0].weight, torch.ones(4, 1)).sin().sum()), g

    exact(losses(mlp, wrap), engine, bits=False)


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
    """It runs again in the backward pass, by the same kernel; where graphs are kept, checkpointing is refused."""
    build = losses(lambda: Padded(1, F.embedding, nn.Linear, checkpointed=True))
    assert right_or_refused(build, engine, "activation checkpointing") == (engine in OWN.values())
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
