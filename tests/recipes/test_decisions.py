"""Decisions: read from a file whatever program saved it, refused where they are about other data, applied to rows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from clean_examples import example_rows
from hypothesis import given
from hypothesis import strategies as st

from bilevel_recipes.clean.decisions import (
    COLUMNS,
    DROPPED,
    NEW,
    decided,
    random_order,
    read_decisions,
    review_key,
)
from bilevel_recipes.tables import csv_text

HEADER = ",".join(COLUMNS) + "\n"
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def _line(rows, i, decision, label=""):
    return [int(rows.used[i]), rows.names[i], rows.classes[rows.y[i]], decision, label]


def _write(path, lines):
    path.write_bytes(csv_text(COLUMNS, lines).encode())
    return path


def _other(rows, i):
    return rows.classes[(rows.y[i] + 1) % len(rows.classes)]


@pytest.fixture
def rows():
    return example_rows("table", 12)


@pytest.fixture
def file(rows, tmp_path):
    lines = [_line(rows, 3, "relabel", _other(rows, 3)), _line(rows, 4, "keep", rows.classes[rows.y[4]])]
    return _write(tmp_path / "decisions.csv", [*lines, _line(rows, 5, "drop")])


def test_rows_are_changed_as_decided(rows, file):
    after = decided(rows, read_decisions(file, rows))
    assert after.used.tolist() == [u for u in rows.used if u != rows.used[5]]
    assert rows.classes[after.labels[3]] == _other(rows, 3)
    assert np.array_equal(after.y[:5], rows.y[:5])  # what the data has
    assert after.labels[4] == rows.y[4]
    assert after.known[[3, 4]].all()
    assert not rows.known[[3, 4]].any()  # the rows that were passed are not changed
    assert after.known.sum() == rows.known.sum() + 2
    assert after.names == rows.names[:5] + rows.names[6:]
    pd.testing.assert_frame_equal(after.content, rows.content.drop(index=5))
    last = after.skipped.iloc[-1]
    assert (last["row"], last["name"], last["reason"]) == (rows.used[5], rows.names[5], DROPPED)
    assert len(after.skipped) == len(rows.skipped) + 1


@pytest.mark.parametrize("kind", ["images", "text", "embeddings"])
def test_content_of_each_kind_stays_aligned(kind, tmp_path):
    rows = example_rows(kind, 6)
    after = decided(rows, read_decisions(_write(tmp_path / "d.csv", [_line(rows, 0, "drop")]), rows))
    assert len(after.content) == 5
    assert all(np.array_equal(a, b) for a, b in zip(after.content, rows.content[1:], strict=True))


def test_what_is_shown_of_embeddings_stays_aligned(tmp_path):
    rows = replace(example_rows("embeddings", 6), shown=list("abcdef"), shown_kind="text")
    lines = [_line(rows, 1, "drop"), _line(rows, 4, "drop")]
    assert decided(rows, read_decisions(_write(tmp_path / "d.csv", lines), rows)).shown == list("acdf")


@pytest.mark.parametrize(
    "save",
    [
        lambda t: b"\xef\xbb\xbf" + t.replace("\n", "\r\n").encode(),
        lambda t: t.replace(",", ";").replace("\n", "\r\n").encode("utf-8-sig"),
        lambda t: t.replace(",", "\t").encode("utf-16"),
        lambda t: (t.replace("row,name", "Row , NAME") + ",,,,\n\n").encode(),
        lambda t: "\n".join(line + f",note {i}" for i, line in enumerate(t.splitlines())).encode(),
    ],
    ids=["windows", "semicolons", "utf-16 with tabs", "header and empty lines", "a column more"],
)
def test_what_spreadsheet_programs_save(rows, file, save):
    want = read_decisions(file, rows)
    file.write_bytes(save(file.read_text()))
    pd.testing.assert_frame_equal(read_decisions(file, rows), want)


def test_a_frame_is_read_like_the_file(rows, file):
    read = read_decisions(file, rows)
    pd.testing.assert_frame_equal(read_decisions(pd.read_csv(file), rows), read)
    pd.testing.assert_frame_equal(read_decisions(read, rows), read)
    with pytest.raises(ValueError, match="frame of decisions has no column label"):
        read_decisions(read.drop(columns="label"), rows)
    with pytest.raises(ValueError, match=r"the frame of decisions can't be used(.|\n)*line 4: row 7 .*'burn'"):
        read_decisions(read.replace("drop", "burn"), rows)


@given(
    st.lists(WORDS, min_size=2, max_size=4, unique=True),
    st.lists(st.tuples(WORDS, st.integers(0, 3), st.sampled_from(["keep", "relabel", "drop", ""])), min_size=1),
    st.sampled_from([",", ";", "\t"]),
)
def test_round_trip(tmp_path_factory, classes, choices, delimiter):
    """Names and classes of any characters come back as they were written, and only decided rows change."""
    n = len(choices)
    rows = example_rows("text", n, classes)
    rows = replace(rows, names=[name for name, *_ in choices])
    lines = [_line(rows, i, d, classes[c % len(classes)] if d == "relabel" else "")
             for i, (_, c, d) in enumerate(choices) if d]  # fmt: skip
    path = tmp_path_factory.mktemp("d") / "decisions.csv"
    frame = pd.DataFrame(lines, columns=COLUMNS)
    frame.to_csv(path, index=False, sep=delimiter, encoding="utf-8-sig", lineterminator="\r\n")
    read = read_decisions(path, rows)
    assert read[["row", "name", "given_label", "decision"]].to_numpy().tolist() == [line[:4] for line in lines]
    after = decided(rows, read)
    assert len(after.used) == n - (read.decision == "drop").sum()
    want = {i: c % len(classes) if d == "relabel" else rows.y[i] for i, (_, c, d) in enumerate(choices) if d != "drop"}
    assert after.labels.tolist() == list(want.values())
    assert after.known.tolist() == [bool(choices[i][2]) or bool(rows.checked[i]) for i in want]
    assert review_key(after, read) == review_key(rows)


def test_suspects_that_were_reviewed_are_no_random_sample(rows):
    order = random_order(rows)
    where = {int(row): i for i, row in enumerate(rows.used)}
    assert sorted(order) == rows.used[~rows.checked].tolist()
    lines = [
        _line(rows, where[row], "keep", rows.classes[rows.y[where[row]]]) for row in (order[0], order[1], order[3])
    ]
    review = read_decisions(pd.DataFrame(lines, columns=COLUMNS), rows)
    after = decided(rows, review)
    new = after.checked & ~rows.checked
    assert set(after.used[new].tolist()) == set(order[:2])  # the third of the order was not decided
    assert random_order(after, review) == order
    assert after.known.sum() == rows.known.sum() + 3


def test_unsure_leaves_a_row_as_it_is_and_a_new_class_takes_it_out(rows):
    lines = [_line(rows, 3, "unsure"), _line(rows, 4, "new", "zebra")]
    after = decided(rows, read_decisions(pd.DataFrame(lines, columns=COLUMNS), rows))
    assert not after.known[3]
    assert after.used.tolist() == [u for u in rows.used if u != rows.used[4]]
    assert after.skipped.iloc[-1]["reason"] == NEW
    with pytest.raises(ValueError, match="a new class has a name that no other class has"):
        read_decisions(pd.DataFrame([_line(rows, 4, "new", rows.classes[0])], columns=COLUMNS), rows)


def test_review_key_follows_names_and_labels(rows):
    same = review_key(example_rows("table", 12))
    assert same == review_key(rows)
    assert same != review_key(replace(rows, names=["x", *rows.names[1:]]))
    assert same != review_key(replace(rows, y=(rows.y + 1) % 3))


def test_everything_wrong_is_listed_at_once(rows, tmp_path):
    lines = [
        _line(rows, 0, "relabel", "unicorn"),
        _line(rows, 1, "delete"),
        [3.5, "x", "cat", "keep", ""],
        [99, "x", "cat", "keep", ""],
        [0, "gone.png", "cat", "keep", ""],
        [*_line(rows, 2, "keep")[:1], "renamed", "cat", "keep", ""],
        [*_line(rows, 3, "keep")[:2], _other(rows, 3), "keep", ""],
        _line(rows, 4, "keep", _other(rows, 4)),
        _line(rows, 5, "drop"),
        _line(rows, 5, "keep"),
    ]
    with pytest.raises(ValueError, match="nothing was applied") as caught:
        read_decisions(_write(tmp_path / "d.csv", lines), rows)
    found = str(caught.value).split("\n")[1:]
    wants = ["'unicorn', which is not one of the classes", "decision 'delete'; it must be one of keep, relabel, drop",
             r"row '3\.5'.*does not exist", "row 99.*does not exist; rows are numbered from 0 to 13",
             r"row 0 .*is skipped \(the file is damaged\)", "is called '4' in the data",
             "had the label.*when it was decided",
             "keeps its label.*write relabel", "row 7 was decided in line 10 already"]  # fmt: skip
    assert len(found) == len(wants)
    for line, want in zip(found, wants, strict=True):
        assert re.search(want, line), (line, want)
    assert found[0].startswith("  line 2: row 2 (2)")
    assert all(repr(c) in str(caught.value) for c in rows.classes)


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"", "no column row, name, given_label, decision, label"),
        (b"row,name,decision\n1,a,keep\n", "no column given_label, label"),
        (HEADER.encode() + "2,é,cat,keep,\n".encode("cp1252"), "not UTF-8.*save it as 'CSV UTF-8'"),
    ],
)
def test_files_that_are_no_decisions(rows, tmp_path, content, want):
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=want):
        read_decisions(path, rows)


def test_missing_file(rows, tmp_path):
    with pytest.raises(FileNotFoundError, match="takes the CSV file that the report exports"):
        read_decisions(tmp_path / "none.csv", rows)


def test_no_decisions_change_nothing(rows, tmp_path):
    path = tmp_path / "d.csv"
    path.write_text(HEADER)
    after = decided(rows, read_decisions(path, rows))
    assert after.y.tolist() == rows.y.tolist()
    assert after.checked.tolist() == rows.checked.tolist()
    assert len(after.skipped) == 2
