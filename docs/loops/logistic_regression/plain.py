"""The loop as people write it."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from .setup import Setup


def train(s: Setup) -> Tensor:
    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        logits = s.model(s.x).squeeze(1)
        penalty = (s.log_penalty.exp() * s.model.weight.square()).sum()
        loss = binary_cross_entropy_with_logits(logits, s.y) + penalty
        loss.backward()
        optimizer.step()
    return binary_cross_entropy_with_logits(s.model(s.x_val).squeeze(1), s.y_val)
