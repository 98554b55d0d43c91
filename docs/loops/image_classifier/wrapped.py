"""# An image classifier

This is the loop of PyTorch's MNIST example. The lines that compute the loss become the function `h`, and `loop.step`
replaces `zero_grad`, `backward` and `step`. Adadelta, `StepLR`, the data loader, dropout and `train()` stay as they
are. The scheduler changes the optimizer's rate, and the block reads the rate at each step.

`test` is a function of the model already, so it can be the outer loss `g`. It sets eval mode, and the block restores
modes and random numbers afterwards. The gradient shows which training samples lower the loss on the test set, and which
raise it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model, data, target, i):
        output = model(data)
        return (s.weight[i].sigmoid() * F.nll_loss(output, target, reduction="none")).mean()

    def g(model):
        return test(model, s.test_loader)

    optimizer = torch.optim.Adadelta(s.model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(3):
            s.model.train()
            for data, target, i in s.train_loader:
                loop.step(data, target, i)
            scheduler.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads


def test(model, loader):
    model.eval()
    losses = [F.nll_loss(model(data), target, reduction="sum") for data, target in loader]
    return sum(losses) / len(loader.dataset)
