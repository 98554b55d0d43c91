"""Data as people have them, beside cleanlab: empty cells, nothing checked, wrong checked rows, few errors.

    python -m benchmarks.cleaning_odd --data-root DIR --out docs/results

Writes cleaning_odd.md. All but the last table take seconds; the last one trains small networks on MNIST.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from bilevel_recipes.clean import Cleaner
from bilevel_recipes.clean.judge import judge
from bilevel_recipes.clean.network import Training, out_of_fold, view
from bilevel_recipes.runs import write_page

from .cleaning_methods import Found, best_strength, cleanlab_found, evaluate, metrics
from .cleaning_methods import out_of_fold as by_logistic
from .cleaning_sets import Draw, Loaded, draw, fingerprint, read, wrong_labels
from .report import grid

DRAWS = 3
FEW = Draw("MNIST", 4000, 0, "uniform", 0.0)
SHARE = 0.0015  # of the labels of MNIST, swapped to the class that a network takes for the second most likely
LOOKS = (50, 200)
HEAD = ["what", "method", "F1", "average precision"]


def digits(seed: int, checked: int) -> Loaded:
    """scikit-learn's digits with 10 % wrong labels."""
    from sklearn.datasets import load_digits

    part, rng = load_digits(return_X_y=True), np.random.default_rng(seed)
    x, truth = (part[0] / 16).astype(np.float32), part[1].astype(np.int64)
    at = np.zeros(len(truth), bool)
    at[rng.permutation(len(truth))[:checked]] = True
    given = truth.copy()
    given[~at] = wrong_labels(truth[~at], "uniform", 0.10, 10, rng)
    return Loaded(x, given, truth, at, 10, list("0123456789"), fingerprint(x, given))


def logistic(one: Loaded, seed: int) -> NDArray[np.float64]:
    """Probabilities by logistic regressions that were not trained on the row, with C by cross-validation."""
    return by_logistic(one.x, one.given, one.classes, best_strength(one.x, one.given, one.classes, seed), seed)


def ours(one: Loaded, seed: int) -> Found:
    verdict = judge(one.x, one.given, one.checked, classes=one.classes, seed=seed)
    return Found(verdict.score, verdict.issue)


def empty_cells(seed: int) -> dict[str, Found | Loaded]:
    """The breast cancer data of scikit-learn, with 5 % of the cells empty and 10 % of the labels wrong."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    part, rng = load_breast_cancer(return_X_y=True), np.random.default_rng(seed)
    x, truth = part[0].copy(), part[1].astype(np.int64)
    x[rng.random(x.shape) < 0.05] = np.nan
    given = wrong_labels(truth, "uniform", 0.10, 2, rng)
    table = pd.DataFrame(x).add_prefix("v").assign(label=given)
    verdict = Cleaner(seed=seed).fit(table).verdict
    filled = StandardScaler().fit_transform(SimpleImputer(strategy="median").fit_transform(x)).astype(np.float32)
    one = Loaded(filled, given, truth, np.zeros(len(truth), bool), 2, ["0", "1"], "")
    return {
        "set": one,
        "ours": Found(verdict.score, verdict.issue),
        "cleanlab": cleanlab_found(given, logistic(one, seed)),
    }


def wrong_checked(seed: int) -> dict[str, Found | Loaded]:
    """Digits of which 100 are checked, 5 of them wrongly: how well those five are found among the hundred."""
    one = digits(seed, 100)
    given, rows = one.given.copy(), np.flatnonzero(one.checked)
    given[rows[:5]] = (one.truth[rows[:5]] + 1 + np.arange(5)) % 10
    one = replace(one, given=given)
    verdict = judge(one.x, given, one.checked, classes=10, seed=seed)
    issue = np.zeros(len(given), bool)
    issue[verdict.doubted] = True
    score = verdict.probabilities[np.arange(len(given)), given].astype(float)
    return {"set": replace(one, checked=~one.checked), "ours": Found(score, issue),
            "cleanlab": cleanlab_found(given, logistic(one, seed))}  # fmt: skip


def probabilities(seed: int) -> dict[str, Found | Loaded]:
    """Digits by probabilities of logistic regressions alone, which both methods are given."""
    one = digits(seed, 0)
    p = logistic(one, seed)
    verdict = judge(view(p), one.given, one.checked, classes=10, seed=seed)
    return {"set": one, "ours": Found(verdict.score, verdict.issue), "cleanlab": cleanlab_found(one.given, p)}


def nothing_checked(seed: int) -> dict[str, Found | Loaded]:
    one = digits(seed, 0)
    return {"set": one, "ours": ours(one, seed), "cleanlab": cleanlab_found(one.given, logistic(one, seed))}


CASES = {
    "breast cancer, 5 % of the cells empty": empty_cells,
    "digits, nothing checked": nothing_checked,
    "digits, 5 of 100 checked rows wrong: these": wrong_checked,
    "digits, probabilities alone": probabilities,
}


def table() -> list[list[str]]:
    lines: list[list[str]] = []
    for name, case in CASES.items():
        found = [case(seed) for seed in range(DRAWS)]
        for method in ("ours", "cleanlab"):
            rows = [evaluate(f["set"], f[method]) for f in found]  # pyright: ignore[reportArgumentType]
            lines.append([name, method, *(f"{np.mean([r[k] for r in rows]):.3f}" for k in ("f1", "ap"))])
    return lines


def few_errors(roots: Sequence[Path]) -> list[list[str]]:
    """MNIST with hardly an error: how many are found by a reviewer of the first rows of each ranking."""
    how, small = Training(width=16, epochs=8), draw(read(FEW.source, roots), FEW, 0)
    x, truth = np.asarray(small.content), small.truth
    p = out_of_fold(x, truth, 10, training=how)
    rows = np.random.default_rng(0).permutation(len(truth))[: round(SHARE * len(truth))]
    given = truth.copy()
    p[rows, truth[rows]] = -1
    given[rows] = p[rows].argmax(1)
    p = out_of_fold(x, given, 10, seed=1, training=how).astype(np.float64)
    p /= p.sum(1, keepdims=True)
    none = np.zeros(len(given), bool)
    from bilevel_recipes.clean.features import features

    patches = features(small.as_rows("MNIST")).x
    scores = {
        "cleanlab, with a network": cleanlab_found(given, p),
        "ours, with the same probabilities": _judged([view(p)], given, none),
        "ours, with these and features (--features network)": _judged([patches, view(p)], given, none),
        "ours, with features alone": _judged([patches], given, none),
    }
    wrong = given != truth
    return [
        [name, *(f"{wrong[np.argsort(f.score, kind='stable')[:count]].sum()} of {wrong.sum()}" for count in LOOKS),
         f"{metrics(wrong, f)['ap']:.3f}", f"{(f.issue & wrong).sum()} of {f.issue.sum()}"]
        for name, f in scores.items()
    ]  # fmt: skip


def _judged(views: list[NDArray[np.float32]], given: NDArray[np.int64], none: NDArray[np.bool_]) -> Found:
    verdict = judge(views, given, none, classes=10)
    return Found(verdict.score, verdict.issue)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.cleaning_odd", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--data-root", type=Path, action="append", default=[], metavar="DIR", help="where MNIST is")
    p.add_argument("--out", type=Path, default=Path("runs/cleaning"), metavar="DIR", help="where the page goes")
    asked = p.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with threadpool_limits(1):
        found = table()
        try:
            few = grid(["ranking", *(f"in {n} rows" for n in LOOKS), "average precision", "in the list"],
                       few_errors(asked.data_root))  # fmt: skip
        except FileNotFoundError as error:
            few = [f"Not run: {error}."]
    write_page(asked.out / "cleaning_odd.md", f"""# Odd data, beside cleanlab

Made by `python -m benchmarks.cleaning_odd --data-root DIR --out docs/results`. Means of {DRAWS} draws.

{chr(10).join(grid(HEAD, found))}

cleanlab has a logistic regression whose C is chosen by cross-validation, on median-filled, standardised cells where
some are empty. 10 % of the labels are wrong (uniform).

## Hardly an error

{FEW.rows:,} images of MNIST, of which {SHARE:.2%} have the class that a network takes for the second most likely.
How many of them are among the first rows of each ranking, and in the list. One draw; nothing is checked. Errors that
MNIST has itself count as right.

{chr(10).join(few)}
""")  # fmt: skip


if __name__ == "__main__":
    main()
