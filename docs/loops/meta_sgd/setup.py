"""Meta-SGD on a task of sine regression: the outer variables are the initialisation and a rate for each weight."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Setup(NamedTuple):
    model: nn.Sequential
    rates: dict[str, Tensor]  # by the names of the parameters
    x: Tensor  # the support set
    y: Tensor
    x_query: Tensor
    y_query: Tensor

    @property
    def outer(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.rates.values()]


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    x, x_query = torch.rand(2, 10, 1, dtype=dtype) * 10 - 5
    y, y_query = (2 * torch.sin(z + 1) for z in (x, x_query))
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(dtype)
    rates = {n: (0.005 + 0.01 * torch.rand_like(p)).requires_grad_() for n, p in model.named_parameters()}
    return Setup(model, rates, x, y, x_query, y_query)
