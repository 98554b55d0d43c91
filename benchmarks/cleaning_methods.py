"""The methods of `benchmarks.cleaning` and their scores: ours, cleanlab with three models, the checked rows alone.

Every method gets the same features, the given labels and which of them are checked. cleanlab is given all rows, the
checked ones with their right labels among them. What it needs are probabilities by models that were not trained on the
row, and these come from five folds. A hyperparameter of a model is chosen by the given labels in the same folds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from .cleaning_sets import Labels, Loaded, Mask

Matrix = NDArray[np.float32]
Scores = NDArray[np.float64]
FOLDS = 5
STRENGTHS = tuple(10.0**k for k in range(-5, 3))  # C of the logistic regression, from the most regularised
NEIGHBOURS = (10, 20, 35, 50)
ENOUGH = 10000  # rows by which C is chosen


@dataclass(frozen=True)
class Found:
    """For each row: the score, which is higher the more the given label is believed, and whether it is called wrong."""

    score: Scores
    issue: Mask


# --- models ---------------------------------------------------------------------------------------------------------


def fold_of(y: Labels, seed: int) -> Labels:
    """A fold for each row, with the classes spread evenly over the folds, also those with fewer rows than folds."""
    order = np.random.default_rng(seed).permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), np.int64)
    fold[order] = np.arange(len(y)) % FOLDS
    return fold


def logistic(x: Matrix, y: Labels, strength: float, steps: int = 300) -> Callable[[Matrix, int], Scores]:
    """A logistic regression of scikit-learn, as a function that gives the probabilities of all classes."""
    model = LogisticRegression(C=strength, max_iter=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # training that stops early regularises; nothing is wrong
        model.fit(x, y)

    def probabilities(rows: Matrix, classes: int) -> Scores:
        out = np.zeros((len(rows), classes))
        out[:, model.classes_] = model.predict_proba(rows)
        return out

    return probabilities


def out_of_fold(x: Matrix, y: Labels, classes: int, strength: float, seed: int, steps: int = 300) -> Scores:
    """Probabilities of the classes for each row, by logistic regressions that were not trained on it."""
    fold, out = fold_of(y, seed), np.zeros((len(y), classes))
    for k in range(FOLDS):
        out[fold == k] = logistic(x[fold != k], y[fold != k], strength, steps)(x[fold == k], classes)
    return out


def log_loss(probabilities: Scores, y: Labels) -> float:
    return float(-np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-6)).mean())


def best_strength(x: Matrix, y: Labels, classes: int, seed: int) -> float:
    """The C of the lowest cross-validated loss: the first one after which it rises."""
    some = np.random.default_rng(seed).permutation(len(y))[:ENOUGH]
    best, lowest = STRENGTHS[0], math.inf
    for strength in STRENGTHS:
        loss = log_loss(out_of_fold(x[some], y[some], classes, strength, seed), y[some])
        if loss > lowest:
            break
        best, lowest = strength, loss
    return best


def neighbour_votes(x: Matrix, y: Labels, classes: int, seed: int) -> Scores:
    """The shares of the classes among the k nearest rows of the other folds, with the k that predicts y best."""
    fold, most = fold_of(y, seed), NEIGHBOURS[-1]
    labels = np.empty((len(y), most), np.int64)
    for k in range(FOLDS):
        model = NearestNeighbors(n_neighbors=most).fit(x[fold != k])
        labels[fold == k] = y[fold != k][model.kneighbors(x[fold == k], return_distance=False)]
    shares = [votes(labels[:, :k], classes) for k in NEIGHBOURS]
    return max(shares, key=lambda share: float(np.mean(share.argmax(1) == y)))


def votes(labels: Labels, classes: int) -> Scores:
    """N × k labels to the N × C shares of the classes."""
    out = np.zeros((len(labels), classes))
    np.add.at(out, (np.arange(len(labels))[:, None], labels), 1 / labels.shape[1])
    return out


# --- methods --------------------------------------------------------------------------------------------------------


def ours(one: Loaded, seed: int) -> Found:
    """The judge of the recipe, with its defaults."""
    from bilevel_recipes.clean.judge import judge

    verdict = judge(one.x, one.given, one.checked, classes=one.classes, seed=seed)
    return Found(verdict.score, verdict.issue)


def cleanlab_found(given: Labels, probabilities: Scores) -> Found:
    """cleanlab's filter and its label quality, both with their defaults."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    issue = find_label_issues(given, probabilities, n_jobs=1)
    return Found(get_label_quality_scores(given, probabilities), np.asarray(issue, dtype=bool))


def cleanlab_usual(one: Loaded, seed: int) -> Found:
    """cleanlab with scikit-learn's logistic regression as it comes (C = 1, 100 steps)."""
    return cleanlab_found(one.given, out_of_fold(one.x, one.given, one.classes, 1.0, seed, steps=100))


def cleanlab_regularised(one: Loaded, seed: int) -> Found:
    """cleanlab with a logistic regression whose C is chosen by cross-validation."""
    strength = best_strength(one.x, one.given, one.classes, seed)
    return cleanlab_found(one.given, out_of_fold(one.x, one.given, one.classes, strength, seed))


def cleanlab_neighbours(one: Loaded, seed: int) -> Found:
    """cleanlab with the k nearest neighbours, where k of 10, 20, 35 and 50 is chosen by cross-validation."""
    return cleanlab_found(one.given, neighbour_votes(one.x, one.given, one.classes, seed))


def checked_alone(one: Loaded, seed: int) -> Found:
    """A logistic regression of the checked rows (C by cross-validation); a label is wrong where it predicts another.

    A class without checked rows cannot be predicted: labels of such a class are all believed.
    """
    x, y = one.x[one.checked], one.given[one.checked]
    found = logistic(x, y, best_strength(x, y, one.classes, seed))(one.x, one.classes)
    known = np.isin(one.given, y)
    score = np.where(known, found[np.arange(len(one.given)), one.given], 1.0)
    return Found(score, known & (found.argmax(1) != one.given))


METHODS: dict[str, Callable[[Loaded, int], Found]] = {
    "ours": ours,
    "cleanlab": cleanlab_usual,
    "cleanlab-regularised": cleanlab_regularised,
    "cleanlab-knn": cleanlab_neighbours,
    "checked-alone": checked_alone,
}


# --- scores ---------------------------------------------------------------------------------------------------------


def metrics(wrong: Mask, found: Found) -> dict[str, float]:
    """How well wrong labels are found; NaN where there are none to find."""
    flagged, count, right = int(found.issue.sum()), int(wrong.sum()), int((found.issue & wrong).sum())
    sizes = {"rows": len(wrong), "wrong": count, "flagged": flagged, "false_alarms": flagged - right}
    if not count:
        return {**sizes, **dict.fromkeys(("f1", "precision", "recall", "ap", "p100"), math.nan)}
    return {
        **sizes,
        "f1": 2 * right / (flagged + count),
        "precision": right / max(flagged, 1),
        "recall": right / count,
        "ap": float(average_precision_score(wrong, -found.score)),  # 1 − score would tie what is near 0
        "p100": precision_at(wrong, found.score, min(100, count)),
    }


def precision_at(wrong: Mask, score: Scores, count: int) -> float:
    """The share of wrong labels among the `count` lowest scores; expected over the orders of rows that tie."""
    last = np.partition(score, count - 1)[count - 1]
    below, tied = score < last, score == last
    return float((wrong[below].sum() + wrong[tied].mean() * (count - below.sum())) / count)


def evaluate(one: Loaded, found: Found) -> dict[str, float]:
    """The metrics of the rows that nobody has checked."""
    free = ~one.checked
    return metrics((one.given != one.truth)[free], Found(found.score[free], found.issue[free]))
