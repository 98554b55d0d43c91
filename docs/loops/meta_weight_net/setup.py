"""A classifier for noisy labels, whose samples are weighed by a small network of their losses."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Setup(NamedTuple):
    model: nn.Sequential
    weight_net: nn.Sequential  # from the loss of a sample to its weight
    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor

    @property
    def outer(self) -> list[Tensor]:
        return list(self.weight_net.parameters())


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    x, x_val = torch.randn(2, 80, 6, dtype=dtype)
    y, y_val = x[:, :3].argmax(1), x_val[:, :3].argmax(1)
    y = torch.where(torch.rand(80) < 0.4, torch.randint(3, (80,)), y)  # noise
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    weight_net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
    return Setup(model.to(dtype), weight_net.to(dtype), x, y, x_val, y_val)
