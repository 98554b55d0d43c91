"""How far the influence of rows can be believed: three measurements that train again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import bilevel_plugin as bilevel
from bilevel_plugin import Forecast

from .influence import Influence

if TYPE_CHECKING:
    from .attribution import Attribution

SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
GOOD, FAIR = 0.9, 0.6


@dataclass(frozen=True)
class Trust:
    """How far an influence can be believed. `print(trust)` says it in words.

    Attributes:
        forecast: what leaving out the most harmful rows promised for the mean loss of the queries, and what happened.
        agreement: rank correlation between predicted and real losses of each query, over random subsets; the mean over
            queries (the linear datamodelling score, LDS). NaN if there were fewer than three subsets.
        error: its standard error over queries.
        subsets: the number of random subsets.
        left_out: the share of the rows that each left out.
    """

    forecast: Forecast
    agreement: float
    error: float
    subsets: int
    left_out: float

    @property
    def smoothness(self) -> float:
        """The metasmoothness of the training, in [−1, 1]."""
        return self.forecast.smoothness

    def lines(self) -> list[tuple[str, str, str]]:
        """Return name, figure and explanation of each measurement."""
        radius = self.forecast.radius
        return [
            ("Smoothness", f"{self.smoothness:.2f}", "metasmoothness, at most 1; below 0.9 look at the other figures"),
            ("Forecast", f"{radius:.0%}" if radius else "none", self.forecast.sentence()),
            (
                "Checked by training again",
                f"{self.agreement:.2f}",
                f"rank correlation of predicted and real losses, ± {self.error:.2f}, over {self.subsets} trainings "
                f"without {self.left_out:.1%} of the rows",
            ),
        ]

    def verdict(self) -> str:
        """Return one sentence that says how far to believe the lists."""
        if not self.agreement >= FAIR:  # NaN is not
            return "Do not rely on these lists: training again does not confirm them."
        if self.agreement >= GOOD:
            return "The lists can be believed: training again gives what they predict."
        return "The first rows of each list are probably right, and the order of the others is not."

    def __str__(self) -> str:
        return "\n".join([f"{name:<26}{figure:>6}  {words}" for name, figure, words in self.lines()] + [self.verdict()])


def trust(
    attribution: Attribution, found: Influence, *, subsets: int, seed: int,
    progress: Callable[[float, str], None] | None = None,
) -> Trust:  # fmt: skip
    """Train on random subsets, and without the most harmful rows; see `Trust`."""
    say = progress or (lambda share, words: None)
    say(0.0, "forecast")
    forecast = harmful(attribution, found)
    n = attribution.shape[0]
    out = max(1, round(found.share * n))
    kept = random_subsets(n, out, subsets, seed)
    real: list[Tensor] = []
    for s, mask in enumerate(kept):
        say(0.5 + 0.5 * s / max(1, len(kept)), f"training {s + 1} of {len(kept)} on a random subset")
        real.append(attribution.losses(spread(mask, attribution.shape).to(attribution.dtype)).cpu())
    scores = np.array([np.nan])
    if len(real) > 2:
        predicted = found.predicted(torch.stack([spread(m, attribution.shape) for m in kept]))
        scores = rank_correlations(predicted.numpy(), torch.stack(real).numpy())
    error = float(np.nanstd(scores) / max(1, np.sqrt(np.isfinite(scores).sum()))) if len(real) > 2 else float("nan")
    mean = float(np.nanmean(scores)) if np.isfinite(scores).any() else float("nan")
    return Trust(forecast, mean, error, len(real), out / n)


def harmful(attribution: Attribution, found: Influence, sizes: Sequence[float] = SIZES) -> Forecast:
    """Return the forecast of leaving out the rows that harm the mean loss of the queries most."""
    weights = attribution.point()
    order = torch.argsort(found.of_rows.mean(0))  # the most harmful first

    def drop(size: float, _: Sequence[Tensor]) -> list[Tensor]:
        gone = torch.zeros(len(order))
        gone[order[: max(1, round(size * len(order)))]] = 1
        return [-weights.detach() * spread(gone, attribution.shape).to(weights)]

    tried = sorted({max(1, round(s * len(order))) / len(order) for s in sizes})
    return bilevel.forecast(
        attribution.train, weights, direction=drop, sizes=tried, loss=lambda loop: attribution.losses_of(loop).mean(),
        unit="dropping {:.1%} of the rows",
    )  # fmt: skip


def random_subsets(rows: int, out: int, count: int, seed: int) -> list[Tensor]:
    """Return masks of random subsets, 0 for the rows that are left out."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.ones(count, rows)
    for mask in masks:
        mask[torch.randperm(rows, generator=generator)[:out]] = 0
    return list(masks)


def spread(of_rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a number for each weight from one for each row."""
    return of_rows.reshape(-1, *[1] * (len(shape) - 1)).expand(*shape)


def rank_correlations(predicted: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation of each column; NaN where one of the two is constant."""
    a, b = (_ranks(x) for x in (predicted, real))
    a, b = a - a.mean(0), b - b.mean(0)
    size = np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return np.where(size > 0, (a * b).sum(0) / np.where(size > 0, size, 1), np.nan)


def _ranks(values: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return np.asarray(rankdata(values, axis=0))
