"""Several processes that share an inner problem find what one process finds on the union of their batches."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from problems import relative
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=[1, 3])
def found(request, tmp_path_factory):
    """What every rank found, in all cases."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", str(HERE / "ranks.py")]
    started = [
        subprocess.Popen([*command, str(r), str(size), str(folder)], stderr=subprocess.PIPE, text=True, cwd=HERE.parent)
        for r in range(size)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(errors)
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(size)]


@pytest.mark.parametrize("name", ranks.CASES)
def test_as_one_process_on_all_batches(found, name):
    alone = ranks.run(name, slice(None))
    tolerance = 1e-10 if name not in ("cg", "neumann") else 1e-6  # those stop at a residual
    assert relative(torch.cat([rank[name]["local"] for rank in found]), alone["local"]) <= tolerance
    for rank in found:
        for got, expected in zip(rank[name]["shared"], alone["shared"], strict=True):
            assert relative(got, expected) <= tolerance or torch.allclose(got, expected, atol=1e-12)  # 0, at cg's t


def test_all_ranks_hold_the_same_bits(found):
    for name in ranks.CASES:
        for rank in found[1:]:
            for got, expected in zip(rank[name]["shared"], found[0][name]["shared"], strict=True):
                assert torch.equal(got, expected), name


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("other_start", "RuntimeError: bilevel.inner: the ranks start from different weights"),
        ("own_rate", "RuntimeError: bilevel.inner: the ranks have come to different weights"),
        ("one_step_more", "RuntimeError: bilevel.inner: the ranks are out of step"),
        ("one_nan", "FloatingPointError: bilevel.inner: h is nan at step k = 1"),
        ("other_inputs", "ValueError: bilevel.inner: the ranks ask for the gradients of different outer variables"),
        ("unused_everywhere", "ValueError: bilevel.inner: neither loss depends on input 0"),
    ],
)
def test_a_mistake_on_one_rank_is_told_to_all(found, mistake, words):
    if len(found) == 1 and mistake != "unused_everywhere":
        words = "nothing was wrong"  # one rank can't differ from the others
    for rank in found:
        assert rank["failures"][mistake].startswith(words)


def test_traffic(found):
    """A step sums its direction and its adjoint, once more where it is run again; besides |w| a few numbers."""
    for rank in found:
        for name, times in (("unroll", 2), ("memory", 2), ("reverse", 3)):
            volume, size = rank["traffic"][name]
            assert times * size <= volume <= times * size + 16, name


@pytest.mark.parametrize("kind", ["plain", "statistics", "momentum"])
def test_a_rank_keeps_its_part_of_every_iterate(found, kind):
    """1/N of what all hold, to rounding; running statistics, which are a rank's own, as a whole."""
    for rank in found:
        (in_memory, state, local, grad), (in_file, *_, from_file) = rank["stored"][kind]
        part = state / len(found)
        steps = 8 - (kind == "momentum")  # the first state has no momentum yet
        assert steps * 0.9 * (part + local) < in_memory <= 1.6 * 8 * (part + local)  # rows are bought in bulk
        assert 8 * 0.9 * (part + local) * (steps / 8) < in_file <= 8 * (part + local + 8 * 64)  # they begin at 64 bytes
        assert torch.equal(grad, from_file)
        assert (local > 0) == (kind == "statistics")
        assert relative(grad, found[0]["stored"][kind][0][-1]) <= 1e-12


def test_tasks_of_their_own_and_an_encoder_under_ddp(found):
    alone = ranks.ddp(0, 0)
    for rank in found:
        for got, expected in zip(rank["ddp"], alone, strict=True):
            assert relative(got, expected) <= 1e-10


def test_a_rank_that_dies_stops_the_others(tmp_path):
    """In their next step, with an error, and not after a time-out."""
    program = f"""
import os, sys, torch, torch.distributed as dist, bilevel_plugin as bilevel
rank = int(sys.argv[1])
dist.init_process_group("gloo", "file://{tmp_path}/store", None, 2, rank)
loss = lambda model, x: model(x).square().mean()
torch.manual_seed(0)
with bilevel.inner(torch.nn.Linear(2, 1), loss, loss, lr=0.1, group=dist.group.WORLD) as loop:
    for k in range(10):
        if (rank, k) == (1, 5):
            os._exit(9)
        loop.step(torch.ones(3, 2), outer=torch.ones(3, 2))
"""
    start = time.monotonic()
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(r)], stderr=subprocess.PIPE, text=True, cwd=HERE.parent)
        for r in range(2)
    ]
    _, errors = both[0].communicate(timeout=60)
    both[1].communicate(timeout=60)
    assert both[0].returncode == 1
    assert "Connection" in errors.splitlines()[-1]
    assert time.monotonic() - start < 50


def refuse(**options):
    loss = lambda model, x: model(x).sum()
    return bilevel.inner(nn.Linear(2, 1), loss, loss, **options)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_takes_no_group(group):
    with pytest.raises(ValueError, match="a tangent for each outer direction"):
        refuse(group=group, engine="forward")
    with pytest.raises(ValueError, match="leave out compile="):
        refuse(group=group, engine=bilevel.Reverse(compile=True))
    with pytest.raises(ValueError, match="give each rank tasks of its own"):
        refuse(group=group, tasks=2)
    with pytest.raises(ValueError, match="there is no group="):
        refuse(local=torch.zeros(1, requires_grad=True))


def test_the_example_of_the_docs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, HERE / "parallel_example.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ranks_, shared, own = zip(*re.findall(r"rank (\d): mu.grad (\S+), lam.grad (\d.\d{6})", done.stdout), strict=True)
    assert sorted(ranks_) == ["0", "1"]
    assert shared[0] == shared[1]
    assert own[0] != own[1]
