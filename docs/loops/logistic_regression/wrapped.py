"""# Hyperparameters of logistic regression

The training loss becomes a function `h` of the model, and the validation loss a function `g`. The three lines
`zero_grad`, `backward` and `step` become `loop.step()`. The optimizer stays: the block reads its rule and its momentum,
and takes the steps itself.

`log_penalty` is not declared as the outer variable. It is a tensor that requires grad, and `h` uses it. The gradient
shows for each weight whether its penalty should be higher. A grid search over 20 penalties would be out of the
question.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model):
        logits = model(s.x).squeeze(1)
        penalty = (s.log_penalty.exp() * model.weight.square()).sum()
        return binary_cross_entropy_with_logits(logits, s.y) + penalty

    def g(model):
        return binary_cross_entropy_with_logits(model(s.x_val).squeeze(1), s.y_val)

    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(100):
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
