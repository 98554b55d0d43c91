"""The comparison of methods that find wrong labels: its draws, its metrics, its baselines, its page."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.neighbors import KNeighborsClassifier

from benchmarks import cleaning, cleaning_page, cleaning_sets
from benchmarks.cleaning_methods import (
    FOLDS,
    METHODS,
    NEIGHBOURS,
    Found,
    checked_alone,
    evaluate,
    fold_of,
    metrics,
    neighbour_votes,
    precision_at,
)
from benchmarks.cleaning_sets import (
    MOST_WRONG,
    SETS,
    SOURCES,
    Draw,
    Loaded,
    Source,
    draw,
    fingerprint,
    load_set,
    read,
    take,
    wrong_labels,
)

NETWORKS = ("cleanlab-network", "margin")  # these need images
BASELINES = [method for method in METHODS if not method.startswith("ours") and method not in NETWORKS]


def source(rows=1000, classes=5, groups=None):
    """Embeddings that are the number of the row, so that a test can tell which row is where."""
    y = np.arange(rows) * 7 % classes
    return Source(
        "embeddings", np.arange(rows)[:, None].astype(np.float32), y, [f"class {c}" for c in range(classes)], groups
    )


# --- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["uniform", "pairwise"])
@pytest.mark.parametrize("rate", [0.0, 0.02, 0.25, 0.4])
def test_exactly_the_stated_share_is_wrong(noise, rate):
    one = draw(source(), Draw("x", 700, 80, noise, rate), seed=3)
    assert len(one.given) == 700
    assert one.checked.sum() == 80
    assert (one.given != one.truth).sum() == round(rate * 620)
    assert np.array_equal(one.given[one.checked], one.truth[one.checked])
    assert np.array_equal(one.truth, source().y[one.positions])
    assert np.array_equal(one.content[:, 0], one.positions)
    assert len(set(one.positions.tolist())) == 700


def test_pairwise_noise_goes_to_the_next_class():
    y = np.arange(100) % 4
    given = wrong_labels(y, "pairwise", 0.5, 4, np.random.default_rng(0))
    assert set(((given - y) % 4)[given != y]) == {1}


def test_uniform_noise_goes_to_every_other_class():
    y = np.arange(4000) % 4
    given = wrong_labels(y, "uniform", 0.5, 4, np.random.default_rng(0))
    assert np.bincount((given - y) % 4).tolist() == pytest.approx([2000, 667, 667, 667], rel=0.1)


def test_class_dependent_noise_is_in_every_other_class_at_rates_that_triple():
    y = np.arange(10000) % 10
    given = wrong_labels(y, "class-dependent", 0.125, 10, np.random.default_rng(0))
    share = np.array([np.mean(given[y == c] != c) for c in range(10)])
    assert share[1::2].tolist() == [0] * 5
    assert share[::2] == pytest.approx([0.125, 0.1875, 0.25, 0.3125, 0.375], abs=0.001)
    assert np.mean(given != y) == pytest.approx(0.125, abs=0.001)


def test_a_class_that_could_not_be_told_from_its_errors_is_refused():
    with pytest.raises(ValueError, match=f"more than {100 * MOST_WRONG:.0f} %"):
        wrong_labels(np.arange(100) % 10, "class-dependent", 0.4, 10, np.random.default_rng(0))


def test_a_draw_depends_on_its_seed_alone():
    plan = Draw("x", 500, 50, "uniform", 0.1)
    one, again, other = (draw(source(), plan, seed) for seed in (0, 0, 1))
    for part in ("given", "truth", "checked", "positions"):
        assert np.array_equal(getattr(one, part), getattr(again, part))
        assert not np.array_equal(getattr(one, part), getattr(other, part))


@pytest.mark.parametrize("seed", range(5))
def test_a_group_is_checked_or_not_as_a_whole(seed):
    groups = np.arange(1000) // 6
    one = draw(source(groups=groups), Draw("x", 700, 100, "uniform", 0.2), seed)
    found = groups[one.positions]
    assert not set(found[one.checked]) & set(found[~one.checked])
    assert (one.checked.sum(), (~one.checked).sum()) == (100, 600)


def test_frequencies_are_exact_and_each_class_is_checked():
    one = draw(source(5000), Draw("x", 402, 40, "uniform", 0.05, (1, 1, 1, 1, 0.02), 3), seed=0)
    assert np.bincount(one.truth).tolist() == [100, 100, 100, 100, 2]
    plan = Draw("x", 808, 40, "uniform", 0.05, (1, 1, 1, 1, 0.04), 3)
    drawn = [draw(source(5000), plan, seed) for seed in range(20)]
    rare = [np.bincount(one.truth[one.checked], minlength=5) for one in drawn]
    assert all(np.bincount(one.truth).tolist() == [200, 200, 200, 200, 8] for one in drawn)
    assert min(counts.min() for counts in rare) == 3
    assert max(counts[4] for counts in rare) < 8  # the rows of a rare class are not all among the checked ones


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="too few"):
        draw(source(100), Draw("x", 101, 5, "uniform", 0.1), 0)


def test_rows_of_any_content_are_taken():
    rows = np.array([2, 0])
    assert take(["a", "b", "c"], rows) == ["c", "a"]
    assert take(np.arange(3), rows).tolist() == [2, 0]
    assert take(pd.DataFrame({"v": [1, 2, 3]}), rows)["v"].tolist() == [3, 1]


def test_the_sets_are_of_many_kinds():
    """What issue 16 asks the table to cover."""
    assert len(SETS) >= 14
    assert {plan.noise for plan in SETS.values()} == {"uniform", "pairwise", "class-dependent", "human"}
    assert {0.0, 0.02, 0.25, 0.4} <= {plan.rate for plan in SETS.values()}
    assert {plan.source for plan in SETS.values()} == set(SOURCES)
    assert max(plan.rows for plan in SETS.values()) == 60000


# --- files ----------------------------------------------------------------------------------------------------------


def test_files_are_read_as_they_are_published(tmp_path):
    (tmp_path / "letter-recognition.data").write_text("T,2,8\nI,5,12\nT,4,11\n")
    (tmp_path / "adult.data").write_text(
        "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Husband, White, Male, 2174, 0, 40, Cuba, <=50K\n"
        "50, Private, 83311, Masters, 14, Divorced, Sales, Husband, Black, Female, 0, 0, 13, Cuba, >50K\n\n"
    )
    (tmp_path / "SMSSpamCollection").write_text('ham\tGo "there\nspam\tWin\ta prize\n')
    (tmp_path / "ag_news_csv").mkdir()
    (tmp_path / "ag_news_csv/test.csv").write_text('"3","Oil","Up, again"\n"4","Chips","null"\n"1","Peace","talks"\n')
    (tmp_path / "banking_data").mkdir()
    (tmp_path / "banking_data/train.csv").write_text('text,category\n"Where, is it?",card_arrival\nNA,top_up\n')
    letter, adult, sms, news, banking = (
        read(name, [tmp_path / "none", tmp_path]) for name in ("letter", "adult", "SMS spam", "AG News", "banking77")
    )
    assert (letter.classes, letter.y.tolist(), letter.content.shape) == (["I", "T"], [1, 0, 1], (3, 2))
    assert (adult.classes, adult.y.tolist(), adult.content.shape) == (["<=50K", ">50K"], [0, 1], (2, 14))
    assert adult.content["occupation"].tolist() == ["?", "Sales"]
    assert (sms.classes, sms.content) == (["ham", "spam"], ['Go "there', "Win\ta prize"])
    assert (news.classes, news.content[1]) == (["Business", "Sci/Tech", "World"], "Chips. null")
    assert (banking.classes, banking.content) == (["card_arrival", "top_up"], ["Where, is it?", "NA"])


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"letter-recognition\.data is missing"):
        read("letter", [Path("/nowhere")])
    with pytest.raises(ValueError, match="there is no set 'mnist'; the sets are digits, "):
        load_set("mnist", 0)


def test_sets_that_draw_the_same_rows_share_their_features(tmp_path, monkeypatch):
    made = []

    def features(rows, seed):
        made.append(rows.title)
        return SimpleNamespace(x=np.asarray(rows.content).reshape(len(rows.y), -1))

    plan = SETS["digits"]
    monkeypatch.setitem(SETS, "more", replace(plan, noise="pairwise", rate=0.25, checked=50))
    monkeypatch.setattr(cleaning_sets, "features", features)
    one, other, again = (load_set(name, 0, cache=tmp_path) for name in ("digits", "more", "more"))
    later = load_set("more", 1, cache=tmp_path)
    assert made == ["digits", "more"]
    assert np.array_equal(one.x, other.x)
    assert (one.checked.sum(), other.checked.sum()) == (100, 50)
    assert other.fingerprint == again.fingerprint
    assert len({one.fingerprint, other.fingerprint, later.fingerprint}) == 3


def test_the_fingerprint_ignores_rounding_and_nothing_else():
    rng = np.random.default_rng(0)
    x, given = rng.normal(size=(500, 40)).astype(np.float32), rng.integers(0, 3, 500)
    other = (given + (np.arange(500) == 7)) % 3
    mark = fingerprint(x, given)
    assert fingerprint(x * np.float32(1 + 1e-7), given) == mark
    assert len({mark, fingerprint(x * 1.05, given), fingerprint(x[:, :39], given), fingerprint(x, other)}) == 4


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    wrong = np.array([True, True, True, False, False, False, False, False])
    score = np.array([0.1, 0.2, 0.9, 0.15, 0.8, 0.95, 0.99, 1.0])  # in order: wrong, right, wrong, right, wrong, …
    found = metrics(wrong, Found(score, score < 0.5))
    assert (found["rows"], found["wrong"], found["flagged"], found["false_alarms"]) == (8, 3, 3, 1)
    assert found["precision"] == found["recall"] == found["f1"] == pytest.approx(2 / 3)
    assert found["ap"] == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    assert found["p100"] == pytest.approx(2 / 3)  # three wrong labels: of the three lowest scores, two


def test_scores_near_zero_do_not_tie():
    wrong, score = np.array([True, False, False]), np.array([1e-30, 1e-20, 1.0])
    assert metrics(wrong, Found(score, score < 0.5))["ap"] == 1.0


def test_precision_at_is_expected_over_ties():
    wrong, score = np.array([True, True, False, False, False]), np.array([0.0, 0.5, 0.5, 0.5, 1.0])
    assert precision_at(wrong, score, 1) == 1.0
    assert precision_at(wrong, score, 2) == pytest.approx((1 + 1 / 3) / 2)
    assert precision_at(wrong, score, 4) == pytest.approx(2 / 4)


def test_nothing_flagged_is_zero_and_nothing_wrong_has_no_f1():
    score, none = np.linspace(0, 1, 4), np.zeros(4, bool)
    assert metrics(np.array([True, False, False, False]), Found(score, none))["f1"] == 0
    clean = metrics(none, Found(score, score < 0.5))
    assert (clean["false_alarms"], clean["wrong"]) == (2, 0)
    assert math.isnan(clean["f1"])
    assert math.isnan(clean["ap"])


def test_checked_rows_do_not_count():
    given, truth, checked = np.array([0, 1, 0, 1]), np.array([0, 1, 1, 1]), np.array([True, True, False, False])
    one = Loaded(np.zeros((4, 1), np.float32), given, truth, checked, 2, ["a", "b"], "")
    found = evaluate(one, Found(np.array([0.0, 0.0, 0.3, 0.9]), np.array([True, True, True, False])))
    assert (found["rows"], found["flagged"], found["f1"], found["ap"]) == (2, 1, 1.0, 1.0)


# --- baselines ------------------------------------------------------------------------------------------------------


def test_folds_spread_the_classes():
    y = np.repeat([0, 1, 2], [50, 23, 2])
    fold = fold_of(y, seed=0)
    assert np.bincount(fold).tolist() == [15] * FOLDS
    assert all(np.ptp(np.bincount(fold[y == c], minlength=FOLDS)) <= 1 for c in range(3))


def test_votes_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    x = (rng.normal(size=(300, 4)) + 2 * np.eye(3, 4)[y]).astype(np.float32)
    fold = fold_of(y, 0)
    expected = {}
    for k in NEIGHBOURS:
        expected[k] = np.zeros((300, 3))
        for f in range(FOLDS):
            model = KNeighborsClassifier(k).fit(x[fold != f], y[fold != f])
            expected[k][fold == f] = model.predict_proba(x[fold == f])
    right = {k: np.mean(p.argmax(1) == y) for k, p in expected.items()}
    np.testing.assert_allclose(neighbour_votes(x, y, 3, 0), expected[max(right, key=right.__getitem__)])


def test_labels_of_a_class_without_checked_rows_are_believed():
    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2], 40)
    x = (rng.normal(size=(120, 3)) + 6 * np.eye(3)[truth]).astype(np.float32)
    given, checked = truth.copy(), np.tile([True, False], 60) & (truth < 2)
    given[1] = 1
    found = checked_alone(Loaded(x, given, truth, checked, 3, ["a", "b", "c"], ""), 0)
    assert np.flatnonzero(found.issue).tolist() == [1]
    assert found.score[truth == 2].tolist() == [1.0] * 40


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run of all baselines on scikit-learn's digits, and on a set whose file is missing."""
    out = tmp_path_factory.mktemp("cleaning")
    arguments = ["--sets", "digits,sms", "--methods", ",".join(BASELINES), "--seeds", "1", "--out", str(out / "page")]
    arguments += ["--cache", str(out / "cache")]
    cleaning.main(arguments)
    return out / "page", arguments


def test_the_baselines_find_the_wrong_digits(page):
    results = json.loads((page[0] / "cleaning.json").read_text())["results"]["digits"]
    assert list(results) == BASELINES
    for method, seeds in results.items():
        for row in seeds.values():
            assert (row["rows"], row["wrong"]) == (1697, 170)
            assert row["ap"] > 0.85, method
            assert row["f1"] > 0.6, method


def test_the_page_names_what_was_not_run(page):
    text = (page[0] / "cleaning.md").read_text()
    assert "Not run: SMSSpamCollection is missing" in text
    assert text.count("| digits | ") >= 3
    assert "--seeds 1 --threads 1" in text
    assert (page[0] / "cleaning.png").stat().st_size > 10000


def test_what_is_known_is_not_computed_again(page, monkeypatch):
    folder, arguments = page
    known = json.loads((folder / "cleaning.json").read_text())["results"]["digits"]
    computed = []
    monkeypatch.setattr(cleaning, "measure", lambda _, m, seed: computed.append((m, seed)) or known[m][str(seed)])
    cleaning.main(arguments)
    assert computed == []
    cleaning.main([*arguments, "--fresh", "checked-alone"])
    assert computed == [("checked-alone", 0)]
    known["checked-alone"]["0"]["features"] = "of other code"
    cleaning.update(folder / "cleaning.json", lambda r: r["results"].update(digits=known))
    computed.clear()
    cleaning.main(arguments)
    assert computed == [("checked-alone", 0)]


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cleaning.main(["--methods", "cleanlap"])
    assert "unknown: cleanlap; choose from ours, ours-hypergradients" in capsys.readouterr().err


def test_level_methods_are_bold():
    def seeds(*values):
        return {str(i): dict.fromkeys(("f1", "ap", "p100"), v) for i, v in enumerate(values)}

    found = {"ours": seeds(0.90, 0.92), "cleanlab": seeds(0.89, 0.91), "cleanlab-knn": seeds(0.80, 0.80)}
    _, head, lines = cleaning_page.table({"results": {"digits": found}}, "f1", "F1")
    assert head == ["set", "ours", "cleanlab", "cleanlab-knn"]
    assert lines[0] == ["digits", "**0.910 ±.014**", "**0.900 ±.014**", "0.800 ±.000"]
    assert lines[1] == ["best or level", "1 of 1", "1 of 1", "0 of 1"]


def test_figures_of_different_features_are_not_compared_silently():
    def seeds(*marks):
        return {str(i): {"features": mark} for i, mark in enumerate(marks)}

    found = {"results": {"digits": {"ours": seeds("a", "b"), "cleanlab": seeds("a", "b")}, "sms": {"ours": seeds("c")}}}
    assert cleaning_page.mixed(found) == []
    found["results"]["sms"]["cleanlab"] = seeds("of other code")
    assert "different features on sms." in cleaning_page.mixed(found)[0]
