"""# ANIL

The optimizer holds only the head, so the block trains the head. The losses also use the encoder's parameters, which
require grad. So these are outer variables. `hypergrad` takes all parameters of the model in one list, where those of
the head stand for its initial values.

The encoder is the same in all steps, so its features are computed once. They are no longer detached, and are passed to
the step as a batch with a graph. The backward pass goes through that graph once, not once per step.
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
