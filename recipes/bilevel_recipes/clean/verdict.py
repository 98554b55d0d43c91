"""The verdict on the labels of a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Verdict:
    """The verdict on each of the M rows that were judged, in the order of `Rows.used`.

    score: the probability that the given label is right; 1 for a checked row.
    issue: whether the given label is called wrong; never for a checked row.
    suggested: the given label, or if that is called wrong, the most probable other class.
    probabilities: M × C, the probability of each class, by models that were not trained on that row.
    noise: C × C; noise[c, d] is the probability that a row of class c was labelled d.
    checked_accuracy: the share of checked rows whose class those models predict. base_accuracy: the share of the
    most frequent class among them, which a model has to pass.
    false_alarms: the share of right labels that are called wrong, as seen on the checked rows.
    method: a sentence that names the judge. warnings: a sentence for each reason to trust the verdict less.
    history: figures of each outer step. seconds: how long the judging took.
    """

    score: NDArray[np.float64]
    issue: NDArray[np.bool_]
    suggested: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    noise: NDArray[np.float64]
    given: NDArray[np.int64]
    checked: NDArray[np.bool_]
    checked_accuracy: float
    base_accuracy: float
    false_alarms: float
    method: str
    warnings: list[str] = field(default_factory=list[str])
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0

    @property
    def noise_rate(self) -> float:
        """The estimated share of wrong labels among the rows that nobody has checked."""
        return float(np.mean(1 - self.score[~self.checked]))

    @property
    def noise_by_class(self) -> NDArray[np.float64]:
        """The estimated share of wrong labels among the unchecked rows of each given label; NaN without any row."""
        rows = ~self.checked
        count = np.bincount(self.given[rows], minlength=len(self.noise))
        wrong = np.bincount(self.given[rows], weights=1 - self.score[rows], minlength=len(self.noise))
        return np.where(count > 0, wrong / np.maximum(count, 1), np.nan)

    @property
    def expected_precision(self) -> float:
        """The expected share of the rows called wrong that are wrong; NaN where none is called wrong.

        It is computed from `false_alarms`, and not from the scores, which are too confident if a model is weak.
        """
        suspects, unchecked = int(self.issue.sum()), int((~self.checked).sum())
        if suspects == 0:
            return float("nan")
        return max(0.0, 1 - self.false_alarms * unchecked * (1 - self.noise_rate) / suspects)
