"""A Lightning module under its Trainer: Adam, a scheduler, clipping, logging, and automatic optimisation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger(lightning.pytorch.__name__).setLevel(logging.ERROR)  # what it says of devices
SAMPLES = 48
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Setup:
    model: nn.Module
    loader: DataLoader[tuple[Tensor, ...]]
    val_loader: DataLoader[tuple[Tensor, ...]]
    outer: list[Tensor]  # a logit for each sample: how much it counts


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    x, x_val = torch.randn(SAMPLES, 6, dtype=dtype), torch.randn(32, 6, dtype=dtype)
    y, y_val = (x[:, 0] + x[:, 1] > 0).long(), (x_val[:, 0] + x_val[:, 1] > 0).long()
    y[:12] = 1 - y[:12]  # wrong labels
    model = nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2)
    )
    loader = DataLoader(TensorDataset(x, y, torch.arange(SAMPLES)), batch_size=12, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val, y_val), batch_size=32)
    return Setup(model.to(dtype), loader, val_loader, [torch.zeros(SAMPLES, dtype=dtype, requires_grad=True)])
