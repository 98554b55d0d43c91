"""What passes no function mode: torch.cond, and what modules look up or import while a loss runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_loop import exact, losses, mlp
from torch.utils import checkpoint

from bilevel_plugin.kernels.attention import MATH_KERNEL
from bilevel_plugin.kernels.switches import Patched

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("sign", [1, -1])
def test_cond(sign, engine):
    """Its second derivative by torch is wrong (56 % here), and it does not run under a function mode."""

    def wrap(h, g):
        branches = (lambda m, x: m(x).square().mean()), (lambda m, x: m(x).sin().mean())

        def loss(m, x, y):
            true, false = (lambda x, f=f: f(m, x) for f in branches)
            return h(m, x, y) + torch.cond(sign * x.sum().exp() > 0, true, false, (x,))

        return loss, g

    exact(losses(mlp, wrap), engine, bits=False)


def test_everything_is_put_back():
    before = F.scaled_dot_product_attention, checkpoint.CheckpointFunction, torch.cond
    with pytest.raises(ZeroDivisionError), Patched(fused=False), Patched(fused=True):
        assert F.scaled_dot_product_attention is not before[0]
        raise ZeroDivisionError
    now = F.scaled_dot_product_attention, checkpoint.CheckpointFunction, torch.cond
    assert all(a is b for a, b in zip(before, now, strict=True))
    assert not Patched.on


def test_what_another_library_has_replaced_is_left_alone(monkeypatch):
    theirs = lambda *args, **kwargs: MATH_KERNEL(*args, **kwargs)
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with Patched(fused=False):
        assert F.scaled_dot_product_attention is theirs
    assert F.scaled_dot_product_attention is theirs
