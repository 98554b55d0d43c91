"""Self-paced learning: samples are weighed by their own losses; the outer variables are the age and how soft it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """A regressor, training samples of which some targets are far off, and held-out ones."""

    model: nn.Module
    training: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    outer: list[Tensor]  # the logarithms of the loss that a sample may have, and of the width of that limit


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)).to(dtype)
    x = torch.randn(96, 3, dtype=dtype)
    y = x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2]
    noisy = y[:48] + torch.where(torch.arange(48) % 4 == 0, 3 * torch.randn(48, dtype=dtype), 0.0)
    age, width = torch.tensor(0.0, dtype=dtype), torch.tensor(-1.0, dtype=dtype)
    outer = [age.requires_grad_(), width.requires_grad_()]
    return Setup(model, (x[:48], noisy), (x[48:], y[48:]), outer)
