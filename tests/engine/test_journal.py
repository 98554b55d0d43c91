"""Reverse(store=folder, resume=True): killed at any moment, the sweep goes on where it was, bit for bit, or refused."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import resuming
import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.engine import reverse
from bilevel_plugin.engine.journal import Journal

HERE = Path(__file__).parents[1]
JOURNAL = "sweep.journal"


def run(folder, out, kill_at, checkpoint):
    command = [
        sys.executable,
        "-W",
        "error",
        str(HERE / "resuming.py"),
        str(folder),
        str(out),
        str(kill_at),
        checkpoint,
    ]
    return subprocess.run(command, cwd=HERE.parent, timeout=600).returncode


@pytest.mark.parametrize("checkpoint", ["1", "sqrt", "reversible"])
def test_killed_at_random_moments_it_ends_alike(tmp_path, checkpoint):
    """Once in the forward steps, twice in the sweep; then it ends, with fewer steps to go over than from the start."""
    whole, alone = tmp_path / "whole", tmp_path / "alone.pt"
    whole.mkdir()
    assert run(whole, alone, -1, checkpoint) == 0
    expected, calls = torch.load(alone)
    draw = random.Random(int(checkpoint == "1"))
    folder, out = tmp_path / "folder", tmp_path / "out.pt"
    folder.mkdir()
    assert run(folder, out, draw.randint(1, resuming.STEPS), checkpoint) == resuming.KILLED
    assert not (folder / JOURNAL).exists()
    assert run(folder, out, draw.randint(resuming.STEPS + 3, resuming.STEPS + 6), checkpoint) == resuming.KILLED
    first = (folder / JOURNAL).read_bytes()
    far = resuming.STEPS + (6 if checkpoint == "1" else 9)  # the others run up to 6 steps again before they can go on
    assert run(folder, out, draw.randint(far, far + 1), checkpoint) == resuming.KILLED
    assert (folder / JOURNAL).read_bytes() != first
    assert run(folder, out, -1, checkpoint) == 0
    found, fewer = torch.load(out)
    for mine, uninterrupted in zip(found, expected, strict=True):
        assert torch.equal(mine, uninterrupted)
    assert fewer < calls
    assert list(folder.iterdir()) == []


class Stop(Exception):
    """What stops a sweep."""


def stop(folder, monkeypatch, **options):
    """A sweep that ends with an error after four steps."""
    plain, gone = reverse.check_end, []

    def stopping(*args):
        gone.append(1)
        if len(gone) == 5:
            raise Stop
        return plain(*args)

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(reverse, "check_end", stopping)
        resuming.solve(folder, **options)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A folder with the journal of a sweep that an error has stopped."""
    stop(tmp_path, monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]
    return tmp_path


def test_after_an_error_it_goes_on(stopped):
    (found,), calls = resuming.solve(stopped)
    (expected,), more = resuming.solve(stopped)
    assert torch.equal(found, expected)
    assert more - calls == 4
    assert list(stopped.iterdir()) == []


@pytest.mark.parametrize("stopped_after", range(1, 4))
def test_a_sweep_over_accumulated_steps_goes_on(tmp_path, monkeypatch, stopped_after):
    """A step is one place of the sweep, whatever it was gathered from."""
    plain, written = Journal.write, []

    def stopping(self, position):
        plain(self, position)
        written.append(position.left)
        if len(written) == stopped_after:
            raise Stop

    def solve(resume=True):
        torch.manual_seed(0)
        model, lam = nn.Linear(2, 1), torch.ones(3, requires_grad=True)
        h = lambda m, i: (lam[i] * m.weight.sum().sin() - m.bias).square().sum()
        engine = bilevel.Reverse(store=tmp_path, resume=resume, every=0.0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        g = lambda m: m(torch.ones(1, 2)).square().sum()
        with bilevel.inner(model, h, g, solver="gd", optimizer=sgd, engine=engine, check=False) as loop:
            for _ in range(3):
                for i in range(2):
                    loop.accumulate(i)
                loop.step()
            return loop.hypergrad(lam)

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(Journal, "write", stopping)
        solve()
    assert torch.equal(solve(), solve(resume=False))
    assert list(tmp_path.iterdir()) == []


def test_the_journal_is_written_no_more_often_than_it_was_asked_for(tmp_path, monkeypatch):
    stop(tmp_path, monkeypatch, every=3600.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"steps": 11}, "the number of steps"),
        ({"steps": 13}, "the number of steps"),
        ({"scale": 2.0}, "the outer loss"),
        ({"inputs": "other"}, "the shapes of the inputs"),
        ({"truncate": 9}, "the options"),
        ({"first": 1.0}, "the first batch and the weights after the last step"),
        ({"weight": 0.5}, "the numbers of the inputs and the weights after the last step"),
    ],
    ids=str,
)
def test_a_journal_of_another_sweep_is_refused(stopped, other, words):
    with pytest.raises(ValueError, match=f"{words}.* differ .* Delete it, name another folder, or set resume=False"):
        resuming.solve(stopped, **other)
    resuming.solve(stopped, **other, resume=False)


def test_a_journal_of_another_torch_is_refused(stopped, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "1.0")
        with pytest.raises(ValueError, match=r"the version of torch differ \(.* then, 1\.0 now\)"):
            resuming.solve(stopped)
    resuming.solve(stopped)


@pytest.mark.parametrize("damage", ["bit", "half", "empty", "strange"])
def test_a_damaged_journal_is_noticed(stopped, damage):
    file = stopped / JOURNAL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes({"bit": data, "half": data[: len(data) // 2], "empty": b"", "strange": b"x" * 500}[damage])
    with pytest.raises(ValueError, match=r"is damaged, or is not the journal of a sweep\. Delete it"):
        resuming.solve(stopped)


def test_a_half_written_journal_beside_the_last_one_does_no_harm(stopped):
    (stopped / "sweep.unfinished").write_bytes(b"half")
    (found,), _ = resuming.solve(stopped)
    assert torch.equal(found, resuming.solve(stopped)[0][0])
    assert list(stopped.iterdir()) == []


def test_what_can_not_be_resumed_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="name one by store="):
        bilevel.Reverse(resume=True)
    with pytest.raises(ValueError, match="every must be a number of seconds"):
        bilevel.Reverse(store=tmp_path, resume=True, every=-1.0)
    with pytest.raises(ValueError, match=r"Call loop.backward\(inputs\)"):
        resuming.solve(tmp_path, inputs="backward")
    model, lam = torch.nn.Linear(2, 1), torch.zeros(3, 2, requires_grad=True)
    loss = lambda model, x: model(x).square().sum()
    engine = bilevel.Reverse(store=tmp_path, resume=True)
    assert "leave out resume=" in engine.refuses_group
    with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, engine=engine) as loop:
        loop.step(lam, outer=(torch.ones(3, 2),))
        with pytest.raises(ValueError, match="a tensor of a batch requires grad"):
            loop.hypergrad(lam)
