"""`python -m bilevel_recipes.few_shot.cost`: the cost of a meta-batch, of the encoder alone, and of a loop over tasks.

All ways do the same batch in turn, again and again, so that a slow moment of the machine hits them alike. Times are
medians of CPU seconds. Encoder passes are the median ratio to a forward and backward pass of the encoder alone, which
was done just before, with the images in chunks of the fastest size.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .. import runs, tables
from ..command import Count, Whole, names, value
from ..malloc import keep_memory
from ..models import ENCODERS, build_encoder
from .episodes import Batch, Episodes, Images
from .sources import SOURCES, load
from .train import adapt_and_pull, encode, encode_task, sphere, zero_head

Rule = bilevel.GD | bilevel.BiGSAM
RATE = 0.1
FLOOR = "encoder alone, forward and backward"


@dataclass(frozen=True)
class Settings:
    """The settings of the measurement."""

    dataset: Annotated[str, value(str, "|".join(SOURCES), list(SOURCES))] = "omniglot"
    """Data set with the classes and images."""
    data_root: str = "data"
    """Folder of the files."""
    model: Annotated[str, value(str, "|".join(ENCODERS), list(ENCODERS))] = "conv4"
    """Encoder to run."""
    solvers: Annotated[tuple[str, ...], names(["gd", "bigsam"])] = ("gd", "bigsam")
    """Inner solvers. Each has a table."""
    tasks: Count = 16
    """Number of tasks in the meta-batch."""
    ways: Count = 5
    """Number of classes in a task."""
    shots: Count = 1
    """Number of support images of each class, from which a task is learnt."""
    queries: Count = 10
    """Number of query images of each class, on which a task is tested."""
    steps: Count = 5
    """Number of inner steps K."""
    repeats: Count = 15
    """Number of measurements of each way."""
    threads: Whole = 0
    """Number of torch threads; 0: torch's default."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder for results.json, from which the results page is made; without this flag, nothing is written."""


def plain(encoder: nn.Module, batch: Batch, chunk: int) -> None:
    """Run one forward and backward pass of the encoder over all images of the batch, which is the lowest cost."""
    x = torch.cat([batch[0][0], batch[1][0]], 1).flatten(0, 1)
    encode(encoder, x.split(chunk)).square().mean().backward()


def together(encoder: nn.Module, batch: Batch, chunk: int, ways: int, steps: int, rule: Rule) -> None:
    """Run the outer step of the recipe: features once, all heads at once, and one backward pass."""
    (x, y), (x_query, y_query) = batch
    f, f_query = sphere(*encode_task(encoder, x, x_query, chunk=chunk))
    query = f_query, y_query
    adapt_and_pull((f, y), query, query, ways, steps, rule, "unroll")


def one_by_one(encoder: nn.Module, batch: Batch, ways: int, steps: int, rule: Rule) -> None:
    """Run the usual loop: for each task its features, K differentiable steps by plain autograd, and a backward pass."""
    for x, y, x_query, y_query in zip(*batch[0], *batch[1], strict=True):
        f, f_query = (part[0] for part in sphere(encoder(x)[None], encoder(x_query)[None]))
        head = zero_head(f.shape[-1], ways)
        w: list[Tensor] = list(head.parameters())
        for k in range(1, steps + 1):
            c_h, c_g = rule.weights(k)
            total = c_h * F.cross_entropy(F.linear(f, *w), y)
            if c_g:
                total = total + c_g * F.cross_entropy(F.linear(f_query, *w), y_query)
            w = [p - d for p, d in zip(w, torch.autograd.grad(total, w, create_graph=True), strict=True)]
        F.cross_entropy(F.linear(f_query, *w), y_query).backward()


def by_higher(encoder: nn.Module, batch: Batch, ways: int, steps: int, rate: float) -> None:
    """Run the same loop with `higher`, as in its examples. It has one inner loss, so this is for gd only."""
    import higher

    for x, y, x_query, y_query in zip(*batch[0], *batch[1], strict=True):
        f, f_query = (part[0] for part in sphere(encoder(x)[None], encoder(x_query)[None]))
        head = zero_head(f.shape[-1], ways)
        sgd = torch.optim.SGD(head.parameters(), rate)
        with higher.innerloop_ctx(head, sgd, copy_initial_weights=False) as (model, optimizer):
            for _ in range(steps):
                optimizer.step(F.cross_entropy(model(f), y))
            F.cross_entropy(model(f_query), y_query).backward()


def seconds(function: Callable[[], None], encoder: nn.Module) -> float:
    """Return the CPU seconds of all threads, which other programs on the machine do not change."""
    encoder.zero_grad()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def gradient(function: Callable[[], None], encoder: nn.Module) -> Tensor:
    encoder.zero_grad()
    function()
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


def fastest_chunk(encoder: nn.Module, batch: Batch, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Return the median seconds of the plain pass for each chunk size, measured in turn."""
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 1):
        for size in sizes:
            found[size].append(seconds(lambda size=size: plain(encoder, batch, size), encoder))
    return {size: statistics.median(times[1:]) for size, times in found.items()}


def measure(s: Settings) -> list[tables.Block]:
    """Measure the encoder alone by chunks, then for each solver the meta-batch by each way."""
    images = Images(load(s.dataset, s.data_root).part("train"))
    batch = next(Episodes(images, s.tasks, s.ways, s.shots, s.queries))
    encoder = build_encoder(s.model, images.shape, 0)
    task = batch[0][0].shape[1] + batch[1][0].shape[1]
    total = task * s.tasks
    sizes = sorted({min(total, n) for n in (task, 2 * task, 4 * task, 8 * task, total)})
    times = fastest_chunk(encoder.train(), batch, sizes, max(3, s.repeats // 3))
    chunk = min(times, key=lambda size: times[size])
    what = f"{s.tasks} tasks, {s.ways}-way {s.shots}-shot, {s.queries} queries a class, {total} images, {s.model}"
    found = [tables.block(FLOOR, ["images at once", "CPU ms"], [[f"{n}", f"{1e3 * t:.0f}"] for n, t in times.items()])]
    for solver in s.solvers:
        header = ["", "CPU ms", "encoder passes", "gradient apart from the recipe's"]
        lines = side_by_side(s, encoder, batch, chunk, solver)
        found.append(tables.block(f"{what}, K = {s.steps}, {solver}", header, lines))
    return found


def side_by_side(s: Settings, encoder: nn.Module, batch: Batch, chunk: int, solver: str) -> list[list[str]]:
    """Return a line for each way to do the meta-batch."""
    rule = bilevel.GD(RATE) if solver == "gd" else bilevel.BiGSAM(RATE)

    def recipe() -> None:
        together(encoder, batch, chunk, s.ways, s.steps, rule)

    loops: dict[str, Callable[[], None]] = {
        "loop over tasks, plain autograd": lambda: one_by_one(encoder, batch, s.ways, s.steps, rule)
    }
    if solver == "gd" and find_spec("higher") is not None:
        loops["loop over tasks, higher"] = lambda: by_higher(encoder, batch, s.ways, s.steps, RATE)
    ways = {FLOOR: lambda: plain(encoder, batch, chunk), "the recipe's outer step": recipe, **loops}
    measured: dict[str, list[float]] = {name: [] for name in ways}
    encoder.train()
    for _ in range(s.repeats + 1):  # the first time warms up
        for name, function in ways.items():
            measured[name].append(seconds(function, encoder))
    encoder.eval()  # BatchNorm's batch is the chunk, and differs between them in training; the gradients are then one
    ours = gradient(recipe, encoder)
    apart = {name: gradient(function, encoder) - ours for name, function in loops.items()}
    return [
        [
            name,
            f"{1e3 * statistics.median(t[1:]):.0f}",
            f"{statistics.median(x / y for x, y in zip(t[1:], measured[FLOOR][1:], strict=True)):.3f}",
            f"{float(apart[name].norm() / ours.norm()):.0e}" if name in apart else "",
        ]
        for name, t in measured.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    prog = "python -m bilevel_recipes.few_shot.cost"
    config = (tyro.conf.FlagCreatePairsOff,)
    about = (__doc__ or "").partition(": ")[2]
    s = tyro.cli(Settings, prog=prog, description=about[0].upper() + about[1:], args=argv, config=config)
    keep_memory()
    try:
        runs.set_up("cpu", s.threads)
        found = measure(s)
        if s.out is not None:
            s.out.mkdir(parents=True, exist_ok=True)
            words = shlex.join(prog.split() + argv)
            runs.write_results(s.out, words, replace(s, out=None), blocks=found)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    print(tables.screen(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
