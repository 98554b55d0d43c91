"""# TD(0)

The target of TD(0) is a constant in the gradient of a step. But it is computed from the weights, the discount and the
rewards. With `.detach()` the block could not follow it, and the hypergradient for the discount would be missing.
`bilevel.stop_gradient` takes no gradient through the target in the step, and includes it in the hypergradient.
Everything else is the same loop with a block around it.

The outer variables are the discount and the weights of two reward features. The outer loss compares the values with
measured returns.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    value_of = s.model
    logit, weights = s.outer
    optimizer = torch.optim.SGD(value_of.parameters(), lr=0.1, momentum=0.9)

    def td_error(model, state, features, following):
        target = features @ weights + torch.sigmoid(logit) * model(following)
        return mse_loss(model(state), bilevel.stop_gradient(target))

    def error(model):
        state, returns = s.measured
        return mse_loss(model(state), returns)

    with bilevel.inner(value_of, td_error, error, solver="gd", optimizer=optimizer) as loop:
        for _ in range(5):
            for i in torch.randperm(48).split(12):
                loop.step(*(x[i] for x in s.transitions))
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
