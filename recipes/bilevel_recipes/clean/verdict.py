"""The verdict on the labels of a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Range

MISTAKES = 20.0  # one in so many labels that a person has verified is expected to be wrong
SURE = 0.01  # a review may stop once at most this share of the labels that nobody looked at is wrong


@dataclass(frozen=True)
class Verdict:
    """The verdict on each of the M rows that were judged, in the order of `Rows.used`.

    score: the probability that the label is right, by the model; 1 for a row that is known. belief: the same for the
    given label, as if nobody had looked at the row.
    issue: whether the label is on the list of suspects; never for a row that is known.
    suggested: the label, or if it is on the list, the most probable other class.
    probabilities: M × C, the probability of each class, by models that were not trained on that row.
    noise: C × C; noise[c, d] is the probability that a row of class c was labelled d.
    given: the label in the data. truth: the right one of a reviewed row; -1 elsewhere. checked: the rows of the random
    sample.
    checked_accuracy: the share of checked rows whose class those models predict. base_accuracy: the share of the
    most frequent class among them, which a model has to pass. Both are NaN if no row is checked.
    left: how many labels are wrong among the rows that are not known. precision: the share of the list that is wrong.
    by_class: the share of wrong labels among the rows of each given label that are not known.
    near: M × k, the nearest other rows of each row.
    method: a sentence that names the judge. warnings: a sentence for each reason to trust the verdict less.
    history: figures of each outer step. seconds: how long the judging took.
    """

    score: NDArray[np.float64]
    belief: NDArray[np.float64]
    issue: NDArray[np.bool_]
    suggested: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    noise: NDArray[np.float64]
    given: NDArray[np.int64]
    truth: NDArray[np.int64]
    checked: NDArray[np.bool_]
    checked_accuracy: float
    base_accuracy: float
    left: Range
    precision: Range
    by_class: NDArray[np.float64]
    near: NDArray[np.int32]
    method: str
    warnings: list[str] = field(default_factory=list[str])
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0

    @property
    def known(self) -> NDArray[np.bool_]:
        """The rows that a person has looked at: the random sample, and what was reviewed."""
        return self.checked | (self.truth >= 0)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each row from now on: the right one of a reviewed row, and the given one elsewhere."""
        return np.where(self.truth >= 0, self.truth, self.given)

    @property
    def doubted(self) -> NDArray[np.int64]:
        """The rows whose label a person has called right and is probably wrong all the same, the most doubtful first.

        One such label in MISTAKES is expected to be wrong; models that were not trained on the row have to outweigh
        that.
        """
        rows = np.flatnonzero(self.known)
        right = np.maximum(self.probabilities[rows, self.labels[rows]].astype(float), 1e-30)
        wrong = (1 - right) / (MISTAKES - 1)
        doubtful = wrong > right
        return rows[doubtful][np.argsort(right[doubtful] / wrong[doubtful], kind="stable")]

    @property
    def found(self) -> int:
        """How many of the reviewed rows had a wrong label."""
        return int(((self.truth >= 0) & (self.truth != self.given)).sum())

    @property
    def noise_rate(self) -> Range:
        """The share of wrong labels among the rows that are not known."""
        count = max(1, int((~self.known).sum()))
        return Range(self.left.value / count, self.left.low / count, self.left.high / count)

    @property
    def can_stop(self) -> bool:
        """Whether so few wrong labels are left that a review may end."""
        return self.noise_rate.high <= SURE
