"""Running statistics that the state of a loop does not have: of modules outside of the model, and moved by hand."""

import pytest
import torch
from promise import (
    RATE,
    Loop,
    Refused,
    constructs,
    each,
    error,
    indexed,
    is_right,
    keeps_the_promise,
    mlp,
    opened,
    rows,
    start,
    weighted,
)
from torch import nn

ALL = "reverse sqrt memory blocks unroll forward tasks"


class Encoder(nn.Module):
    """A module outside of the model, with BatchNorm; λ is its first layer's weight."""

    def __init__(self, lam):
        super().__init__()
        self.lam, self.norm = lam, nn.BatchNorm1d(2).double()

    def forward(self, x):
        return self.norm((x @ self.lam.view(3, 2)).tanh() + 0.5)


def head(norm=False):
    middle = [nn.BatchNorm1d(2)] if norm else []
    return nn.Sequential(nn.Linear(2, 2), *middle, nn.Tanh(), nn.Linear(2, 1)).double()


def outside(h_trains, g_trains, norm=False):
    """An encoder outside of the model, called by h and by g in one of the two modes each. `norm`: in the model too."""

    def build(lam):
        encoder, model = Encoder(lam), head(norm)

        def h(m, x, y):
            return error(m, encoder.train(h_trains)(x), y)

        def g(m, x, y):
            return error(m, encoder.train(g_trains)(x), y)

        loop = Loop(model, h, g, rows(), rows(5))
        loop.encoder = encoder
        return loop

    return build


def in_g_alone(lam):
    """The encoder normalises what g judges, and its statistics move there."""
    encoder = Encoder(torch.randn(6, dtype=torch.float64))
    model = mlp()
    loop = Loop(
        model,
        weighted(lam),
        lambda m, x, y: error(m, x, y) + 0.1 * encoder(x * m[2].weight[0, :3]).square().mean(),
        indexed(),
        rows(5),
    )
    loop.encoder = encoder
    return loop


def instance_norm(lam):
    """InstanceNorm with running statistics, outside, which g reads in eval mode."""
    norm, model = nn.InstanceNorm1d(2, track_running_stats=True).double(), head()

    def features(x):
        return norm((x @ lam.view(3, 2)).tanh().T.unsqueeze(0) + 0.5)[0].T

    def h(m, x, y):
        norm.train()
        return error(m, features(x), y)

    def g(m, x, y):
        norm.eval()
        return error(m, features(x), y)

    return Loop(model, h, g, rows(), rows(5))


OUTSIDE = {
    "trained in both": outside(True, True),
    "eval in g": outside(True, False),
    "eval in h": outside(False, True),
    "eval in both": outside(False, False),
    "in g alone": in_g_alone,
    "trained in both, and one in the model": outside(True, True, norm=True),
    "eval in g, and one in the model": outside(True, False, norm=True),
    "eval in h, and one in the model": outside(False, True, norm=True),
    "instance norm, eval in g": instance_norm,
}
NAMES = r"batch_?norm|instance_?norm|running|statistic"


@constructs(OUTSIDE, ALL)
def test_batchnorm_of_a_module_outside_of_the_model(construct, variant):
    keeps_the_promise(construct, variant, NAMES)


@each(ALL)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("g_trains", [True, False], ids=["train", "eval"])
def test_statistics_outside_have_no_graph_and_move_as_in_the_plain_loop(variant, g_trains, norm):
    """What the block leaves in an encoder is what the plain loop leaves there, or it is refused."""
    build = outside(True, g_trains, norm)
    torch.manual_seed(0)
    plain = build(start())
    optimizer = torch.optim.SGD(plain.model.parameters(), RATE)
    for _ in range(3):
        optimizer.zero_grad()
        plain.h(plain.model, *plain.batch).backward()
        optimizer.step()

    def use(block, loop, lam):
        seen = loop.encoder.norm.running_mean.clone()
        block.hypergrad(lam)
        return seen, loop.encoder.norm

    try:
        seen, norm = opened(build, variant, use)
    except Refused:
        return
    assert not norm.running_mean.requires_grad, "the statistics have a graph"
    torch.testing.assert_close(seen.detach(), plain.encoder.norm.running_mean, rtol=1e-10, atol=0)
    moves = int(norm.num_batches_tracked) - int(plain.encoder.norm.num_batches_tracked)
    assert moves in (0, 1), f"replays and differences moved the statistics {moves} times more"


@each(ALL)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("g_trains", [True, False], ids=["train", "eval"])
def test_a_second_outer_step_with_an_encoder_outside(variant, g_trains, norm):
    """Few-shot: one encoder for all blocks, and each outer step moves its weights by `backward()`."""
    build = outside(True, g_trains, norm)
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loop = build(lam)

    def again(_):
        return loop

    for _ in range(3):
        lam.grad = None
        try:
            opened(again, variant, lambda block, loop, _: block.backward(), steps=2)
        except Refused:
            return
        assert lam.grad is not None
        with torch.no_grad():
            lam -= 0.1 * lam.grad


# --- statistics of the model, moved where a list does not look ----------------------------------------------------


class OwnUpdate(nn.BatchNorm1d):
    """A subclass that moves its statistics itself, as frozen or "synchronised" BatchNorms of detectors do."""

    def forward(self, x):
        if not self.training:
            return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * self.weight + self.bias
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean.mul_(0.5).add_(0.5 * mean)
            self.running_var.mul_(0.5).add_(0.5 * var)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Renorm(nn.Module):
    """A normalisation with its own name and its own buffers, which are replaced instead of written to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - x.mean(0)
        return x - self.mean


def modes(model):
    def build(lam):
        m = model()

        def h(m, x, y, i):
            m.train()
            return weighted(lam)(m, x, y, i)

        def g(m, x, y):
            m.eval()
            return error(m, x, y)

        return Loop(m, h, g, indexed(), rows(5))

    return build


def looked_at(lam):
    """A forward in training mode under no_grad in h (a pseudo-label, a log line); g is in eval mode."""
    m = mlp(nn.BatchNorm1d(4))

    def h(m, x, y, i):
        m.train()
        with torch.no_grad():
            m(2 * x + 1)
        return weighted(lam)(m, x, y, i)

    def g(m, x, y):
        m.eval()
        return error(m, x, y)

    return Loop(m, h, g, indexed(), rows(5))


def looked_at_by_parts(lam):
    """The same, of a part of the model, and detached instead of under no_grad."""
    m = mlp(nn.BatchNorm1d(4))

    def h(m, x, y, i):
        m.train()
        m[1](m[0](2 * x + 1).detach())
        return weighted(lam)(m, x, y, i)

    def g(m, x, y):
        m.eval()
        return error(m, x, y)

    return Loop(m, h, g, indexed(), rows(5))


def calibrated(lam):
    """Statistics that are reset, and collected anew by a pass under no_grad in g (as after weight averaging)."""
    m, batch = mlp(nn.BatchNorm1d(4)), indexed()

    def h(m, x, y, i):
        m.train()
        return weighted(lam)(m, x, y, i)

    def g(m, z, u):
        m.train()
        m[1].reset_running_stats()
        with torch.no_grad():
            m(batch[0])
        m.eval()
        return error(m, z, u)

    return Loop(m, h, g, batch, rows(5))


IN_THE_MODEL = {
    "a forward under no_grad in h": looked_at,
    "a detached forward of a part in h": looked_at_by_parts,
    "statistics collected anew in g": calibrated,
    "a subclass that moves them itself": modes(lambda: mlp(OwnUpdate(4).double())),
    "a normalisation of another name": modes(lambda: mlp(Renorm())),
    "plain batchnorm": modes(lambda: mlp(nn.BatchNorm1d(4))),
    "cumulative momentum": modes(lambda: mlp(nn.BatchNorm1d(4, momentum=None))),
}


@constructs(IN_THE_MODEL, ALL)
def test_statistics_moved_by_something_else_than_a_step(construct, variant):
    keeps_the_promise(construct, variant, NAMES + r"|buffer|'mean'|no_grad|gradient of g")


@each(ALL)
def test_plain_batchnorm_is_right(variant):
    is_right(IN_THE_MODEL["plain batchnorm"], variant)
