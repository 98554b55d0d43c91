"""The judge of labels on small data whose right labels are known."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from benchmarks.cleaning_methods import Found, checked_alone, cleanlab_regularised, evaluate
from benchmarks.cleaning_sets import Loaded, wrong_labels
from bilevel_recipes.clean import judge as module
from bilevel_recipes.clean.judge import Options, judge, neighbours, stratified

QUICK = Options(steps=20, outer_steps=2)


@functools.cache
def digits(noise: str = "pairwise", rate: float = 0.25, rows: int = 450, checked: int = 60, seed: int = 0) -> Loaded:
    """scikit-learn's digits with wrong labels; the first rows are checked."""
    part, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(part.target))[:rows]
    x, truth = (part.data[order] / 16).astype(np.float32), part.target[order].astype(np.int64)
    given, at = truth.copy(), np.arange(rows) < checked
    given[~at] = wrong_labels(truth[~at], noise, rate, 10, rng)
    return Loaded(x, given, truth, at, 10, list("0123456789"), "")


@functools.cache
def verdict_of(noise: str, rate: float):
    """By default options, each once."""
    one = digits(noise, rate)
    return judge(one.x, one.given, one.checked, classes=10)


@functools.cache
def quick():
    """Of the pairwise noise, by a tenth of the work."""
    one = digits()
    return judge(one.x, one.given, one.checked, classes=10, options=QUICK)


def quality(one: Loaded, verdict) -> dict[str, float]:
    return evaluate(one, Found(verdict.score, verdict.issue))


def clouds(rows: int, classes: int, columns: int = 4, apart: float = 4.0, seed: int = 0):
    """Gaussian clouds, one for each class."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    return (rng.normal(size=(rows, columns)) + apart * np.eye(classes, columns)[y]).astype(np.float32), y


# --- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate"), [("pairwise", 0.25), ("uniform", 0.15), ("class-dependent", 0.15)])
def test_it_finds_more_than_cleanlab_and_than_the_checked_rows_alone(noise, rate):
    one = digits(noise, rate)
    ours = quality(one, verdict_of(noise, rate))
    by_hypergradients = judge(one.x, one.given, one.checked, classes=10, options=replace(Options(), outer_steps=8))
    best = quality(one, by_hypergradients)
    assert best["f1"] > 0.93
    assert best["ap"] > 0.97
    for other in (cleanlab_regularised, checked_alone):
        theirs = evaluate(one, other(one, 0))
        assert ours["f1"] > theirs["f1"] + 0.03, other
        assert ours["ap"] > theirs["ap"], other


def test_clean_labels_are_hardly_ever_called_wrong():
    assert verdict_of("uniform", 0.0).issue.sum() <= 6  # of 390; some of these digits are hard to read


@pytest.mark.parametrize(("rate", "options"), [(0.8, QUICK), (0.9, Options())])
def test_it_does_not_collapse_where_most_labels_are_wrong(rate, options):
    one = digits("uniform", rate)
    verdict = judge(one.x, one.given, one.checked, classes=10, options=options)
    ours, alone = quality(one, verdict), evaluate(one, checked_alone(one, 0))
    assert ours["f1"] > alone["f1"] - 0.02
    assert ours["ap"] > alone["ap"] - 0.02
    assert any("of the unchecked labels are wrong" in told for told in verdict.warnings)


def test_where_all_other_labels_are_wrong_in_the_same_way_the_checked_rows_judge():
    one = digits()
    given = np.where(one.checked, one.truth, (one.truth + 3) % 10)
    verdict = judge(one.x, given, one.checked, classes=10, options=QUICK)
    assert verdict.method == "A classifier of the checked rows alone judges."
    assert "did not help to predict the checked ones" in verdict.warnings[0]
    found = quality(replace(one, given=given), verdict)
    assert found["precision"] == 1.0  # every one of them is wrong
    assert found["recall"] > 0.9
    wrong = verdict.noise.copy()
    np.fill_diagonal(wrong, 0)
    assert (wrong.argmax(1) == (np.arange(10) + 3) % 10).all()


def test_a_rare_class_is_not_flagged_wholesale():
    x, y = clouds(300, 4)
    y = np.where((y == 3) & (np.arange(300) >= 24), 0, y)
    x[y == 0] = clouds(300, 4, seed=1)[0][np.arange(300) % 4 == 0][np.arange((y == 0).sum()) % 75]
    rare = np.flatnonzero(y == 3)
    checked = np.zeros(300, bool)
    checked[::5] = True
    checked[rare] = np.arange(len(rare)) < 3
    given = y.copy()
    free = np.flatnonzero(~checked & (y != 3))
    given[free[::10]] = (y[free[::10]] + 1) % 3
    verdict = judge(x, given, checked, classes=4, options=QUICK)
    assert (len(rare), (~checked[rare]).sum()) == (6, 3)
    assert not verdict.issue[rare].any()
    assert verdict.issue[free[::10]].mean() > 0.9


def test_it_learns_from_a_sample_and_judges_all(monkeypatch):
    one, whole = digits(), quality(digits(), quick())
    monkeypatch.setattr(module, "LEARNT_FROM", 250)
    verdict = judge(one.x, one.given, one.checked, classes=10, options=QUICK)
    found = quality(one, verdict)
    assert found["f1"] > whole["f1"] - 0.05
    assert found["ap"] > whole["ap"] - 0.02
    assert not np.array_equal(verdict.score, quick().score)


@pytest.mark.parametrize(("noise", "rate"), [("pairwise", 0.25), ("uniform", 0.15), ("class-dependent", 0.15)])
def test_the_expected_precision_is_near_the_real_one(noise, rate):
    verdict = verdict_of(noise, rate)
    assert verdict.precision.value == pytest.approx(quality(digits(noise, rate), verdict)["precision"], abs=0.1)
    assert verdict.precision.low < quality(digits(noise, rate), verdict)["precision"] < verdict.precision.high + 0.02
    assert verdict.noise_rate.value == pytest.approx(rate, abs=0.04)


def test_without_steps_on_the_checked_rows_the_solver_is_gd_throughout(monkeypatch):
    one, solvers = digits(), []
    real = module.learn

    def spy(*args, solver, **rest):
        solvers.append(solver)
        return real(*args, solver=solver, **rest)

    monkeypatch.setattr(module, "learn", spy)
    verdict = judge(one.x, one.given, one.checked, classes=10, options=Options(solver="gd", outer_steps=2))
    assert solvers == ["gd"] * 5  # two rounds and one for the features, one and one with the neighbours
    assert quality(one, verdict)["f1"] > 0.9


# --- what a verdict is ------------------------------------------------------------------------------------------------


def test_the_parts_of_a_verdict_agree():
    one, verdict = digits(), verdict_of("pairwise", 0.25)
    assert verdict.score[verdict.issue].max() < verdict.score[~verdict.issue].min()
    assert not verdict.issue[one.checked].any()
    assert (verdict.score[one.checked] == 1).all()
    assert verdict.score.min() >= 0
    assert verdict.score.max() <= 1
    free = verdict.score[~one.checked]
    assert len(free) - len(np.unique(free)) <= 3  # hardly a tie
    assert np.array_equal(verdict.suggested[~verdict.issue], one.given[~verdict.issue])
    assert (verdict.suggested[verdict.issue] != one.given[verdict.issue]).all()
    found = verdict.issue & (one.given != one.truth)
    assert (verdict.suggested == one.truth)[found].mean() > 0.95
    np.testing.assert_allclose(verdict.probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(verdict.noise.sum(1), 1, atol=1e-6)
    wrong = verdict.noise - np.diag(verdict.noise.diagonal())
    assert (wrong.argmax(1) == (np.arange(10) + 1) % 10).all()
    learnt = judge(one.x, one.given, one.checked, classes=10, options=Options(outer_steps=8)).noise
    # 0.25 is true; the prior lowers it where a class has 40 rows, and less so if hypergradients learn it
    assert 0.08 < wrong.max(1).mean() < (learnt - np.diag(learnt.diagonal())).max(1).mean() - 0.03 < 0.27
    assert [row["inputs"] for row in verdict.history] == ["features", "neighbours"]
    assert [row["inputs"] for row in quick().history] == ["features"] * 3 + ["neighbours"] * 2
    assert verdict.near.shape == (450, 5)


def test_the_seed_decides_and_nothing_else():
    one = digits()
    again, other = (judge(one.x, one.given, one.checked, classes=10, seed=seed, options=QUICK) for seed in (0, 1))
    for name in ("score", "issue", "suggested", "probabilities", "noise"):
        assert np.array_equal(getattr(again, name), getattr(quick(), name)), name
    assert again.history == quick().history
    assert not np.array_equal(other.score, again.score)
    assert np.mean(other.issue == again.issue) > 0.97


def test_the_numbers_of_the_classes_do_not_matter():
    one = digits()
    number = np.random.default_rng(0).permutation(10)
    other = judge(one.x, number[one.given], one.checked, classes=10, options=QUICK)
    assert np.mean(other.issue == quick().issue) > 0.97
    assert np.mean(other.suggested == number[quick().suggested]) > 0.97
    np.testing.assert_allclose(other.noise[number][:, number], quick().noise, atol=0.1)


def test_progress_ends_at_one_and_only_there():
    x, y = clouds(60, 3)
    for options in (QUICK, Options(steps=5, outer_steps=0), Options(steps=5, outer_steps=5)):
        told = []
        judge(x, y, np.arange(60) < 12, classes=3, options=options, progress=lambda *t, told=told: told.append(t))
        shares = [share for share, _ in told]
        assert shares == sorted(set(shares))
        assert shares[-1] == 1.0
        assert [what for _, what in told][-1] == "checked rows alone"


# --- what was reviewed ------------------------------------------------------------------------------------------------


@functools.cache
def reviewed(checked: int, count: int):
    """Digits whose most suspicious labels were reviewed without a mistake: the first verdict, and the one after it."""
    one = digits("class-dependent", 0.2, rows=900, checked=checked, seed=3)
    first = judge(one.x, one.given, one.checked, classes=10)
    order = np.argsort(first.score, kind="stable")
    order = order[~first.known[order]][:count]
    truth = np.full(len(one.given), -1)
    truth[order] = one.truth[order]
    return one, first, judge(one.x, one.given, one.checked, truth=truth, classes=10)


@pytest.mark.parametrize("checked", [0, 60])
@pytest.mark.parametrize("count", [60, 120])
def test_a_review_of_suspects_makes_nothing_worse(checked, count):
    one, first, now = reviewed(checked, count)
    free = ~now.known
    wrong = one.given != one.truth
    before, after = (evaluate(replace(one, checked=now.known), Found(v.belief, v.issue)) for v in (first, now))
    assert wrong[free].sum() >= 25
    assert after["ap"] > before["ap"] - 0.01
    assert after["f1"] > before["f1"] - 0.03
    assert now.left.low <= wrong[free].sum() <= now.left.high
    assert now.found == wrong[now.truth >= 0].sum()
    assert np.array_equal(now.labels[now.truth >= 0], one.truth[now.truth >= 0])


def test_known_rows_are_no_suspects_and_keep_the_label_that_was_found():
    _, _, now = reviewed(60, 60)
    assert not now.issue[now.known].any()
    assert (now.score[now.known] == 1).all()
    assert (now.belief[now.truth >= 0] < 0.9).mean() > 0.9  # what was believed of them without the review


def test_without_a_checked_row_the_labels_judge_each_other():
    one = digits("uniform", 0.15)
    verdict = judge(one.x, one.given, one.checked & False, classes=10)
    wrong = one.given != one.truth
    assert evaluate(replace(one, checked=one.checked & False), Found(verdict.score, verdict.issue))["f1"] > 0.9
    assert verdict.noise_rate.low <= wrong.mean() <= verdict.noise_rate.high
    assert np.isnan(verdict.checked_accuracy)
    assert "No row is checked" in verdict.method
    assert not any("rows are checked" in told for told in verdict.warnings)


def test_wrong_labels_among_the_checked_rows_are_doubted():
    one = digits("uniform", 0.15, checked=100)
    given = one.given.copy()
    given[:5] = (given[:5] + 1) % 10
    doubted = judge(one.x, given, one.checked, classes=10).doubted.tolist()
    assert len(set(doubted) & set(range(5))) >= 4
    assert len(doubted) <= 8
    assert set(doubted) <= set(range(100))


def test_two_views_are_better_than_the_worse_and_a_view_of_noise_does_little_harm():
    one = digits("uniform", 0.15)
    noise = np.random.default_rng(0).normal(size=one.x.shape).astype(np.float32)
    views = {"both": [one.x[:, :32], one.x[:, 32:]], "upper": [one.x[:, :32]], "noise": [one.x, noise], "all": [one.x]}
    found = {name: quality(one, judge(v, one.given, one.checked, classes=10))["ap"] for name, v in views.items()}
    assert found["both"] > found["upper"] + 0.005
    assert found["noise"] > found["all"] - 0.01


@pytest.mark.parametrize(("wish", "check"), [
    ({"length": 17}, lambda v: v.issue.sum() == 17),
    ({"recall": 0.5}, lambda v: 20 < v.issue.sum() < 40),
    ({"precision": 0.6}, lambda v: v.issue.sum() > 50),
])  # fmt: skip
def test_the_list_fits_the_wish(wish, check):
    one = digits("uniform", 0.15)
    verdict = judge(one.x, one.given, one.checked, classes=10, options=Options(**wish))
    assert check(verdict)
    assert verdict.score[verdict.issue].max() < verdict.score[~verdict.issue].min()


# --- awkward data -----------------------------------------------------------------------------------------------------


LAYOUTS = {
    "int32 labels": lambda x, y, c: (x, y.astype(np.int32), c),
    "uint8 labels": lambda x, y, c: (x, y.astype(np.uint8), c),
    "Fortran order": lambda x, y, c: (np.asfortranarray(x), y, c),
    "every other column of a wider array": lambda x, y, c: (np.repeat(x, 2, 1)[:, ::2], y, c),
    "negative strides": lambda x, y, c: (x[::-1].copy()[::-1], y[::-1].copy()[::-1], c[::-1].copy()[::-1]),
    "float64": lambda x, y, c: (x.astype(np.float64), y, c),
    "large": lambda x, y, c: (x.astype(np.float64) * 1e6, y, c),
    "small": lambda x, y, c: (x * np.float32(1e-6), y, c),
    "squares overflow": lambda x, y, c: (x * np.float32(1e25), y, c),
    "squares underflow": lambda x, y, c: (x * np.float32(1e-25), y, c),
    "float32 could not hold it": lambda x, y, c: (x.astype(np.float64) * 1e200, y, c),
    "far from zero": lambda x, y, c: (x.astype(np.float64) + 1e8, y, c),
}


@pytest.fixture(scope="module")
def noisy_clouds():
    x, y = clouds(90, 3)
    given = y.copy()
    given[20::8] = (y[20::8] + 1) % 3
    checked = np.arange(90) < 18
    return x, given, checked, judge(x, given, checked, classes=3, options=QUICK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_type_and_scale_of_the_arrays_do_not_matter(noisy_clouds, layout):
    x, y, checked, plain = noisy_clouds
    arrays = [array.view() for array in LAYOUTS[layout](x, y, checked)]
    for array in arrays:
        array.flags.writeable = False  # as those of pandas are
    found = judge(*arrays, classes=3, options=QUICK)
    assert plain.issue.sum() >= 6
    assert np.array_equal(found.issue, plain.issue)
    np.testing.assert_allclose(found.score, plain.score, atol=1e-3)


@pytest.mark.parametrize(("rows", "classes", "checked", "folds"),
                         [(12, 2, 2, 5), (12, 3, 3, 2), (3, 2, 2, 5), (30, 2, 29, 5), (20, 2, 4, 10)])  # fmt: skip
def test_a_handful_of_rows_is_judged(rows, classes, checked, folds):
    x, y = clouds(rows, classes, apart=8.0)
    options = replace(QUICK, folds=folds)
    verdict = judge(x, y, np.arange(rows) < checked, classes=classes, options=options)
    assert np.isfinite(verdict.score).all()
    assert not verdict.issue.any()
    assert any(f"Only {checked} rows are checked" in told for told in verdict.warnings) == (checked < 20)


def test_one_column_is_enough_where_it_tells_the_classes():
    x, y = clouds(100, 2, columns=1, apart=8.0)
    given = y.copy()
    given[30::10] = 1 - y[30::10]
    verdict = judge(x, given, np.arange(100) < 20, classes=2, options=QUICK)
    assert np.flatnonzero(verdict.issue).tolist() == list(range(30, 100, 10))


def test_rows_that_are_all_the_same_are_told_to_be_hopeless():
    y, checked = np.arange(60) % 2, np.arange(60) < 20
    verdict = judge(np.full((60, 3), 0.1, np.float32), y, checked, classes=2, options=QUICK)
    assert np.isfinite(verdict.score).all()
    assert verdict.warnings[0].startswith("The model is weak: it predicts ")


def test_a_weak_model_is_told():
    one = digits()
    x = np.random.default_rng(0).normal(size=one.x.shape).astype(np.float32)
    verdict = judge(x, one.given, one.checked, classes=10, options=QUICK)
    assert any(told.startswith("The model is weak: it predicts ") for told in verdict.warnings)
    assert not any("weak" in told for told in verdict_of("pairwise", 0.25).warnings)


def test_classes_without_a_checked_row_are_named():
    x, y = clouds(120, 4)
    checked = (np.arange(120) < 48) & (y != 2) & (y != 3)
    verdict = judge(x, y, checked, classes=4, names=["ant", "bee", "cat", "dog"], options=QUICK)
    assert any(told.startswith("No row of these classes is checked: cat, dog. ") for told in verdict.warnings)
    numbers = judge(x, y, checked, classes=4, options=QUICK)
    assert any(told.startswith("No row of these classes is checked: 2, 3. ") for told in numbers.warnings)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_neighbours_against_brute_force():
    x = torch.randn(70, 5) + 3
    found = neighbours(x, 6, chunk=32)
    centred = (x - x.mean(0)).double()
    for row in range(70):
        near = F.cosine_similarity(centred[row], centred, dim=1)
        near[row] = -2
        assert set(found[row].tolist()) == set(near.topk(6).indices.tolist()), row


def test_neighbours_of_many_rows_are_those_of_the_first_components(monkeypatch):
    monkeypatch.setattr(module, "LEARNT_FROM", 50)
    x = torch.cat([torch.randn(80, 4), 1e-4 * torch.randn(80, 30)], 1)
    reduced, whole = neighbours(x, 5, most=8), neighbours(x[:, :4], 5)
    same = [len(set(a) & set(b)) for a, b in zip(reduced.tolist(), whole.tolist(), strict=True)]
    assert np.mean(same) > 4.9


def test_folds_are_stratified():
    y = torch.tensor([0] * 50 + [1] * 23 + [2] * 7 + [3] * 2)
    checked = torch.arange(82) % 3 == 0
    fold = stratified(y, checked, 5, seed=0)
    for c in range(4):
        for kind in (checked, ~checked):
            counts = torch.bincount(fold[(y == c) & kind], minlength=5)
            assert int(counts.max() - counts.min()) <= 1
    assert not torch.equal(fold, stratified(y, checked, 5, seed=1))


def test_every_fold_has_a_checked_row_where_they_are_fewer_than_the_folds(monkeypatch):
    seen = []
    real = module.stratified
    monkeypatch.setattr(module, "stratified", lambda *args: seen.append(real(*args)) or seen[-1])
    x, y = clouds(40, 2)
    judge(x, y, np.arange(40) < 3, classes=2, options=replace(QUICK, folds=8))
    assert sorted(seen[0][:3].tolist()) == [0, 1, 2]
    assert int(seen[0].max()) == 2


# --- refusals ---------------------------------------------------------------------------------------------------------

X, Y, AT = np.zeros((6, 2), np.float32), np.arange(6) % 2, np.arange(6) < 2
BAD = {
    "one dimension": ((X[:, 0], Y, AT), ValueError, r"one mark for each row; got arrays of shapes \(6,\)"),
    "no column": ((X[:, :0], Y, AT), ValueError, r"got arrays of shapes \(6, 0\), \(6,\), \(6,\)"),
    "too few labels": ((X, Y[:5], AT), ValueError, r"shapes \(6, 2\), \(5,\), \(6,\)"),
    "too few marks": ((X, Y, AT[:5]), ValueError, r"shapes \(6, 2\), \(6,\), \(5,\)"),
    "NaN": ((np.full_like(X, np.nan), Y, AT), ValueError, "NaN or infinite numbers; fill or drop those rows first"),
    "a label too high": ((X, Y + 1, AT), ValueError, "labels must lie in 0 to 1; got 1 to 2"),
    "a negative label": ((X, Y - 1, AT), ValueError, "labels must lie in 0 to 1; got -1 to 0"),
    "labels of floats": ((X, Y + 0.5, AT), TypeError, "labels must be whole numbers.*got float64"),
    "marks of numbers": ((X, Y, AT.astype(int)), TypeError, "checked must hold booleans; got int64"),
    "everything checked": ((X, Y, AT | True), ValueError, "some rows must be unknown.*got 6 known of 6 rows, of 2 cl"),
    "one class": ((X, Y * 0, AT), ValueError, "there must be two classes; got 2 known of 6 rows, of 1 classes"),
    "no row": ((X[:0], Y[:0], AT[:0]), ValueError, r"got arrays of shapes \(0, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_judged_is_refused(name):
    arrays, kind, sentence = BAD[name]
    with pytest.raises(kind, match=f"^bilevel-clean: .*{sentence}"):
        judge(*arrays, classes=2)


@pytest.mark.parametrize(("option", "sentence"), [
    ({"folds": 1}, "folds must be at least 2; got 1"),
    ({"neighbours": 0}, "neighbours must be at least 1; got 0"),
    ({"steps": 0}, "steps must be at least 1; got 0"),
    ({"outer_steps": -1}, "outer_steps must be at least 0; got -1"),
    ({"solver": "adam"}, "solver must be bigsam or gd; got 'adam'"),
    ({"recall": 1.5}, "recall must be between 0 and 1; got 1.5"),
    ({"length": -1}, "length must be a number of rows; got -1"),
    ({"recall": 0.5, "length": 3}, "the list has a recall or a length; give one of them"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(option, sentence):
    with pytest.raises(ValueError, match=f"^bilevel-clean: {sentence}"):
        Options(**option)
