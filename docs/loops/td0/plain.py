"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .setup import Setup


def train(s: Setup) -> Tensor:
    value_of = s.model
    logit, weights = s.outer
    optimizer = torch.optim.SGD(value_of.parameters(), lr=0.1, momentum=0.9)

    def td_error(model, state, features, following):
        target = features @ weights + torch.sigmoid(logit) * model(following)
        return mse_loss(model(state), target.detach())

    def error(model):
        state, returns = s.measured
        return mse_loss(model(state), returns)

    for _ in range(5):
        for i in torch.randperm(48).split(12):
            optimizer.zero_grad()
            td_error(value_of, *(x[i] for x in s.transitions)).backward()
            optimizer.step()
    return error(value_of).detach()
