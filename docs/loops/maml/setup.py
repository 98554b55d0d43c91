"""MAML on a task of sine regression: the outer variable is the initialisation of the network that adapts."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Setup(NamedTuple):
    model: nn.Sequential
    x: Tensor  # the support set
    y: Tensor
    x_query: Tensor
    y_query: Tensor

    @property
    def outer(self) -> list[Tensor]:
        return list(self.model.parameters())


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    x, x_query = torch.rand(2, 10, 1, dtype=dtype) * 10 - 5
    y, y_query = (2 * torch.sin(z + 1) for z in (x, x_query))
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    return Setup(model.to(dtype), x, y, x_query, y_query)
