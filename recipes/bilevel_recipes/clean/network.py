"""A small network that is trained on the rows themselves, out of fold: what a linear judge of features can't see.

Each row's probabilities come from a network that was trained on other rows, so that it has not learnt a wrong label by
heart. Their logarithms are a second view of the rows, whose judge is mixed with that of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

SIDE = 32  # images are trained on at most so many pixels to a side
SHIFT = 3  # pixels by which an image is moved at random, as a share of SIDE
SMOOTH = 0.05  # of the labels, some of which are wrong
FEWEST = 1e-4  # added to probabilities before their logarithm is taken


@dataclass(frozen=True)
class Training:
    """How the networks are trained."""

    folds: int = 3
    epochs: int = 12
    batch: int = 100
    rate: float = 4e-3
    width: int = 32


def out_of_fold(
    x: NDArray[Any],
    y: NDArray[np.int64],
    classes: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    training: Training | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> NDArray[np.float32]:
    """Return M × C probabilities by networks that were not trained on the row.

    x: M × H × W or M × H × W × 3 images, uint8, for convolutions; or M × D features, for a network of two layers.
    progress: is called with the share of the work that is done.
    """
    how, place = training or Training(), torch.device(device)
    rows = _images(x) if x.ndim > 2 else torch.from_numpy(np.ascontiguousarray(x, np.float32))
    rows, labels = rows.to(place), torch.from_numpy(np.array(y, np.int64)).to(place)
    fold = _folds(labels, how.folds, seed)
    found = torch.zeros(len(labels), classes, device=place)
    done = 0
    with torch.random.fork_rng(devices=[] if place.type == "cpu" else None):
        for k in range(how.folds):
            torch.manual_seed(seed + k)
            model = (_convolutions if x.ndim > 2 else _layers)(rows.shape[1], classes, how.width).to(place)
            train = torch.nonzero(fold != k)[:, 0]
            for _ in _epochs(model, rows, labels, train, how):
                done += 1
                progress(done / (how.folds * how.epochs))
            here = torch.nonzero(fold == k)[:, 0]
            found[here] = _predicted(model, rows, here)
    return found.cpu().numpy()


def view(probabilities: NDArray[Any]) -> NDArray[np.float32]:
    """Return the view of the rows that probabilities are: their logarithms, centred in each row."""
    log_p = np.log(np.asarray(probabilities, np.float64) + FEWEST)
    return (log_p - log_p.mean(1, keepdims=True)).astype(np.float32)


def _images(x: NDArray[Any]) -> Tensor:
    images = torch.from_numpy(np.ascontiguousarray(x)).float()
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    side = max(images.shape[2:])
    if side > SIDE:
        size = [max(8, round(s * SIDE / side)) for s in images.shape[2:]]
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    mean, deviation = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    return ((images - mean) / deviation.clamp_min(1e-3)).contiguous(memory_format=torch.channels_last)


def _folds(y: Tensor, count: int, seed: int) -> Tensor:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    order = order[torch.argsort(y[order], stable=True)]
    fold = torch.empty_like(y)
    fold[order] = torch.arange(len(y), device=y.device) % count
    return fold


def _convolutions(channels: int, classes: int, width: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    model = nn.Sequential(
        *block(channels, width), nn.MaxPool2d(2, ceil_mode=True),
        *block(width, 2 * width), nn.MaxPool2d(2, ceil_mode=True),
        *block(2 * width, 3 * width), nn.AdaptiveMaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(12 * width, classes),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _layers(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 8 * width), nn.BatchNorm1d(8 * width), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(8 * width, classes),
    )  # fmt: skip


def _epochs(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, how: Training) -> Iterator[None]:
    """Train the model on these rows, and yield after each epoch."""
    steps = how.epochs * max(1, len(rows) // how.batch)
    adam = torch.optim.AdamW(model.parameters(), how.rate, weight_decay=0.05)
    course = torch.optim.lr_scheduler.OneCycleLR(adam, how.rate, total_steps=steps + 1)
    model.train()
    for _ in range(how.epochs):
        order = rows[torch.randperm(len(rows), device="cpu").to(rows.device)]
        for batch in order.chunk(max(1, len(rows) // how.batch)):
            inputs = _moved(x[batch]) if x.dim() == 4 else x[batch]
            adam.zero_grad()
            F.cross_entropy(model(inputs), y[batch], label_smoothing=SMOOTH).backward()
            adam.step()
            course.step()
        yield


def _moved(images: Tensor) -> Tensor:
    """Move the images of a batch, all in the same way, by a few pixels."""
    most = max(1, round(SHIFT * min(images.shape[2:]) / SIDE))
    down, right = torch.randint(-most, most + 1, (2,)).tolist()
    return torch.roll(images, (down, right), (2, 3))


@torch.no_grad()
def _predicted(model: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    model.eval()
    return torch.cat([model(x[part]).softmax(1) for part in rows.split(500)])
