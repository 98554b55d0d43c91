"""The ways in for weights give the same numbers: the model's own parameters, our swap, torch.func.functional_call."""

import copy

import pytest
import torch
from test_real_models import MODELS, problem
from torch import nn
from torch.func import functional_call

from bilevel_plugin.binding import Binding


class Host(nn.Module):
    """Calls a loss with the model as a child, so that functional_call reaches whatever the loss does with it."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch):
        return self.loss(self.model, *batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_three_ways_in_for_weights(name):
    """A loss and its gradient at other weights, bit for bit, on every kind of model of the tests."""
    model, h, _, _, batch, _ = problem(name)
    torch.manual_seed(3)
    found = []
    w = {n: (p.detach() + 0.1 * torch.randn_like(p)) for n, p in model.named_parameters() if p.requires_grad}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for way in ("own parameters", "our swap", "functional_call"):
        twin = copy.deepcopy(model)
        state = {n: x.clone().requires_grad_() for n, x in w.items()}
        torch.manual_seed(5)
        if way == "functional_call":
            named = {f"model.{n}": x for n, x in {**state, **{n: b.clone() for n, b in buffers.items()}}.items()}
            with Binding(twin).twice_differentiable():
                loss = functional_call(Host(twin, h), named, batch)
                leaves = list(state.values())
                grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        else:
            binding = Binding(twin, own_parameters=way == "own parameters")
            with binding.inside({**state, **buffers}, buffers, twice=True) as inside:
                loss = binding.loss("h", h, inside, batch)
                grads = torch.autograd.grad(loss, list(inside.weights.values()), allow_unused=True)
        found.append([loss.detach(), *grads])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
