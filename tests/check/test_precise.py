"""Casting what a function holds, and putting it back."""

import pytest
import torch
from torch import nn

from bilevel_plugin.check.precise import in_float64, restored, tensors_held


def setting():
    net, data, lam = nn.BatchNorm1d(2), torch.randn(3, 2), torch.ones(2, requires_grad=True)
    return net, data, lam, lambda: (net(data) * lam).sum()


def test_a_function_runs_in_float64_and_its_tensors_come_back():
    net, data, lam, function = setting()
    before = [(x, x.detach().clone()) for x in tensors_held(function, [lam])]
    assert {id(x) for x, _ in before} >= {id(x) for x in (data, lam, *net.parameters(), *net.buffers())}
    with restored([x for x, _ in before], []), in_float64([x for x, _ in before]):
        assert function().dtype == torch.float64
        assert nn.Linear(2, 2).weight.dtype == torch.float64
        assert (torch.ones(2, dtype=torch.float32) * 1).dtype == torch.float64
        function().backward()
    for x, value in before:
        assert x.dtype == value.dtype
        assert torch.equal(x.detach(), value)
        assert x.grad is None


def test_what_a_run_changes_is_put_back():
    net, data, lam, function = setting()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), restored(tensors_held(function, [lam]), []):
        torch.rand(3)
        with torch.no_grad():
            lam.add_(1)
            net.weight.data = torch.zeros(2)
            data.mul_(2)
        function()
        raise KeyError
    assert torch.equal(lam, torch.ones(2))
    assert torch.equal(net.weight, torch.ones(2))
    assert torch.equal(net.running_mean, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), state)
