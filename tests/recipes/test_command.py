"""The paper's study as a command, end to end: files, resume after kill -9, flags, errors, Table 1."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import killed

from bilevel_recipes import command as shared
from bilevel_recipes import report, runs, tables
from bilevel_recipes.data_cleaning import table1
from bilevel_recipes.data_cleaning.__main__ import RECIPE, main
from bilevel_recipes.data_cleaning.output import blocks
from bilevel_recipes.data_cleaning.study import Job, Settings, features, fingerprint, jobs, principal, problem, run

ROOT = Path(__file__).parents[2]
SMALL = ["--train", "100", "--validation", "60", "--steps", "10", "--outer-steps", "2", "--fit-steps", "20"]
SMALL += ["--lr", "0.1", "--quiet", "--threads", "1"]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def scores(folder: Path) -> list[tuple[str, ...]]:
    """What curves.csv holds besides seconds."""
    return [tuple(v for k, v in row.items() if k != "seconds") for row in rows(folder / "curves.csv")]


def test_a_study_leaves_everything_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    grid = ["--solvers", "gd,bigsam", "--every", "1,5", "--rho", "0.8,0.6", "--seeds", "2"]
    assert main([*SMALL, *grid, "--baselines", "validation-only,keep-all,oracle", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out / "report.html")
    assert "bigsam (K=10, every 5)" in printed

    results = json.loads((out / "results.json").read_text())
    assert len(results["runs"]) == 2 * 2 * (3 + 3)
    assert len(results["table"]) == 2 * (3 + 3)
    oracle = next(r for r in results["table"] if r["label"] == "oracle")
    assert oracle["f1_clean"] == oracle["f1_corrupted"] == 1
    gd = [r for r in results["runs"] if r["method"] == "gd" and r["rho"] == 0.8]
    mean = next(r for r in results["table"] if r["label"].startswith("gd") and r["rho"] == 0.8)
    assert mean["f1_clean"] == pytest.approx(np.mean([r["f1_clean"] for r in gd]))
    assert mean["f1_clean_std"] == pytest.approx(np.std([r["f1_clean"] for r in gd], ddof=1))
    assert results["settings"]["seeds"] == 2
    assert results["versions"]["torch"] == torch.__version__

    assert mean["steps_to_gd"] in (1, 2)  # gd is as good as itself at its end, or was so before
    assert oracle["steps_to_gd"] is None

    curves = rows(out / "curves.csv")
    assert len(curves) == 2 * 2 * 3 * 2
    last = [c for c in curves if c["method"] == "gd" and c["rho"] == "0.8" and c["seed"] == "1"][-1]
    assert float(last["f1_clean"]) == next(r["f1_clean"] for r in gd if r["seed"] == 1)

    page = (out / "report.html").read_text()
    assert page.count("<img") == 3
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing from the network, nothing from beside it
    for name in ("f1_by_step", "f1_by_time", "histogram"):
        assert (out / f"{name}.png").stat().st_size > 5000
        assert (out / f"{name}.svg").read_text().count("<path") > 5


def test_kill_and_resume_gives_the_same_bits(tmp_path: Path) -> None:
    command = [
        *SMALL,
        "--outer-steps",
        "8",
        "--steps",
        "25",
        "--batch-size",
        "32",
        "--baselines",
        "none",
    ]
    chosen, _ = shared.parse(RECIPE, command)
    runs.open_folder(tmp_path / "whole", fingerprint(chosen), resume=False)
    run(chosen, tmp_path / "whole", quiet=True)
    file, found = killed("bilevel_recipes.data_cleaning", command, tmp_path / "killed")
    assert 1 <= len(found["history"]) < 6
    run(chosen, tmp_path / "killed", quiet=True)
    whole, resumed = (runs.load(tmp_path / name / "runs" / file) for name in ("whole", "killed"))
    assert whole is not None
    assert resumed is not None
    assert torch.equal(whole["lam"], resumed["lam"])


def test_ctrl_c_loses_nothing_that_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--baselines", "none"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    save = runs.save

    def save_then_stop(path: Path, state: dict[str, object]) -> None:
        save(path, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save", save_then_stop)
        assert main([*command, "--out", str(tmp_path / "stopped")]) == 130
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "stopped"), "--resume"]) == 0
    assert scores(tmp_path / "whole") == scores(tmp_path / "stopped")


def test_a_finished_run_is_neither_overwritten_nor_resumed_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--baselines", "none", "--out", str(tmp_path)]
    assert main(command) == 0
    before = scores(tmp_path)
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--lr", "0.2"]) == 2
    assert "lr: 0.1 then, 0.2 now" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert scores(tmp_path) == before


def test_read_only_arrays_of_files_are_no_trouble(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        x, y = rng.integers(0, 256, (200, 28, 28), np.uint8), (np.arange(200) % 10).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", x), (f"{part}-labels-idx1-ubyte", y)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (raw / name).write_bytes(head + array.tobytes())
    flags = ["--dataset", "mnist", "--data-root", str(tmp_path), "--model", "linear,cnn", "--steps", "2", "--paper"]
    assert main([*SMALL, *flags, "--rho", "0.8", "--batch-size", "20", "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out/table.md").read_text()
    assert "MNIST, cnn, ρ = 0.8" in table
    assert "0.781" in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--dataset", "mnist", "--data-root", "nowhere"],
            "Give --data-root, the folder that holds them, or --download",
        ),
        (["--dataset", "qmnist", "--data-root", "nowhere"], "--dataset mnist-qmnist-labels"),
        (["--memory", "much"], "memory"),
        (["--train", "5000"], "too few"),
        (["--lr", "1e38", "--steps", "5"], "smaller --lr"),
        pytest.param(
            ["--device", "cuda"],
            "use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here"),
        ),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*flags, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--solvers", "sgd"], "there is no 'sgd'; known: gd, bigsam"),
        (["--model", "linear,vit"], "there is no 'vit'; known: linear"),
        (["--baselines", "luck"], "there is no 'luck'; known: validation-only"),
        (["--dataset", "mine.npz"], "there is no 'mine.npz'; known: digits"),
        (["--steps", "0"], "at least 1; got 0"),
        (["--outer-steps", "-3"], "at least 1; got -3"),
        (["--train", "-1"], "at least 0; got -1"),
        (["--seeds", "many"], "invalid literal for int"),
        (["--rho", "0.5,1.5"], "at least 0 and less than 1; got 1.5"),
        (["--rho", "-0.1"], "at least 0 and less than 1; got -0.1"),
        (["--lr", "nan"], "at least 0; got nan"),
        (["--features", "pixel"], "pixels"),
        (["--outer-step", "3"], "Perhaps you meant: --outer-steps"),
        (["--judge", "evidence"], "Unrecognized options: --judge"),
    ],
)
def test_flags_that_cannot_be_say_what_can(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in unboxed(capsys.readouterr().err)


def unboxed(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def test_help_explains_each_flag_and_each_setting_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = unboxed(capsys.readouterr().out)
    for name in [*Settings.__dataclass_fields__, *shared.Output.__dataclass_fields__]:
        assert re.search(rf" --{name.replace('_', '-')} .*?\(default: ", printed), name
    for group in ("data options", "method options", "comparison options", "run options", "output options"):
        assert group in printed


def test_flags_go_over_paper_and_paper_over_the_defaults() -> None:
    plain, output = shared.parse(RECIPE, [])
    assert plain == Settings()
    assert output.out == Path("runs/data_cleaning")
    paper, _ = shared.parse(RECIPE, ["--rho", "0.9, 0.8", "--paper", "--baselines", "none"])
    assert paper.solvers == ("gd", "bigsam", "bigsam-convergent")
    assert (paper.rho, paper.baselines) == ((0.9, 0.8), ())


def test_every_says_nothing_about_gd_and_files_do_not_collide() -> None:
    grid = list(
        jobs(
            Settings(
                solvers=("gd", "bigsam"),
                every=(1, 5),
                seeds=2,
                baselines=("oracle",),
                dataset=("digits", "mnist", "mnist-qmnist-labels"),
            )
        )
    )
    assert sum(j.method == "gd" for j in grid) == 2 * 3
    assert {j.seed for j in grid if j.dataset == "mnist"} == {0, 1}
    assert {j.seed for j in grid if j.dataset == "mnist-qmnist-labels"} == {2, 3}  # MNIST's rows: other draws of them
    assert len({j.file for j in grid}) == len(grid)
    assert all("/" not in j.file for j in grid)


def test_the_papers_figures_stand_beside_ours() -> None:
    row = {"dataset": "svhn", "model": "linear", "rho": 0.8, "validation": 0, "f1_clean": 0.9, "f1_clean_std": 0.01}
    row["steps_to_gd"] = None
    both = [{**row, "method": m, "label": f"{m} (K=100)"} for m in ("bigsam", "gd")]
    text = tables.markdown(blocks(both, {"svhn": "SVHN (subset)"}))
    assert "0.900 ± 0.010" in text
    assert "| 0.536 |" in text.splitlines()[4]
    assert "| 0.443 |" in text.splitlines()[5]


def colour_files(root: Path) -> None:
    """A data set like CIFAR-10's subset, whose ten classes are ten textures."""
    rng = np.random.default_rng(0)
    textures = rng.integers(0, 256, (10, 8, 8, 3))
    y = {"train": np.arange(300) % 10, "test": np.arange(40) % 10}
    x = {k: np.tile(textures[v], (1, 4, 4, 1)) + rng.integers(-90, 90, (len(v), 32, 32, 3)) for k, v in y.items()}
    images = {f"x_{k}": v.clip(0, 255).astype(np.uint8) for k, v in x.items()}
    np.savez(root / "CIFAR10_subset.npz", **images, **{f"y_{k}": v for k, v in y.items()})


def test_linear_models_see_patches_of_colour_and_networks_see_pixels(tmp_path: Path) -> None:
    colour_files(tmp_path)
    s = Settings(dataset=("cifar10",), data_root=str(tmp_path), train=100, validation=(60,))
    linear, cnn = (Job("cifar10", model, 0.5, 60, "gd", 1, 5, 0) for model in ("linear", "cnn"))
    assert [features(s, job) for job in (linear, cnn)] == ["patches", "pixels"]
    assert features(replace(s, features="pixels"), linear) == "pixels"
    assert features(Settings(), Job("digits", "linear", 0.5, 0, "gd", 1, 5, 0)) == "pixels"
    learnt, pixels = problem(s, linear), problem(s, cnn)
    assert pixels.train[0].shape == (100, 3, 32, 32)
    assert learnt.train[0].ndim == 2
    for x in (learnt.train[0], pixels.train[0]):
        assert x.mean(0).abs().max() < 1e-4
    assert torch.equal(learnt.train[1], pixels.train[1])  # the same rows with the same wrong labels


def test_descent_in_rotated_coordinates_is_the_same_but_for_what_is_dropped() -> None:
    s = Settings(train=200, validation=(100,))
    job = Job("digits", "linear", 0.5, 100, "bigsam", 1, 20, 0)
    whole = problem(s, job)
    assert principal(whole, 0) is whole
    some = principal(whole, 40)
    assert some.train[0].shape == (200, 40)
    x = whole.train[0].flatten(1)
    kept = some.train[0].square().sum() / x.square().sum()
    assert 0.95 < kept < 1
    best = torch.linalg.svdvals(x)[:40].square().sum() / x.square().sum()
    assert kept == pytest.approx(float(best), rel=1e-4)
    torch.testing.assert_close(some.train[0] @ some.train[0].T, x @ x.T, atol=0.1 * x.shape[1], rtol=0)


def table1_runs(folder: Path) -> list[str]:
    """Runs on digits for the table and for the figures."""
    figures = {"table": ["--seeds", "2"], "figure2": ["--every", "1,5"], "figure3": ["--steps", "4,8"], "figure1": []}
    for name, flags in figures.items():
        flags = [*flags, *([] if name == "table" else ["--baselines", "none", "--rho", "0.8"])]
        assert main([*SMALL, "--paper", *flags, "--out", str(folder / name)]) == 0
    return [str(folder / name) for name in figures]


def test_table_1_is_one_page_with_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = table1_runs(tmp_path)
    assert table1.main([*folders, "--out", str(tmp_path / "docs")]) == 0
    page = (tmp_path / "docs/data_cleaning_table1.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| digits")]
    assert [line.split(" | ")[1] for line in lines] == ["0.9", "0.8", "0.6"]
    assert all(line.count("**") == 2 for line in lines)  # the best of each line
    mean = next(r for r in json.loads((tmp_path / "table/results.json").read_text())["table"] if r["method"] == "gd")
    assert f"{mean['f1_clean']:.3f} ± {mean['f1_clean_std']:.3f}" in lines[0]
    assert "1 cells were run for 2 of them. At the end, `bigsam` is above `gd` in 1 of these" in page
    assert "--data-root" not in page
    assert str(tmp_path) not in page
    for n in (1, 2, 3):
        assert f"](data_cleaning_figure{n}.png)" in page
        assert (tmp_path / f"docs/data_cleaning_figure{n}.png").stat().st_size > 5000
    assert table1.main([folders[1], "--out", str(tmp_path / "docs")]) == 2
    assert "none of these runs belongs to Table 1" in capsys.readouterr().err
    assert table1.main([str(tmp_path / "nowhere")]) == 2
    assert "results.json does not exist" in capsys.readouterr().err


def test_the_claim_of_table_1_is_checked_line_by_line() -> None:
    def rows_of(dataset: str, **figures: float) -> list[dict[str, object]]:
        cell = {"dataset": dataset, "model": "linear", "rho": 0.9, "validation": 0}
        return [{**cell, "method": m, "f1_clean": f, "f1_clean_std": 0.01} for m, f in figures.items()]

    titles = {"mnist": "MNIST", "svhn": "SVHN", "digits": "digits", "cifar10": "CIFAR-10"}
    found = table1.table(
        [
            *rows_of("mnist", gd=0.5, bigsam=0.7),
            *rows_of("svhn", gd=0.3, bigsam=0.4),  # not above the paper's 0.404
            *rows_of("cifar10", gd=0.5, bigsam=0.45),
            *rows_of("digits", gd=0.3, bigsam=0.4),
        ],
        titles,
    )
    assert [line[-1] for line in found] == ["yes", "no", "no", ""]
    assert found[0][4] == "**0.700 ± 0.010**"
    assert found[1][7] == "**0.404**"


def test_checkpoints_are_whole_or_absent_and_hold_no_code(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    assert runs.load(path) is None
    runs.save(path, {"lam": torch.arange(3.0), "history": [{"step": 1}]})
    (tmp_path / ".state.pt.tmp").write_bytes(b"half")  # what a kill leaves
    assert torch.equal((runs.load(path) or {})["lam"], torch.arange(3.0))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="delete it to redo"):
        runs.load(path)
    torch.save({"evil": Settings()}, path)
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        runs.load(path)


def test_report_escapes_what_users_name() -> None:
    page = report.page(
        "<b>",
        "a & b",
        [("<h>", report.table(["<x>"], [["<script>"]]) + report.gallery([(np.zeros((2, 2), np.uint8), '"><i>')]))],
    )
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert '"><i>' not in page


def test_the_report_opens_in_a_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    assert main([*SMALL, "--baselines", "none", "--out", str(tmp_path / "out")]) == 0
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'profile'}"]
    flags = [f"--{flag}" for flag in flags]
    page = (tmp_path / "out/report.html").as_uri()
    dom = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "F1 against outer step" in dom
    assert dom.count("<img") == 3
    subprocess.run(
        [browser, *flags, f"--screenshot={tmp_path / 'shot.png'}", page], capture_output=True, timeout=300, check=True
    )
    assert (tmp_path / "shot.png").stat().st_size > 20_000
