"""The models that a recipe can name. Any other `nn.Module` works from Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .vision import torchvision

Shape = tuple[int, ...]  # of one sample: (D,) or (C, H, W)


def linear(shape: Shape, classes: int) -> nn.Module:
    """x·W + b, from zero: a convex inner problem, the same from every seed."""
    head = nn.Linear(_size(shape), classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), head)


def mlp(shape: Shape, classes: int, width: int = 100) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_size(shape), width), nn.ReLU(), nn.Linear(width, classes))


def cnn(shape: Shape, classes: int, width: int = 16) -> nn.Module:
    """Two strided convolutions and a linear layer: average pooling, since a max has no use for a 2nd derivative."""
    c, h, w = _image(shape, "cnn")
    return nn.Sequential(
        nn.Conv2d(c, width, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * (h // 4) * (w // 4), classes),
    )  # fmt: skip


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images: a 3 × 3 convolution, no pooling."""
    c, _, _ = _image(shape, "resnet18")
    model = torchvision("models").resnet18(weights=None, num_classes=classes)
    model.conv1 = nn.Conv2d(c, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
}


def build(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """The named model, initialised from the seed without touching the global generator."""
    if name not in MODELS:
        raise ValueError(f"recipes.models: no model {name!r}; one of {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](shape, classes)


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _image(shape: Shape, name: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(
            f"recipes.models: {name} needs images (C, H, W); a sample here has shape {shape}: use linear or mlp"
        )
    return shape[0], shape[1], shape[2]
