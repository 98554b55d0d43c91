"""Long attention: peak memory and time of one pullback, plain kernel against chunks. `make attention`.

Writes docs/results/attention.md. Peaks are bytes of tensors, times are medians, plain and chunks in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import bilevel_plugin as bilevel
from bilevel_plugin.kernels import attention as chunks
from bilevel_plugin.kernels.replace import replaced
from bilevel_recipes.runs import write_page

from .measure import clock, live, say
from .report import machine

NEVER, ALWAYS, BY_LENGTH = 2**62, 1, chunks.LONG
LENGTHS = 512, 1024, 2048, 4096
HEADS, WIDTH = 4, 64
Run = Callable[[], Any]


@contextmanager
def chunks_from(scores: int) -> Generator[None]:
    """Chunks where there are so many scores or more."""
    before, chunks.LONG = chunks.LONG, scores
    try:
        yield
    finally:
        chunks.LONG = before


def inputs(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def attend(xs: Sequence[Tensor]) -> Tensor:
    with replaced():
        q, k, v = xs
        return F.scaled_dot_product_attention(q, k, v)


def pullback(batch: int, heads: int, length: int, width: int = WIDTH) -> Run:
    """∇⟨∇ℓ, u⟩ for q, k and v, by double backward."""
    xs = inputs(batch, heads, length, width)
    us = [torch.ones_like(x) for x in xs]

    def run() -> list[Tensor]:
        value = attend(xs).square().sum()
        grads = torch.autograd.grad(value, xs, create_graph=True)
        return list(torch.autograd.grad(grads, xs, us))

    return run


def forward_over_reverse(batch: int, heads: int, length: int) -> Run:
    """The same, by a gradient under a level of forward mode."""
    xs = inputs(batch, heads, length, WIDTH)
    us = [torch.ones_like(x) for x in xs]

    def run() -> list[Tensor]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, u) for x, u in zip(xs, us, strict=True)]
            value = attend(duals).square().sum()
            grads = torch.autograd.grad(value, duals)
            return [forward_ad.unpack_dual(x).tangent for x in grads]  # pyright: ignore[reportReturnType]

    return run


def hypergradient(batch: int, heads: int, length: int) -> Run:
    """Two steps and a hypergradient of `reverse`, for a weight on each token; an encoder layer."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(heads * WIDTH, heads, 2 * heads * WIDTH, 0.0, batch_first=True)
    x, lam = torch.randn(batch, length, heads * WIDTH), torch.zeros(length, requires_grad=True)

    def h(model: Any, x: Tensor) -> Tensor:
        return (lam.sigmoid() * model(x).square().mean(-1)).mean()

    def g(model: Any, x: Tensor) -> Tensor:
        return model(x).cos().mean()

    def run() -> list[Tensor]:
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:
            loop.run(2, x, outer=(x,))
            return [loop.hypergrad(lam)]

    return run


def compare(run: Run, others: Sequence[int], rounds: int) -> list[tuple[float, float]]:
    """For each threshold the peak in MB and the median of the seconds, in turns."""
    peaks: list[float] = []
    for scores in others:
        with chunks_from(scores):
            peaks.append(live(run) / 1e6)
    seconds: list[list[float]] = [[] for _ in others]
    for _ in range(rounds):
        for scores, took in zip(others, seconds, strict=True):
            with chunks_from(scores):
                took.append(clock(run))
    return [(peak, statistics.median(took)) for peak, took in zip(peaks, seconds, strict=True)]


def table(build: Callable[[int, int, int], Run], lengths: Sequence[int], rounds: int) -> list[str]:
    lines = [
        "| L | plain, MB | chunks, MB | plain, s | chunks, s | time, ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for length in lengths:
        say(f"{build.__name__}, L = {length}")
        (peak, took), (lean, longer) = compare(build(1, HEADS, length), (NEVER, ALWAYS), rounds)
        lines.append(f"| {length:,} | {peak:,.0f} | {lean:,.0f} | {took:.2f} | {longer:.2f} | {longer / took:.2f} |")
    return lines


def threshold(shapes: Sequence[tuple[int, int, int]], rounds: int) -> list[str]:
    lines = [
        "| batch, heads, L | scores | plain, MB | chunks, MB | time, ratio | the block takes |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for batch, heads, length in shapes:
        say(f"threshold, {batch} × {heads} × {length}")
        (peak, took), (lean, longer) = compare(pullback(batch, heads, length), (NEVER, ALWAYS), 3 * rounds)
        scores = batch * heads * length**2
        takes = "chunks" if scores >= BY_LENGTH else "the plain kernel"
        case = f"{batch}, {heads}, {length:,} | {scores / 2**20:g}·2^20"
        lines.append(f"| {case} | {peak:,.0f} | {lean:,.0f} | {longer / took:.2f} | {takes} |")
    return lines


def error(length: int) -> float:
    """The largest difference between the two pullbacks, relative, in float64."""
    torch.set_default_dtype(torch.float64)
    run = pullback(1, HEADS, length)
    torch.set_default_dtype(torch.float32)
    found: list[list[Tensor]] = []
    for scores in (NEVER, ALWAYS):
        with chunks_from(scores):
            found.append(run())
    return max(float((x - y).norm() / x.norm()) for x, y in zip(*found, strict=True))


def page(lengths: Sequence[int], shapes: Sequence[tuple[int, int, int]], rounds: int) -> str:
    limit, part = BY_LENGTH.bit_length() - 1, chunks.CHUNK.bit_length() - 1
    lines = [
        "# What long attention costs",
        "",
        f"Made by `python -m benchmarks.attention --rounds {rounds}` on {machine([])['cpu']}, {os.cpu_count()} cores, "
        f"one thread, torch {torch.__version__}, in float32. The memory is the peak of the bytes that tensors hold. "
        f"The times are medians of {rounds} ({3 * rounds} in the last table), plain and chunks in turns.",
        "",
        "**Plain** is PyTorch's math kernel, the only one with a second derivative. **Chunks** computes "
        f"about 2^{part} scores at a time, for some rows of the queries (at least as many as the width of a head). "
        f"The two pullbacks differ by {error(lengths[1]):.0e} (relative, float64, L = {lengths[1]:,}).",
        "",
        f"## A pullback, ∇⟨∇ℓ, u⟩, of attention alone ({HEADS} heads of {WIDTH})",
        "",
        *table(pullback, lengths, rounds),
        "",
        "## The same by forward over reverse",
        "",
        *table(forward_over_reverse, lengths, rounds),
        "",
        f"## A hypergradient of `reverse`: an encoder layer of width {HEADS * WIDTH}, K = 2",
        "",
        *table(hypergradient, lengths, rounds),
        "",
        "## From which length on",
        "",
        "A pullback computes every score three times with chunks, and once without. "
        f"Below 2^{limit} scores chunks would cost time and save little memory, so there the block uses the plain "
        "kernel. (The tables above use chunks at every length.) This is the pullback of attention alone:",
        "",
        *threshold(shapes, rounds),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """The page, for all lengths or for short ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/attention.md"))
    parser.add_argument("--rounds", type=int, default=3, help="for the times")
    parser.add_argument("--quick", action="store_true", help="short sequences, one round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [(8, 4, 128), (1, 4, 512), (8, 8, 256), (1, 4, 1024), (4, 8, 512), (1, 4, 2048), (16, 8, 512)]
    quick = options.quick
    text = page((64, 128) if quick else LENGTHS, shapes[:1] if quick else shapes, 1 if quick else options.rounds)
    write_page(options.out, text)
    print(text)


if __name__ == "__main__":
    main()
