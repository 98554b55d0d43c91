"""ANIL on a few-shot task: the head adapts, and the outer variables are the encoder and the head's initialisation."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Setup(NamedTuple):
    model: Model
    x: Tensor  # the support set
    y: Tensor
    x_query: Tensor
    y_query: Tensor

    @property
    def outer(self) -> list[Tensor]:
        return list(self.model.parameters())


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    classes = torch.randn(5, 1, 8, 8, dtype=dtype)
    y, y_query = torch.arange(5), torch.arange(5).repeat(3)
    x, x_query = (classes[z] + 0.5 * torch.randn(len(z), 1, 8, 8, dtype=dtype) for z in (y, y_query))
    return Setup(Model().to(dtype), x, y, x_query, y_query)
