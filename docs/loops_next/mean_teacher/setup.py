"""A mean teacher, by which the training is judged; the outer variable weighs each labelled sample."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """Student and teacher, labelled samples of which some labels are wrong, unlabelled ones, and held-out ones."""

    model: nn.Module
    teacher: nn.Module
    labelled: tuple[Tensor, Tensor]
    unlabelled: Tensor
    held_out: tuple[Tensor, Tensor]
    outer: list[Tensor]  # a weight for each labelled sample


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)).to(dtype)
    x = torch.randn(128, 4, dtype=dtype)
    y = (x @ torch.randn(4, 3, dtype=dtype)).argmax(1)
    wrong = y[:32].clone()
    wrong[::3] = torch.randint(3, (11,))
    weights = torch.zeros(32, dtype=dtype, requires_grad=True)
    teacher = copy.deepcopy(model).requires_grad_(False)
    return Setup(model, teacher, (x[:32], wrong), x[32:96], (x[96:], y[96:]), [weights])
