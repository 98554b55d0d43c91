"""# MAML

The plain loop fine-tunes on one task. MAML needs the derivative of the loss on the query set for the initial weights.
As an input of `hypergrad`, a parameter of the model stands for the initial weight w_0. So
`loop.hypergrad(model.parameters())` is that derivative, with all second derivatives.

In meta-training, leave out `commit_()`. The model then has its initial weights again after the block, and a
meta-optimizer can update them after `loop.backward(model.parameters())`, for one task or for the mean of several.
[The tutorial](../tutorials/maml.md) does this, with `tasks=N` for many tasks at once.
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

    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.01)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(5):
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
