"""The methods of `benchmarks.cleaning` and their scores: ours, cleanlab with four models, the checked rows alone.

Every method gets the same features, the given labels and which of them are checked. cleanlab is given all rows, the
checked ones with their right labels among them. What it needs are probabilities by models that were not trained on the
row, and these come from five folds. A hyperparameter of a model is chosen by the given labels in the same folds.
"""

from __future__ import annotations

import functools
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


def ours(one: Loaded, seed: int, outer_steps: int = 0, more: tuple[Matrix, ...] = ()) -> Found:
    """The judge of the recipe, with its defaults."""
    from bilevel_recipes.clean.judge import Options, judge

    options = Options(outer_steps=outer_steps)
    verdict = judge([one.x, *more], one.given, one.checked, classes=one.classes, seed=seed, options=options)
    return Found(verdict.score, verdict.issue)


def ours_network(one: Loaded, seed: int) -> Found:
    """The judge of the recipe with --features network."""
    from bilevel_recipes.clean.network import view

    return ours(one, seed, more=(view(network(one, seed)),))


@functools.lru_cache(maxsize=2)
def _trained(fingerprint: str, seed: int, one: _Keyed) -> Scores:
    from bilevel_recipes.clean.network import out_of_fold

    if one.loaded.content is None:
        raise ValueError("a network needs the images of a set, and this one has only features")
    return np.asarray(
        out_of_fold(np.asarray(one.loaded.content()), one.loaded.given, one.loaded.classes, seed=seed), dtype=np.float64
    )


@dataclass(frozen=True)
class _Keyed:
    """A set that is the same key of a cache as any other: its fingerprint is the key."""

    loaded: Loaded

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed)


def network(one: Loaded, seed: int) -> Scores:
    """Probabilities by the small network of the recipe, each by one that was not trained on the row."""
    return _trained(one.fingerprint, seed, _Keyed(one))


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


def cleanlab_best(one: Loaded, seed: int) -> Found:
    """The same with the filter_by that finds the most, chosen with the truth, which no user has."""
    from cleanlab.filter import find_label_issues

    strength = best_strength(one.x, one.given, one.classes, seed)
    p = out_of_fold(one.x, one.given, one.classes, strength, seed)
    found = cleanlab_found(one.given, p)
    for way in ("prune_by_noise_rate", "both", "confident_learning", "predicted_neq_given"):
        other = Found(found.score, np.asarray(find_label_issues(one.given, p, filter_by=way, n_jobs=1), dtype=bool))
        found = max(found, other, key=lambda f: np.nan_to_num(evaluate(one, f)["f1"]))
    return found


def cleanlab_network(one: Loaded, seed: int) -> Found:
    """cleanlab with the probabilities of the small network."""
    p = network(one, seed).astype(np.float64)
    return cleanlab_found(one.given, p / p.sum(1, keepdims=True))


def margin(one: Loaded, seed: int, epochs: int = 12) -> Found:
    """The logit margin of the given label, averaged over a training on all rows (arXiv 2510.16211).

    It only ranks: a label is called wrong if the mean margin is negative.
    """
    import torch

    from bilevel_recipes.clean import network as module

    if one.content is None:
        raise ValueError("a network needs the images of a set, and this one has only features")
    x, y = module._images(np.asarray(one.content())), torch.from_numpy(one.given)
    torch.manual_seed(seed)
    model = module._convolutions(x.shape[1], one.classes, module.Training().width)
    total = torch.zeros(len(y))
    for _ in module._epochs(model, x, y, torch.arange(len(y)), module.Training(epochs=epochs)):
        with torch.no_grad():
            logits = torch.cat([model.eval()(part) for part in x.split(500)])
        model.train()
        other = logits.scatter(1, y[:, None], -torch.inf).max(1).values
        total += logits.gather(1, y[:, None])[:, 0] - other
    score = (total / epochs).double().numpy()
    return Found(score, score < 0)


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
    "ours-hypergradients": functools.partial(ours, outer_steps=8),
    "ours-network": ours_network,
    "cleanlab": cleanlab_usual,
    "cleanlab-regularised": cleanlab_regularised,
    "cleanlab-best-filter": cleanlab_best,
    "cleanlab-knn": cleanlab_neighbours,
    "cleanlab-network": cleanlab_network,
    "margin": margin,
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
