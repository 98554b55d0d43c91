"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .setup import Setup


def train(s: Setup) -> Tensor:
    model, weights = s.model, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, x, y, w):
        return (torch.sigmoid(w) * cross_entropy(model(x), y, reduction="none")).mean()

    def error(model):
        x, y = s.held_out
        return cross_entropy(model(x), y)

    x, y = s.training
    for _ in range(4):
        for i in torch.randperm(48).split(12):
            optimizer.zero_grad()
            loss(model, x[i], y[i], weights[i]).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                steps = [0.1 * p.grad / (norm + 1e-12) for p in model.parameters()]
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.add_(step)
            optimizer.zero_grad()
            loss(model, x[i], y[i], weights[i]).backward()
            with torch.no_grad():
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.sub_(step)
            optimizer.step()
    return error(model).detach()
