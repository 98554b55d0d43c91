"""Time to quality: MNIST with 80 % wrong labels; seconds until the cleaner tells right from wrong.

The paper's protocol, the same for all (`python -m bilevel_recipes.data_cleaning --paper`): linear model from zero,
5,000 noisy and 5,000 checked samples, K = 100 full-batch steps of rate 0.05, λ from 0 by Adam with rate 0.2 on the
hypergradient.
A sample is kept if λ ≥ 0; F1 is that of the clean class. `bigsam` changes the inner steps, nothing else.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bilevel_recipes.data_cleaning.score import f1
from bilevel_recipes.data_cleaning.study import Job, Settings
from bilevel_recipes.data_cleaning.study import problem as mnist
from bilevel_recipes.models import build

from .measure import Result, Setting, say
from .problems import Problem, Weighted, mean_loss
from .runners import BY_NAME, Build, ours

TARGETS = (0.85, 0.90)
STAY = 10  # outer steps that F1 has to stay above the target


def cleaners(asked: list[str]) -> dict[str, tuple[str, str]]:
    """label -> (solver, runner): bigsam and gd with our default engine, then the loops of the others."""
    peers = [name for name, runner in BY_NAME.items() if runner.group == "peer" or name == "autograd create_graph"]
    loops = [name for name in peers if name in asked]
    mine = {"ours: bigsam": ("bigsam", "ours: reverse"), "ours: gd": ("gd", "ours: reverse")}
    fast = {f"ours: {solver}, unroll": (solver, "ours: unroll") for solver in ("bigsam", "gd")}
    return {**(mine if "ours: reverse" in asked else {}), **(fast if "ours: unroll" in asked else {}),
            **{f"{name} (gd)": ("gd", name) for name in loops}}  # fmt: skip


def clean(setting: Setting, solver: str, runner: str, root: str, cap: float) -> Result:
    """Outer steps until F1 has stayed above the highest target, or the time is up."""
    settings = Settings(dataset=("mnist",), data_root=root)
    cut = mnist(settings, Job("mnist", "linear", 0.8, 0, solver, 1, 100, 0))
    (x, y), truth = cut.train, cut.clean
    lam = torch.zeros(len(y), requires_grad=True)
    batches = [(x, y, slice(None))], cut.validation
    model = build("linear", cut.shape, cut.classes, 0)
    p = Problem("MNIST", "", "mlp", model, [lam], Weighted(lam), mean_loss, lambda: batches, 100, 0.05)
    run = with_solver(runner, solver)(p)
    adam = torch.optim.Adam([lam], lr=0.2)
    curve, spent = list[tuple[float, float]](), 0.0
    while spent < cap and not (len(curve) >= STAY and all(score >= TARGETS[-1] for _, score in curve[-STAY:])):
        lam.grad = None  # a library may add to it
        started = time.perf_counter()
        (lam.grad,) = run()
        adam.step()
        spent += time.perf_counter() - started
        curve.append((spent, f1(lam.detach() >= 0, truth)))
        now = f"{len(curve)} outer steps, {spent:.0f} of at most {cap:.0f} s, F1 {curve[-1][1]:.3f}"
        say(f"MNIST, {solver}, {runner}: {now}")
    return {"curve": curve, "cap": cap, "reached": {str(target): reached(curve, target) for target in TARGETS}}


def with_solver(runner: str, solver: str) -> Build:
    if solver == "gd":
        return BY_NAME[runner].build
    return ours(lambda p: runner.removeprefix("ours: "), solver=solver)


def reached(curve: list[tuple[float, float]], target: float) -> float | None:
    """Seconds after which F1 is above the target and stays there for STAY outer steps."""
    for k in range(len(curve) - STAY + 1):
        if all(score >= target for _, score in curve[k : k + STAY]):
            return curve[k][0]
    return None


def data(root: str | None) -> str:
    """Where MNIST is, or nothing."""
    place = Path(root or "data")
    return str(place) if (place / "MNIST.tar.xz").is_file() or (place / "MNIST").is_dir() else ""
