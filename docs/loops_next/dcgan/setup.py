"""DCGAN, one forward of the generator for both networks; the outer variable weighs each training image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """The two networks in one module, training and held-out images, and a weight for each training image."""

    model: nn.ModuleDict
    images: Tensor
    held_out: Tensor
    z_held_out: Tensor  # what the generator is judged on
    outer: list[Tensor]

    def noise(self, n: int) -> Tensor:
        return torch.randn(n, *self.z_held_out.shape[1:], dtype=self.images.dtype)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 6, 4, stride=2, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(0.2),
        nn.Conv2d(6, 1, 4), nn.Flatten(0),
    )  # fmt: skip
    model = nn.ModuleDict({"generator": generator, "critic": critic}).to(dtype)
    images, held_out = _blobs(32, dtype), _blobs(32, dtype)
    images[::2] = torch.rand(16, 1, 8, 8, dtype=dtype) * 2 - 1  # every other image is noise
    weights = torch.zeros(32, dtype=dtype, requires_grad=True)
    return Setup(model, images, held_out, torch.randn(32, 4, 1, 1, dtype=dtype), [weights])


def _blobs(n: int, dtype: torch.dtype) -> Tensor:
    """Bright spots, each at a place of its own."""
    at = torch.arange(8, dtype=dtype)
    row, column = 2 + 3 * torch.rand(2, n, 1, dtype=dtype)
    spot = torch.exp(-((at - row) ** 2)[:, :, None] / 4 - ((at - column) ** 2)[:, None] / 4)
    return 2 * spot[:, None] - 1


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """The maximum mean discrepancy of two sets of images, by a kernel of 1/(1 + distance²)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (1 / (1 + (a.flatten(1)[:, None] - b.flatten(1)).square().mean(-1))).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
