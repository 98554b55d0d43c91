"""# Data reweighting by a network (Meta-Weight-Net)

The weight of a sample is the output of a small network, whose input is the loss of the sample. The parameters of this
network are the outer variable, and `loop.hypergrad` takes the whole list.

The training takes no gradient through the input of the network, so the plain loop has a `detach()`. But w_K depends on
that input, because the losses depend on the weights of earlier steps. `bilevel.stop_gradient` stops the gradient in the
step and keeps the path in the hypergradient. With `detach()` the training would be the same, and the hypergradient
wrong.

Momentum and weight decay are the optimizer's. The batches are drawn in the loop, as before.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model, i):
        cost = cross_entropy(model(s.x[i]), s.y[i], reduction="none").unsqueeze(1)
        weight = s.weight_net(bilevel.stop_gradient(cost))
        return (weight * cost).mean()

    def g(model):
        return cross_entropy(model(s.x_val), s.y_val)

    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(5):
            for i in torch.randperm(len(s.x)).split(16):
                loop.step(i)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
