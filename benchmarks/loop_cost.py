"""What the checks and the structure of the core cost: `make loop-cost` makes docs/results/loop.md."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import bilevel_plugin as bilevel
from bilevel_plugin.model.model import Model

PACKAGE = Path(bilevel.__file__).parent


def median(run: Callable[[], object], rounds: int = 15) -> float:
    """The median of the seconds of CPU time that a call takes, so that a busy machine does not count."""
    times: list[float] = []
    for _ in range(rounds):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def problem(model: nn.Module, x: Tensor) -> tuple[Any, ...]:
    y, lam = torch.randint(10, (len(x),)), torch.zeros(len(x), requires_grad=True)

    def h(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return model, h, g, lam, x, y


def mlp() -> tuple[Any, ...]:
    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return problem(nn.Sequential(*layers), torch.randn(256, 256))


def convolution() -> tuple[Any, ...]:
    first = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return problem(nn.Sequential(*first, *last), torch.randn(64, 3, 16, 16))


def sentinel_in_plain_steps(make: Callable[[], tuple[Any, ...]]) -> float:
    """How many plain steps one look of the sentinel takes."""
    torch.manual_seed(0)
    model, h, g, lam, x, y = make()
    weights = list(model.parameters())

    def plain() -> None:
        grads = torch.autograd.grad(h(model, x, y), weights)
        with torch.no_grad():
            for p, d in zip(weights, grads, strict=True):
                p.sub_(d, alpha=0.0)

    def block(check: Any) -> None:
        with bilevel.inner(model, h, g, solver="gd", lr=0.01, check=check) as loop:
            loop.step(x, y, outer=(x, y))
            loop.hypergrad(lam)

    plain()
    block(False)
    return (median(lambda: block("always")) - median(lambda: block(False))) / median(plain, 45)


class Host(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def ways_in(layers: int) -> tuple[float, float, float]:
    """Microseconds of one loss by own parameters, by the block's way to swap, by functional_call alone."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(4, 4), nn.Tanh())))
    host, x, bound = Host(model), torch.randn(8, 4), Model(model, dict(model.named_parameters()), swaps=True)
    w = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    named = {f"model.{n}": p for n, p in w.items()}

    def swapped() -> Tensor:
        return bound.swapped(w, lambda: host(x))

    runs: tuple[Callable[[], Tensor], ...] = (lambda: host(x), swapped, lambda: functional_call(host, named, (x,)))
    own, swap, call = (1e4 * median(lambda run=run: [run() for _ in range(100)]) for run in runs)
    return own, swap, call


def trace(run: Callable[[], object]) -> tuple[int, int, int]:
    """Calls, functions, and changes of file among the functions of the core that a call runs."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append((frame.f_code.co_filename, f"{frame.f_code.co_name} {frame.f_code.co_firstlineno}"))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(calls), len(set(calls)), sum(a[0] != b[0] for a, b in pairwise(calls))


def main() -> None:
    torch.set_num_threads(1)
    print("# What the checks and the structure cost\n")
    print(f"Made by `make loop-cost` on {os.cpu_count()} cores, one thread, no GPU, torch {torch.__version__}.\n")
    print("## The sentinel\n")
    print("The time that the check of one hypergradient takes, in plain training steps of the same model.\n")
    print("| model | plain steps |\n| --- | ---: |")
    for name, make in (
        ("MLP 256-256-256-10, float32, batch 256", mlp),
        ("small CNN with BatchNorm, float32", convolution),
    ):
        print(f"| {name} | {sentinel_in_plain_steps(make):.1f} |")
    print("\n## How weights enter a loss\n")
    print("Microseconds for one evaluation of the loss of a tiny model.\n")
    print("| model | own parameters | our swap | `torch.func.functional_call` |")
    print("| --- | ---: | ---: | ---: |")
    for layers in (1, 5, 12):
        print(f"| {2 * layers} parameters | " + " | ".join(f"{x:.0f}" for x in ways_in(layers)) + " |")
    _, h, g, lam, x, y = problem(nn.Linear(3, 10), torch.randn(4, 3))
    print("\n## Python functions that a call runs\n")
    print("A linear model under `reverse`, in its third step: how often a function of the core is called, how many")
    print("different ones there are, and how often the next call is in another file.\n")
    print("| | calls | functions | changes of file |\n| --- | ---: | ---: | ---: |")
    with bilevel.inner(nn.Linear(3, 10), h, g, solver="gd", lr=0.1, check=False) as loop:
        loop.run(2, x, y, outer=(x, y))
        for name, run in (("loop.step", lambda: loop.step(x, y)), ("loop.hypergrad", lambda: loop.hypergrad(lam))):
            print(f"| `{name}` | " + " | ".join(map(str, trace(run))) + " |")


if __name__ == "__main__":
    main()
