"""Data as people have them: cells, marks and labels of every sort are read, or answered with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bilevel_recipes.clean import Cleaner, read
from bilevel_recipes.clean.cells import as_numbers


def table(n: int = 60, **columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    y = np.arange(n) % 2
    frame = pd.DataFrame({"a": y + rng.normal(size=n), "b": rng.normal(size=n), "label": np.where(y, "cow", "cat")})
    return frame.assign(**columns)


@pytest.mark.parametrize(("cells", "numbers"), [
    (["1,234.50", "$ 12", "-7", "3,000"], [1234.5, 12, -7, 3000]),
    (["1.234,50 €", "12,5", "-7", ""], [1234.5, 12.5, -7, np.nan]),
    (["1 234", "12", "(7)", "n/a"], [1234, 12, -7, np.nan]),
    (["5 %", "12.5%", "7", "8"], [5, 12.5, 7, 8]),
    (["1e3", "2.5", "-1e-2", "0"], [1000, 2.5, -0.01, 0]),
])  # fmt: skip
def test_numbers_as_people_write_them(cells: list[str], numbers: list[float]) -> None:
    found = as_numbers(pd.Series(cells))
    assert found is not None
    np.testing.assert_allclose(found, numbers)


@pytest.mark.parametrize("cells", [
    ["2024-01-02", "2024-01-03", "2024-02-01", None],
    ["02.01.2024", "03.01.2024", "01.02.2024", "13.02.2024"],
    ["1/2/2024", "1/3/2024", "2/1/2024", "2/13/2024"],
    [pd.Timestamp("2024-01-02"), pd.Timestamp("2024-01-03"), pd.Timestamp("2024-02-01"), pd.NaT],
])  # fmt: skip
def test_dates_are_days(cells: list[Any]) -> None:
    found = as_numbers(pd.Series(cells))
    assert found is not None
    assert found.iloc[:3].diff().tolist()[1:] == [1, 29]


@pytest.mark.parametrize("cells", [["red", "blue", "7"], ["A1", "B2", "C3"], ["12a", "7b", "9c"], [None, None, None]])
def test_words_are_no_numbers(cells: list[Any]) -> None:
    assert as_numbers(pd.Series(cells, dtype=object)) is None


def test_prices_and_dates_are_features() -> None:
    price = [f"$ {v:,.2f}" for v in np.linspace(900, 2000, 60)]
    rows = read(table(price=price, day=pd.date_range("2024-01-01", periods=60)))
    assert list(rows.content) == ["a", "b", "price", "day"]
    assert rows.content["price"].iloc[[0, -1]].tolist() == [900, 2000]
    assert rows.content["day"].diff().iloc[1] == 1


def test_identifiers_are_left_out_where_rows_are_repeated() -> None:
    one = table(id=np.arange(60) * 7)
    rows = read(pd.concat([one, one], ignore_index=True))
    assert list(rows.content) == ["a", "b"]
    assert "id (an identifier)" in rows.note


def test_labels_by_other_annotators_are_no_features() -> None:
    one = table()
    other = one["label"].where(np.arange(60) % 10 != 0, one["label"].map({"cat": "cow", "cow": "cat"}))
    rows = read(one.assign(second=other))
    assert list(rows.content) == ["a", "b"]
    assert any("second holds labels of the same classes" in told for told in rows.warnings)


@pytest.mark.parametrize(("marks", "count"), [
    (["Anna"] * 10 + [""] * 40 + ["Ben"] * 10, 20),
    (["x"] * 5 + [None] * 55, 5),
    (["yes"] * 5 + ["no"] * 55, 5),
])  # fmt: skip
def test_marks_of_people(marks: list[Any], count: int) -> None:
    rows = read(table(checked=marks))
    assert rows.checked.sum() == count
    assert any("Anna, Ben" in told for told in rows.warnings) == ("Anna" in marks)


def test_the_right_labels_as_marks_keep_the_given_ones() -> None:
    one = table()
    right = one["label"].where(np.arange(60) < 20, None)
    right[0] = "cow"  # given as a cat
    rows = read(one.assign(checked=right))
    assert rows.checked.sum() == 20
    assert rows.classes[rows.y[0]] == "cat"
    assert rows.classes[rows.labels[0]] == "cow"
    assert (rows.right[20:] == -1).all()


@pytest.mark.parametrize("marks", [["maybe"] * 60, ["yes", "Anna"] * 30, [f"note {i}" for i in range(60)]])
def test_marks_that_are_unclear_are_refused(marks: list[str]) -> None:
    with pytest.raises(ValueError, match="true, yes, x and 1 mean checked"):
        read(table(checked=marks))


@pytest.mark.parametrize(("labels", "sentence"), [
    (["cat|cow", "cow|dog", "cat|dog", "cat", "cow", "dog"] * 10, r"several labels in a cell.*get_dummies\('\|'\)"),
    (np.arange(60) % 40 + 10.5, "40 different numbers, some with decimals"),
])  # fmt: skip
def test_labels_that_are_no_single_class(labels: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(table(label=labels))


def test_ages_are_a_quantity_and_numbered_classes_are_not() -> None:
    numbers = np.arange(300) % 60
    with pytest.raises(ValueError, match="60 different numbers in a column called age"):
        read(table(300).drop(columns="label").assign(age=numbers), label="age")
    assert len(read(table(300, label=numbers)).classes) == 60


@pytest.mark.parametrize("form", ["jsonl", "xlsx", "latin-1"])
def test_other_files(form: str, tmp_path: Path) -> None:
    frame = table(city=["Zürich", "Genève", "Bern"] * 20)
    path = tmp_path / f"mine.{'csv' if form == 'latin-1' else form}"
    if form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif form == "xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(path, index=False)
    else:
        frame.to_csv(path, index=False, encoding="latin-1")
    rows = read(path)
    assert set(rows.content["city"]) == {"Zürich", "Genève", "Bern"}
    np.testing.assert_allclose(rows.content["a"], frame["a"])
    assert any("Latin-1" in told for told in rows.warnings) == (form == "latin-1")


def test_probabilities_are_enough() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(300) % 3
    wrong = rng.random(300) < 0.1
    given = np.where(wrong, (truth + 1) % 3, truth)
    p = rng.dirichlet([1, 1, 1], 300) + 3 * np.eye(3)[truth]
    p /= p.sum(1, keepdims=True)
    found = Cleaner().fit(pd.DataFrame({"label": given}), pred_probs=p)
    issue = found.frame["is_label_issue"].to_numpy()
    assert (issue & wrong).sum() > 0.9 * wrong.sum()
    assert (issue & wrong).sum() > 0.9 * issue.sum()
    both = Cleaner(features="none").fit(pd.DataFrame({"label": given, "v": rng.normal(size=300)}), pred_probs=p)
    np.testing.assert_allclose(both.frame["label_score"], found.frame["label_score"], atol=1e-9)
    with pytest.raises(ValueError, match="2 columns for 3 classes"):
        Cleaner().fit(pd.DataFrame({"label": given}), pred_probs=p[:, :2])
    with pytest.raises(ValueError, match="no probabilities"):
        Cleaner().fit(pd.DataFrame({"label": given}), pred_probs=5 * p)
