"""# First-order MAML

First-order MAML is MAML with the direction of each step as a constant. `direction=` is a function of the direction,
so `detach()` there does exactly this; `check=False`, since a derivative is left out on purpose. Then w_K is w_0 plus
constants, and the hypergradient is the gradient of the query loss at w_K. Everything else is the loop of
[MAML](maml.md).

`plain.py` computes this gradient by `torch.autograd.grad` at the end of its loop. The block is compared with that,
and not with differences, which would give the gradient of MAML.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model):
        return mse_loss(model(s.x), s.y)

    def g(model):
        return mse_loss(model(s.x_query), s.y_query)

    def first_order(d):
        return {name: x.detach() for name, x in d.items()}

    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.01)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer, direction=first_order, check=False) as loop:
        for _ in range(5):
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
