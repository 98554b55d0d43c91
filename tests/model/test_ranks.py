"""Several processes that share an inner problem find what one process finds on the union of their batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from handle import SAMPLES, judge
from handle_ranks import OF_GROUPS, SIZE, TOGETHER, together
from plain_loop import RATE, data, mlp, start
from problems import refused, relative, says, weighted
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=[1, 3])
def found(request, tmp_path_factory):
    """What every rank found, in all cases."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", str(HERE / "ranks.py")]
    started = [
        subprocess.Popen([*command, str(r), str(size), str(folder)], stderr=subprocess.PIPE, text=True, cwd=HERE.parent)
        for r in range(size)
    ]
    errors = [process.communicate(timeout=600)[1] for process in started]
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
        ("own_rate", "RuntimeError: bilevel.inner: the ranks have reached different weights"),
        ("one_step_more", "RuntimeError: bilevel.inner: the ranks are out of step"),
        ("one_nan", "FloatingPointError: bilevel.inner: h is nan at step k = 1"),
        ("other_inputs", "ValueError: bilevel.inner: the ranks want the gradients of different outer variables"),
        ("unused_everywhere", "ValueError: bilevel.inner: neither loss depends on input 0"),
        (
            "outer_variable_in_direction",
            "ValueError: bilevel.inner: a function of the direction, or a rule of your own",
        ),
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
dist.init_process_group("gloo", "{(tmp_path / "store").as_uri()}", None, 2, rank)
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
    _, errors = both[0].communicate(timeout=300)
    both[1].communicate(timeout=300)
    assert both[0].returncode == 1
    assert "Connection" in errors.splitlines()[-1]
    assert time.monotonic() - start < 50


def refuse(**options):
    loss = lambda model, x: model(x).sum()
    return bilevel.inner(nn.Linear(2, 1), loss, loss, **options)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", (tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_takes_no_group(group):
    with pytest.raises(ValueError, match="a tangent for each outer direction"):
        refuse(group=group, engine="forward")
    with pytest.raises(ValueError, match="leave out compile="):
        refuse(group=group, engine=bilevel.Reverse(compile=True))
    with pytest.raises(ValueError, match="Give each rank its own tasks"):
        refuse(group=group, tasks=2)
    with pytest.raises(ValueError, match="Give group="):
        refuse(local=torch.zeros(1, requires_grad=True))


def test_the_example_of_the_docs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, HERE / "parallel_example.py"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ranks_, shared, own = zip(*re.findall(r"rank (\d): mu.grad (\S+), lam.grad (\d.\d{6})", done.stdout), strict=True)
    assert sorted(ranks_) == ["0", "1"]
    assert shared[0] == shared[1]
    assert own[0] != own[1]
    page = (HERE.parent / "docs" / "have" / "cluster.md").read_text(encoding="utf-8")
    for rank, *grads in zip(ranks_, shared, own, strict=True):
        shown = re.search(rf"rank {rank}: mu.grad (\S+), lam.grad (\S+)", page)
        assert [float(x) for x in shown.groups()] == pytest.approx([float(x) for x in grads], rel=0.05)


# --- models that reduce by themselves, and ranks that differ ---


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", (tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a world of one
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("double")
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part of it"])
@pytest.mark.parametrize("wrap", [ddp, fsdp, fully_sharded])
def test_parallel_models_without_a_group(wrap, part, engine):
    """Their reduction hangs on .backward(), which no block calls: each rank would go its own way."""
    lam = start()
    model = nn.Sequential(nn.Linear(3, 3), wrap(mlp())) if part else wrap(mlp())
    with refused("group=", "Distributed|DDP" if wrap is ddp else "FSDP|Sharded|fully_shard"):
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, engine=engine, check=False) as loop:
            loop.run(2, *data(), outer=data(5))
            loop.hypergrad(lam)


DIFFERING = """
import datetime, json, pathlib, sys, torch, torch.distributed as dist, bilevel_plugin as bilevel
from torch import nn
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

def start(roll=0, shape=(3, 2)):
    model = nn.Linear(*shape)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).roll(i + roll).view_as(p))
    return model

def run(model=None, steps=2, rate=0.1, **options):
    model = model or start()
    lam = torch.zeros((), requires_grad=True)
    mean = lambda m, x: lam.exp() * m(x).square().mean()
    options = {"solver": "gd", "lr": rate, **options}
    with bilevel.inner(model, mean, mean, group=dist.group.WORLD, check=False, **options) as loop:
        for _ in range(steps):
            loop.step(torch.ones(4, 3), outer=torch.ones(4, 3))
        loop.hypergrad(lam)

def sgd(lr, **options):
    model = start()
    run(model, lr=None, optimizer=torch.optim.SGD(model.parameters(), lr, **options))

CASES = {
    "nothing": lambda: run(),
    "permuted weights": lambda: run(start(roll=rank)),
    "other rates": lambda: run(rate=0.1 * (1 + rank)),
    "other rates of an optimizer": lambda: sgd(0.1 * (1 + rank)),
    "other momentum": lambda: sgd(0.1, momentum=0.5 * (1 + rank) / 2),
    "other solvers": lambda: run(solver="gd" if rank else "penalty"),
    "one step more": lambda: run(steps=2 + rank),
    "one step less": lambda: run(steps=3 - rank),
    "other engines": lambda: run(engine="unroll" if rank else "reverse"),
}
for i, name in enumerate(list(CASES)[int(sys.argv[3]):]):
    store = pathlib.Path(folder, f"{sys.argv[3]}.{i}").as_uri()
    dist.init_process_group("gloo", store, datetime.timedelta(seconds=10), 2, rank)
    try:
        CASES[name]()
        found = "nothing was wrong"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}.jsonl", "a") as file:
        print(json.dumps([name, found]), file=file)
    dist.destroy_process_group()
"""


DIFFER = {
    "permuted weights": "different weights",
    "other rates": "rate|different",
    "other rates of an optimizer": "rate|different|lr",
    "other momentum": "momentum|different",
    "other solvers": "solver|rate|different|weights",
    "one step more": "out of step|steps",
    "one step less": "out of step|steps",
    "other engines": "engine|out of step|different",
}


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """What each of two ranks was told. If one dies in a case, two others go on with the next."""
    folder, found = tmp_path_factory.mktemp("ranks"), [{}, {}]
    cases = ["nothing", *DIFFER]
    while any(len(rank) < len(cases) for rank in found):
        done = min(map(len, found))
        command = [sys.executable, "-W", "error", "-c", DIFFERING]
        where = {"stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
        both = [subprocess.Popen([*command, str(r), str(folder), str(done)], **where) for r in range(2)]
        errors = []
        for process in both:
            try:
                errors.append(process.communicate(timeout=300)[1])
            except subprocess.TimeoutExpired:
                process.kill()
                errors.append("it hung")
        for r, rank in enumerate(found):
            lines = (folder / f"{r}.jsonl").read_text().splitlines() if (folder / f"{r}.jsonl").exists() else []
            rank.update(json.loads(line) for line in lines)
        died = cases[min(map(len, found))] if any(len(rank) < len(cases) for rank in found) else None
        for rank, error in zip(found, errors, strict=True):
            if died is not None:
                rank.setdefault(died, f"the process died: {error}")
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", DIFFER)
def test_ranks_that_differ_are_told_so_on_both(differing, case):
    for rank in differing:
        assert rank["nothing"] == "nothing was wrong"
        kind, _, message = rank[case].partition(": ")
        assert kind in ("RuntimeError", "ValueError"), rank[case]
        says(RuntimeError(message), (DIFFER[case],))


# --- the bodies of tests/handle_ranks.py ---


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """What each of two processes found."""
    folder, root = tmp_path_factory.mktemp("bodies"), Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", str(root / "tests" / "handle_ranks.py")]
    paths = os.pathsep.join((str(root), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "PYTHONPATH": paths}
    started = [
        subprocess.Popen([*command, str(r), str(folder)], stderr=subprocess.PIPE, text=True, cwd=root, env=env)
        for r in range(SIZE)
    ]
    errors = [process.communicate(timeout=600)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(errors)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(SIZE)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", OF_GROUPS)
@pytest.mark.parametrize("name", TOGETHER)
def test_processes_find_what_the_plain_loop_on_both_their_batches_does(bodies, name, engine):
    case = together(name, None)
    state, value = case.alone()
    per_rank = [rank[f"{name}, {engine}"] for rank in bodies]
    for found, got, _ in per_rank:
        torch.testing.assert_close(found, state, rtol=1e-11, atol=1e-12)
        assert got == pytest.approx(value, rel=1e-11)
    own = sum(grad[:SAMPLES] for _, _, grad in per_rank)  # a rank has a gradient for its own samples alone
    for r, (_, _, grad) in enumerate(per_rank):
        others = torch.arange(SAMPLES).view(SIZE, 4)[1 - r]
        assert float(grad[others].abs().max()) == 0.0
        assert torch.equal(grad[SAMPLES:], per_rank[0][2][SAMPLES:])
    judge(case, torch.cat([own, per_rank[0][2][SAMPLES:]]))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("more micro-batches", "ranks"),
        ("one gathers", "ranks"),
        ("a learned direction", "function of the direction"),
    ],
)
def test_a_mistake_of_one_process_is_told_to_all(bodies, mistake, words):
    for rank in bodies:
        told = rank["mistakes"][mistake]
        assert re.match(r"\w+: bilevel\.\w+: ", told), told
        assert words in told
