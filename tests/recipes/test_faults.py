"""Disks that are full, folders that can't be written, checkpoints that are damaged: one line, and nothing is lost.

kill -9 is in the tests of the commands, and 50 times over in `make soak`.
"""

from __future__ import annotations

import errno
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from soak import broken, result

from bilevel_recipes import plots, runs
from bilevel_recipes.data_cleaning.__main__ import main as clean
from bilevel_recipes.few_shot.__main__ import main as few_shot

COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "data_cleaning": (clean, [
        *("--train", "60", "--validation", "40", "--steps", "4", "--outer-steps", "4", "--fit-steps", "5"),
        *("--lr", "0.1", "--quiet", "--threads", "1"),
    ]),
    "few_shot": (few_shot, [
        *("--tasks", "2", "--outer-steps", "4", "--queries", "2", "--steps", "2", "--test-episodes", "4"),
        *("--curve-points", "2", "--curve-episodes", "4", "--save-every", "1", "--baselines", "none"),
        *("--solvers", "bigsam", "--quiet", "--threads", "1"),
    ]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel for each figure, written as figures are: drawing them would take most of the time."""

    def save(figure: Any, path: Path) -> Path:
        plots.plt.close(figure)
        pixel = io.BytesIO()
        Image.new("L", (1, 1)).save(pixel, "PNG")
        runs.write(path.with_suffix(".png"), pixel.getvalue())
        return path.with_suffix(".png")

    monkeypatch.setattr(plots, "save", save)


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_full_disk_at_any_write_loses_nothing(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at the first write, and at a later one each time that the run is resumed."""
    main, flags = COMMANDS[recipe]
    assert main([*flags, "--out", str(tmp_path / "whole")]) == 0
    fsync, calls = os.fsync, {"left": 0}

    def full(handle: int) -> None:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for failures in range(9):
        calls["left"] = 3**failures
        code = main([*flags, "--resume", "--out", str(tmp_path / "full")])
        assert broken(tmp_path / "full") == []
        if code == 0:
            break
        error = capsys.readouterr().err
        assert code == 2
        assert "can't be written (No space left on device); what was there before is kept" in error
        assert "--resume" in error
        assert error.count("\n") == 1
        assert not list((tmp_path / "full").rglob(".*.tmp"))  # what is of no use does not fill the disk
    assert 2 < failures < 8
    assert result(tmp_path / "full") == result(tmp_path / "whole")


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_folder_that_cannot_be_made_is_named(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, flags = COMMANDS[recipe]
    (tmp_path / "file").write_text("in the way")
    assert main([*flags, "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file" / "out") in error
    assert error.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert clean([*COMMANDS["data_cleaning"][1], "--out", str(tmp_path / "locked" / "out")]) == 2
    assert "Permission denied" in capsys.readouterr().err


def two_checkpoints(folder: Path) -> Path:
    path = folder / "state.pt"
    for step in (1, 2):
        runs.save(path, {"lam": torch.arange(300.0) + step, "history": [{"step": step}]})
    return path


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut short anywhere, or with any one bit flipped: never other numbers than were saved."""
    path = two_checkpoints(tmp_path)
    raw = path.read_bytes()
    wanted = {1: torch.arange(300.0) + 1, 2: torch.arange(300.0) + 2}
    fell_back = 0
    for i in range(0, len(raw), 7):
        for damaged in (raw[:i], raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :]):
            path.write_bytes(damaged)
            state = runs.load(path)
            assert state is not None
            step = state["history"][0]["step"]
            assert torch.equal(state["lam"], wanted[step])
            fell_back += step == 1
    assert fell_back > len(raw) / 7
    assert "is damaged" in capsys.readouterr().err
    path.write_bytes(raw[:100])
    runs.before(path).write_bytes(raw[:90])
    with pytest.raises(ValueError, match=r"state\.pt is not a readable checkpoint .*delete it to redo this run"):
        runs.load(path)


def test_a_checkpoint_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = two_checkpoints(tmp_path)
    for other in ({"format": 99, "lam": torch.zeros(1)}, {"lam": torch.zeros(1)}):
        torch.save(other, path)
        raw = path.read_bytes()
        with pytest.raises(ValueError, match=r"another version of the recipes \(format .*; this one reads 1\)"):
            runs.load(path)
        assert path.read_bytes() == raw


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_run_with_a_damaged_checkpoint_comes_to_the_same_end(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, flags = COMMANDS[recipe]
    assert main([*flags, "--out", str(tmp_path / "whole")]) == 0
    save, count = runs.save, {"saved": 0}

    def stop_after_three(path: Path, state: dict[str, Any]) -> None:
        save(path, state)
        count["saved"] += 1
        if count["saved"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save", stop_after_three)
        assert main([*flags, "--out", str(tmp_path / "hurt")]) == 130
    last = max((tmp_path / "hurt/runs").glob("[!.]*.pt"), key=lambda file: file.stat().st_mtime_ns)
    last.write_bytes(last.read_bytes()[:-300])
    assert main([*flags, "--resume", "--out", str(tmp_path / "hurt")]) == 0
    assert result(tmp_path / "hurt") == result(tmp_path / "whole")


def test_a_setting_that_there_is_no_longer_is_a_change(tmp_path: Path) -> None:
    """A newer version that has dropped a setting would not come to the same end."""
    runs.open_folder(tmp_path, {"lr": 1, "warmup": 2}, resume=False)
    with pytest.raises(ValueError, match=r"other settings \(warmup: 2 then, None now\)"):
        runs.open_folder(tmp_path, {"lr": 1}, resume=True)


@dataclass
class Job:
    dataset: str
    seed: int = 0


def test_jobs_have_files_of_their_own_whatever_characters_they_hold() -> None:
    names = ["a/b", "a-b", "a b", "a:b", "../a", "a"]
    files = {runs.file_name(Job(name)) for name in names}
    assert len(files) == len(names)
    assert all(re.fullmatch(r"[\w.-]+\.pt", file) for file in files)


def test_settings_that_are_damaged_are_named(tmp_path: Path) -> None:
    runs.open_folder(tmp_path, {"lr": 1}, resume=False)
    (tmp_path / "settings.json").write_text('{"lr"')
    with pytest.raises(ValueError, match=r"settings\.json is damaged"):
        runs.open_folder(tmp_path, {"lr": 1}, resume=True)
