"""The results page of few-shot studies: its tables, curves and notes, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from bilevel_recipes import command
from bilevel_recipes.few_shot import results
from bilevel_recipes.few_shot.__main__ import RECIPE, main
from bilevel_recipes.few_shot.study import over_seeds

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--tasks", "2", "--outer-steps", "2", "--queries", "3", "--test-episodes", "9", "--test-steps", "1"]
SMALL += ["--curve-points", "2", "--curve-episodes", "5", "--quiet", "--threads", "1", "--data-root", "the data"]
NOTES = """# The page

It begins so.

## many: Many ways: one encoder

What is known of it.

## curves-gd curves-bigsam: Curves
## absent: Not run
"""


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One encoder tested on three kinds of task; and a study in two runs, whose solvers have rates of their own."""
    home = tmp_path_factory.mktemp("studies")
    common = [*SMALL, "--baselines", "none", "--ways", "3", "--shots", "1,2", "--steps", "1,2"]
    for name, flags in {
        "many": [*SMALL, "--ways", "6", "--also", "3x1,3x2", "--steps", "2", "--seeds", "3", "--solvers", "gd,bigsam"],
        "curves-gd": [*common, "--solvers", "gd", "--lr", "0.3"],
        "curves-bigsam": [*common, "--solvers", "bigsam", "--lr", "0.6"],
    }.items():
        assert main([*flags, "--out", str(home / name)]) == 0
    (home / "notes.md").write_text(NOTES)
    return home


def page(home: Path, out: Path, *names: str, notes: Path | None = None) -> str:
    folders = [str(home / name) for name in names]
    assert results.main([str(notes or home / "notes.md"), *folders, "--out", str(out)]) == 0
    return (out / "few_shot.md").read_text()


def cells(text: str, title: str) -> dict[str, list[str]]:
    """The lines of the table below a title, by their first cell."""
    lines = text.split(f"**{title}**\n\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def scores(home: Path, name: str, method: str, cell: str = "") -> Any:
    found = json.loads((home / name / "results.json").read_text())["runs"]
    part = [r["also"][cell] if cell else r["scores"] for r in found if r["method"] == method]
    return np.array([100 * s["2"]["mean"] for s in part])


def test_the_page_has_titles_notes_commands_tables_and_figures(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(studies, tmp_path, "many", "curves-bigsam", "curves-gd")
    assert text.startswith("# The page\n\nIt begins so.\n\n## Many ways: one encoder\n\nWhat is known of it.\n\n```\n")
    assert "Not run" not in text
    assert "not given, and so not on the page: absent" in capsys.readouterr().err
    assert text.count("python -m bilevel_recipes.few_shot --tasks 2") == 3
    assert str(studies) not in text
    assert "--data-root DATA" in text
    assert "--out runs/curves-gd" in text
    for name in ("few_shot_many.png", "few_shot_curves-gd.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).stat().st_size > 5000
    assert {file.name for file in tmp_path.iterdir()} == {"few_shot.md", "few_shot_many.png", "few_shot_curves-gd.png"}
    for line in text.splitlines():  # the commands are ones that can be given
        if line.startswith("python -m"):
            command.parse(RECIPE, shlex.split(line)[3:])


def test_figures_are_those_of_the_runs(studies: Path, tmp_path: Path) -> None:
    text = page(studies, tmp_path, "many", "curves-bigsam", "curves-gd")
    title = "digits, conv4, K = 2, trained on 6-way 1-shot"
    found = cells(text, title)
    assert found["method"] == ["t", "3-way 1-shot", "3-way 2-shot", "6-way 1-shot", "CPU s of a training"]
    assert list(found)[2:] == ["untrained", "gd", "bigsam"]
    ours = {name: scores(studies, "many", name, "3x2") for name in ("gd", "bigsam")}
    mean, interval = map(float, found["gd"][2].split(" ± "))
    assert mean == pytest.approx(ours["gd"].mean(), abs=0.005)
    assert interval == pytest.approx(student.ppf(0.975, 2) * ours["gd"].std(ddof=1) / 3**0.5, abs=0.005)
    gain = cells(text, "Less gd with the same seeds, in points")
    assert list(gain)[2:] == ["bigsam"]
    mean, interval = map(float, gain["bigsam"][1].split(" ± "))
    assert mean == pytest.approx((ours["bigsam"] - ours["gd"]).mean(), abs=0.005)
    assert interval == pytest.approx(over_seeds(ours["bigsam"] - ours["gd"]), abs=0.005)
    runs = json.loads((studies / "many" / "results.json").read_text())["runs"]
    seconds = np.mean([r["cpu_seconds"] for r in runs if r["method"] == "gd"])
    assert found["gd"][-1] == f"{seconds:.0f}"
    assert found["untrained"][-1] == "–"


def test_runs_of_one_section_share_a_table_though_their_rates_differ(studies: Path, tmp_path: Path) -> None:
    text = page(studies, tmp_path, "curves-bigsam", "curves-gd")
    found = cells(text, "digits, conv4")
    assert list(found)[2:] == ["gd, K = 1", "bigsam, K = 1", "gd, K = 2", "bigsam, K = 2"]
    assert [found[name][0] for name in ("gd, K = 1", "bigsam, K = 1")] == ["0.3", "0.6"]
    gain = cells(text, "Less gd with the same seeds, in points")
    runs = {name: json.loads((studies / f"curves-{name}" / "results.json").read_text())["runs"] for name in
            ("gd", "bigsam")}  # fmt: skip
    first = {name: next(r for r in found if (r["shots"], r["steps"]) == (1, 2)) for name, found in runs.items()}
    one = {name: 100 * r["scores"]["2"]["mean"] for name, r in first.items()}
    assert float(gain["bigsam, K = 2"][0]) == pytest.approx(one["bigsam"] - one["gd"], abs=0.005)
    assert "One seed, 9 test tasks" in text


def changed(studies: Path, out: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a run whose results.json is changed."""
    found = json.loads((studies / name / "results.json").read_text())
    change(found)
    out.mkdir(parents=True)
    (out / "results.json").write_text(json.dumps(found))
    return out


def test_settings_that_differ_are_named_and_doubles_are_refused(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("## curves-gd other: Two\n")
    same = changed(studies, tmp_path / "a" / "other", "curves-gd", lambda found: None)
    command = [str(notes), str(studies / "curves-gd"), str(same), "--out", str(tmp_path / "out")]
    assert results.main(command) == 2
    assert "two runs of the section curves-gd other have gd, K = 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    longer = changed(studies, tmp_path / "b" / "other", "curves-gd", lambda found: found["settings"].update(eta=0.5))
    command[2] = str(longer)
    assert results.main(command) == 0
    found = cells((tmp_path / "out" / "few_shot.md").read_text(), "digits, conv4")
    assert list(found)[2:4] == ["gd, K = 1, eta 0.002", "gd, K = 2, eta 0.002"]


def test_seeds_may_be_in_runs_of_their_own(studies: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("## curves-gd other: Two\n")
    other = changed(studies, tmp_path / "other", "curves-gd", lambda found: [r.update(seed=1) for r in found["runs"]])
    assert results.main([str(notes), str(studies / "curves-gd"), str(other), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "few_shot.md").read_text()
    assert "2 seeds, 9 test tasks of each kind; ± is the 95 % interval over the seeds" in text
    assert cells(text, "digits, conv4")["gd, K = 1"][1].endswith(" ± 0.00")


def test_one_kind_of_task_at_several_rates_has_a_line_for_each(studies: Path, tmp_path: Path) -> None:
    def more(found: Any) -> None:
        found["runs"] += [{**copy.deepcopy(r), "lr": 0.9} for r in found["runs"]]

    folder = changed(studies, tmp_path / "curves-gd", "curves-gd", more)
    text = page(tmp_path, tmp_path / "out", folder.name, notes=studies / "notes.md")
    assert "gd, K = 1, t = 0.3" in cells(text, "digits, conv4")
    assert "gd, K = 1, t = 0.9" in cells(text, "digits, conv4")


def test_more_curves_than_can_be_told_apart_are_refused(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def more(found: Any) -> None:
        found["runs"] += [{**r, "lr": lr} for r in found["runs"] for lr in (1, 2, 3, 4)]

    folder = changed(studies, tmp_path / "curves-gd", "curves-gd", more)
    assert results.main([str(studies / "notes.md"), str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "10 curves in one panel can't be told apart" in capsys.readouterr().err


def test_a_table_of_the_cost_is_taken_as_it_is(studies: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("## cost: Cost\n")

    def cost(found: Any) -> None:
        del found["runs"], found["data"]
        found["blocks"] = [["A table", ["", "CPU ms"], [["plain", "12"], ["ours", "13"]]]]

    changed(studies, tmp_path / "cost", "many", cost)
    text = page(tmp_path, tmp_path / "out", "cost", notes=notes)
    assert cells(text, "A table") == {"": ["CPU ms"], "---": ["---:"], "plain": ["12"], "ours": ["13"]}


def test_missing_and_damaged_runs_get_one_line(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*words: object) -> str:
        assert results.main([*map(str, words), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    notes = studies / "notes.md"
    assert "finish that study" in fails(notes, studies / "nothing")
    assert "finish that study" in fails(notes, notes)
    assert "there is no file" in fails(tmp_path / "none.md", studies / "many")
    assert "give the file of the notes first" in fails(studies / "many", studies / "curves-gd")
    (tmp_path / "plain.md").write_text("# A page\n## A heading\n")
    assert "no line '## RUN: TITLE'" in fails(tmp_path / "plain.md", studies / "many")
    (tmp_path / "other.md").write_text("## other: A heading\n")
    assert "no section of" in fails(tmp_path / "other.md", studies / "many")
    (tmp_path / "double.md").write_text("## many: A heading\n## many: Another\n")
    assert "two places of" in fails(tmp_path / "double.md", studies / "many")
    copied = changed(studies, tmp_path / "copy" / "many", "many", lambda found: None)
    assert "two folders for the run many" in fails(notes, studies / "many", copied)
    for number, change in enumerate((
        lambda found: found.pop("versions"),
        lambda found: found["runs"][0].pop("cpu_seconds"),
        lambda found: found["runs"][2]["scores"].pop("2"),
        lambda found: found["runs"][2]["scores"]["2"].update(mean=None),
        lambda found: found["runs"][2]["history"][0].update(step="one"),
        lambda found: found["settings"].pop("outer_steps"),
        lambda found: found.update(runs={"a": 1}),
    )):  # fmt: skip
        folder = changed(studies, tmp_path / str(number) / "many", "many", change)
        assert "is not the result of a few-shot study" in fails(notes, folder)
    whole = (studies / "many" / "results.json").read_text()
    for number, text in enumerate((whole[: len(whole) // 2], "", "[1]", "null")):
        folder = tmp_path / f"cut{number}" / "many"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(text)
        assert "is not the result of a few-shot study" in fails(notes, folder)
    assert not (tmp_path / "out").exists()


def test_commands_are_shown_without_the_places_of_this_machine() -> None:
    given = "python -m x --data-root '/home/a b' --out=/home/me/runs/omniglot --quiet --lr 0.4"
    assert results.shown(given) == "python -m x --data-root DATA --out runs/omniglot --lr 0.4"


def test_make_few_shot_has_a_section_for_each_study_and_flags_that_exist() -> None:
    dry = ["make", "-n", "-o", ".venv/.test", "few-shot", "DATA=DATA", "RUNS=nowhere"]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, sections = results.read_notes(ROOT / "docs" / "results" / "few_shot_notes.md")
    outs: list[str] = []
    for text in re.split(r"&&|\n", printed.replace("\\\n", " ")):
        words = shlex.split(text)
        if "bilevel_recipes.few_shot" in words:
            chosen, output = command.parse(RECIPE, words[3:])
            assert (output.resume, chosen.data_root) == (True, "DATA")
            outs.append(output.out.name)
        elif "bilevel_recipes.few_shot.cost" in words:
            outs.append(Path(words[-1]).name)
    assert sorted(outs) == sorted(name for section in sections for name in section.names)


def test_settings_of_their_own_are_settings() -> None:
    chosen, _ = command.parse(RECIPE, SMALL)
    assert set(vars(chosen)) >= results.OWN
