"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .setup import Setup


def train(s: Setup) -> Tensor:
    model = s.model
    age, width = s.outer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def pace(model, x, y):
        losses = (model(x) - y).square()
        return torch.sigmoid((age.exp() - losses) / width.exp())

    def loss(model, x, y, w):
        return (w * (model(x) - y).square()).mean()

    def error(model):
        x, y = s.held_out
        return mse_loss(model(x), y)

    x, y = s.training
    for _ in range(4):
        weights = pace(model, x, y)
        for i in torch.randperm(48).split(12):
            optimizer.zero_grad()
            loss(model, x[i], y[i], weights[i]).backward()
            optimizer.step()
    return error(model).detach()
