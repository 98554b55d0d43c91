"""A classifier trained by sharpness-aware minimisation (SAM); the outer variable weighs each training sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """A classifier, training samples of which some labels are wrong, and held-out ones."""

    model: nn.Module
    training: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    outer: list[Tensor]  # a weight for each training sample


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    x = torch.randn(96, 4, dtype=dtype)
    y = (x @ torch.randn(4, 3, dtype=dtype)).argmax(1)
    wrong = y[:48].clone()
    wrong[::3] = torch.randint(3, (16,))
    weights = torch.zeros(48, dtype=dtype, requires_grad=True)
    return Setup(model, (x[:48], wrong), (x[48:], y[48:]), [weights])
