"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from .setup import Setup


def train(s: Setup) -> Tensor:
    model, teacher, weights = s.model, s.teacher, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def loss(model, x, y, w, u):
        errors = cross_entropy(model(x), y, reduction="none")
        with torch.no_grad():
            targets = teacher(u + 0.1 * torch.randn_like(u)).softmax(1)
        consistency = mse_loss(model(u + 0.1 * torch.randn_like(u)).softmax(1), targets)
        return (torch.sigmoid(w) * errors).mean() + 3 * consistency

    def error(model):
        teacher.eval()
        x, y = s.held_out
        return cross_entropy(teacher(x), y)

    x, y = s.labelled
    for _ in range(4):
        for i, j in zip(torch.randperm(32).split(8), torch.randperm(64).split(16), strict=True):
            optimizer.zero_grad()
            loss(model, x[i], y[i], weights[i], s.unlabelled[j]).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(teacher.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(p, alpha=0.1)
    return error(model).detach()
