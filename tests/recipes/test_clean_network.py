"""The small network, and the calibration of scores."""

from __future__ import annotations

import numpy as np
import pytest

from bilevel_recipes.clean.calibration import Evidence, best_length, calibrated
from bilevel_recipes.clean.network import Training, out_of_fold, view

QUICK = Training(epochs=6, batch=20, width=8)


def rows(n: int = 240, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Small images with a bright upper or lower half."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    x = rng.integers(0, 120, (n, 12, 12))
    x[y == 0, :6] += 100
    x[y == 1, 6:] += 100
    return x.astype(np.uint8), y


@pytest.mark.parametrize("flat", [False, True])
def test_it_learns_what_it_has_not_seen(flat: bool) -> None:
    x, y = rows()
    given = np.where(np.arange(240) % 10 == 0, 1 - y, y)
    inputs = (x.reshape(240, -1) / 128 - 1).astype(np.float32) if flat else x
    p = out_of_fold(inputs, given, 2, training=QUICK)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    assert np.mean(p.argmax(1) == y) > 0.9
    assert np.array_equal(p, out_of_fold(inputs, given, 2, training=QUICK))
    assert np.isfinite(view(p)).all()


def test_no_network_has_seen_the_label_of_the_row_that_it_judges() -> None:
    x, y = rows(60)
    told: list[float] = []
    before = out_of_fold(x, y, 2, training=QUICK, progress=told.append)
    other = y.copy()
    other[[7, 8]] = other[[8, 7]]  # the folds are stratified, so the counts stay
    after = out_of_fold(x, other, 2, training=QUICK)
    same = np.isclose(before, after, atol=1e-7).all(1)
    assert not same.all()
    assert told[-1] == 1.0


def evidence(
    n: int, a: float, b: float, seed: int, checked: int = 0, reviewed: int = 0, both: bool = False
) -> tuple[Evidence, np.ndarray]:
    """Scores of which a known curve says how often they are wrong."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(-3, 2.5, n)
    wrong = rng.random(n) < 1 / (1 + np.exp(-(a + b * logit)))
    at = np.zeros(n, bool)
    sample = rng.permutation(n if both else np.flatnonzero(~wrong))  # judged by their right labels
    at[sample[:checked]] = True
    seen = np.zeros(n, bool)
    seen[np.argsort(-np.where(at, -np.inf, logit))[:reviewed]] = True
    known = seen | at if both else seen
    return Evidence(1 / (1 + np.exp(logit)), at | seen, wrong, known, at), wrong


@pytest.mark.parametrize(
    "how", [{}, {"checked": 100, "both": True}, {"reviewed": 150}, {"checked": 100, "reviewed": 100}]
)
def test_intervals_hold(how: dict[str, int]) -> None:
    held: list[bool] = []
    for seed in range(60):
        rng = np.random.default_rng(1000 + seed)
        one, wrong = evidence(1000, rng.normal(-0.75, 0.8), 0.75 * np.exp(rng.normal(0, 0.3)), seed, **how)
        left = calibrated(one).wrong(~one.known)
        assert left.low <= left.value <= left.high
        held.append(left.low <= wrong[~one.known].sum() <= left.high)
    assert np.mean(held) >= 0.85


def test_what_is_known_makes_the_interval_shorter() -> None:
    widths = []
    for how in ({}, {"reviewed": 100}, {"checked": 300, "both": True}):
        left = calibrated(evidence(2000, -0.5, 0.8, 0, **how)[0]).wrong(np.ones(2000, bool))
        widths.append(left.high - left.low)
    assert widths[0] > widths[1] > widths[2]


def test_the_best_length_of_a_list() -> None:
    assert best_length(np.array([1.0, 1.0, 0.0, 0.0])) == 2
    assert best_length(np.array([0.9, 0.6, 0.1])) == 2
    assert best_length(np.array([])) == 0
