"""`python -m bilevel_recipes.few_shot.cost`: one meta-batch, against the encoder alone and a loop over tasks.

All four do the same batch of tasks in turn, again and again, so that a slow moment of the machine hits them alike; the
ratio of two is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

from ..malloc import keep_memory
from ..models import ENCODERS, build_encoder
from .episodes import Batch, Episodes, Images
from .sources import SOURCES, load
from .train import adapt_and_pull, encode, encode_task, sphere, zero_head

Rule = bilevel.GD | bilevel.BiGSAM


def plain(encoder: nn.Module, batch: Batch, chunk: int) -> None:
    """One forward and backward pass of the encoder over all images of the batch: the floor."""
    x = torch.cat([batch[0][0], batch[1][0]], 1).flatten(0, 1)
    encode(encoder, x.split(chunk)).square().mean().backward()


def together(encoder: nn.Module, batch: Batch, chunk: int, ways: int, steps: int, rule: Rule) -> None:
    """The recipe's outer step: features once, all heads at once, one trip back."""
    (x, y), (x_query, y_query) = batch
    f, f_query = sphere(*encode_task(encoder, x, x_query, chunk=chunk))
    query = f_query, y_query
    adapt_and_pull((f, y), query, query, ways, steps, rule, "unroll")


def one_by_one(encoder: nn.Module, batch: Batch, ways: int, steps: int, rule: Rule) -> None:
    """The usual loop: for each task its features, K differentiable steps by plain autograd, and back."""
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
    """The same loop with `higher`, as its examples have it (gd only: it knows one loss)."""
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
    encoder.zero_grad()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def gradient(function: Callable[[], None], encoder: nn.Module) -> Tensor:
    encoder.zero_grad()
    function()
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


def fastest_chunk(encoder: nn.Module, batch: Batch, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Median seconds of the plain pass for each chunk size, measured in turn."""
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 1):
        for size in sizes:
            found[size].append(seconds(lambda size=size: plain(encoder, batch, size), encoder))
    return {size: statistics.median(times[1:]) for size, times in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bilevel_recipes.few_shot.cost", description=(__doc__ or "").partition("\n")[0]
    )
    p.add_argument("--dataset", default="omniglot", choices=list(SOURCES))
    p.add_argument("--data-root")
    p.add_argument("--model", default="conv4", choices=list(ENCODERS))
    for name, value in {"tasks": 16, "ways": 5, "shots": 1, "queries": 10, "steps": 5, "repeats": 15}.items():
        p.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    p.add_argument("--solver", default="gd", choices=["gd", "bigsam"])
    p.add_argument("--threads", type=int)
    a = p.parse_args(argv)
    keep_memory()
    if a.threads:
        torch.set_num_threads(a.threads)
    images = Images(load(a.dataset, a.data_root).part("train"))
    batch = next(Episodes(images, a.tasks, a.ways, a.shots, a.queries))
    encoder = build_encoder(a.model, images.shape, 0).train()
    rule = bilevel.GD(0.1) if a.solver == "gd" else bilevel.BiGSAM(0.1)
    task = batch[0][0].shape[1] + batch[1][0].shape[1]
    total = task * a.tasks
    print(f"{a.tasks} tasks, {a.ways}-way {a.shots}-shot, {a.queries} queries a class: {total} images {images.shape}")
    threads = torch.get_num_threads()
    print(f"{a.model}, {a.solver}, K = {a.steps}, torch {torch.__version__}, {threads} threads, {a.repeats} repeats")

    sizes = sorted({min(total, n) for n in (task, 2 * task, 4 * task, 8 * task, total)})
    times = fastest_chunk(encoder, batch, sizes, max(3, a.repeats // 3))
    chunk = min(times, key=lambda size: times[size])
    print(
        "encoder alone, by chunk: "
        + ", ".join(f"{n}: {1e3 * t:.1f} ms" for n, t in times.items())
        + f"; taken: {chunk}"
    )

    recipe: Callable[[], None] = lambda: together(encoder, batch, chunk, a.ways, a.steps, rule)  # noqa: E731
    loops: dict[str, Callable[[], None]] = {"plain autograd": lambda: one_by_one(encoder, batch, a.ways, a.steps, rule)}
    if a.solver == "gd":
        loops["higher"] = lambda: by_higher(encoder, batch, a.ways, a.steps, 0.1)
    runs: dict[str, Callable[[], None]] = {
        "encoder alone, forward and backward": lambda: plain(encoder, batch, chunk),
        "the recipe's outer step": recipe,
        **{f"loop over tasks, {name}": loop for name, loop in loops.items()},
    }
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(a.repeats + 1):
        for name, function in runs.items():
            measured[name].append(seconds(function, encoder))
    first = measured["encoder alone, forward and backward"][1:]
    for name, t in measured.items():
        ratio = statistics.median(x / y for x, y in zip(t[1:], first, strict=True))
        print(f"{name:38} {1e3 * statistics.median(t[1:]):8.1f} ms   × {ratio:.3f}")

    encoder.eval()  # BatchNorm's batch is the chunk, and differs between them in training; the gradients are then one
    ours = gradient(recipe, encoder)
    for name, function in loops.items():
        other = gradient(function, encoder)
        print(f"same gradient as {name}: relative difference {float((ours - other).norm() / other.norm()):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
