"""The quality of a list of suspects where the truth is known, compared with simpler methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .. import tables
from .cleaner import Cleaner
from .features import features
from .read import read
from .rows import Rows

REGULARISATION = (0.001, 0.01, 0.1, 1.0, 10.0)
CHECKED, WRONG = 100, 0.3  # the demo's number of checked rows, and its share of wrong labels among the others


@dataclass(frozen=True)
class Found:
    """A list of suspects: whether each label is called wrong, and the score of each label, low for a wrong one."""

    issue: NDArray[np.bool_]
    score: NDArray[np.float64]


@dataclass(frozen=True)
class Demo:
    """Handwritten digits of which some labels are wrong, with the truth, and a test set by other writers.

    x: N × 8 × 8, uint8. given: N labels. checked: N booleans, true where the given label is sure to be right.
    """

    x: NDArray[np.uint8]
    given: NDArray[np.int64]
    checked: NDArray[np.bool_]
    truth: NDArray[np.int64]
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int64]

    def rows(self) -> Rows:
        return replace(read((self.x, self.given, self.checked)), title="demo: handwritten digits")


def demo(seed: int = 0) -> Demo:
    """Return scikit-learn's digits. Half of the wrong labels are the next digit, as in a slip; others are any digit."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    x, y = (digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)
    # The last 500 digits are by other writers than the first, so the handwriting of the test set is new.
    x, truth, x_test, y_test = x[:-500], y[:-500], x[-500:], y[-500:]
    random = np.random.default_rng(seed)
    checked = np.zeros(len(x), bool)
    checked[random.permutation(len(x))[:CHECKED]] = True
    wrong = ~checked & (random.random(len(x)) < WRONG)
    shift = np.where(random.random(len(x)) < 0.5, 1, random.integers(1, 10, len(x)))
    return Demo(x, np.where(wrong, (truth + shift) % 10, truth), checked, truth, x_test, y_test)


def checked_alone(x: NDArray[Any], given: NDArray[np.int64], checked: NDArray[np.bool_], seed: int = 0) -> Found:
    """Call a label wrong if a classifier of the checked rows alone predicts another class."""
    model = _classifier(seed).fit(x[checked], given[checked])
    p = model.predict_proba(x)
    known = {c: n for n, c in enumerate(model.classes_.tolist())}
    score = np.array([p[i, known[c]] if c in known else 0.0 for i, c in enumerate(given.tolist())])
    return Found(~checked & (model.predict(x) != given), np.where(checked, 1.0, score))


def confident_learning(x: NDArray[Any], given: NDArray[np.int64], checked: NDArray[np.bool_], seed: int = 0) -> Found:
    """Run cleanlab's confident learning on the predictions of a classifier that is cross-validated on all rows."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    p: Any = cross_val_predict(_classifier(seed), x, given, cv=folds, method="predict_proba")
    issue: Any = find_label_issues(given, p, n_jobs=1)
    score = np.asarray(get_label_quality_scores(given, p), float)
    return Found(np.asarray(issue, bool) & ~checked, np.where(checked, 1.0, score))


def baselines(x: NDArray[Any], given: NDArray[np.int64], checked: NDArray[np.bool_], seed: int = 0) -> dict[str, Found]:
    """Return the lists of the simpler methods, cleanlab among them if it is installed."""
    found = {"checked rows alone": checked_alone(x, given, checked, seed)}
    if find_spec("cleanlab") is not None:
        found["cleanlab"] = confident_learning(x, given, checked, seed)
    return found


def quality(found: Found, wrong: NDArray[np.bool_], checked: NDArray[np.bool_]) -> dict[str, float]:
    """Return F1, precision and recall of the list, and average precision of the ranking, on the unchecked rows."""
    from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score

    truth, called, rank = wrong[~checked], found.issue[~checked], -found.score[~checked]
    return {
        "f1": float(f1_score(truth, called, zero_division=0.0)),  # pyright: ignore[reportArgumentType]
        "average_precision": float(average_precision_score(truth, rank)),
        "precision": float(precision_score(truth, called, zero_division=0.0)),  # pyright: ignore[reportArgumentType]
        "recall": float(recall_score(truth, called, zero_division=0.0)),  # pyright: ignore[reportArgumentType]
    }


def accuracies_on_test(data: Demo, issue: NDArray[np.bool_], seed: int = 0) -> dict[str, float]:
    """Return the test accuracy of one kind of classifier, trained on several choices of rows."""
    choices: Mapping[str, NDArray[np.bool_]] = {
        "all rows, as labelled": np.ones(len(data.given), bool),
        "checked rows alone": data.checked,
        "suspects dropped": ~issue,
        "right labels only (best possible)": data.given == data.truth,
    }
    x, x_test = pixels(data.x), pixels(data.x_test)
    return {
        name: float(np.mean(_classifier(seed).fit(x[rows], data.given[rows]).predict(x_test) == data.y_test))
        for name, rows in choices.items()
    }


@dataclass(frozen=True)
class Comparison:
    """Lists of suspects for the demo, by name, with the quality of each. The first one is the cleaner's."""

    lists: Mapping[str, Found]
    wrong: NDArray[np.bool_]
    checked: NDArray[np.bool_]
    accuracies: Mapping[str, float]

    @classmethod
    def of(cls, data: Demo, cleaner: Cleaner) -> Comparison:
        """Compare a cleaner with the baselines on the same features.

        Labels that a review has changed or dropped count as called wrong.
        """
        frame, seed = cleaner.frame, cleaner.seed
        x = features(data.rows(), cleaner.features, seed=seed, weights=cleaner.weights).x
        issue = (frame["suggested_label"] != frame["given_label"]).to_numpy()
        suspect = frame["is_label_issue"].to_numpy() | ~issue
        found = Found(issue, np.where(suspect, frame["label_score"], 0.0))
        lists = {"bilevel-clean": found, **baselines(x, data.given, data.checked, seed)}
        return cls(lists, data.given != data.truth, data.checked, accuracies_on_test(data, found.issue, seed))

    @property
    def figures(self) -> dict[str, Any]:
        """Every figure by name, for JSON."""
        lists = {name: quality(found, self.wrong, self.checked) for name, found in self.lists.items()}
        return {"wrong_labels": int(self.wrong.sum()), "lists": lists, "test_accuracy": dict(self.accuracies)}

    @property
    def table(self) -> pd.DataFrame:
        """The quality of each list, one line for each."""
        return pd.DataFrame.from_dict(self.figures["lists"], orient="index").rename_axis("list of suspects")

    def text(self) -> str:
        """Return two tables in plain text."""
        table = self.table
        head = ["list of suspects", *(str(name).replace("_", " ").replace("f1", "F1") for name in table.columns)]
        lines = [[str(name), *(f"{v:.3f}" for v in values)] for name, *values in table.itertuples(name=None)]
        trained = [[name, f"{v:.3f}"] for name, v in self.accuracies.items()]
        count = f"{self.wrong.sum():,} labels of the demo are wrong. How well each list finds them:"
        return tables.screen([
            (count, head, lines),
            ("A classifier trained on a choice of rows, tested on 500 digits by other writers:",
             ["trained on", "test accuracy"], trained),
        ])  # fmt: skip

    def draw(self, path: Path) -> Path:
        """Plot precision against recall, and the test accuracies. Return the path of the .png."""
        from sklearn.metrics import precision_recall_curve

        from .. import plots

        figure, (left, right) = plots.panels(["wrong labels found", "classifier trained on"], width=5.2)
        for colour, (name, found) in zip(plots.COLOURS, self.lists.items(), strict=False):
            q = quality(found, self.wrong, self.checked)
            truth, rank = self.wrong[~self.checked], -found.score[~self.checked]
            precision, recall, _ = precision_recall_curve(truth, rank)
            left.plot(recall, precision, color=colour, label=f"{name} (F1 {q['f1']:.2f})")
            left.plot(q["recall"], q["precision"], "o", color=colour)
        left.set(xlabel="recall (a dot is the list that is given)", ylabel="precision", ylim=(0.4, 1.02))
        left.legend(loc="lower left", fontsize=9)
        names = list(self.accuracies)
        bars = right.barh(names, list(self.accuracies.values()), color=["0.7", "0.7", plots.COLOURS[0], "0.85"])
        right.bar_label(bars, fmt="%.3f", padding=3)
        right.invert_yaxis()
        right.set(xlabel="test accuracy", xlim=(0.5, 1.0))
        return plots.save(figure, path)


def pixels(x: NDArray[np.uint8]) -> NDArray[Any]:
    """Return images as rows of numbers in [0, 1]."""
    return x.reshape(len(x), -1) / np.float32(255)


def _classifier(seed: int) -> Any:
    """Return logistic regression whose regularisation is best for held-out rows. Without it, noise would be learnt."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    model = LogisticRegression(max_iter=1000, random_state=seed)
    return GridSearchCV(model, {"C": REGULARISATION}, scoring="neg_log_loss", cv=3)
