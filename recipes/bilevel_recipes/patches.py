"""Features of images that are learnt from the images themselves, without labels (Coates, Lee & Ng, AISTATS 2011).

`python -m bilevel_recipes.patches --data-root DIR` prints how well classes are told apart by them, and by pixels.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .data import Split, load, split

_SAMPLED = 50_000  # patches that the filters are learnt from
_STATISTICS = 1000  # images that the mean and deviation of each feature are estimated from
_ITERATIONS = 10  # of k-means; the filters hardly move after that
_CHUNK = 2**20  # numbers that one chunk of responses may have: 4 MB, which stay in the cache
_GRID = 3  # an image is pooled in 3 × 3 parts
SMALLEST = 4  # pixels of the shorter side


@dataclass(frozen=True)
class Patches:
    """Filters, and how an image becomes its mean response to each of them in 3 × 3 parts of the image.

    A patch x is normalised, z = (x − mean(x)) / √(var(x) + flat), and whitened. Each centroid d that k-means finds
    among whitened patches gives two features, max(0, d·z − θ) and max(0, −d·z − θ), averaged over the patches of
    a part of the image. The features are the square roots of these averages, standardised.
    """

    filters: Tensor  # count × channels × size × size; whitening is part of them, and each has mean zero
    bias: Tensor  # count
    flat: float
    threshold: float
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
        device: torch.device | str = "cpu",
    ) -> Patches:
        """Learn filters from images, N × H × W or N × H × W × 3.

        size: the side of a patch in pixels. count: the number of filters, each of which gives 18 features. Both are
        chosen by the size and number of the images unless they are given.
        """
        x = _channels_first(images)
        size = size or patch_size(*x.shape[2:])
        _refuse_if_smaller(x, size)
        flat = 0.0025 * float(x[:1000].var()) + 1e-12
        generator = torch.Generator().manual_seed(seed)
        patches = _normalised(_sample(x, size, generator).to(device), flat)
        mean, whitening = _whitening(patches)
        count = count or filter_count(x.size // x.shape[1])
        filters = _centroids((patches - mean) @ whitening, count, generator) @ whitening  # d·W(z − m) = dW·z − dW·m
        bias = filters @ mean
        filters = filters - filters.mean(1, keepdim=True)  # so that they subtract the mean of a patch
        raw = cls(filters.reshape(-1, x.shape[1], size, size), bias, flat, threshold, mean, mean)
        some = torch.randperm(len(x), generator=generator)[:_STATISTICS].numpy()
        pooled = raw._pooled(x[some])
        return replace(raw, mean=pooled.mean(0), deviation=pooled.std(0, correction=0))

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return N × D standardised features of N images of the size and colour that the filters were learnt from."""
        x = _channels_first(images)
        if x.shape[1] != self.filters.shape[1]:
            raise ValueError(
                f"recipes.patches: the filters were learnt from images of {self.filters.shape[1]} colours; these have "
                f"{x.shape[1]}."
            )
        _refuse_if_smaller(x, self.filters.shape[-1])
        scale = torch.where(self.deviation > 0, 1 / self.deviation, 0.0)
        return self._pooled(x).sub_(self.mean).mul_(scale).cpu().numpy()

    @torch.no_grad()
    def _pooled(self, x: NDArray[np.uint8]) -> Tensor:
        count, _, size, _ = self.filters.shape
        chunk = max(1, _CHUNK // (count * (x.shape[2] - size + 1) * (x.shape[3] - size + 1)))
        result = torch.empty(len(x), 2 * _GRID**2 * count, device=self.filters.device)
        for start in range(0, len(x), chunk):
            part = torch.from_numpy(x[start : start + chunk]).to(self.filters.device).float()
            result[start : start + chunk] = self._responses(part)
        return result

    def _responses(self, x: Tensor) -> Tensor:
        size = self.filters.shape[-1]
        x = x - x.mean((1, 2, 3), keepdim=True)  # the variance below is a difference of squares
        moments = torch.stack([x.mean(1), x.square().mean(1)], 1)
        mean, square = F.avg_pool2d(moments, size, stride=1).split(1, dim=1)
        deviation = (square - mean.square()).clamp_min(0).add(self.flat).sqrt()
        z = F.conv2d(x, self.filters).div_(deviation).sub_(self.bias[:, None, None])
        both = [F.adaptive_avg_pool2d(part.sub_(self.threshold).relu_(), _GRID) for part in (z.neg(), z)]
        return torch.cat(both, 1).flatten(1).sqrt_()


def patch_size(height: int, width: int) -> int:
    """Return the side of a patch: 8 pixels, or a third of the shorter side of images that are smaller than 24."""
    return max(2, min(8, round(min(height, width) / 3)))


def filter_count(pixels: int) -> int:
    """Return the number of filters for images of so many pixels altogether: 200, but fewer above 25 million pixels."""
    return max(50, min(200, 5_000_000_000 // pixels))


def reduce(x: NDArray[np.float32], dimensions: int, whitening: float = 0.5, seed: int = 0) -> NDArray[np.float32]:
    """Return the largest principal components u of the rows of x, each divided by its deviation to the power whitening.

    0 keeps their variances, 1 makes all of them 1, which is what gradient descent likes best. The result is scaled as
    a whole to variance 1 on average. The components are those of 10,000 rows if there are more.
    """
    from sklearn.decomposition import PCA

    some = np.random.default_rng(seed).permutation(len(x))[:10_000] if len(x) > 10_000 else slice(None)
    pca = PCA(min(dimensions, *x.shape), random_state=seed).fit(x[some])
    variance = np.maximum(pca.explained_variance_, 1e-6 * pca.explained_variance_[0])
    result = pca.transform(x) * (variance ** (-whitening / 2)).astype(np.float32)
    return result / np.sqrt(np.square(result).mean())


def _channels_first(images: Any) -> NDArray[np.uint8]:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim not in (3, 4):
        got = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"recipes.patches: images are one uint8 array, N × H × W or N × H × W × 3; got {got}.")
    if images.ndim == 4 and images.shape[-1] not in (1, 3):
        raise ValueError(f"recipes.patches: images have 1 or 3 colours, as the last dimension; got {images.shape}.")
    if len(images) == 0 or min(images.shape[1:3]) < SMALLEST:
        raise ValueError(
            f"recipes.patches: at least one image, of {SMALLEST} × {SMALLEST} pixels or more, is needed; got "
            f"{images.shape}."
        )
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _refuse_if_smaller(x: NDArray[np.uint8], size: int) -> None:
    most = min(x.shape[2:])
    if not 2 <= size <= most - _GRID + 1:
        raise ValueError(
            f"recipes.patches: a patch of {size} × {size} pixels has no 3 × 3 places in images of {x.shape[2]} × "
            f"{x.shape[3]} pixels; choose a size from 2 to {most - _GRID + 1}."
        )


def _sample(x: NDArray[np.uint8], size: int, generator: torch.Generator) -> Tensor:
    """Return patches at random places of random images, one in each row; no more than there are."""
    places = (len(x), x.shape[2] - size + 1, x.shape[3] - size + 1)
    count = min(_SAMPLED, math.prod(places))
    image, row, column = (torch.randint(n, (count,), generator=generator).numpy() for n in places)
    views = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
    return torch.from_numpy(views[image, :, row, column].reshape(count, -1)).float()


def _normalised(patches: Tensor, flat: float) -> Tensor:
    centred = patches - patches.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + flat).sqrt()


def _whitening(patches: Tensor, regular: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return the mean and W = (Cov + regular·I)^(−1/2)."""
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((patches - mean).T, correction=0))
    return mean, vectors * (values.clamp_min(0) + regular).rsqrt() @ vectors.T


def _centroids(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return unit vectors by spherical k-means, where a row belongs to the vector of largest |product| with it."""
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


def measure(
    data_root: Path,
    datasets: tuple[str, ...] = ("digits", "mnist", "fashion-mnist", "svhn", "cifar10"),
    dimensions: tuple[int, ...] = (256, 512),
    whitening: tuple[float, ...] = (0.0, 0.5, 1.0),
    seed: int = 0,
) -> None:
    """Print the accuracy of a linear model and of 10 nearest neighbours (by cosine) on pixels and on patches.

    The features are learnt from training and validation images together, as the cleaning recipe does; labels are used
    for the training images alone. The linear model is a logistic regression with C = 0.02. Seconds are those of the
    features.
    """
    print(f"{'data set':14} {'features':24} {'numbers':>7} {'linear':>7} {'10-NN':>7} {'seconds':>8}")
    for name in datasets:
        part = split(load(name, data_root), 0.0, None, None, seed)
        images = np.concatenate([part.x, part.x_val])
        pixels = images.reshape(len(images), -1).astype(np.float32)
        pixels = (pixels - pixels.mean(0)) / pixels.std()
        start = time.perf_counter()
        patches = Patches.learn(images, seed=seed).encode(images)
        seconds = time.perf_counter() - start
        _print_accuracy(name, "pixels", pixels, part, 0.0)
        for count, exponent in itertools.product(dimensions, whitening):
            start = time.perf_counter()
            x = reduce(patches, count, exponent, seed)
            reducing = time.perf_counter() - start
            _print_accuracy(name, f"patches, whitening {exponent}", x, part, seconds + reducing)


def _print_accuracy(name: str, words: str, x: NDArray[np.float32], part: Split, seconds: float) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    n = len(part.y)
    models = (LogisticRegression(C=0.02, max_iter=1000), KNeighborsClassifier(10, metric="cosine"))
    linear, near = (model.fit(x[:n], part.y).score(x[n:], part.y_val) for model in models)
    print(f"{name:14} {words:24} {x.shape[1]:7} {linear:7.4f} {near:7.4f} {seconds:8.1f}", flush=True)


if __name__ == "__main__":
    import tyro

    tyro.cli(measure)
