"""An image classifier by the usual recipe: mixup, label smoothing, warm-up and cosine, BatchNorm, and an EMA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, CLASSES = 3, 16, 4


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.body(x) + self.shortcut(x))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        Residual(4, 4, 1),
        Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


@dataclass
class Setup:
    model: nn.Module
    ema: AveragedModel
    loader: DataLoader[tuple[Tensor, ...]]
    x_val: Tensor
    y_val: Tensor
    outer: list[Tensor]  # the logit of the label smoothing, and a log-weight for each class


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    (x, y), (x_val, y_val) = _images(64, dtype), _images(32, dtype)
    model = network().to(dtype)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    outer = [torch.tensor(-2.0, dtype=dtype), 0.1 * torch.randn(CLASSES, dtype=dtype)]
    return Setup(model, ema, loader, x_val, y_val, [v.requires_grad_() for v in outer])


def _images(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Noise with a bright corner; which corner it is, is the class."""
    x, y = torch.randn(n, 1, 8, 8, dtype=dtype), torch.randint(CLASSES, (n,))
    for image, corner in zip(x, y.tolist(), strict=True):
        row, column = divmod(corner, 2)
        image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return x, y


def mixup(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each image blended with another one, and the targets likewise; drawn with torch."""
    share = torch.distributions.Beta(0.4, 0.4).sample().to(x.dtype)
    other = torch.randperm(len(x))
    targets = nn.functional.one_hot(y, CLASSES).to(x.dtype)
    return x.lerp(x[other], share), targets.lerp(targets[other], share)


def smoothed_loss(logits: Tensor, targets: Tensor, smoothing: Tensor, log_weights: Tensor) -> Tensor:
    """Cross entropy with label smoothing and class weights, which torch's own takes as numbers only."""
    smoothing = smoothing.sigmoid()
    targets = (1 - smoothing) * targets + smoothing / CLASSES
    return -(targets * log_weights.exp() * logits.log_softmax(1)).sum(1).mean()
