"""BYOL on vectors, two noisy views of each; the outer variable is the strength of the noise by coordinate."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """The online network and its target, samples without labels, a few with labels to judge the features by."""

    model: Online
    target: nn.Module
    samples: Tensor
    labelled: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    outer: list[Tensor]  # the logarithms of the strengths


class Online(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8))
        self.projector = nn.Sequential(nn.Tanh(), nn.Linear(8, 6))
        self.predictor = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.projector(self.encoder(x)))


class Target(nn.Module):
    """Encoder and projector, under the names that they have in the online network."""

    def __init__(self, online: Online) -> None:
        super().__init__()
        self.encoder, self.projector = copy.deepcopy(online.encoder), copy.deepcopy(online.projector)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = Online().to(dtype)
    x = torch.randn(128, 6, dtype=dtype)
    y = (x[:, 0] * x[:, 1]).sign() + x[:, 2].tanh()
    outer = [torch.full((6,), -1.0, dtype=dtype, requires_grad=True)]
    return Setup(model, Target(model), x[:64], (x[64:96], y[64:96]), (x[96:], y[96:]), outer)


def ridge_error(features: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """The error on held-out features of a ridge regression that was fitted to the labelled ones, in closed form."""
    (a, b), (y, z) = features, targets
    eye = torch.eye(a.shape[1], dtype=a.dtype)
    return (b @ torch.linalg.solve(a.T @ a + 0.1 * eye, a.T @ y) - z).square().mean()
