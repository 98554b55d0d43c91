"""The loop as people write it."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from .setup import Setup


def train(s: Setup) -> Tensor:
    optimizer = torch.optim.Adadelta(s.model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        s.model.train()
        for data, target, i in s.train_loader:
            optimizer.zero_grad()
            output = s.model(data)
            loss = (s.weight[i].sigmoid() * F.nll_loss(output, target, reduction="none")).mean()
            loss.backward()
            optimizer.step()
        scheduler.step()
    return test(s.model, s.test_loader)


def test(model, loader):
    model.eval()
    losses = [F.nll_loss(model(data), target, reduction="sum") for data, target in loader]
    return sum(losses) / len(loader.dataset)
