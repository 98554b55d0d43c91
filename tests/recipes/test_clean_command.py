"""`bilevel-clean`: what it writes and prints, how a run is resumed or replaced, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bilevel_recipes.clean import Cleaner, Options, __main__, compare, run
from bilevel_recipes.clean.__main__ import main
from bilevel_recipes.clean.judge import judge

FILES = ["cleaned.csv", "cleaner.npz", "label_issues.csv", "report.html", "results.json", "suspects.csv"]
Command = Callable[..., tuple[int, str, str]]


def fruit(rows: int = 90) -> pd.DataFrame:
    """Two classes that one number tells apart; every ninth row that is not checked has a wrong label."""
    random = np.random.default_rng(0)
    truth, checked = np.arange(rows) % 2, np.arange(rows) % 3 == 0
    wrong = ~checked & (np.arange(rows) % 9 == 1)
    return pd.DataFrame(
        {
            "size": truth * 8 + random.normal(size=rows),
            "weight": random.normal(size=rows),
            "label": np.where(truth ^ wrong, "plum", "cherry"),
            "checked": checked,
        }
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fruit().to_csv("fruit.csv", index=False)
    return tmp_path


@pytest.fixture
def command(here: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as left:  # where the command line can't be read
            code = int(left.code or 0)
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the judge take few steps, where its verdict does not matter."""
    few = partial(judge, options=Options(steps=5, outer_steps=0))
    monkeypatch.setattr("bilevel_recipes.clean.cleaner.judge", lambda *a, options, **k: few(*a, **k))


# --- a run -----------------------------------------------------------------------------------------------------


def test_one_command_from_a_table_to_a_cleaned_table(command: Command, here: Path) -> None:
    code, printed, shown = command("fruit.csv")
    assert code == 0, shown
    out = here / "runs" / "fruit"
    assert sorted(path.name for path in out.iterdir()) == FILES
    table = fruit()
    wrong = (np.arange(90) % 9 == 1) & ~table["checked"].to_numpy()
    issues = pd.read_csv(out / "label_issues.csv")
    assert issues["row"].tolist() == list(range(90))
    assert issues["is_label_issue"].to_numpy().tolist() == wrong.tolist()
    suspects = pd.read_csv(out / "suspects.csv")
    assert set(suspects["row"]) == set(np.flatnonzero(wrong))
    assert suspects["label_score"].is_monotonic_increasing
    pd.testing.assert_frame_equal(pd.read_csv(out / "cleaned.csv"), table[~wrong].reset_index(drop=True))
    for words in ("90, of which 30 are checked", f"{wrong.sum()} of the 60 labels", "estimated noise", "precision"):
        assert words in printed
    assert "bilevel-clean fruit.csv --decisions decisions.csv --overwrite" in printed
    assert str(Path("runs/fruit/report.html")) in printed
    assert "%" in shown  # the progress bar


@pytest.mark.usefixtures("quick")
def test_results_json_has_settings_versions_figures_and_the_noise_matrix(command: Command, here: Path) -> None:
    assert command("fruit.csv", "--out", "o", "--quiet", "--seed", "3")[0] == 0
    found = json.loads((here / "o" / "results.json").read_text())
    assert found["settings"]["seed"] == 3
    assert found["versions"]["torch"]
    assert found["command"] == "bilevel-clean fruit.csv --out o --seed 3"
    cleaner = Cleaner.load(here / "o")
    assert found["trust"]["suspects"] == cleaner.verdict.issue.sum()
    assert found["trust"]["checked_accuracy"] == cleaner.verdict.checked_accuracy
    assert found["noise_matrix"]["classes"] == ["cherry", "plum"]
    assert np.allclose(np.sum(found["noise_matrix"]["given_by_true_class"], axis=1), 1)


@pytest.mark.usefixtures("quick")
def test_quiet_shows_no_progress(command: Command) -> None:
    code, printed, shown = command("fruit.csv", "--quiet")
    assert (code, shown) == (0, "")
    assert "suspects" in printed


def test_a_folder_of_images_with_a_list_of_checked_files(command: Command, here: Path) -> None:
    random, listed = np.random.default_rng(0), []
    for n in range(60):
        low, checked = n % 2, n % 3 == 0
        name = ("top", "bottom")[low ^ (n in (7, 20))]
        file = here / "photos" / name / f"{n:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image = random.integers(0, 60, (8, 8))
        image[4 * low : 4 * low + 4] += 150
        Image.fromarray(image.astype(np.uint8)).save(file)
        listed += [f"{name}/{file.name}"] if checked else []
    (here / "checked.txt").write_text("\n".join(listed))
    code, _, shown = command("photos", "--checked", "checked.txt", "--quiet")
    assert code == 0, shown
    suspects = pd.read_csv(here / "runs" / "photos" / "suspects.csv")
    assert set(suspects["name"]) == {"top/07.png", "bottom/20.png"}
    cleaned = pd.read_csv(here / "runs" / "photos" / "cleaned.csv")
    assert len(cleaned) == 58
    assert "top/07.png" not in set(cleaned["file"])


def test_help_has_groups_and_examples(command: Command) -> None:
    code, printed, _ = command("--help")
    assert code == 0
    for words in (
        "usage: bilevel-clean",
        "bilevel-clean mine.csv",
        "reading options",
        "judging options",
        "--overwrite",
    ):
        assert words in printed
    for setting in Cleaner().settings():
        assert f"--{setting.replace('_', '-')}" in printed


# --- resume, overwrite, decisions ------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_run_is_neither_mixed_nor_lost(command: Command, here: Path) -> None:
    assert command("fruit.csv", "--quiet")[0] == 0
    before = (here / "runs" / "fruit" / "results.json").read_bytes()
    code, _, error = command("fruit.csv", "--quiet")
    assert code == 2
    assert "--resume" in error
    assert "--overwrite" in error
    assert (here / "runs" / "fruit" / "results.json").read_bytes() == before
    code, _, error = command("fruit.csv", "--resume", "--overwrite")
    assert code == 2
    assert "give one of them" in error


@pytest.mark.usefixtures("quick")
def test_resume_writes_what_is_missing_without_another_fit(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = here / "runs" / "fruit"
    assert command("fruit.csv", "--quiet")[0] == 0
    whole = {name: (out / name).read_bytes() for name in ("suspects.csv", "cleaned.csv", "label_issues.csv")}
    monkeypatch.setattr(Cleaner, "fit", None)  # calling it would fail
    code, printed, _ = command("fruit.csv", "--resume")
    assert code == 0
    assert "Nothing was missing in runs/fruit" in printed
    for name in ("report.html", *whole):
        (out / name).unlink()
    code, printed, _ = command("fruit.csv", "--resume")
    assert code == 0
    assert "label_issues.csv, suspects.csv, cleaned.csv, report.html written" in printed
    assert {name: (out / name).read_bytes() for name in whole} == whole
    assert (out / "report.html").stat().st_size > 1000


@pytest.mark.usefixtures("quick")
def test_resume_begins_where_nothing_is(command: Command, here: Path) -> None:
    assert command("fruit.csv", "--resume", "--quiet")[0] == 0
    assert (here / "runs" / "fruit" / "cleaned.csv").exists()


def _changed(what: str) -> pd.DataFrame:
    table = fruit()
    if what == "added":
        return pd.concat([table, table.iloc[[1, 2]]])
    if what == "removed":
        return table.iloc[:-3]
    if what == "labels":
        table.loc[[4, 5], "label"] = ["plum", "cherry"]
    elif what == "checked":
        table.loc[4, "checked"] = True
    else:
        table.loc[4, "size"] += 1
    return table


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("added", "2 rows were added"),
        ("removed", "3 rows were removed"),
        ("labels", "2 labels were changed"),
        ("checked", "1 rows are checked that were not, or the reverse"),
        ("content", "the contents of rows were changed"),
    ],
)
def test_resume_sees_that_the_data_changed(command: Command, here: Path, what: str, sentence: str) -> None:
    assert command("fruit.csv", "--quiet")[0] == 0
    _changed(what).to_csv("fruit.csv", index=False)
    (here / "runs" / "fruit" / "report.html").unlink()
    code, _, error = command("fruit.csv", "--resume")
    assert code == 2
    assert sentence in error
    assert "--overwrite" in error
    assert not (here / "runs" / "fruit" / "report.html").exists()


@pytest.mark.usefixtures("quick")
def test_resume_sees_that_a_setting_changed(command: Command) -> None:
    assert command("fruit.csv", "--quiet")[0] == 0
    code, _, error = command("fruit.csv", "--resume", "--seed", "4")
    assert code == 2
    assert "seed was 0 and is 4" in error


@pytest.mark.usefixtures("quick")
def test_overwrite_replaces_the_run_and_nothing_else(command: Command, here: Path) -> None:
    out = here / "runs" / "fruit"
    assert command("fruit.csv", "--quiet")[0] == 0
    (out / "decisions.csv").write_text("mine")
    (out / "notes.txt").write_text("mine")
    (out / "cleaner.npz").write_bytes(b"damaged")
    assert command("fruit.csv", "--resume")[0] == 2
    assert command("fruit.csv", "--overwrite", "--quiet", "--seed", "1")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "decisions.csv", "notes.txt"])
    assert (out / "decisions.csv").read_text() == (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "results.json").read_text())["settings"]["seed"] == 1


@pytest.mark.usefixtures("quick")
def test_a_kill_while_files_are_written_leaves_no_old_file_beside_new_ones(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = here / "runs" / "fruit"
    assert command("fruit.csv", "--quiet")[0] == 0
    with monkeypatch.context() as patch:

        def stop(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(Cleaner, "report", stop)
        code, _, shown = command("fruit.csv", "--overwrite", "--quiet", "--seed", "1")
    assert code == 130
    assert "--resume" in shown
    assert not (out / "results.json").exists()
    assert command("fruit.csv", "--resume", "--quiet", "--seed", "1")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == FILES


@pytest.mark.usefixtures("quick")
def test_review_and_rerun(command: Command, here: Path) -> None:
    assert command("fruit.csv", "--quiet")[0] == 0
    suspects = pd.read_csv(here / "runs" / "fruit" / "suspects.csv")
    a, b, c = suspects["row"][:3]
    label = fruit()["label"]
    lines = ["row,name,given_label,decision,label", f"{a},{a},{label[a]},keep,", f"{b},{b},{label[b]},drop,"]
    other = {"plum": "cherry", "cherry": "plum"}[label[c]]
    lines.append(f"{c},{c},{label[c]},relabel,{other}")
    (here / "decisions.csv").write_text("\n".join(lines))
    code, printed, error = command("fruit.csv", "--decisions", "decisions.csv", "--overwrite", "--quiet")
    assert code == 0, error
    assert "3 decisions were applied (1 keep, 1 drop, 1 relabel)" in printed
    issues = pd.read_csv(here / "runs" / "fruit" / "label_issues.csv")
    assert issues.loc[[a, c], "checked"].all()
    cleaned = pd.read_csv(here / "runs" / "fruit" / "cleaned.csv")
    size = fruit()["size"]
    assert cleaned.loc[np.isclose(cleaned["size"], size[c]), "label"].tolist() == [other]
    assert cleaned.loc[np.isclose(cleaned["size"], size[a]), "label"].tolist() == [label[a]]
    assert not np.isclose(cleaned["size"], size[b]).any()
    code, _, error = command("fruit.csv", "--resume")  # without the decisions it is another run
    assert code == 2
    assert "rows" in error
    assert command("fruit.csv", "--resume", "--decisions", "decisions.csv")[0] == 0


# --- the demo --------------------------------------------------------------------------------------------------


def test_the_demo_compares_with_the_truth(command: Command, here: Path) -> None:
    code, printed, error = command("demo", "--quiet", "--threads", "1")
    assert code == 0, error
    out = here / "runs" / "demo"
    assert {path.name for path in out.iterdir()} == {*FILES, "comparison.png", "comparison.svg"}
    found = json.loads((out / "results.json").read_text())["comparison"]
    lists, accuracy = found["lists"], found["test_accuracy"]
    assert list(lists) == ["bilevel-clean", "checked rows alone", "cleanlab"]
    for other in ("checked rows alone", "cleanlab"):
        assert lists["bilevel-clean"]["f1"] > lists[other]["f1"]
        assert lists["bilevel-clean"]["average_precision"] >= lists[other]["average_precision"] - 0.01
    assert accuracy["suspects dropped"] > accuracy["checked rows alone"]
    assert accuracy["suspects dropped"] > accuracy["all rows, as labelled"]
    for words in ("checked rows alone", "test accuracy", f"{lists['bilevel-clean']['f1']:.3f}", "comparison.png"):
        assert words in printed
    assert "demo: handwritten digits" in (out / "report.html").read_text()
    assert command("demo", "--quiet", "--threads", "1", "--resume")[0] == 0
    code, _, error = command("demo", "--label", "species", "--out", "other")
    assert code == 2
    assert "takes no --label" in error


def test_what_a_list_is_worth() -> None:
    wrong, checked = np.array([True, True, False, False, False]), np.array([False] * 4 + [True])
    found = compare.Found(np.array([True, False, True, False, True]), np.array([0.1, 0.2, 0.15, 0.9, 0.0]))
    worth = compare.quality(found, wrong, checked)  # without the last row, which is checked
    assert worth == pytest.approx({"f1": 0.5, "average_precision": (1 + 2 / 3) / 2, "precision": 0.5, "recall": 0.5})


def test_a_class_without_checked_rows_is_always_suspected_by_the_checked_rows_alone() -> None:
    x = np.repeat([[0.0], [5.0], [9.0]], 12, axis=0) + np.linspace(0, 1, 36)[:, None]
    given = np.repeat([0, 1, 2], 12)
    found = compare.checked_alone(x, given, (np.arange(36) % 2 == 0) & (given < 2))
    assert found.issue.tolist() == (given == 2).tolist()
    assert (found.score[given == 2] == 0).all()


# --- what is refused -------------------------------------------------------------------------------------------


def one_line(shown: str) -> str:
    assert re.fullmatch(r"bilevel-clean: error: .+\n", shown), shown
    return shown


def _refused(here: Path) -> None:
    """Files that can't be used, one for each case below."""
    table = fruit()
    table.assign(label="plum").to_csv(here / "one_class.csv", index=False)
    table.assign(checked=table["checked"] & (table["label"] == "plum")).to_csv(here / "one_checked.csv", index=False)
    table.assign(checked=False).to_csv(here / "none_checked.csv", index=False)
    table.drop(columns="checked").to_csv(here / "no_column.csv", index=False)
    (here / "broken.csv").write_bytes(b"\xff\xfe\x00\xd8label")
    (here / "broken.npz").write_bytes(b"PK\x03\x04")
    (here / "words.docx").write_bytes(b"PK")
    (here / "a_file").write_text("")
    (here / "empty").mkdir()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("missing.csv",), "missing.csv does not exist"),
        (("broken.csv",), "broken.csv is not a table with"),
        (("broken.npz",), "broken.npz is damaged, or not an .npz"),
        (("words.docx",), "ends in '.docx'"),
        (("empty",), "has no images"),
        (("one_class.csv",), "there is only one class, 'plum'"),
        (("one_checked.csv",), "all 15 checked rows are of one class, 'plum'"),
        (("fruit.csv", "--label", "lable"), r"no column 'lable'.*Did you mean --label label\?"),
        (("fruit.csv", "--label", "weight"), r"Choose a column of classes with --label,"),
        (("fruit.csv", "--checked", "chekced"), r": --checked chekced is neither.*Did you mean --checked checked\?"),
        (("fruit.csv", "--root", "no where"), "--root 'no where' is not a folder"),
        (("fruit.csv", "--threads", "0"), "threads must be at least 1; got 0"),
        (("fruit.csv", "--seed", "-1"), "seed must not be negative; got -1"),
        (("fruit.csv", "--device", "cuda:77"), "device 'cuda:77' can't be used here"),
        (("fruit.csv", "--features", "pixels"), "features 'pixels' are for images, .*choose --features auto"),
        (("fruit.csv", "--weights", "a_file"), "weights were given, but features 'auto' are no model"),
        (("fruit.csv", "--decisions", "missing.csv"), "there is no file missing.csv; --decisions takes"),
        (("fruit.csv", "--out", "a_file/out"), "a_file is a file"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    command: Command, here: Path, words: tuple[str, ...], sentence: str
) -> None:
    _refused(here)
    before = sorted(here.rglob("*"))
    code, printed, shown = command("--quiet", *words)
    assert (code, printed) == (2, "")
    assert re.search(sentence, one_line(shown)), shown
    assert sorted(here.rglob("*")) == before  # nothing is left behind


@pytest.mark.parametrize("words", [("out/cleaned.csv", "--out", "out"), ("out", "--out", "out/results"), (".",)])
def test_the_data_is_not_mixed_with_the_results(command: Command, here: Path, words: tuple[str, ...]) -> None:
    (here / "out").mkdir()
    fruit().to_csv(here / "out" / "cleaned.csv", index=False)
    before = (here / "out" / "cleaned.csv").read_bytes()
    code, _, shown = command(*words, "--overwrite")
    assert code == 2
    assert "use an --out outside of the data" in one_line(shown)
    assert (here / "out" / "cleaned.csv").read_bytes() == before


def test_an_out_that_cant_be_written_is_seen_before_the_work(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cleaner, "fit", None)  # calling it would fail
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who can write anywhere
    code, _, shown = command("fruit.csv", "--out", "here")
    assert code == 2
    assert "nothing can be written in" in one_line(shown)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fruit.csv", "--lable", "species"), "--label"),
        (("fruit.csv", "--overwrit"), "--overwrite"),
        (("fruit.csv", "--seed", "many"), "--seed"),
        (("fruit.csv", "--steps", "0"), "steps must be at least 1; got"),
        (("fruit.csv", "--folds", "1"), "folds must be at least 2; got"),
        (("fruit.csv", "--solver", "magic"), "bigsam"),
        ((), "DATA"),
    ],
)
def test_a_flag_that_cant_be_read_gets_a_suggestion(command: Command, words: tuple[str, ...], sentence: str) -> None:
    code, printed, shown = command(*words)
    assert (code, printed) == (2, "")
    assert sentence in shown


@pytest.mark.usefixtures("quick")
def test_an_error_of_the_program_itself_is_not_hidden(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(__main__, "write", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        command("fruit.csv", "--quiet")


def test_ctrl_c_leaves_with_130_and_a_sentence(here: Path) -> None:
    code = (
        "import signal, sys, time; from bilevel_recipes.clean import __main__ as m; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell has background jobs ignore it
        "m.Cleaner.fit = lambda *_, **__: time.sleep(60); sys.exit(m.main(['fruit.csv']))"
    )
    home = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{home}:{home / 'recipes'}"}
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=here) as process:
        assert process.stderr is not None
        seen = process.stderr.read(1)  # the progress bar: it is at work
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "bilevel-clean: stopped." in seen + rest
    assert "Traceback" not in rest
    assert not (here / "runs").exists()


def test_the_files_of_a_run_are_those_that_are_listed(command: Command, here: Path) -> None:
    assert sorted(run.FILES) == FILES
