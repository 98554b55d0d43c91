"""Kernels whose second derivative is missing or wrong are replaced, or refused by name."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, OWN
from plain_loop import SAMPLES, Case, Rows, Words, attempt, data, exact, losses, mlp, right_or_refused, start
from problems import Once, relative, weighted
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import embedding as by_its_own_name
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

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


def late(term):
    """h with one more term from the second step on; the batch tells which step it is."""

    def build(lam):
        model, (x, y) = mlp(), data()
        h, g = weighted(lam)
        before, step = list(model.parameters()), []

        def loss(m, x, y):
            later = len(step) > 0 and not m[0].weight.equal(step[0])
            step[:] = step or [m[0].weight.detach().clone()]
            return h(m, x, y) + term(m, before, x) if later else h(m, x, y)

        return Case(model, loss, g, (x, y), data(5))

    return build


def hooked(model, weights, x):
    y = model(x)
    y.register_hook(lambda d: 3 * d)
    return y.square().mean()


def tied(model, weights, x):
    table = model[2].weight
    return (F.embedding((x > 0).long(), table, padding_idx=1).mean(1).tanh() @ table.T).square().mean()


LATE = {  # with the engines that have it right, and what the others say
    "a list of parameters": (lambda m, ws, x: sum(w.square().sum() for w in ws), OWN, "by a reference"),
    "once_differentiable": (lambda m, ws, x: Once.apply(m[0].weight).square().sum(), (), "Once.*once_differentiable"),
    "checkpointing": (
        lambda m, ws, x: checkpoint(lambda x: m(x).square().mean(), x, use_reentrant=False), OWN, "activation check",
    ),
    "padding": (tied, ENGINES, ""),
    "a hook": (hooked, (), "hook on a tensor that changes a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("how", ENGINES)
def test_what_a_loss_does_only_in_a_later_step(name, how):
    term, right, words = LATE[name]
    assert right_or_refused(late(term), ENGINES[how], *filter(None, [words])) == (how in right)


def test_hooks_that_look_on_are_left_to_the_user(engine):
    """They change nothing, so that second derivatives stay what they are; FlopCounterMode has such hooks."""
    seen = []

    def wrap(h, g):
        def loss(m, x, y):
            out = m(x)
            out.register_hook(lambda d: seen.append(d.norm()))
            return h(m, x, y) + out.square().mean()

        return loss, g

    exact(losses(mlp, wrap), engine, bits=False)
    assert seen


def test_a_hook_that_writes_to_the_gradient_is_refused(engine):
    def wrap(h, g):
        def loss(m, x, y):
            out = m(x)
            out.register_hook(lambda d: (d.mul_(2), None)[1])
            return h(m, x, y) + out.square().mean()

        return loss, g

    assert not right_or_refused(losses(mlp, wrap), engine, "hook on a tensor that changes a gradient")


@pytest.mark.parametrize("around", [True, False])
def test_counting_flops(around, engine):
    counter = lambda: FlopCounterMode(display=False)

    def wrap(h, g):
        def loss(m, *b):
            with counter():
                return h(m, *b)

        return (h if around else loss), g

    with counter() if around else contextlib.nullcontext():
        exact(losses(mlp, wrap), engine, bits=False)


def jagged(read):
    """Rows of different lengths, each of which has a weight."""

    def build(lam):
        model, outer = mlp(), data(5)
        _, g = weighted(lam)
        rows = torch.nested.nested_tensor([torch.randn(n + 2, 3) for n in range(SAMPLES)], layout=torch.jagged)

        def h(m, x, y):
            return (torch.sigmoid(lam) * F.cross_entropy(read(m(x)), y, reduction="none")).mean()

        return Case(model, h, g, (rows, torch.randint(2, (SAMPLES,))), outer)

    return build


def means(x):
    n = x.offsets().diff()
    which = torch.repeat_interleave(torch.arange(SAMPLES), n)
    return x.values().new_zeros(SAMPLES, 2).index_add(0, which, x.values()) / n[:, None]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors(engine):
    """Right by their rows (not in forward mode); `unbind` of torch has no second derivative."""
    assert right_or_refused(jagged(means), engine, "jagged", "reverse") == (engine != "forward")
    unbound = jagged(lambda x: torch.stack([row.mean(0) for row in x.unbind()]))
    assert not right_or_refused(unbound, engine, "jagged", r"x\.values\(\) with x\.offsets\(\)")


def test_a_sparse_embedding_as_the_outer_variable(engine):
    table = torch.randn(2, 3, requires_grad=True)

    def build(lam):
        h, g = weighted(start().detach())
        rows = torch.arange(SAMPLES) % 2
        return Case(mlp(), lambda m, x, y: h(m, x + F.embedding(rows, lam, sparse=True), y), g, data(), data(5))

    exact(build, engine, bits=False, lam=table)


class SparseWords(Rows):
    def __init__(self):
        super().__init__(nn.Embedding(2, 4, sparse=True))

    def forward(self, x):
        return self.out(self.layer((x > 0).long()).mean(1).tanh())


def test_a_sparse_embedding_in_the_model(engine):
    exact(losses(SparseWords), engine, bits=False)


def with_func(m, x):
    return torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]


def with_duals(m, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("tangent", [with_func, with_duals])
def test_forward_mode_in_a_loss(tangent, engine):
    wrap = lambda h, g: ((lambda m, x, y: h(m, x, y) + tangent(m, x).square().mean()), g)
    exact(losses(mlp, wrap), engine, bits=False)
