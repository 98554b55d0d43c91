"""bilevel-attribute: tables, texts, folders and arrays; what it writes; resumed, replaced, refused; the page."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bilevel_recipes.attribution.__main__ import FILES, main, parse
from bilevel_recipes.attribution.rows import read_both

QUICK = ["--epochs", "3", "--subsets", "3", "--quiet", "--threads", "1"]


def table(rows, seed, wrong=0):
    random = np.random.default_rng(seed)
    kind = np.arange(rows) % 2
    frame = pd.DataFrame({"length": random.normal(3 * kind), "width": random.normal(size=rows)})
    frame["label"] = np.where(kind, "long", "short")
    frame.loc[: wrong - 1, "label"] = np.where(kind[:wrong], "short", "long")
    return frame


@pytest.fixture
def files(tmp_path):
    table(60, 0, wrong=6).to_csv(tmp_path / "train.csv", index=False)
    table(10, 1).to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def run(folder, *flags, data="train.csv", queries="test.csv"):
    return main([str(folder / data), "--queries", str(folder / queries), "--out", str(folder / "out"), *QUICK, *flags])


def test_a_table(files, capsys):
    assert run(files) == 0
    out = capsys.readouterr().out
    assert "60 rows, 10 queries explained" in out
    assert "Smoothness" in out
    assert {p.name for p in (files / "out").iterdir()} >= set(FILES)
    lines = pd.read_csv(files / "out/attribution.csv")
    assert set(lines["did"]) == {"helped", "hurt"}
    assert set(lines["query"]) == set(range(10))
    assert lines.groupby(["query", "did"]).size().max() <= 10
    assert lines["label"].isin(["long", "short"]).all()
    helped = lines[lines["did"] == "helped"]
    assert (helped["label"] == helped["explained"]).mean() > 0.9  # rows of a class speak for that class
    made = json.loads((files / "out/results.json").read_text())
    assert made["trust"]["smoothness"] > 0.9
    assert made["settings"]["leave_out"] == "1"
    page = (files / "out/report.html").read_text()
    assert page.count('<article class="query"') == 10
    assert "length: " in page
    assert "<script" not in page
    assert "http" not in re.sub(r"Content-Security-Policy|http-equiv", "", page)


def test_wrong_labels_hurt(files):
    assert run(files, "--about", "label", "--leave-out", "0.1", "--epochs", "20") == 0
    together = pd.read_csv(files / "out/together.csv")
    hurt = together[together["did"] == "hurt"]["row"].head(3)
    assert (hurt < 6).all(), together


def test_queries_without_labels(files, capsys):
    table(5, 1).drop(columns="label").to_csv(files / "new.csv", index=False)
    assert run(files, queries="new.csv") == 0
    assert "answered rightly" not in capsys.readouterr().out
    assert run(files, "--wrong", "--overwrite", queries="new.csv") == 2
    assert "--queries has no labels" in capsys.readouterr().err


def test_texts(tmp_path):
    random = np.random.default_rng(0)
    words = {"good": ["fine", "lovely", "great"], "bad": ["awful", "dull", "poor"]}
    lines = [(k, " ".join(random.choice(words[k], 4)) + " film") for k in ("good", "bad") for _ in range(30)]
    for name, part in (("train.csv", lines), ("test.csv", lines[::15])):
        pd.DataFrame(part, columns=["label", "review"]).to_csv(tmp_path / name, index=False)
    assert run(tmp_path, "--text", "review") == 0
    assert "film" in (tmp_path / "out/report.html").read_text()


def test_folders_of_images(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 2)):
        for c, shade in (("dark", 40), ("light", 200)):
            (tmp_path / part / c).mkdir(parents=True)
            for k in range(count):
                pixels = random.integers(0, 40, (12, 12)) + shade
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / part / c / f"{k}.png")
    assert run(tmp_path, data="train", queries="test") == 0
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("data:image/png;base64") > 10
    lines = pd.read_csv(tmp_path / "out/attribution.csv")
    assert lines["name"].str.startswith("train/").all()
    assert lines["query_name"].str.startswith("test/").all()


def test_arrays_and_one_class_of_queries(tmp_path):
    random = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = random.normal(size=(40, 3)) + 2 * y[:, None]
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "test.npz", x=x[1:8:2], y=y[1:8:2])
    assert run(tmp_path, data="train.npz", queries="test.npz") == 0
    both = read_both({"x": x, "y": y}, {"x": x[:3], "y": y[:3]})
    assert len(both.train) == 40
    assert len(both.queries) == 3


def test_again_resumed_and_replaced(files, capsys):
    assert run(files) == 0
    assert run(files) == 2
    assert "holds a run" in capsys.readouterr().err
    first = (files / "out/attribution.csv").read_text()
    assert run(files, "--resume") == 0
    assert (files / "out/attribution.csv").read_text() == first
    assert run(files, "--resume", "--rate", "0.1") == 2
    assert "rate: 0.5 then, 0.1 now" in capsys.readouterr().err
    assert run(files, "--overwrite", "--rate", "0.1") == 0
    assert run(files, "--overwrite", "--resume") == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--leave-out", "1.5"], "--leave-out is a number of rows"),
        (["--leave-out", "60"], "less than 60"),
        (["--model", "forest"], "choose linear or mlp"),
        (["--label", "species"], "there is no column 'species'"),
        (["--rate", "1e30"], "A smaller --rate may help"),
    ],
)
def test_what_is_refused(files, capsys, flags, words):
    assert run(files, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("bilevel-attribute: error: ")
    assert words in error


def test_queries_that_do_not_fit(files, capsys):
    assert main([str(files / "train.csv"), "--out", str(files / "out")]) == 2
    assert "--queries is missing" in capsys.readouterr().err
    table(5, 1).drop(columns="width").to_csv(files / "narrow.csv", index=False)
    assert run(files, queries="narrow.csv") == 2
    assert "--queries has no column width" in capsys.readouterr().err
    table(5, 1).assign(label="round").to_csv(files / "new.csv", index=False)
    assert run(files, queries="new.csv") == 2
    assert "no training row has the label 'round'" in capsys.readouterr().err
    assert run(files, queries="none.csv") == 2
    assert "This is --queries" in capsys.readouterr().err


def test_the_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "out"), "--epochs", "4", *QUICK[2:]]) == 0
    out = capsys.readouterr().out
    assert "1,297 rows, 8 queries explained" in out
    assert (tmp_path / "out/report.html").read_text().count('<article class="query"') == 8


def test_flags_are_parsed():
    command = parse(["data.csv", "--queries", "q.csv", "--columns", "a", "b", "--wrong"])
    assert command.reading.columns == ("a", "b")
    assert command.asking.wrong


def test_the_page_in_a_browser(files, browser):
    assert run(files) == 0
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((files / "out/report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".figures > div").count() == 5
        page.close()
