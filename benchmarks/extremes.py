"""The two ends: what a step costs on a model of ten parameters, and ten thousand steps in one loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .measure import Result, Setting, grown
from .problems import make, mean_loss

STEPS = {"full": 300, "quick": 100, "tiny": 5}
HORIZONS = {"full": (100, 1000, 10_000), "quick": (100, 1000), "tiny": (4, 9)}
ENGINES = {
    "unroll": bilevel.Unroll(),
    "reverse memory=1GiB": bilevel.Reverse(memory="1GiB"),
    "reverse": bilevel.Reverse(),
}


def overhead(setting: Setting, rounds: int) -> Result:
    """Microseconds of CPU time of a step (and of its share of the gradient), in turns with the same loop by hand."""
    torch.manual_seed(0)
    steps = STEPS[setting.size]
    model, x, y = nn.Linear(4, 2), torch.randn(8, 4), torch.randint(2, (8,))
    lam = torch.zeros(8, requires_grad=True)

    def h(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def by_hand() -> tuple[float, float]:
        begin, w = time.process_time(), dict[str, Tensor](model.named_parameters())
        at: Callable[[Tensor], Tensor] = lambda x: torch.func.functional_call(model, w, (x,))  # noqa: E731
        for _ in range(steps):
            grads = torch.autograd.grad(0.1 * h(at, x, y), list(w.values()), create_graph=True)
            w = {n: p - d for (n, p), d in zip(w.items(), grads, strict=True)}
        done = time.process_time()
        torch.autograd.grad(F.cross_entropy(at(x), y), lam)
        return done - begin, time.process_time() - begin

    def by_us(engine: Any) -> tuple[float, float]:
        begin = time.process_time()
        with bilevel.inner(model, h, mean_loss, solver="gd", lr=0.1, engine=engine) as loop:
            for _ in range(steps):
                loop.step(x, y, outer=(x, y))
            done = time.process_time()
            loop.hypergrad(lam)
            return done - begin, time.process_time() - begin

    found: dict[str, list[list[float]]] = {"by hand": [], **{name: [] for name in ENGINES}}
    for turn in range(rounds + 1):
        for name in found:
            took = by_hand() if name == "by hand" else by_us(ENGINES[name])
            if turn:
                found[name].append([1e6 * t / steps for t in took])
    return {"steps": steps, "rows": found}


def long_loop(setting: Setting, engine: str, steps: int) -> Result:
    """P1's model on a tenth of its samples, so many steps: time, growth of the process, iterates that were held."""
    p = make("P7", setting.size, steps=steps)
    (batch,), outer = p.batches()
    mu = torch.tensor(-5.0, requires_grad=True)
    plan = ""

    def h(model: Any, x: Tensor, y: Tensor, i: Any) -> Tensor:
        return F.cross_entropy(model(x), y) + mu.exp() * sum(w.square().sum() for w in model.parameters())

    weighted = engine != "forward"
    options = {"engine": bilevel.Reverse(checkpoint="sqrt") if weighted else "forward", "solver": "gd", "lr": p.lr}

    def run() -> None:
        nonlocal plan
        with bilevel.inner(p.model, p.h if weighted else h, p.g, **options) as loop:
            loop.run(p.steps, *batch, outer=outer)
            plan = str(loop.plan or "")
            loop.hypergrad(p.outer if weighted else mu)

    def short() -> None:
        p.steps = 2
        run()
        p.steps = steps

    short()
    begin = time.perf_counter()
    resident = grown(run)
    return {"resident": resident, "seconds": time.perf_counter() - begin, "plan": plan, "title": p.title}
