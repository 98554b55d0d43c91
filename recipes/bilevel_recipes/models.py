"""The models that a recipe can name. Any other `nn.Module` works from Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


def conv4(shape: Shape, width: int = 64) -> nn.Module:
    """Four strided 3 × 3 convolutions with BatchNorm and ReLU: MAML's network for Omniglot, without its last layer."""
    return _blocks(shape, width, lambda c: [nn.Conv2d(c, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()])


def conv4_pool(shape: Shape, width: int = 64) -> nn.Module:
    """The same with a pooling layer in place of each stride (Vinyals et al. 2016): four times the arithmetic.

    ReLU and pooling can change places; behind the pooling, ReLU has a quarter of the work.
    """
    if min(_image(shape, "conv4-pool")[1:]) < 16:
        raise ValueError(f"recipes.models: conv4-pool halves its images four times; {shape} is too small: use conv4")
    return _blocks(
        shape, width, lambda c: [nn.Conv2d(c, width, 3, 1, 1), nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.ReLU()]
    )


def _blocks(shape: Shape, width: int, block: Callable[[int], list[nn.Module]]) -> nn.Module:
    layers = [layer for c in (_image(shape, "conv4")[0], width, width, width) for layer in block(c)]
    return nn.Sequential(*layers, nn.Flatten())


def resnet18_features(shape: Shape) -> nn.Module:
    """torchvision's ResNet-18 as it is, up to its 512 features: a fifteenth of the work with the small stem."""
    c, _, _ = _image(shape, "resnet18")
    model = torchvision("models").resnet18(weights=None)
    if c != 3:
        model.conv1 = nn.Conv2d(c, 64, 7, 2, 3, bias=False)
    model.fc = nn.Identity()
    return model


ENCODERS: dict[str, Callable[[Shape], nn.Module]] = {
    "conv4": conv4,
    "conv4-pool": conv4_pool,
    "resnet18": resnet18_features,
}


def build_encoder(name: str, shape: Shape, seed: int) -> nn.Module:
    """The named encoder, images to features, initialised from the seed without touching the global generator."""
    if name not in ENCODERS:
        raise ValueError(f"recipes.models: no encoder {name!r}; one of {', '.join(ENCODERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # channels last is the layout in which the CPU's convolutions run fastest, with few channels above all
        return ENCODERS[name](shape).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def autocast(device: torch.device, on: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if on else nullcontext()


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
