"""MoCo with a key encoder and a queue of keys; the outer variable is the strength of the noise by coordinate."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


@dataclass
class Setup:
    """The encoder and the key encoder, the first queue, samples without labels, a few with labels to judge by."""

    model: nn.Module
    key_encoder: nn.Module
    queue: Tensor
    samples: Tensor
    labelled: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    outer: list[Tensor]  # the logarithms of the strengths


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)
    x = torch.randn(128, 6, dtype=dtype)
    y = (x[:, 0] * x[:, 1]).sign() + x[:, 2].tanh()
    queue = normalize(torch.randn(32, 8, dtype=dtype))
    outer = [torch.full((6,), -1.0, dtype=dtype, requires_grad=True)]
    key_encoder = copy.deepcopy(model).requires_grad_(False)
    return Setup(model, key_encoder, queue, x[:64], (x[64:96], y[64:96]), (x[96:], y[96:]), outer)


def ridge_error(features: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """The error on held-out features of a ridge regression that was fitted to the labelled ones, in closed form."""
    (a, b), (y, z) = features, targets
    eye = torch.eye(a.shape[1], dtype=a.dtype)
    return (b @ torch.linalg.solve(a.T @ a + 0.1 * eye, a.T @ y) - z).square().mean()
