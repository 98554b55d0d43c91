"""# ANIL

The optimizer holds the head alone, so the head is what the block trains. The encoder's parameters are used by the
losses and require grad, which makes them outer variables. `hypergrad` takes all parameters of the model in one list:
those of the head stand for its initialisation.

The encoder is the same in all steps, so its features are computed once. They lose their `detach()` and go into the
step as a batch with a graph. The block goes back through that graph once, and not once for each step.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model, features):
        return cross_entropy(model.head(features), s.y)

    def g(model):
        return cross_entropy(model(s.x_query), s.y_query)

    optimizer = torch.optim.SGD(s.model.head.parameters(), lr=0.5)
    features = s.model.encoder(s.x)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(5):
            loop.step(features)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
