"""# Sharpness-aware minimisation

SAM takes the gradient at w + ρ·∇h/‖∇h‖, and steps from w. `bilevel.sam(loss, rho=0.1)` is the loss with that gradient.
The ascent is a constant in the gradient of a step, and depends on the weights and the outer variable in the
hypergradient. It takes the place of two backward passes with the ascent between them. The optimizer stays as it was.

The outer variable weighs the training samples, of which some labels are wrong.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, weights = s.model, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, x, y, w):
        return (torch.sigmoid(w) * cross_entropy(model(x), y, reduction="none")).mean()

    def error(model):
        x, y = s.held_out
        return cross_entropy(model(x), y)

    x, y = s.training
    with bilevel.inner(model, bilevel.sam(loss, rho=0.1), error, solver="gd", optimizer=optimizer) as loop:
        for _ in range(4):
            for i in torch.randperm(48).split(12):
                loop.step(x[i], y[i], weights[i])
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
