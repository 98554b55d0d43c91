"""What a loss makes require grad is for its own derivatives: it is no outer variable, and is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from contract import ENGINES, OWN
from plain_loop import block, data, exact, losses, mlp, right_or_refused, start
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def flagged(x):
    y = x.detach().clone()
    y.requires_grad = True
    return y


POINTS = {
    "detach": lambda x: x.detach().clone().requires_grad_(),
    "flag": flagged,
    "made": lambda x: torch.linspace(-1, 1, 300, requires_grad=True).view(100, 3),
    "batch": lambda x: x.requires_grad_(),
    "set": lambda x: torch.tensor(x.tolist(), requires_grad=True),
}


def penalised(points):
    """h with the penalty ‖∂u/∂x‖² → 1 at these points, of gradient penalties and physics-informed losses."""

    def wrap(h, g):
        def loss(m, x, y):
            at = points(x)
            (slope,) = torch.autograd.grad(m(at).square().sum(), at, create_graph=True)
            return h(m, x, y) + (slope.square().sum(1) - 1).square().mean()

        return loss, g

    return losses(mlp, wrap)


@pytest.mark.parametrize("name", POINTS)
def test_a_leaf_that_a_loss_makes_is_no_outer_variable(name, engine):
    """No false alarm of the sentinel, and no outer direction more in forward mode (of 256 at most)."""
    exact(penalised(POINTS[name]), engine, bits=False, check="first")


def test_points_of_the_user_are_as_they_were(engine):
    points, lam = torch.randn(5, 3), start()
    build = penalised(lambda x: points.requires_grad_())
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(3, *batch, outer=outer)
        assert not points.requires_grad
        loop.backward()
    assert points.grad is None
    assert lam.grad is not None


def test_a_parameter_that_a_loss_builds_keeps_its_flag():
    """A loss may build a part of a model when it is first called."""
    built = []

    def wrap(h, g):
        def loss(m, *b):
            if not built:
                built.append(nn.Parameter(torch.ones(())))
            return h(m, *b) * built[0]

        return loss, g

    block(losses(mlp, wrap), start(), steps=1)
    assert built[0].requires_grad


def test_a_derivative_that_a_loss_takes_only_later(engine):
    """In one graph of all steps it would go through the weights into the steps before, which used the same points."""
    points, calls = torch.randn(5, 3).requires_grad_(), []

    def wrap(h, g):
        def loss(m, x, y):
            calls.append(0)
            total = h(m, x, y) + m(points).square().mean()
            if len(calls) > 1 and engine == "unroll":
                (slope,) = torch.autograd.grad(m(points).square().sum(), points, create_graph=True)
                total = total + slope.square().mean()
            return total

        return loss, g

    right = right_or_refused(losses(mlp, wrap), engine, "earlier steps", r"detach\(\)\.requires_grad_")
    assert right == (engine != "unroll")


def test_a_checkpointed_part_sees_the_flag_again():
    """It runs again in the backward pass, before the flag is taken back."""

    def wrap(h, g):
        run = lambda m, x: checkpoint(m, x.clone().requires_grad_(), use_reentrant=False)
        return (lambda m, x, y: h(lambda x: run(m, x), x, y)), g

    for name in OWN:
        exact(losses(mlp, wrap), ENGINES[name], bits=False)
    assert data()
