"""Lean: the values of the gradient are left out, and the hypergradient is that of `unroll`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.kernels.stopping import Differentiation
from bilevel_plugin.pullback import lean as lean_products
from bilevel_plugin.pullback.lean import LeanProducts

N = 6


@pytest.fixture(autouse=True)
def every_product_is_large(monkeypatch):
    """The models here are small, and it is the products left out that are tested."""
    monkeypatch.setattr(lean_products, "LARGE", 0)


class Tied(nn.Module):
    """One matrix in three roles: weight of two products, and an input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5) / 3)

    def forward(self, x):
        return F.linear(F.linear(x, self.w).tanh(), self.w, self.w[0]) @ F.linear(self.w, self.w)


class Words(nn.Module):
    """Linear layers on sequences, keywords in the calls, a bias alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.shift = nn.Linear(5, 4, bias=False), nn.Linear(4, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        x = x.reshape(-1, 5, 1) * x.reshape(-1, 1, 5)
        x = F.linear(input=self.a(x).sigmoid(), weight=self.b.weight, bias=self.b.bias)
        return F.linear(x, self.b.weight.new_ones(2, 3), bias=None).mean(1) + self.shift[:2]


def convolution(kind, shape, **options):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[kind - 1]
    return nn.Sequential(
        nn.Unflatten(1, shape), layer(shape[0], 4, 2, **options), nn.ReLU(inplace=True), layer(4, 2, 1), nn.Flatten()
    )


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(24, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
    "tied": lambda: nn.Sequential(nn.Linear(24, 5), Tied()),
    "words": lambda: nn.Sequential(nn.Linear(24, 5), Words()),
    "conv1d": lambda: convolution(1, (2, 12), stride=2, padding=1),
    "conv2d": lambda: convolution(2, (2, 3, 4), padding=(1, 0), groups=2),
    "conv2d dilated": lambda: convolution(2, (1, 4, 6), dilation=(1, 2)),
    "conv2d same": lambda: convolution(2, (1, 4, 6), padding="same"),
    "conv2d circular": lambda: convolution(2, (1, 4, 6), padding=1, padding_mode="circular"),
    "conv3d": lambda: convolution(3, (1, 2, 3, 4), bias=False),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(24, 4)), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(nn.Linear(24, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2)),
}


def plain(model, x):
    return model(x).square().mean(1)


def decay(model, x):
    """The weights are used outside of the layers as well."""
    return plain(model, x) + 0.1 * sum(w.pow(4).sum() for w in model.parameters())


def pseudo_labels(model, x):
    """What is made under no_grad is a constant."""
    with torch.no_grad():
        target = model(x).roll(1, 0)
    return (model(x) - target).square().mean(1) + plain(model, x).detach()


def flat_minimum(model, x):
    """A derivative for the weights in the loss: a user's own, whose numbers are read."""
    grads = torch.autograd.grad(plain(model, x).mean(), list(model.parameters()), create_graph=True, allow_unused=True)
    return plain(model, x) + sum(g.square().sum() for g in grads if g is not None)


def flat_in_x(model, x):
    """One for the data, by functional transforms."""
    return plain(model, x) + torch.func.grad(lambda x: plain(model, x).sum())(x).square().mean(1)


def forward_mode(model, x):
    """Forward mode goes through no autograd.Function of this kind: the step is run with its value."""
    return plain(model, x) + torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean(1)


LOSSES = [plain, decay, pseudo_labels, flat_minimum, flat_in_x, forward_mode]


CASES = [
    (name, loss)
    for name in MODELS
    for loss in LOSSES
    if name != "batch norm" or loss not in (flat_in_x, forward_mode)  # these can't write to its running statistics
]


def hypergradient(model, loss, engine, rate_of="solver"):
    """For λ, the rate and w_0. The rate is part of the loss (the solver's) or of the update (lr=)."""
    torch.manual_seed(1)
    x, xv = torch.randn(2, N, 24, dtype=torch.float64)
    lam = torch.linspace(-1, 1, N, dtype=torch.float64, requires_grad=True)
    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    h = lambda m, x: (lam.sigmoid() * loss(m, x)).mean()
    g = lambda m, x: (plain(m, x) - 1).square().mean()
    options = {"solver": bilevel.BiGSAM(rate)} if rate_of == "solver" else {"lr": rate}
    with bilevel.inner(model, h, g, engine=engine, check=False, **options) as loop:
        loop.run(4, x, outer=(xv,))
        return loop.hypergrad([lam, rate, *model.parameters()], allow_unused=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(("name", "loss"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_agrees_with_unroll(name, loss, left_out):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for rate_of in ("solver", "update"):
        expected = hypergradient(model, loss, "unroll", rate_of)
        for engine in ("reverse", bilevel.Reverse("sqrt")):
            left_out.clear()
            found = hypergradient(model, loss, engine, rate_of)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13)
            # the derivative for a rate of the update takes the numbers of the gradient
            looked = 1 if name == "weight norm" else 4  # nothing to leave out there: `plain` from then on
            assert len(left_out) == (looked if rate_of == "solver" else 0)
            if rate_of == "solver" and name not in ("weight norm", "conv2d same") and loss is not forward_mode:
                assert all(left_out)


def test_what_is_left_out_and_what_is_not():
    """Zeros for a matrix, the numbers themselves for all else; and a user's own gradient has its own."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    weights = list(model.parameters())
    with LeanProducts(weights, Differentiation()) as products:
        loss = plain(model, x).mean()
    with products.taking_gradient():
        found = torch.autograd.grad(loss, weights, create_graph=True)
    theirs = torch.autograd.grad(plain(model, x).mean(), weights, create_graph=True)
    for w, mine, true in zip(weights, found, theirs, strict=True):
        assert (id(w) in products.without_value) == (w.dim() == 2)
        torch.testing.assert_close(mine, torch.zeros_like(true) if w.dim() == 2 else true)
    for mine, true in zip(torch.autograd.grad(loss, weights), theirs, strict=True):
        torch.testing.assert_close(mine, true)


def test_a_change_that_the_loss_does_not_show():
    """The value of h stays, its gradient does not: the biases tell."""
    torch.manual_seed(0)
    model, x, lam = MODELS["mlp"](), torch.randn(N, 24), torch.zeros(N, requires_grad=True)
    half = [False]

    def h(m, x):
        value = (lam.sigmoid() * plain(m, x)).mean()
        return (value + value.detach()) / 2 if half[0] else value

    g = lambda m, x: plain(m, x).mean()
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:  # the sentinel would tell as well
        loop.run(3, x, outer=(x,))
        half[0] = True
        with pytest.raises(RuntimeError, match="ended elsewhere"):
            loop.hypergrad(lam)
