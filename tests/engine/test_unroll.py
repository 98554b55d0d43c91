"""Unroll keeps the whole graph, so that the hypergradient can be differentiated again."""

from __future__ import annotations

import pytest
import torch
from problems import Ridge

import bilevel_plugin as bilevel


def test_unroll_is_differentiable_again():
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.3, engine="unroll") as loop:
        loop.run(4)
        grad = loop.hypergrad(ridge.lam, create_graph=True)
        (second,) = torch.autograd.grad(grad, ridge.lam)
    f = []
    for d in (-1e-5, 1e-5):
        with torch.no_grad():
            ridge.lam += d
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.3) as loop:
            loop.run(4)
            f.append(float(loop.hypergrad(ridge.lam)))
        with torch.no_grad():
            ridge.lam -= d
    assert float(second) == pytest.approx((f[1] - f[0]) / 2e-5, rel=1e-6)
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.3) as loop:
        loop.run(4)
        with pytest.raises(ValueError, match="only engine='unroll' keeps"):
            loop.hypergrad(ridge.lam, create_graph=True)
