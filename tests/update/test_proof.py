"""Proofs by value: the derivative of a function of the direction against differences."""

import pytest
import torch

from bilevel_plugin.update.proof import derivative_error

pytestmark = pytest.mark.usefixtures("double")


def d_and_w():
    return {"a": torch.randn(30), "b": torch.randn(4, 5)}, {"a": torch.randn(30), "b": torch.randn(4, 5)}


def test_a_right_derivative_has_no_error_and_the_generator_stands_still():
    d, w = d_and_w()
    held = torch.get_rng_state()
    assert derivative_error(lambda d, w: {n: x.tanh() * w[n].norm() for n, x in d.items()}, d, w) < 1e-8
    assert torch.equal(torch.get_rng_state(), held)


@pytest.mark.parametrize("part", [1.0, 0.1, 0.01])
def test_the_error_is_the_part_that_is_left_out(part):
    """Of d·(1 + part·|d|²), with the second factor detached."""
    wrong = lambda d, w: {n: x * (1 + part * x.square().mean().detach()) for n, x in d.items()}
    assert part / 200 < derivative_error(wrong, *d_and_w()) < 10 * part
