"""Which parameters of a model are trained, and which models are refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_loop import (
    RATE,
    attempt,
    data,
    exact,
    losses,
    right_or_refused,
    start,
)
from problems import differences, hypergrad, refused, value, weighted
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def test_parameters_that_can_not_be_trained(parts):
    _, h, g, _, _, _ = parts

    class Holder(nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.p = nn.Parameter(tensor, requires_grad=tensor.is_complex())

    with pytest.raises(ValueError, match=r"no trainable parameter.*torch.int64.*integers can't be trained"):
        bilevel.inner(Holder(torch.arange(3)), h, g)
    with pytest.raises(TypeError, match=r"'p' is complex .torch.complex128..*real and imaginary parts"):
        bilevel.inner(Holder(torch.ones(3, dtype=torch.complex128)), h, g)
    with pytest.raises(ValueError, match=r"no trainable parameter"):
        bilevel.inner(nn.Linear(2, 2).requires_grad_(False), h, g)
    with pytest.raises(ValueError, match=r"no trainable parameter"):
        bilevel.inner(nn.Tanh(), h, g)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got function"):
        bilevel.inner(h, h, g)  # pyright: ignore


def test_an_integer_parameter_beside_trainable_ones_is_like_a_buffer(parts):
    _, _, _, _, x, y = parts

    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.shift = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

        def forward(self, x):
            return super().forward(x) + self.shift

    g = lambda m, x, y: F.cross_entropy(m(x), y)
    scale = torch.ones((), requires_grad=True)
    problem, batch = (Shifted(), lambda m, x, y: scale * g(m, x, y), g), (x, y)
    got = hypergrad(*problem, scale, batch, batch, lr=0.1)
    expected = differences(lambda: value(*problem, batch, batch, lr=0.1), scale, torch.ones_like(scale))
    assert float(got) == pytest.approx(expected, rel=1e-7)


# --- weights that share memory ---


class Twins(nn.Module):
    """Two layers, of which the second holds the first one's memory in some way."""

    def __init__(self, tie):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        tie(self)

    def forward(self, x):
        x = self.b(self.a(x).tanh()).tanh()
        return self.out(F.linear(x, 4 * self.copy) if hasattr(self, "copy") else x)


class Overlapping(nn.Module):
    """Weights that are views of one tensor: `shift` elements apart."""

    def __init__(self, shift):
        super().__init__()
        self.flat = torch.randn(12 + 2)
        self.a, self.b = (nn.Parameter(self.flat[i : i + 6].view(3, 2)) for i in (0, shift))
        del self.flat

    def forward(self, x):
        return (x @ self.a).tanh() + (x @ self.b).sin()


def by_data(m):
    m.b.weight.data = m.a.weight.data


def by_a_buffer(m):
    m.register_buffer("copy", m.a.weight.data)


def by_a_frozen_parameter(m):
    m.b.weight = nn.Parameter(m.a.weight.data, requires_grad=False)


def by_an_attribute(m):
    m.copy = m.a.weight.detach()


def by_a_transposed_buffer(m):
    m.register_buffer("copy", m.a.weight.data.t())


TIES = [by_data, by_a_buffer, by_a_frozen_parameter, by_an_attribute, by_a_transposed_buffer]


@pytest.mark.parametrize("tie", [*TIES, "overlapping"], ids=lambda t: getattr(t, "__name__", t))
def test_weights_that_share_memory(tie, engine):
    make = (lambda: Overlapping(3)) if tie == "overlapping" else (lambda: Twins(tie))
    check = "first" if tie is by_an_attribute else False  # of a plain attribute the sentinel may be the first to know
    assert not right_or_refused(losses(make), engine, "are tied: .* share their memory", check=check)


@pytest.mark.parametrize("shift", [6, 8])
def test_weights_side_by_side_in_one_tensor_share_nothing(shift, engine):
    exact(losses(lambda: Overlapping(shift)), engine)


# --- lazy modules ---


@pytest.mark.parametrize(
    "lazy", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(3, 2))]
)
def test_lazy_modules(lazy):
    """They have no weights yet; their first call makes them."""
    model, lam = lazy(), start()
    with refused("of a lazy module has no shape yet"):
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, check=False) as loop:
            loop.step(*data(), outer=data(5))
    model(data()[0])
    attempt(model, *weighted(lam), lam, data(), data(5))
