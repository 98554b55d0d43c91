"""The command, end to end: files, resume after kill -9, own data, errors."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import killed

from bilevel_recipes import data, report, runs
from bilevel_recipes.data_cleaning.__main__ import main, parser, settings
from bilevel_recipes.data_cleaning.output import markdown
from bilevel_recipes.data_cleaning.study import Settings, fingerprint, jobs, run

ROOT = Path(__file__).parents[2]
SMALL = ["--train", "100", "--validation", "60", "--steps", "10", "--outer-steps", "2", "--fit-steps", "20"]
SMALL += ["--lr", "0.1", "--quiet", "--threads", "1"]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_a_study_leaves_everything_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    grid = ["--solvers", "gd,bigsam", "--judge", "validation", "--every", "1,5", "--rho", "0.8,0.6", "--seeds", "2"]
    assert main([*SMALL, *grid, "--baselines", "validation-only,keep-all,oracle", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out / "report.html")
    assert "bigsam (validation, K=10, every 5)" in printed

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

    weights = rows(out / "weights.csv")
    cut = data.split(data.load("digits"), 0.8, 100, 60, seed=0)
    given = dict(zip(cut.rows.tolist(), cut.y.tolist(), strict=True))
    assert len(weights) == 100
    assert [float(w["weight"]) for w in weights] == sorted(float(w["weight"]) for w in weights)
    assert all(given[int(w["index"])] == int(w["given_label"]) for w in weights)
    assert all((float(w["weight"]) < 0.5) == (w["verdict"] == "mislabelled") for w in weights)
    assert all((w["given_label"] == w["suggested_label"]) == (w["verdict"] == "keep") for w in weights)

    page = (out / "report.html").read_text()
    assert page.count("<img") >= 4 + 10
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing from the network, nothing from beside it
    for name in ("f1_by_step", "f1_by_time", "histogram", "confusion"):
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
    chosen = settings(parser().parse_args(command))
    runs.open_folder(tmp_path / "whole", fingerprint(chosen), resume=False)
    run(chosen, tmp_path / "whole", quiet=True)
    file, found = killed("bilevel_recipes.data_cleaning", command, tmp_path / "killed")
    assert 1 <= len(found["history"]) < 6
    run(chosen, tmp_path / "killed", quiet=True)
    whole, resumed = (runs.load(tmp_path / name / "runs" / file) for name in ("whole", "killed"))
    assert whole is not None
    assert resumed is not None
    assert torch.equal(whole["lam"], resumed["lam"])
    assert torch.equal(whole["suggested"], resumed["suggested"])


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
    assert (tmp_path / "whole/weights.csv").read_bytes() == (tmp_path / "stopped/weights.csv").read_bytes()


def test_a_finished_run_is_neither_overwritten_nor_resumed_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--baselines", "none", "--out", str(tmp_path)]
    assert main(command) == 0
    before = (tmp_path / "weights.csv").read_bytes()
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--lr", "0.2"]) == 2
    assert "lr: 0.1 then, 0.2 now" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "weights.csv").read_bytes() == before


def test_own_npz_with_a_fifth_of_the_labels_wrong(tmp_path: Path) -> None:
    images = data.load("digits")
    truth = images.y[:600]
    checked = np.arange(600) < 150
    y, _ = data.corrupt(truth[~checked], 0.2, 10, np.random.default_rng(0))
    mine = tmp_path / "mine.npz"
    np.savez(mine, x=images.x[:600], y=np.concatenate([truth[checked], y]), checked=checked)
    assert main(["--dataset", str(mine), "--outer-steps", "3", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    wrong = {int(r["index"]) for r in rows(tmp_path / "out/weights.csv") if r["verdict"] == "mislabelled"}
    real = set((np.flatnonzero(~checked)[y != truth[~checked]]).tolist())
    assert len(wrong & real) / len(wrong) > 0.8
    assert len(wrong & real) / len(real) > 0.85
    table = json.loads((tmp_path / "out/results.json").read_text())["table"]
    assert all("f1_clean" not in row for row in table)  # nobody knows the truth here
    assert "mislabelled" in (tmp_path / "out/report.html").read_text()


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


def test_own_features_without_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = rng.normal(size=(120, 5)) + 3 * y[:, None]
    np.savez(tmp_path / "mine.npz", x=x, y=y, checked=np.arange(120) < 40, classes=np.array(["<no>", "yes"]))
    assert main(["--dataset", str(tmp_path / "mine.npz"), *SMALL, "--out", str(tmp_path / "out")]) == 0
    assert "<no>" not in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "mnist", "--data-root", "nowhere"], "--data-root, or --download"),
        (["--dataset", "nowhere.npz"], "nowhere.npz does not exist"),
        (["--rho", "1.5"], "fraction of wrong labels"),
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
    "flags", [["--solvers", "sgd"], ["--model", "vit"], ["--judge", "me"], ["--baselines", "luck"]]
)
def test_unknown_names_list_the_known(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "known:" in capsys.readouterr().err


def test_help_explains_each_flag_and_each_setting_has_one() -> None:
    actions = [a for a in parser()._actions if a.option_strings]
    assert all(a.help for a in actions)
    assert set(Settings.__dataclass_fields__) <= {a.dest for a in actions}
    assert "--batch-size" in parser().format_help()


def test_every_says_nothing_about_gd_and_files_do_not_collide() -> None:
    grid = list(
        jobs(
            Settings(
                solvers=("gd", "bigsam"),
                every=(1, 5),
                seeds=2,
                baselines=("oracle",),
                dataset=("digits", "a/b.npz", "a-b.npz"),
            )
        )
    )
    assert sum(j.method == "gd" for j in grid) == 2 * 3
    assert len({j.file for j in grid}) == len(grid)
    assert all("/" not in j.file for j in grid)


def test_the_papers_figures_stand_beside_ours() -> None:
    row = {"dataset": "mnist", "model": "linear", "rho": 0.8, "validation": 0, "f1_clean": 0.9, "f1_clean_std": 0.01}
    text = markdown(
        [{**row, "label": "bigsam (validation, K=100)"}, {**row, "label": "gd (validation, K=100)"}], {"mnist": "MNIST"}
    )
    assert "0.900 ± 0.010" in text
    assert "| 0.781 |" in text.splitlines()[4]
    assert "| 0.721 |" in text.splitlines()[5]


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
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    assert main([*SMALL, "--baselines", "none", "--out", str(tmp_path / "out")]) == 0
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'profile'}"]
    flags = [f"--{flag}" for flag in flags]
    page = (tmp_path / "out/report.html").as_uri()
    dom = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "The most suspicious samples" in dom
    assert dom.count("<img") > 10
    subprocess.run(
        [browser, *flags, f"--screenshot={tmp_path / 'shot.png'}", page], capture_output=True, timeout=60, check=True
    )
    assert (tmp_path / "shot.png").stat().st_size > 20_000
