"""Logistic regression with a penalty exp(λⱼ) for each weight, by full-batch SGD with momentum."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Setup(NamedTuple):
    model: nn.Linear
    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor
    log_penalty: Tensor

    @property
    def outer(self) -> list[Tensor]:
        return [self.log_penalty]


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    features, relevant = 20, 4
    x, x_val = torch.randn(2, 60, features, dtype=dtype)
    true = torch.randn(relevant, dtype=dtype)
    y, y_val = ((z[:, :relevant] @ true + torch.randn(60, dtype=dtype) > 0).to(dtype) for z in (x, x_val))
    model = nn.Linear(features, 1, dtype=dtype)
    return Setup(model, x, y, x_val, y_val, torch.full((features,), -4.0, dtype=dtype, requires_grad=True))
