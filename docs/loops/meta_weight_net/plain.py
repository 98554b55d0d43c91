"""The loop as people write it."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .setup import Setup


def train(s: Setup) -> Tensor:
    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(5):
        for i in torch.randperm(len(s.x)).split(16):
            cost = cross_entropy(s.model(s.x[i]), s.y[i], reduction="none").unsqueeze(1)
            weight = s.weight_net(cost.detach())
            loss = (weight * cost).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return cross_entropy(s.model(s.x_val), s.y_val)
