"""The few-shot command, end to end: files, resume after kill -9, errors; its cost."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import killed

from bilevel_recipes import command as shared
from bilevel_recipes import runs
from bilevel_recipes.data_cleaning.study import Settings as CleaningSettings
from bilevel_recipes.few_shot import cost
from bilevel_recipes.few_shot.__main__ import RECIPE, main
from bilevel_recipes.few_shot.study import Settings, fingerprint, jobs, run, summary, tasks

SMALL = ["--tasks", "3", "--outer-steps", "4", "--queries", "4", "--steps", "3", "--test-episodes", "20"]
SMALL += ["--curve-points", "2", "--curve-episodes", "10", "--test-steps", "1,6", "--quiet", "--threads", "1"]


def test_a_study_leaves_everything_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    grid = ["--solvers", "gd,bigsam", "--ways", "3,5", "--every", "1,2", "--seeds", "2", "--also", "3x1,4x2"]
    assert main([*SMALL, *grid, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out / "report.html")
    assert "bigsam (K=3, t=0.4, every 2)" in printed
    assert "digits, conv4, 5-way 1-shot" in printed

    results = json.loads((out / "results.json").read_text())
    assert len(results["runs"]) == 2 * 2 * (1 + 1 + 2)
    assert len(results["table"]) == (2 + 1 + 2) * (1 + 1 + 2)  # two cells, and 3x1 from 5x1, 4x2 from both
    assert "gd (K=3, t=0.4), trained 5-way 1-shot" in printed
    assert set(results["runs"][0]["scores"]) == {"1", "3", "6", "nearest mean", "leaky"}
    row = next(r for r in results["table"] if r["method"] == "gd" and r["ways"] == 5)
    both = [r["scores"]["3"]["mean"] for r in results["runs"] if r["method"] == "gd" and r["ways"] == 5]
    assert row["scores"]["3"]["mean"] == pytest.approx(sum(both) / 2)
    assert row["scores"]["3"]["interval"] == pytest.approx(12.706 * abs(both[0] - both[1]) / 2, rel=1e-4)
    assert f"{100 * row['scores']['3']['mean']:.2f} ± " in (out / "table.md").read_text()

    with open(out / "curves.csv", newline="") as handle:
        curves = list(csv.DictReader(handle))
    assert [int(c["step"]) for c in curves] == [2, 4] * 2 * (1 + 2) * (2 + 1 + 2)  # seeds, methods, cells as above
    own, other = (
        [float(c["mean"]) for c in curves if c["ways"] == "3" and c["label"] == label]
        for label in ("gd (K=3, t=0.4)", "gd (K=3, t=0.4), trained 5-way 1-shot")
    )
    assert len(own) == len(other) == 4  # two points for each of two seeds, and no curve is taken for another
    assert own != other
    page = (out / "report.html").read_text()
    assert page.count("<img") == 2 + 3 * 3  # curves; support and two queries of three classes
    assert not re.search(r'(src|href)="(?!data:)', page)
    for name in ("accuracy_by_step", "accuracy_by_time"):
        assert (out / f"{name}.png").stat().st_size > 5000
        assert (out / f"{name}.svg").read_text().count("<path") > 5


def test_test_views_and_test_turns_change_what_is_measured_and_not_the_training(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for flags in ([], ["--test-views", "mirror,shift"], ["--test-turns", "1"]):
        out = tmp_path / str(len(found))
        assert main([*SMALL, "--ways", "3", "--baselines", "none", *flags, "--out", str(out)]) == 0
        found += json.loads((out / "results.json").read_text())["runs"]
    plain, views, turns = found
    assert [point["mean"] for point in views["history"]] == [point["mean"] for point in plain["history"]]
    assert views["scores"] != plain["scores"]
    assert turns["scores"] != plain["scores"]
    assert main([*SMALL, "--adapt", "all", "--test-views", "mirror", "--out", str(tmp_path / "all")]) == 2


def test_classes_for_training_are_not_tested_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--train-on", "train+val", "--test-on", "val", "--out", str(tmp_path)]) == 2
    assert "--train-on train+val trains on the classes of --test-on val" in capsys.readouterr().err


def test_omniglot_sets_the_flags_of_the_readme_and_none_is_written_as_none(capsys: pytest.CaptureFixture[str]) -> None:
    chosen, _ = shared.parse(RECIPE, ["--omniglot", "--seeds", "3"])
    assert (chosen.dataset, chosen.ways, chosen.baselines, chosen.seeds) == (("omniglot",), (120,), (), 3)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--baselines none" in re.sub(r"[│╭╮╰╯─\s]+", " ", capsys.readouterr().out)


def test_kill_and_resume_gives_the_same_bits(tmp_path: Path) -> None:
    command = [*SMALL, "--outer-steps", "40", "--save-every", "3", "--baselines", "none", "--solvers", "bigsam"]
    chosen, _ = shared.parse(RECIPE, command)
    runs.open_folder(tmp_path / "whole", fingerprint(chosen), resume=False)
    run(chosen, tmp_path / "whole", quiet=True)
    file, found = killed("bilevel_recipes.few_shot", command, tmp_path / "killed")
    assert 3 <= found["step"] < 36
    run(chosen, tmp_path / "killed", quiet=True)
    whole, resumed = (runs.load(tmp_path / name / "runs" / file) for name in ("whole", "killed"))
    assert whole is not None
    assert resumed is not None
    assert all(torch.equal(v, resumed["encoder"][k]) for k, v in whole["encoder"].items())
    assert whole["record"]["scores"] == resumed["record"]["scores"]
    assert [h["mean"] for h in whole["record"]["history"]] == [h["mean"] for h in resumed["record"]["history"]]


def test_other_settings_are_not_resumed_and_a_finished_run_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--baselines", "none", "--out", str(tmp_path)]
    assert main(command) == 0
    before = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert main(command) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--lr", "0.2"]) == 2
    assert "lr: [0.4] then, [0.2] now" in capsys.readouterr().err
    assert main([*command, "--resume", "--save-every", "7"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ways", "25"], "25 ways with 11 images of each class were asked for; there are 24 classes"),
        (["--ways", "17"], "there are 16 classes"),
        (["--shots", "200"], "the smallest of 174 images"),
        (["--dataset", "omniglot", "--data-root", "nowhere"], "--download"),
        (["--also", "5-1"], "WAYSxSHOTS"),
        (["--test-on", "val"], "has no split 'val'"),
        (["--batchnorm", "batch", *SMALL], "'running' or 'task'"),
        (["--images", "0"], "--images must be at least 1"),
        (["--train-queries", "200"], "5 ways with 201 images of each class"),
        (["--features", "flat", *SMALL], "one of sphere, centred, raw; got 'flat'"),
        (["--eta", "1e30", *SMALL], "a smaller --lr or --eta"),
        (["--precision", "bf16"], "images of 8 pixels, of which the last convolution sees one"),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*flags, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--solvers", "sgd"], ["--model", "vit"], ["--dataset", "mnist"]])
def test_unknown_names_list_the_known(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "known:" in capsys.readouterr().err


def test_help_explains_each_flag_and_each_setting_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = re.sub(r"[│╭╮╰╯─\s]+", " ", capsys.readouterr().out)
    for name in Settings.__dataclass_fields__:
        assert re.search(rf" --{name.replace('_', '-')} .*?\(default: ", printed)
    assert "--solvers gd,bigsam-paper --lr 0.01 --s 0.01 --eta 0.001 --no-decay --features raw" in printed
    both = {"dataset", "data_root", "solvers", "steps", "every", "seeds", "threads"}
    assert both <= set(CleaningSettings.__dataclass_fields__) & set(Settings.__dataclass_fields__)


def test_paper_sets_the_papers_rates_and_flags_go_over_it() -> None:
    paper, _ = shared.parse(RECIPE, ["--paper", "--eta", "0.01"])
    assert (paper.lr, paper.s, paper.eta, paper.no_decay) == ((0.01,), 0.01, 0.01, True)


def test_jobs_do_not_collide_and_every_says_nothing_about_gd() -> None:
    grid = list(
        jobs(Settings(solvers=("gd", "bigsam"), every=(1, 5), lr=(0.1, 0.2), seeds=2, baselines=("untrained",)))
    )
    assert sum(j.method == "gd" for j in grid) == 4
    assert len({j.file for j in grid}) == len(grid) == 2 * 2 * (1 + 1 + 2)


def test_training_tasks_can_have_fewer_queries_and_are_then_more() -> None:
    s = Settings(images=880)
    job = next(jobs(s))
    assert (tasks(s, job), tasks(replace(s, train_queries=3), job)) == (16, 44)


def test_the_interval_of_one_seed_is_that_of_its_tasks() -> None:
    record: dict[str, Any] = {"dataset": "d", "model": "m", "ways": 5, "shots": 1, "label": "gd", "method": "gd",
                              "steps": 5, "every": 1, "lr": 0.1, "seconds": 1.0, "cpu_seconds": 1.0, "also": {},
                              "scores": {"5": {"mean": 0.5, "interval": 0.1}}}  # fmt: skip
    assert summary([record])[0]["scores"]["5"] == {"mean": 0.5, "interval": 0.1}


def test_cost_compares_equal_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("higher")
    flags = ["--dataset", "digits", "--tasks", "3", "--repeats", "2", "--queries", "3", "--out", str(tmp_path)]
    assert cost.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    apart = [float(line.split()[-1]) for line in lines if line.startswith("loop over tasks")]
    assert len(apart) == 3  # higher has no steps on g
    assert max(apart) < 1e-4
    results = json.loads((tmp_path / "results.json").read_text())
    assert [len(rows) for _, _, rows in results["blocks"]] == [3, 4, 3]
    assert results["blocks"][1][2][0][2] == "1.000"
    assert results["command"].startswith("python -m bilevel_recipes.few_shot.cost --dataset digits")
    assert cost.main(["--data-root", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
