"""The GPT of the gallery under bf16 autocast: weights in float32, matrix products in bf16."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from docs.loops.gpt import plain, setup, wrapped


def test_end_point_is_that_of_the_plain_loop_bit_for_bit() -> None:
    s, t = (setup.make(torch.float32, autocast=True) for _ in range(2))
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):  # the kernel that the block takes, since it has a second derivative
        expected = plain.train(s)
    torch.manual_seed(0)
    value, _ = wrapped.train(t)
    for name, x in s.model.state_dict().items():
        assert torch.equal(t.model.state_dict()[name], x), name
    assert torch.equal(value.detach(), expected)


def test_hypergradient_is_near_that_of_float32() -> None:
    torch.manual_seed(0)
    _, (ours,) = wrapped.train(setup.make(torch.float32, autocast=True))
    torch.manual_seed(0)
    _, (exact,) = wrapped.train(setup.make(torch.float32))
    assert not torch.equal(ours, exact)  # else autocast was off
    assert float((ours - exact).norm() / exact.norm()) < 0.05
