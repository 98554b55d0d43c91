"""Random changes of training images, to which an encoder should be invariant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import place


@dataclass(frozen=True)
class Augment:
    """The sizes of random changes, which are drawn for each image.

    mirror: swap left and right in half of the images. shift: move by up to this share of the side. turn: turn by up to
    this many degrees. zoom: enlarge or shrink by a factor between 1/(1 + zoom) and 1 + zoom, in width and height apart.
    light: multiply contrast by a factor in 1 ± light, and add up to ± light, in units of the standard deviation.
    """

    mirror: bool = False
    shift: float = 0.0
    turn: float = 0.0
    zoom: float = 0.0
    light: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shift", "turn", "zoom", "light"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"few_shot: {name} of the augmentation must be at least 0, got {value}.")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return changed images of the same shape (n, channels, height, width), which are normalised."""
        if not len(x):
            return x

        def uniform(*size: int) -> Tensor:
            """Return numbers between −1 and 1, drawn on the CPU, so that all devices get the same."""
            return place(2 * torch.rand(len(x), *size, generator=generator) - 1, x.device)

        if self.mirror:
            x = torch.where((uniform() < 0)[:, None, None, None], x.flip(-1), x)
        if max(self.shift, self.turn, self.zoom) > 0:
            # each matrix maps a place in the new image to one in the old
            angle = uniform() * math.radians(self.turn)
            scale = torch.exp(uniform(2) * math.log1p(self.zoom))
            rows = [torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)]
            turned = torch.stack(rows, 1).view(-1, 2, 2) * scale[:, None]
            moved = 2 * self.shift * uniform(2)
            grid = F.affine_grid(torch.cat([turned, moved[..., None]], 2), list(x.shape), align_corners=False)
            x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
        if self.light:
            change = self.light * uniform(2)[..., None, None, None]
            x = x * (1 + change[:, 0]) + change[:, 1]
        return x
