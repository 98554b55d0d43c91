"""Both recipes under torchrun: N processes come to what one comes to, and a run goes on with another number of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bilevel_recipes.data_cleaning.__main__ import main as clean
from bilevel_recipes.few_shot.__main__ import main as few_shot

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

CLEANING = "--dataset digits --solvers bigsam --baselines none --steps 8 --outer-steps 4 --rho 0.3 --batch-size 151"
FEW_SHOT = (
    "--dataset digits --solvers bigsam --baselines none --batchnorm task --tasks 6 --ways 3 --outer-steps 6 "
    "--test-episodes 40 --curve-points 1 --curve-episodes 20 --save-every 2"
)


def words(flags, out):
    return [*flags.split(), "--threads", "1", "--quiet", "--out", str(out)]


def command(ranks, recipe, flags, out):
    how = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return [sys.executable, *how, f"bilevel_recipes.{recipe}", *words(flags, out)]


def finish(*args, more=()):
    done = subprocess.run([*command(*args), *more], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same_encoder(folder, expected):
    """Its filters: the gradient of a bias before BatchNorm is rounding alone, of which Adam makes whole steps."""
    filters = []
    for place in (folder, expected):
        (file,) = (place / "runs").glob("*.pt")
        filters.append([x for x in torch.load(file, weights_only=True)["encoder"].values() if x.ndim == 4])
    torch.testing.assert_close(*filters, atol=1e-3, rtol=0)


def children(pid):
    """The processes that a process has started, in this order."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # not Linux
        return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()


def weights(folder):
    (file,) = (folder / "runs").glob("*.pt")
    return torch.sigmoid(torch.load(file, weights_only=True)["lam"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert clean(words(CLEANING, folder / "data_cleaning")) == 0
    assert few_shot(words(FEW_SHOT, folder / "few_shot")) == 0
    return folder


def test_cleaning_as_one_process(alone, tmp_path):
    """The 151 samples of a batch can't be dealt out evenly."""
    out = finish(2, "data_cleaning", CLEANING, tmp_path)
    assert out.count("F1 clean") == 1  # one of them prints
    torch.testing.assert_close(weights(tmp_path), weights(alone / "data_cleaning"), atol=2e-3, rtol=0)


def test_a_process_that_dies_stops_the_run_and_another_number_goes_on(alone, tmp_path):
    """One of two is killed after the first checkpoint: the run ends with a message; three processes finish it.

    What they finish is what one process comes to, so that neither two nor three processes train otherwise than one.
    """
    out = tmp_path / "few_shot"
    run = subprocess.Popen(command(2, "few_shot", FEW_SHOT, out), stderr=subprocess.PIPE, text=True)
    while not list(out.glob("runs/*.pt")):
        assert run.poll() is None
        time.sleep(0.02)
    os.kill(int(children(run.pid)[-1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 1
    assert "another process of this run has ended" in errors
    finish(3, "few_shot", FEW_SHOT, out, more=["--resume"])
    assert_same_encoder(out, alone / "few_shot")
