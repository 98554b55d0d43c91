"""The loop as people write it."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .setup import Setup


def train(s: Setup) -> Tensor:
    for _ in range(5):
        s.model.zero_grad()
        loss = mse_loss(s.model(s.x), s.y)
        loss.backward()
        with torch.no_grad():
            for name, p in s.model.named_parameters():
                p -= s.rates[name] * p.grad
    return mse_loss(s.model(s.x_query), s.y_query)
