"""Reverse mode: checkpoints change the number of steps run again, and no gradient."""

from __future__ import annotations

import pytest
import torch
from problems import Ridge, relative

import bilevel_plugin as bilevel


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9, 16, 17, 50])
@pytest.mark.parametrize("checkpoint", [1, 2, 3, 7, 100, "sqrt"])
def test_checkpoints_do_not_change_the_gradient(steps, checkpoint):
    ridge = Ridge.random()
    grads = []
    for how in ("unroll", bilevel.Reverse(checkpoint)):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(steps)
            grads.append(torch.stack([loop.hypergrad(ridge.lam), loop.hypergrad(ridge.lam, outer=())]))
    assert relative(*grads) < 1e-12
    assert torch.equal(grads[1][0], grads[1][1])  # a second sweep is the first again


def test_sqrt_runs_each_step_at_most_once_more():
    """K steps forward, at most K again without a graph, K with one."""
    ridge, calls = Ridge.random(), []
    h = lambda m: calls.append(1) or ridge.h(m)
    for how, most in (("reverse", 2), (bilevel.Reverse("sqrt"), 3), (bilevel.Reverse(5), 3), ("unroll", 1)):
        calls.clear()
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.1, engine=how, check=False) as loop:
            loop.run(50)
            loop.hypergrad(ridge.lam)
        assert len(calls) <= most * 50
