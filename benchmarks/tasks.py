"""Many tasks at once beside a loop over them: `make tasks` makes docs/results/tasks.md.

Every way does the same meta-batch in turn, one thread, and times are medians of CPU seconds. Bytes are the most that
tensors hold at any time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import higher
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_plugin.model.tasks import Tasks
from bilevel_recipes.models import conv4, conv4_pool

from .measure import live

WAYS, STEPS, RATE, ENGINES = 5, 5, 0.1, ("unroll", "reverse")


class Problem(NamedTuple):
    """All weights of the model adapt to each task, and their start is the outer variable."""

    title: str
    model: nn.Module
    batch: tuple[Tensor, Tensor, Tensor, Tensor]  # support, query; the first dimension is the task


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def problem(title: str, model: nn.Module, shape: tuple[int, ...], tasks: int, shots: int, queries: int = 10) -> Problem:
    x, x_query = (torch.rand(tasks, WAYS * n, *shape) for n in (shots, queries))
    y, y_query = (torch.arange(WAYS).repeat(n).expand(tasks, -1) for n in (shots, queries))
    return Problem(f"{title}, {tasks} tasks of {WAYS} ways and {shots} shots", model, (x, y, x_query, y_query))


def adapted(encoder: nn.Module) -> nn.Module:
    """The encoder with a head; BatchNorm has the statistics of the batch at hand, as in MAML."""
    for m in encoder.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.track_running_stats = False
            m.running_mean = m.running_var = m.num_batches_tracked = None
    return nn.Sequential(encoder, nn.Linear(encoder(torch.zeros(2, 1, 28, 28)).shape[1], WAYS))


def problems() -> list[Problem]:
    shape = 1, 28, 28
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, WAYS))
    return [
        problem("linear heads on 64 features", nn.Linear(64, WAYS), (64,), 16, 1),
        problem("MLP 784-64-5", mlp, shape, 4, 1),
        problem("Conv-4 of 64 filters with strides", adapted(conv4(shape)), shape, 4, 1),
        problem("Conv-4 of 64 filters with pooling", adapted(conv4_pool(shape)), shape, 4, 1),
        problem("Conv-4 of 32 filters with pooling", adapted(conv4_pool(shape, 32)), shape, 4, 5),
    ]


def tasks_at_once(p: Problem, engine: str) -> None:
    x, y, *query = p.batch
    with bilevel.inner(p.model, loss, loss, solver="gd", lr=RATE, engine=engine, tasks=len(x)) as loop:
        loop.run(STEPS, x, y, outer=tuple(query))
        loop.backward(inputs=p.model)


def vmapped(p: Problem, engine: str) -> None:
    """What `tasks=N` would do with convolutions if it did not loop over the tasks."""
    with mock.patch.object(Tasks, "_needs_loop", return_value=False):
        tasks_at_once(p, engine)


def block_for_each(p: Problem, engine: str) -> None:
    for x, y, *query in zip(*p.batch, strict=True):
        with bilevel.inner(p.model, loss, loss, solver="gd", lr=RATE, engine=engine) as loop:
            loop.run(STEPS, x, y, outer=tuple(query))
            loop.backward(inputs=p.model)


def by_higher(p: Problem) -> None:
    library: Any = higher
    for x, y, *query in zip(*p.batch, strict=True):
        sgd = torch.optim.SGD(p.model.parameters(), RATE)
        with library.innerloop_ctx(p.model, sgd, copy_initial_weights=False) as (model, optimizer):
            for _ in range(STEPS):
                optimizer.step(loss(model, x, y))
            loss(model, *query).backward()


def ways(p: Problem) -> dict[str, Callable[[], None]]:
    found = {"`higher`, a loop over the tasks": lambda: by_higher(p)}
    for engine in ENGINES:
        found[f"`{engine}`, a block for each task"] = lambda engine=engine: block_for_each(p, engine)
        found[f"`{engine}`, `tasks=N`"] = lambda engine=engine: tasks_at_once(p, engine)
        if any(isinstance(m, nn.Conv2d) for m in p.model.modules()):
            found[f"(`{engine}`, `tasks=N`, if it were vmapped)"] = lambda engine=engine: vmapped(p, engine)
    return found


def gradient(p: Problem, run: Callable[[], None]) -> Tensor:
    p.model.zero_grad()
    run()
    return torch.cat([x.grad.flatten() for x in p.model.parameters() if x.grad is not None])


def measure(p: Problem, rounds: int) -> list[tuple[str, float, float, float]]:
    """For each way, its name, seconds, bytes, and its relative distance from the gradient of the first."""
    runs = ways(p)
    grads = {name: gradient(p, run) for name, run in runs.items()}
    true = next(iter(grads.values()))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            p.model.zero_grad()
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    return [
        (n, statistics.median(seconds[n]), live(run), float((grads[n] - true).norm() / true.norm()))
        for n, run in runs.items()
    ]


def main(rounds: int = 7) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("# Many tasks at once, and a loop over them\n")
    print(f"Made by `make tasks` on {os.cpu_count()} cores, one thread, no GPU, torch {torch.__version__}.")
    print(
        f"MAML in float32: all weights adapt in K = {STEPS} steps, and their start is the outer variable. CPU time is"
    )
    print(f"the median of {rounds} rounds, and MB is the peak of what tensors hold. The last column is the relative")
    print("distance from `higher`'s gradient.")
    for p in problems():
        print(f"\n## {p.title}\n\n| | CPU ms | of `higher`'s | MB | apart |\n| --- | ---: | ---: | ---: | ---: |")
        found = measure(p, rounds)
        for name, took, held, apart in found:
            print(f"| {name} | {1e3 * took:.0f} | {took / found[0][1]:.2f} | {held / 1e6:.1f} | {apart:.0e} |")


if __name__ == "__main__":
    main()
