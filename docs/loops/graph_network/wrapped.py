"""# A graph network

The adjacency is a sparse matrix whose entries depend on the outer variable, so it is no longer detached. It is computed
once, as before. The steps and `g` get it as a batch with a graph. The backward pass goes through `normalised` once, at
the end, and not once per step.

Dropout needs nothing: the reverse sweep draws the same random numbers when it runs a step again. Adam's weight decay
and state are part of the step. `g` is in eval mode and the steps are in training mode. The gradient shows which edges
mislead. On average, these connect nodes of different classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import bilevel_plugin as bilevel

from .setup import Setup, normalised


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model, adjacency):
        output = model(s.features, adjacency)
        return F.nll_loss(output[s.train], s.labels[s.train])

    def g(model, adjacency):
        model.eval()
        output = model(s.features, adjacency)
        return F.nll_loss(output[s.val], s.labels[s.val])

    adjacency = normalised(s.edges, s.edge_weight.sigmoid(), len(s.features))
    optimizer = torch.optim.Adam(s.model.parameters(), lr=0.01, weight_decay=5e-4)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(20):
            s.model.train()
            loop.step(adjacency, outer=adjacency)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
