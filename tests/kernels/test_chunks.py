"""Functions of rows, computed for some rows at a time: any such function, to the second order, against the whole."""

from __future__ import annotations

import pytest
import torch

from bilevel_plugin.kernels.chunks import Plan, apply_plan


def part(rows, inputs):
    """Rows of sin(x)·(column sums of y), and a summand of xᵀx."""
    x, y = inputs
    return [x.sin() * y.sum(0), x.mT @ x]


def whole(x, y):
    return x.sin() * y.sum(0), x.mT @ x


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_values_and_derivatives(chunk):
    xs = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)]
    xs[1].requires_grad_()
    plan = Plan(part, rows=5, chunk=chunk, cut=(True, False), joined=(True, False))
    for ours, theirs in zip(apply_plan(plan, *xs), whole(*xs), strict=True):
        torch.testing.assert_close(ours, theirs)
    function = lambda *xs: apply_plan(plan, *xs)
    assert torch.autograd.gradcheck(function, xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, xs, check_fwd_over_rev=True)
