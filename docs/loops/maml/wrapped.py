"""# MAML

The plain loop is the fine-tuning on one task. MAML asks how the loss on its query set changes with the initial
weights. As an input of `hypergrad`, a parameter of the model stands for the initial weight w_0, so that
`loop.hypergrad(model.parameters())` is the answer, second derivatives included.

In meta-training leave out `commit_()`. Then the model has its initial weights again after the block, and a
meta-optimizer can step on them with `loop.backward(model.parameters())`, or with the mean of several tasks. [The
tutorial](../tutorials/maml.md) does that, with `tasks=N` for many tasks at once.
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
