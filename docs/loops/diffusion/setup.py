"""A tiny diffusion model (DDPM) of points in the plane; the outer variable weighs the loss of each timestep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

STEPS = 12  # of the noise schedule


@dataclass
class Setup:
    """A network that predicts noise, points to train and to validate on, and a log-weight for each timestep."""

    model: Denoiser
    train: Tensor
    validation: tuple[Tensor, Tensor, Tensor]  # points, timesteps, noise
    kept: Tensor  # ᾱ_t, what is kept of the signal at timestep t
    outer: list[Tensor]


class Denoiser(nn.Module):
    """ε(x_t, t), and beside its weights their moving average, as one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, 8)
        self.net = nn.Sequential(nn.Linear(2 + 8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        self.register_buffer("average", parameters_to_vector(self.parameters()).detach())

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.time(t)], 1))

    def averaged(self) -> Tensor:
        """The moving average, once the current weights are taken in."""
        return self.average.lerp(parameters_to_vector(self.parameters()), 0.1)

    def at(self, weights: Tensor) -> Callable[..., Tensor]:
        """The network at weights that are given as one vector."""
        named = dict(self.named_parameters())
        parts = weights.split([p.numel() for p in named.values()])
        instead = {n: part.view_as(p) for (n, p), part in zip(named.items(), parts, strict=True)}
        return lambda *inputs: functional_call(self, instead, inputs)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = Denoiser().to(dtype)
    points, held_out = _spiral(64, dtype), _spiral(96, dtype)
    kept = torch.cumprod(1 - torch.linspace(1e-2, 0.4, STEPS, dtype=dtype), 0)
    validation = held_out, torch.arange(96) % STEPS, torch.randn(96, 2, dtype=dtype)
    return Setup(model, points, validation, kept, [torch.zeros(STEPS, dtype=dtype, requires_grad=True)])


def _spiral(n: int, dtype: torch.dtype) -> Tensor:
    angle = 1 + 3 * torch.rand(n, dtype=dtype)
    return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 2
