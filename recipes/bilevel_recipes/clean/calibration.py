"""How many labels are wrong: an interval from the scores, and from the rows that are known.

The score of a label is a posterior under a model of noise, and people make other noise than models do. So the
probability that a label is wrong is taken to be

    w(s) = ε + (1 − ε)·σ(a + b·logit(1 − s))

for the score s. The prior of (a, b, ε) says how far scores were from the truth on data with human and other noise.
Known rows turn it into a posterior on a grid:

- rows whose given and whose right label are known, each by w or 1 − w;
- rows of which only the right label is known: they show how the scores of right labels are spread, which is
  (1 − w(s)) times the spread of all scores.

Reviewed rows were chosen by their scores, which the likelihood of w allows for. But they are the end of a curve that is
not exactly of this form, and right labels are on easier rows than all labels. So all rows of these two sorts together
count as `MOST` rows at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

# The prior: mean and deviation of a, median and log-deviation of b, mean of ε.
SHIFT, SLOPE, FLOOR = (-0.75, 1.1), (0.75, 0.45), 0.01
MOST = 100.0  # as many rows do all reviewed ones count at most
BINS = 240
LIMIT = 14.0  # logits beyond it are clipped
COVERAGE = 0.9
LEAST = 0.1  # the list of best expected F1 has no rows whose labels are less probably wrong


class Range(NamedTuple):
    """An estimate, and the interval that holds the true figure with a probability of 90 %."""

    value: float
    low: float
    high: float


UNKNOWN = Range(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True)
class Evidence:
    """What is known of M rows.

    belief: the probability that the given label is right, as if nobody had looked at the row. known: whether the right
    label is known. both: whether the given one is known as well, and wrong: whether these differ. checked: whether the
    row belongs to a random sample.
    """

    belief: Numbers
    known: Mask
    wrong: Mask
    both: Mask
    checked: Mask


@dataclass(frozen=True)
class Trust:
    """The posterior of w. weights: of the points of the grid. curves: points × bins. bins: the bin of each row.
    known, wrong: see `Evidence`; a known row counts with what is known of it."""

    weights: Numbers
    curves: Numbers
    bins: NDArray[np.int64]
    known: Mask
    found: Mask

    @property
    def probability(self) -> Numbers:
        """The expected probability that each label is wrong; of a known row, that of others with its score."""
        return (self.weights @ self.curves)[self.bins]

    def wrong(self, rows: Mask) -> Range:
        """Return the number of wrong labels among these rows."""
        open_ones = np.bincount(self.bins[rows & ~self.known], minlength=self.curves.shape[1]).astype(float)
        found = float(self.found[rows].sum())
        mean, deviation = self.curves @ open_ones, np.sqrt((self.curves * (1 - self.curves)) @ open_ones)
        low, high = _interval(self.weights, mean, deviation)
        count = open_ones.sum()
        return Range(*(found + float(np.clip(v, 0, count)) for v in (self.weights @ mean, low, high)))

    def share(self, rows: Mask) -> Range:
        """Return the share of wrong labels among these rows."""
        count = int(rows.sum())
        if not count:
            return UNKNOWN
        found = self.wrong(rows)
        return Range(found.value / count, found.low / count, found.high / count)

    def by_class(self, given: NDArray[np.int64], classes: int) -> Numbers:
        """Return the expected share of wrong labels among the open rows of each given label; NaN without any."""
        rows = ~self.known
        count = np.bincount(given[rows], minlength=classes)
        wrong = np.bincount(given[rows], weights=self.probability[rows], minlength=classes)
        return np.where(count > 0, wrong / np.maximum(count, 1), np.nan)


def calibrated(rows: Evidence) -> Trust:
    """Return the posterior of w for these rows."""
    edges = np.linspace(-LIMIT, LIMIT, BINS + 1)
    logit = np.clip(_logit(1 - rows.belief), -LIMIT + 1e-9, LIMIT - 1e-9)
    bins = (np.digitize(logit, edges) - 1).astype(np.int64)
    log_prior, curves = _grid((edges[1:] + edges[:-1]) / 2)

    def counts(mask: Mask) -> Numbers:
        return np.bincount(bins[mask], minlength=BINS).astype(float)

    log_wrong, log_right = np.log(curves), np.log1p(-curves)
    log_posterior = log_prior
    for sample, most in ((rows.checked, np.inf), (~rows.checked, MOST)):
        both = rows.both & sample
        weight = min(1.0, most / max(1, both.sum()))
        log_posterior = log_posterior + weight * (log_wrong @ counts(both & rows.wrong))
        log_posterior += weight * (log_right @ counts(both & ~rows.wrong))
    alone = rows.checked & ~rows.both
    if alone.any():
        everyone = counts(~alone)
        like = log_right @ counts(alone) - alone.sum() * np.log((1 - curves) @ everyone / everyone.sum())
        log_posterior += min(1.0, MOST / alone.sum()) * like
    weights = np.exp(log_posterior - log_posterior.max())
    return Trust(weights / weights.sum(), curves, bins, rows.known, rows.wrong & rows.both)


def _grid(logit: Numbers) -> tuple[Numbers, Numbers]:
    """Return the log of the prior of each point, and w of each point and bin."""
    a, b, floor = np.meshgrid(
        np.arange(-5, 5.01, 0.25), SLOPE[0] * np.exp(SLOPE[1] * np.arange(-3, 3.01, 0.5)),
        np.array([0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]) * FLOOR, indexing="ij",
    )  # fmt: skip
    a, b, floor = (v.ravel()[:, None] for v in (a, b, floor))
    log_prior = -np.square((a - SHIFT[0]) / SHIFT[1]) / 2 - np.square(np.log(b / SLOPE[0]) / SLOPE[1]) / 2
    curves = floor + (1 - floor) / (1 + np.exp(-(a + b * logit)))
    widths = np.gradient(np.unique(floor))  # the points of ε are not evenly spaced
    log_prior = log_prior - floor / FLOOR + np.log(widths[np.searchsorted(np.unique(floor), floor)])
    return log_prior[:, 0], np.clip(curves, 1e-7, 1 - 1e-7)


def _logit(p: Numbers) -> Numbers:
    p = np.clip(p, 1e-15, 1 - 1e-15)
    return np.log(p) - np.log1p(-p)


def _interval(weights: Numbers, mean: Numbers, deviation: Numbers) -> tuple[float, float]:
    """Return the quantiles of a mixture of normal distributions."""
    tail, nodes = (1 - COVERAGE) / 2, np.array([-1.8, -1.2, -0.7, -0.25, 0.25, 0.7, 1.2, 1.8])
    chance = np.exp(-np.square(nodes) / 2)
    values = (mean[:, None] + deviation[:, None] * nodes).ravel()
    mass = (weights[:, None] * chance / chance.sum()).ravel()
    order = np.argsort(values)
    steps = np.cumsum(mass[order])
    low, high = (values[order][np.searchsorted(steps, q)] for q in (tail, 1 - tail))
    return float(low), float(high)


def best_length(probability: Numbers) -> int:
    """Return the number of rows, of these that are sorted by falling probability, whose expected F1 is highest."""
    if not len(probability):
        return 0
    right = np.cumsum(probability)
    f1 = 2 * right / (np.arange(1, len(right) + 1) + right[-1])
    return int(f1.argmax()) + 1


def wished(
    rows: Evidence, trust: Trust, *, length: int | None, recall: float | None, precision: float | None
) -> NDArray[np.int64]:
    """Return the open rows to list, the most suspicious first: so many, or as a recall or a precision asks for."""
    order = np.argsort(rows.belief, kind="stable")
    order = order[~rows.known[order]]
    p = trust.probability[order]
    if length is not None:
        return order[:length]
    right = np.cumsum(p)
    if recall is not None:
        return order[: int(np.searchsorted(right, recall * right[-1])) + 1]
    if precision is not None:
        enough = np.flatnonzero(right / np.arange(1, len(p) + 1) >= precision)
        return order[: int(enough[-1]) + 1 if len(enough) else 0]
    return order[: min(best_length(p), int((p >= LEAST).sum()))]
