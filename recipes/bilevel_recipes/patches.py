"""Features of images that are learnt from the images themselves, without labels (Coates, Lee & Ng, AISTATS 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_SAMPLED = 50_000  # patches that the filters are learnt from
_STATISTICS = 500  # images that mean and deviation of each feature are estimated from
_ITERATIONS = 10  # of k-means; the filters hardly move after that
_CHUNK = 2**21  # numbers that one chunk of responses may have: 8 MB, which stays in the cache


@dataclass(frozen=True)
class Patches:
    """Filters, and how an image becomes the average response to each of them in its four quarters.

    A patch x is normalised, z = (x − mean(x)) / √(var(x) + flat), and whitened. Each centroid d of k-means on whitened
    patches gives two features: max(0, d·z − θ) and max(0, −d·z − θ), averaged over the patches of a quarter.
    """

    filters: Tensor  # count × channels × size × size; whitening is part of them, and each has mean zero
    bias: Tensor  # count
    flat: float
    threshold: float
    stride: int
    mean: Tensor  # of each feature
    deviation: Tensor

    @classmethod
    def learn(
        cls,
        images: NDArray[np.uint8],
        size: int | None = None,
        count: int | None = None,
        seed: int = 0,
        *,
        threshold: float = 0.5,
        stride: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Patches:
        """Learn filters from images, N × H × W or N × H × W × 3.

        size of a patch, count of filters and stride are chosen by the size and number of the images unless given.
        """
        x = _channels_first(images)
        size = size or patch_size(*x.shape[2:])
        default_count, default_stride = effort(x.size // x.shape[1])
        stride = stride or default_stride
        flat = 0.0025 * float(x[:1000].var()) + 1e-12
        generator = torch.Generator().manual_seed(seed)
        patches = _normalised(_sample(x, size, generator).to(device), flat)
        mean, whitening = _whitening(patches)
        centroids = _centroids((patches - mean) @ whitening, count or default_count, generator)
        filters = centroids @ whitening  # d·(W(z − m)) = (dW)·z − dW·m
        bias = filters @ mean
        filters = filters - filters.mean(1, keepdim=True)  # subtracts the mean of the patch
        shape = (-1, x.shape[1], size, size)
        none = torch.empty(0, device=device)
        raw = cls(filters.reshape(shape), bias, flat, threshold, stride, none, none)
        some = torch.randperm(len(x), generator=generator)[:_STATISTICS].numpy()
        response = raw._pooled(x[some])
        return cls(raw.filters, bias, flat, threshold, stride, response.mean(0), response.std(0, correction=0))

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return N × D standardised features of N images of the size and colour that the filters were learnt from."""
        scale = torch.where(self.deviation > 0, 1 / self.deviation, 0.0)
        return ((self._pooled(_channels_first(images)) - self.mean) * scale).cpu().numpy()

    @torch.no_grad()
    def _pooled(self, x: NDArray[np.uint8]) -> Tensor:
        size = self.filters.shape[-1]
        outputs = [(side - size) // self.stride + 1 for side in x.shape[2:]]
        chunk = max(1, _CHUNK // (len(self.filters) * outputs[0] * outputs[1]))
        result = torch.empty(len(x), 8 * len(self.filters), device=self.filters.device)
        for start in range(0, len(x), chunk):
            part = torch.from_numpy(x[start : start + chunk]).to(self.filters.device).float()
            result[start : start + chunk] = self._responses(part)
        return result

    def _responses(self, x: Tensor) -> Tensor:
        size, stride = self.filters.shape[-1], self.stride
        centre = x - x.mean((1, 2, 3), keepdim=True)  # the variance below is a difference of squares
        box = F.avg_pool2d(
            torch.cat([centre.mean(1, keepdim=True), centre.square().mean(1, keepdim=True)], 1), size, stride
        )
        deviation = (box[:, 1:] - box[:, :1].square()).clamp_min(0).add(self.flat).sqrt()
        z = F.conv2d(centre, self.filters, stride=stride).div_(deviation).sub_(self.bias[:, None, None])
        up = F.adaptive_avg_pool2d((z - self.threshold).relu_(), 2)
        down = F.adaptive_avg_pool2d(z.neg_().sub_(self.threshold).relu_(), 2)
        return torch.cat([up, down], 1).flatten(1)


def patch_size(height: int, width: int) -> int:
    """The side of a patch: 6 pixels, or less for images that are smaller than 18 pixels."""
    return max(2, min(6, min(height, width) // 3))


def effort(pixels: int) -> tuple[int, int]:
    """Number of filters and stride for images that have so many pixels altogether."""
    return (400, 1) if pixels <= 16_000_000 else (200, 2)


def _channels_first(images: Any) -> NDArray[np.uint8]:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim not in (3, 4):
        got = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"recipes.patches: images are one uint8 array, N × H × W or N × H × W × 3; got {got}.")
    if images.ndim == 4 and images.shape[-1] not in (1, 3):
        raise ValueError(f"recipes.patches: images have 1 or 3 colours, as the last dimension; got {images.shape}.")
    if len(images) == 0 or min(images.shape[1:3]) < 4:
        raise ValueError(
            f"recipes.patches: at least one image, of 4 × 4 pixels or more, is needed; got {images.shape}."
        )
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _sample(x: NDArray[np.uint8], size: int, generator: torch.Generator) -> Tensor:
    """Patches at random places of random images, one in each row."""
    image, row, column = (
        torch.randint(n, (_SAMPLED,), generator=generator).numpy()
        for n in (len(x), x.shape[2] - size + 1, x.shape[3] - size + 1)
    )
    views = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
    return torch.from_numpy(views[image, :, row, column].reshape(_SAMPLED, -1)).float()


def _normalised(patches: Tensor, flat: float) -> Tensor:
    centred = patches - patches.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + flat).sqrt()


def _whitening(patches: Tensor, regular: float = 0.1) -> tuple[Tensor, Tensor]:
    """Mean, and W = (Cov + regular·I)^(−1/2)."""
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((patches - mean).T, correction=0))
    return mean, vectors * (values.clamp_min(0) + regular).rsqrt() @ vectors.T


def _centroids(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Spherical k-means: unit vectors, each the mean direction of the rows that point along it most (or against)."""
    d = F.normalize(torch.randn(count, x.shape[1], generator=generator).to(x))
    for _ in range(_ITERATIONS):
        total = torch.zeros_like(d)
        for part in x.split(4096):
            value, index = _strongest(part @ d.T)
            total.index_add_(0, index, part * value[:, None])
        d = F.normalize(d + total)
    return d


def _strongest(product: Tensor) -> tuple[Tensor, Tensor]:
    index = product.abs().argmax(1)
    return product.gather(1, index[:, None]).squeeze(1), index
