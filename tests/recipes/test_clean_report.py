"""The review page without a browser: what it holds, that nothing is fetched, and that no data becomes markup."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from clean_examples import example_rows, example_verdict
from PIL import Image

from bilevel_recipes import on_page
from bilevel_recipes.clean import report
from bilevel_recipes.clean.calibration import UNKNOWN
from bilevel_recipes.clean.decisions import COLUMNS, decided, read_decisions, review_key
from bilevel_recipes.clean.report import write_report

NASTY = '</script><img src=x onerror="alert(1)">'
CLASSES = [NASTY, 'a "quoted", comma; semicolon', "two\nlines", "עברית", "{{ 7 * 7 }}", "日本"]


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and the data of its script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self._script: list[str] = []
        self.feed(self.source)
        self.data = json.loads(self._script[0])
        self.script = self._script[1]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.text += " "
        if tag == "script":
            self._script.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self._script[-1] += data
        elif self.lasttag != "style":
            self.text += data


def _write(path, rows, verdict=None, **more):
    verdict = example_verdict(rows) if verdict is None else verdict
    options = {"title": "My data", "settings": {"seed": 3}, "command": "bilevel-clean mine.csv", **more}
    return write_report(path / "report.html", rows, verdict, **options), verdict


@pytest.mark.parametrize("kind", ["images", "text", "table", "embeddings"])
def test_every_suspect_is_there_most_suspicious_first(kind, tmp_path):
    rows = example_rows(kind)
    (path,), verdict = _write(tmp_path, rows)
    data = Page(path).data
    start, end = data["groups"]["suspects"]
    want = sorted(np.flatnonzero(verdict.issue), key=lambda i: verdict.score[i])
    assert (start, end) == (0, len(want))
    assert data["row"][:end] == rows.used[want].tolist()
    assert data["name"][:end] == [rows.names[i] for i in want]
    assert [data["classes"][c] for c in data["suggested"][:end]] == [rows.classes[verdict.suggested[i]] for i in want]
    assert data["score"][:end] == pytest.approx(verdict.score[want], abs=1e-4)
    assert {len(data[k]) for k in ("row", "name", "given", "suggested", "score", "others", "content")} == {
        data["groups"]["earlier"][1]
    }


def test_the_rest_are_unchecked_rows_with_another_class_as_suggestion(tmp_path):
    rows = example_rows("text", 400)
    (path,), verdict = _write(tmp_path, rows, example_verdict(example_rows("text", 400), 0.2))
    data = Page(path).data
    start, end = data["groups"]["rest"]
    assert end - start == report.REST
    position = {row: i for i, row in enumerate(rows.used.tolist())}
    shown = [position[row] for row in data["row"][start:end]]
    assert not (verdict.checked | verdict.issue)[shown].any()
    assert (np.diff(verdict.score[shown]) >= 0).all()
    for k, i in zip(range(start, end), shown, strict=True):
        other = np.delete(np.arange(3), rows.y[i])
        assert data["suggested"][k] == other[np.argmax(verdict.probabilities[i, other])]


def test_pictures_are_exact(tmp_path):
    rows = example_rows("images")
    (path,), _ = _write(tmp_path, rows)
    data = Page(path).data
    picture = base64.b64decode(data["content"][0].removeprefix("data:image/png;base64,"))
    i = rows.used.tolist().index(data["row"][0])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture))), rows.content[i])


def test_the_trust_line_warnings_and_what_is_behind(tmp_path):
    rows = replace(example_rows("table"), warnings=["Two columns are equal."], note="The columns were read.")
    table = pd.DataFrame({"F1": [0.5, float("nan")]}, index=["ours", "theirs"])
    (path,), verdict = _write(tmp_path, rows, table=table)
    text = " ".join(Page(path).text.replace("\u202f", " ").split())
    for want in ("Rows 122 12 checked, 2 skipped", f"Suspects {verdict.issue.sum()}", "Accuracy on checked rows 91.0 %",
                 f"Estimated noise {100 * verdict.noise_rate.value:.1f} %", "90 %: ", "40.0 % by always naming",
                 f"Expected precision {100 * verdict.precision.value:.1f} %", *verdict.warnings,
                 "Two columns are equal.", "The columns were read.", "method F1 ours 0.5 theirs –",
                 "outer loss: 1 → 0.2",
                 "0 gone.png the file is damaged 1 bare.png no label", '"seed": 3', '"torch":',
                 "bilevel-clean mine.csv"):  # fmt: skip
        assert want in text, want
    assert text.index("Expected precision") < text.index("Behind the verdict")


def test_no_data_becomes_markup_and_nothing_is_fetched(tmp_path):
    rows = example_rows("text", 80, CLASSES)
    table = pd.DataFrame({NASTY: [NASTY]})
    rows = replace(rows, names=[f"{NASTY}{i}" for i in range(80)], content=[NASTY] * 80, warnings=[NASTY],
                   skipped=pd.DataFrame({"row": [0], "name": [NASTY], "reason": [NASTY]}))  # fmt: skip
    (path,), _ = _write(tmp_path, rows, title=NASTY, command=NASTY, settings={NASTY: NASTY}, table=table)
    page = Page(path)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert "{{ 7 * 7 }}" in page.text
    assert page.data["classes"] == CLASSES
    for _tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert all(not (attributes.get(k) or "#").startswith(("http", "//")) for k in ("src", "href"))
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?:|script-src [^;]*unsafe", policy)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|innerHTML|https?://", page.script)


def test_many_pictures_go_to_a_folder_and_leave_it_again(tmp_path, monkeypatch):
    rows = example_rows("images")
    monkeypatch.setattr(on_page, "INSIDE", 5000)
    (path, folder), _ = _write(tmp_path, rows)
    data = Page(path).data
    assert folder == tmp_path / "report_files"
    assert len(set(data["content"] + data["gallery"])) == len([*folder.iterdir()])
    i = rows.used.tolist().index(data["row"][-1])
    assert np.array_equal(np.asarray(Image.open(tmp_path / data["content"][-1])), rows.content[i])
    _write(tmp_path, example_rows("images", 60))
    assert len([*folder.iterdir()]) < len(data["content"])
    monkeypatch.undo()
    (path,), _ = _write(tmp_path, rows)
    assert not folder.exists()
    assert all(c.startswith("data:") for c in Page(path).data["content"])


def test_large_photos_are_made_smaller_and_missing_ones_are_left_out(tmp_path):
    rows = example_rows("embeddings", 20)
    photos = [None if i % 2 else np.full((900, 600, 3), i, np.uint8) for i in range(20)]
    (path,), _ = _write(tmp_path, replace(rows, shown=photos, shown_kind="images"))
    data = Page(path).data
    assert data["kind"] == "images"
    assert data["large"]
    for row, content in zip(data["row"], data["content"], strict=True):
        if photos[row - 2] is None:
            assert content is None
        else:
            jpeg = base64.b64decode(content.removeprefix("data:image/jpeg;base64,"))
            assert Image.open(io.BytesIO(jpeg)).size == (256, 384)


def test_decisions_of_earlier_runs_stay_on_the_page(tmp_path):
    rows = example_rows("text", 60)
    given = [rows.classes[c] for c in rows.y]
    other = rows.classes[(rows.y[3] + 1) % 3]
    about = [[int(rows.used[i]), rows.names[i], given[i]] for i in (3, 4)]
    frame = pd.DataFrame([[*about[0], "relabel", other], [*about[1], "drop", ""]], columns=COLUMNS)
    decisions = read_decisions(frame, rows)
    after = decided(rows, decisions)
    (path,), _ = _write(tmp_path, after, decisions=decisions)
    data = Page(path).data
    assert data["key"] == review_key(rows)
    start, end = data["groups"]["earlier"]
    assert data["row"][start:end] == [rows.used[3], rows.used[4]]
    assert [rows.classes[c] for c in data["given"][start:end]] == [given[3], given[4]]
    assert data["suggested"][start:end] == [rows.classes.index(other), -1]
    assert data["content"][start:end] == [rows.content[3], None]
    assert data["earlier"] == decisions.to_numpy().tolist()


def test_nothing_suspected(tmp_path):
    rows = example_rows("table", 30)
    verdict = example_verdict(rows, 0.0)
    assert not verdict.issue.any()
    (path,), _ = _write(
        tmp_path, rows, replace(verdict, checked_accuracy=float("nan"), precision=UNKNOWN, history=[], warnings=[])
    )
    page = Page(path)
    assert page.data["groups"]["suspects"] == [0, 0]
    assert page.text.count("unknown") == 2
    assert "Course of the outer steps" not in page.text


def test_two_hundred_classes_keep_the_page_small(tmp_path):
    rows = example_rows("text", 2000, [f"class {i}" for i in range(200)])
    (path,), _ = _write(tmp_path, rows)
    assert path.stat().st_size < 600_000
    assert "The 60 most frequent confusions of 200 classes." in Page(path).text


def test_long_texts_are_cut_with_a_word(tmp_path):
    rows = replace(example_rows("text", 20), content=["x" * 30_000] * 20)
    (path,), _ = _write(tmp_path, rows)
    assert Page(path).data["content"][0].endswith("x… (10,000 more characters are in the data)")


def test_names_that_are_not_utf_8(tmp_path):
    rows = replace(example_rows("text", 20), names=["caf\udce9"] * 20)
    (path,), _ = _write(tmp_path, rows, title="caf\udce9")
    assert "caf\\udce9" in Page(path).text
    assert Page(path).data["name"][0] == "caf\udce9"
