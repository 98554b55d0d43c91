"""The Cleaner: what follows from a fit, what is stored of it, and what it refuses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from bilevel_recipes.clean import Cleaner, Options
from bilevel_recipes.clean.judge import judge
from bilevel_recipes.clean.read import read
from bilevel_recipes.clean.stored import FORMAT

ROWS, CLASSES = 150, ("cat", "cow", "dog")
QUICK = Options(steps=5, outer_steps=1)  # where the verdict does not matter


def animals(seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Three well separated classes, a fifth of the unchecked labels wrong; the table, and which labels are wrong."""
    random = np.random.default_rng(seed)
    truth = np.arange(ROWS) % 3
    checked = np.arange(ROWS) < 45
    wrong = ~checked & (random.random(ROWS) < 0.2)
    centres = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]])
    place = centres[truth] + random.normal(size=(ROWS, 2))
    given = np.where(wrong, (truth + 1) % 3, truth)
    table = pd.DataFrame(
        {
            "length": place[:, 0],
            "height": place[:, 1],
            "species": [CLASSES[c] for c in given],
            "checked": checked,
        },
        index=[f"animal {n}" for n in range(ROWS)],
    )
    return table, wrong


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    table = animals()[0].copy()
    table.loc["animal 60", "species"] = None  # a row that can't be judged
    return table


@pytest.fixture(scope="module")
def fitted(table: pd.DataFrame) -> Cleaner:
    return Cleaner().fit(table, label="species", columns=["length", "height"])


def numeric(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y = np.array([CLASSES.index(c) for c in table["species"]])
    return table[["length", "height"]].to_numpy(), y, table["checked"].to_numpy()


# --- results ---------------------------------------------------------------------------------------------------


def test_the_frame_has_a_line_for_each_row_of_the_users_table(fitted: Cleaner, table: pd.DataFrame) -> None:
    frame, wrong = fitted.frame, animals()[1].copy()
    wrong[60] = False
    assert frame.index.equals(table.index)
    assert frame["is_label_issue"].dtype == bool
    found = frame["is_label_issue"].to_numpy()
    assert (found & wrong).sum() >= 0.9 * wrong.sum()
    assert (found & wrong).sum() >= 0.9 * found.sum()
    truth = [CLASSES[n % 3] for n in range(ROWS)]
    assert np.mean(frame["suggested_label"][found] == np.array(truth)[found]) > 0.9
    judged = frame["skipped"] == ""
    assert frame.index[~judged].tolist() == ["animal 60"]
    assert frame.loc["animal 60", ["given_label", "suggested_label", "is_label_issue"]].tolist() == ["", "", False]
    assert np.isnan(frame.loc["animal 60", "label_score"])
    assert frame.loc[judged, "label_score"].between(0, 1).all()
    assert frame.loc[judged, "given_label"].tolist() == table.loc[judged, "species"].tolist()
    assert frame["checked"].equals(table["checked"])
    assert (frame.loc[table["checked"], "label_score"] == 1).all()
    assert (frame.loc[judged & ~found, "suggested_label"] == frame.loc[judged & ~found, "given_label"]).all()


def test_issues_are_the_suspects_with_the_most_suspicious_first(fitted: Cleaner) -> None:
    issues = fitted.issues()
    assert issues["is_label_issue"].all()
    assert len(issues) == fitted.verdict.issue.sum() > 10
    assert issues["label_score"].is_monotonic_increasing


def test_trust_says_how_much_and_how_sure(fitted: Cleaner) -> None:
    text = fitted.trust()
    assert f"{ROWS}, of which 45 are checked and 1 were skipped" in text
    assert f"{fitted.verdict.issue.sum()} of the {ROWS - 46} labels" in text
    assert f"{100 * fitted.verdict.checked_accuracy:.1f} %" in text
    for figure in (fitted.verdict.noise_rate, fitted.verdict.precision):
        assert f"{100 * figure.value:.1f} % ({100 * figure.low:.1f} to {100 * figure.high:.1f} %)" in text
    worst = CLASSES[int(np.argmax(fitted.verdict.by_class))]
    assert f"most in {worst}" in text


def test_arrays_give_the_same_verdict_as_a_table(table: pd.DataFrame) -> None:
    x, y, checked = numeric(animals()[0])
    arrays = Cleaner().fit((x, y, checked))
    assert arrays.frame.index.tolist() == list(range(ROWS))
    assert set(arrays.frame["given_label"]) == {"0", "1", "2"}
    wrong = animals()[1]
    found = arrays.frame["is_label_issue"].to_numpy()
    assert (found & wrong).sum() >= 0.9 * max(wrong.sum(), found.sum())


def test_a_fit_repeats_bit_for_bit_and_hangs_on_the_seed(table: pd.DataFrame) -> None:
    def frame(seed: int) -> pd.DataFrame:
        return Cleaner(options=QUICK, seed=seed).fit(table, label="species", columns=["length", "height"]).frame

    pd.testing.assert_frame_equal(frame(0), frame(0), check_exact=True)
    assert (frame(0)["label_score"] != frame(1)["label_score"]).any()


@pytest.mark.parametrize("suspects", ["drop", "relabel", "keep"])
def test_cleaned_is_the_users_table_without_the_suspects_or_with_other_labels(
    fitted: Cleaner, table: pd.DataFrame, suspects: Any
) -> None:
    judged, found = table.index != "animal 60", fitted.frame["is_label_issue"]
    cleaned = fitted.cleaned(suspects)
    if suspects == "drop":
        pd.testing.assert_frame_equal(cleaned, table[judged & ~found])
        pd.testing.assert_frame_equal(fitted.cleaned(), cleaned)
    elif suspects == "keep":
        pd.testing.assert_frame_equal(cleaned, table[judged])
    else:
        assert (cleaned.loc[found, "species"] == fitted.frame.loc[found, "suggested_label"]).all()
        pd.testing.assert_frame_equal(cleaned[~found[judged]], table[judged & ~found])
    assert table.loc["animal 61", "species"] in CLASSES  # the user's own table is not touched


def test_relabelling_keeps_the_type_of_the_labels() -> None:
    _, y, _ = numeric(animals()[0])
    table = animals()[0].assign(species=y * 10)
    cleaned = Cleaner(options=QUICK).fit(table, label="species").cleaned("relabel")
    assert cleaned["species"].dtype == table["species"].dtype
    assert set(cleaned["species"]) == {0, 10, 20}
    assert (cleaned["species"] != table["species"]).sum() > 10


def test_decisions_count_as_checked_and_are_in_the_cleaned_table(fitted: Cleaner, table: pd.DataFrame) -> None:
    issues = fitted.issues()
    keep, change, drop = issues.index[:3]
    place = {name: n for n, name in enumerate(table.index)}
    other = next(c for c in CLASSES if c not in (table.loc[change, "species"], issues.loc[change, "suggested_label"]))
    decisions = pd.DataFrame(
        [
            [place[keep], keep, table.loc[keep, "species"], "keep", ""],
            [place[change], change, table.loc[change, "species"], "relabel", other],
            [place[drop], drop, table.loc[drop, "species"], "drop", ""],
        ],
        columns=["row", "name", "given_label", "decision", "label"],
    )
    again = Cleaner(options=QUICK).fit(table, label="species", columns=["length", "height"], decisions=decisions)
    frame = again.frame
    assert frame.loc[[keep, change], "checked"].all()
    assert not frame.loc[[keep, change, drop], "is_label_issue"].any()
    assert "decision" in frame.loc[drop, "skipped"]
    assert frame.loc[change, ["given_label", "suggested_label"]].tolist() == [table.loc[change, "species"], other]
    cleaned = again.cleaned()
    assert cleaned.loc[keep, "species"] == table.loc[keep, "species"]
    assert cleaned.loc[change, "species"] == other
    assert drop not in cleaned.index
    assert drop not in again.cleaned("keep").index


def test_progress_ends_at_one(table: pd.DataFrame) -> None:
    seen: list[tuple[float, str]] = []
    Cleaner(options=QUICK).fit(table, label="species", progress=lambda share, words: seen.append((share, words)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert all(words for _, words in seen)


def test_before_a_fit_there_is_a_sentence(tmp_path: Path) -> None:
    uses = (lambda c: c.frame, lambda c: c.rows, lambda c: c.verdict, lambda c: c.issues(), lambda c: c.trust(),
            lambda c: c.cleaned(), lambda c: c.report(tmp_path / "r.html"), lambda c: c.save(tmp_path))  # fmt: skip
    for use in uses:
        with pytest.raises(AttributeError, match=r"bilevel-clean: .* call fit\(data\) first"):
            use(Cleaner())
    assert not list(tmp_path.iterdir())


# --- settings --------------------------------------------------------------------------------------------------


def test_the_settings_are_those_of_scikit_learn_objects(fitted: Cleaner) -> None:
    copy = clone(fitted.set_params(seed=0))
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(AttributeError, match="call fit"):
        copy.frame  # noqa: B018
    assert repr(Cleaner(seed=3)).startswith("Cleaner(features='auto', weights=None, seed=3")
    with pytest.raises(ValueError, match="no setting seeds; the settings are features, weights, seed"):
        Cleaner().set_params(seeds=1)


def test_every_setting_of_the_judge_is_a_setting_of_the_cleaner_with_the_same_default() -> None:
    given_by_fit = {"x", "given", "checked", "truth", "classes", "names", "progress"}
    settings = {k: p.default for k, p in inspect.signature(judge).parameters.items() if k not in given_by_fit}
    mine = Cleaner().get_params()
    assert {**settings, "options": Options()} == {k: mine[k] for k in settings}
    assert mine.keys() - settings.keys() == {"features", "weights", "threads"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"threads": 0}, "threads must be at least 1; got 0"),
        ({"seed": -1}, "seed must not be negative; got -1"),
        ({"device": "nowhere"}, "device 'nowhere' can't be used here"),
        ({"features": "wishes"}, "there are no features 'wishes'; choose auto"),
        ({"options": {"steps": 0}}, "steps must be at least 1; got 0"),
        ({"options": {"folds": 1}}, "folds must be at least 2; got 1"),
        ({"options": {"solver": "magic"}}, "solver must be bigsam or gd; got 'magic'"),
    ],
)
def test_a_bad_setting_is_refused(table: pd.DataFrame, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"bilevel-clean: .*{sentence}"):
        if "options" in settings:
            settings = {"options": Options(**settings["options"])}
        Cleaner(**settings).fit(table, label="species")


# --- data that can't be judged ---------------------------------------------------------------------------------


def broken(what: str) -> Any:
    x, y, checked = numeric(animals()[0])
    marks = y == 0
    return {
        "one class": (x, np.zeros_like(y), checked),
        "checked rows of one class": (x, y, checked & marks),
        "no checked row": (x, y, np.zeros_like(checked)),
        "empty checked": (x, y, np.zeros(0, bool)),
        "only checked rows": (x, y, np.ones_like(checked)),
        "x without rows": (x[:0], y[:0], checked[:0]),
        "x of one dimension": (x[:, 0], y, checked),
        "y of two dimensions": (x, np.stack([y, y], 1), checked),
        "y too short": (x, y[:-1], checked),
        "a list of four": (x, y, checked, checked),
    }[what]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("one class", "there is only one class, '0'"),
        ("checked rows of one class", "all 15 checked rows are of one class"),
        ("empty checked", r"checked .*\(0,\)"),
        ("only checked rows", "all rows are checked"),
        ("x without rows", "arrays is empty"),
        ("x of one dimension", r"\(150,\)"),
        ("y of two dimensions", r"y .*\(150, 2\)"),
        ("y too short", r"y .*\(149,\)"),
        ("a list of four", "got tuple"),
    ],
)
def test_arrays_that_cant_be_judged_get_a_sentence(what: str, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"(?s)bilevel-clean: .*{sentence}"):
        Cleaner(options=QUICK).fit(broken(what))


def test_rows_with_missing_numbers_are_named(table: pd.DataFrame) -> None:
    x, y, checked = numeric(animals()[0])
    x = x.copy()
    x[[70, 80], 1] = np.nan
    frame = Cleaner(options=QUICK).fit((x, y, checked)).frame
    assert frame.index[frame["skipped"] != ""].tolist() == [70, 80]


def test_rows_take_no_second_description(table: pd.DataFrame) -> None:
    rows = read(table, label="species")
    with pytest.raises(TypeError, match="read already take no label"):
        Cleaner(options=QUICK).fit(rows, label="species")


def test_suspects_are_dropped_relabelled_or_kept(fitted: Cleaner) -> None:
    with pytest.raises(ValueError, match="drop, relabel or keep; got 'burn'"):
        fitted.cleaned("burn")  # pyright: ignore[reportArgumentType]


# --- files -----------------------------------------------------------------------------------------------------


def test_a_saved_cleaner_is_the_same_bit_for_bit(fitted: Cleaner, table: pd.DataFrame, tmp_path: Path) -> None:
    path = fitted.save(tmp_path / "there")
    loaded = Cleaner.load(tmp_path / "there")
    assert path.parent == tmp_path / "there"
    pd.testing.assert_frame_equal(loaded.frame, fitted.frame, check_exact=True)
    for name in ("score", "issue", "suggested", "probabilities", "noise", "given", "checked"):
        mine, theirs = getattr(fitted.verdict, name), getattr(loaded.verdict, name)
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()
    assert loaded.get_params() == fitted.get_params()
    assert (loaded.trust(), loaded.verdict.method) == (fitted.trust(), fitted.verdict.method)
    assert loaded.verdict.history == fitted.verdict.history
    for suspects in ("drop", "relabel", "keep"):
        pd.testing.assert_frame_equal(loaded.cleaned(suspects), fitted.cleaned(suspects), check_exact=True)


def test_what_is_in_a_table_comes_back(tmp_path: Path) -> None:
    table = animals()[0].assign(
        day=pd.date_range("2026-01-01", periods=ROWS),
        note=pd.Series([None, "", "NA"] * 50, dtype="str").to_numpy(),
        group=pd.Categorical(["a", "b"] * 75),
        tenth=np.arange(ROWS) / 10,
        small=np.arange(ROWS, dtype=np.int8),
    )
    table.index = pd.MultiIndex.from_arrays([np.arange(ROWS) // 2, ["x", "y"] * 75], names=["pair", None])
    cleaner = Cleaner(options=QUICK).fit(table, label="species", columns=["length", "height"])
    cleaner.save(tmp_path)
    pd.testing.assert_frame_equal(Cleaner.load(tmp_path).cleaned(), cleaner.cleaned(), check_exact=True)


def test_a_report_after_loading_shows_the_columns_of_the_table(
    fitted: Cleaner, table: pd.DataFrame, tmp_path: Path
) -> None:
    fitted.save(tmp_path)
    page = tmp_path / "report.html"
    assert Cleaner.load(tmp_path).report(page)[0] == page
    assert "animal" in page.read_text()
    with pytest.raises(ValueError, match="not what this cleaner was fitted to"):
        Cleaner.load(tmp_path, table.assign(length=0.0))


def test_a_report_after_loading_needs_the_arrays(tmp_path: Path) -> None:
    arrays = numeric(animals()[0])
    Cleaner(options=QUICK).fit(arrays).save(tmp_path)
    with pytest.raises(ValueError, match=r"Give the data again, with Cleaner.load\(folder, data\)"):
        Cleaner.load(tmp_path).report(tmp_path / "report.html")
    assert Cleaner.load(tmp_path, arrays).report(tmp_path / "report.html")


def test_a_saved_table_has_no_objects_in_its_cells(tmp_path: Path) -> None:
    table = animals()[0].assign(photo=[{"bytes": b"\0" * 9}] * ROWS)
    cleaner = Cleaner(options=QUICK).fit(table, label="species", columns=["length", "height"])
    cleaner.save(tmp_path)
    loaded = Cleaner.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.frame, cleaner.frame)
    with pytest.raises(ValueError, match="Give the data again"):
        loaded.cleaned()
    pd.testing.assert_frame_equal(Cleaner.load(tmp_path, table).cleaned(), cleaner.cleaned())


def test_a_report_after_loading_reads_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "animals.csv"
    animals()[0].to_csv(file, index=False)
    Cleaner(options=QUICK).fit(file, label="species").save(tmp_path)
    assert Cleaner.load(tmp_path).report(tmp_path / "report.html")[0].stat().st_size > 1000
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"animals\.csv"):
        Cleaner.load(tmp_path).report(tmp_path / "report.html")


def test_a_damaged_file_gets_a_sentence(fitted: Cleaner, tmp_path: Path) -> None:
    whole = fitted.save(tmp_path).read_bytes()
    file = tmp_path / "cleaner.npz"
    random = np.random.default_rng(0)
    parts = [b"", b"PK", whole[: len(whole) // 2], whole[:-1]]
    for place in random.integers(len(whole), size=40):
        parts.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    refused = 0
    for part in parts:
        file.write_bytes(part)
        try:
            loaded = Cleaner.load(tmp_path)
        except ValueError as error:
            assert str(error).startswith(f"bilevel-clean: {file} is damaged")  # noqa: PT017
            refused += 1
        else:  # a byte of the zip format that nobody reads, as a time stamp
            pd.testing.assert_frame_equal(loaded.frame, fitted.frame, check_exact=True)
    assert refused > len(parts) / 2
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no saved cleaner in"):
        Cleaner.load(tmp_path)


def test_another_version_is_not_read(fitted: Cleaner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bilevel_recipes.clean.stored.FORMAT", FORMAT + 1)
    fitted.save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"another version \(format {FORMAT + 1}; this one reads {FORMAT}\)"):
        Cleaner.load(tmp_path)


def test_importing_the_cleaner_loads_nothing_heavy() -> None:
    heavy = "{'torchvision', 'matplotlib', 'datasets', 'timm'}"
    code = f"import sys, bilevel_recipes.clean; print(sorted({heavy} & {{*sys.modules}}))"
    home = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{home}:{home}/recipes"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
