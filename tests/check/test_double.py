"""Casting to float64: weights on a line, and the outer variables that a loss reads."""

import pytest
import torch
from torch import nn

from bilevel_plugin.check.double import InFloat64, Onward, dot, random_like


def test_random_numbers_are_as_large_as_the_tensor():
    for shape in ((), (7,), (5000,), (3, 4099)):
        x = torch.full(shape, 2.0)
        v = random_like(x)
        assert v.shape == x.shape
        assert float(v.norm()) == pytest.approx(float(x.norm()), rel=1e-5)
        assert torch.equal(v, random_like(x))
    rows = random_like(torch.ones(8, 4096))
    assert torch.linalg.matrix_rank(rows) == 8
    assert bool(random_like(torch.zeros(5)).any())


def test_the_derivative_along_a_line_is_a_dot_product_twice():
    w, v = torch.randn(4, dtype=torch.float64), torch.randn(4)
    s, t = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = Onward.apply(Onward.apply(w, t, lambda a: dot(a, v)), s, lambda a: dot(a, 2 * v))
    assert torch.equal(x, w)
    (first,) = torch.autograd.grad((x**4).sum(), s, create_graph=True)
    assert torch.allclose(first, (4 * w**3 * 2 * v).sum())
    (second,) = torch.autograd.grad(first, t)
    assert torch.allclose(second, (12 * w**2 * 2 * v * v).sum())


def test_arguments_are_cast_and_leaves_get_one_stand_in():
    lam, x, net = torch.ones(1, 2, requires_grad=True), torch.ones(2), nn.Linear(2, 2)
    with InFloat64({}) as mode:
        y = net(lam * x) + lam.T[:, 0] + torch.zeros(2, dtype=torch.float32) + x.float()
    assert y.dtype == torch.float64
    assert {id(v) for v, _ in mode.found.values()} == {id(lam), *map(id, net.parameters())}
    (grad,) = torch.autograd.grad(y.sum(), mode.found[id(lam)][1])
    assert torch.allclose(grad, net.weight.double().sum(0) + 1)


def test_what_is_replaced_is_read():
    lam, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with InFloat64({id(lam): torch.full((2,), 3.0, dtype=torch.float64)}) as mode:
        assert float((lam * other).sum().detach()) == 6
    assert mode.read == {id(lam)}
    assert mode.found.keys() == {id(other)}


def test_a_derivative_inside_with_respect_to_a_leaf_of_float32():
    x = torch.ones(3, requires_grad=True)
    with InFloat64({}):
        (d,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        assert d.dtype == torch.float64
        assert torch.equal(d.detach(), torch.full((3,), 3.0, dtype=torch.float64))


def test_functorch_and_copies():
    import copy

    x, net = torch.ones(3), nn.Linear(3, 1)
    with InFloat64({}):
        d = torch.func.grad(lambda p: (p * x).square().sum())(x)
        assert torch.equal(d, torch.full((3,), 2.0, dtype=torch.float64))
        again = copy.deepcopy(net.weight * 2)
    assert again.is_leaf
    assert again.requires_grad


def test_leaves_with_an_entry_for_each_sample_are_cut():
    lam, other = torch.arange(6.0, requires_grad=True), torch.ones(5, requires_grad=True)
    with InFloat64({}, rows=(6, 2)):
        assert (lam * 1).shape == (2,)
        assert (other * 1).shape == (5,)
