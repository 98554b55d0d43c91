"""Many outer losses in one sweep: time and peak memory for Q = 1, 5, 20 and 100, beside Q sweeps.

    make queries

Each cell is measured in a process of its own, after one sweep that is not counted. CPU seconds of one thread.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

HEAD = """# Many outer losses in one sweep

Made by `make queries`. The outer variable has a weight for each training row; the outer loss is a vector of Q cross
entropies, and `loop.hypergrad(lam)` returns a row for each. The time is that of the hypergradient in CPU seconds of one
thread, without the training. The memory is what the peak of the process grows by during the hypergradient. "Times one"
is the time for Q queries as a multiple of that for one; Q sweeps take Q times. The error is the largest difference
from single sweeps for the first three, relative to the largest entry (float32).
"""
QUERIES = (1, 5, 20, 100)


class Setting(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    rows: int
    steps: int


SETTINGS = (Setting("64-64-10", (64, 64, 10), 200, 100), Setting("256-512-10", (256, 512, 10), 200, 5))


class Cell(NamedTuple):
    seconds: float
    megabytes: float
    error: float


def network(sizes: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def measured(setting: Setting, queries: int) -> Cell:
    """Train, take one hypergradient that is not counted and one that is, and compare rows with single sweeps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rows = network(setting.sizes), setting.rows
    x, y = torch.randn(rows, setting.sizes[0]), torch.randint(setting.sizes[-1], (rows,))
    xq, yq = torch.randn(queries, setting.sizes[0]), torch.randint(setting.sizes[-1], (queries,))
    lam = torch.ones(rows, requires_grad=True)

    def h(model: nn.Module) -> Tensor:
        return (lam * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:
        loop.run(setting.steps, outer=(xq, yq))
        few = [loop.hypergrad(lam, outer=(xq[i : i + 1], yq[i : i + 1]))[0] for i in range(min(queries, 3))]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = loop.hypergrad(lam)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        started = time.process_time()
        loop.hypergrad(lam)
        seconds = time.process_time() - started
    wanted = torch.stack(few)
    error = float((found[: len(few)] - wanted).abs().max() / wanted.abs().max())
    return Cell(seconds, memory, error)


def _in_child(send: Any, setting: Setting, queries: int) -> None:
    send.send(measured(setting, queries))


def in_own_process(setting: Setting, queries: int) -> Cell:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(send, setting, queries))
    child.start()
    send.close()
    found = receive.recv()
    child.join()
    return found


def page(measure: Callable[[Setting, int], Cell], settings: tuple[Setting, ...] = SETTINGS) -> str:
    lines = [HEAD]
    for setting in settings:
        lines += [f"## {setting.name}, {setting.rows} rows, K = {setting.steps}", ""]
        lines += ["| Q | CPU seconds | times one | memory, MB | error |", "| --- | --- | --- | --- | --- |"]
        one: float | None = None
        for q in QUERIES:
            cell = measure(setting, q)
            one = cell.seconds if one is None else one
            times = cell.seconds / one
            lines.append(f"| {q} | {cell.seconds:.2f} | {times:.1f} | {cell.megabytes:.0f} | {cell.error:.0e} |")
            print(json.dumps([setting.name, q, *cell]), file=sys.stderr, flush=True)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(page(in_own_process))
