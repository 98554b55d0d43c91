"""Peak memory and time of one hypergradient, engine by engine: MLP 784-300-10, 5,000 samples, full batch, K = 100.

Data cleaning with plain GD inner steps. Each case runs in a process of its own, after set-up and a plain gradient:

    live      the peak of the bytes that tensors hold (torch's profiler), the same whatever the allocator does
    resident  the peak of what the process occupies, above what it occupied before; malloc's holes count here
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

ENGINES = {
    "unroll": bilevel.Unroll(),
    "reverse": bilevel.Reverse(),
    "reverse, checkpoint='sqrt'": bilevel.Reverse(checkpoint="sqrt"),
}
HIGHER = "higher 0.2.1 (unrolled)"
ROWS = [*ENGINES, *([HIGHER] if importlib.util.find_spec("higher") else [])]


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def case(name: str, samples: int, steps: int, live: bool) -> dict[str, float]:
    """One hypergradient; with `live`, under the profiler, which makes its time meaningless."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    (x, y), (xv, yv) = ((torch.rand(samples, 784), torch.randint(10, (samples,))) for _ in range(2))
    lam = torch.zeros(samples, requires_grad=True)

    def h(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def run() -> None:
        if name == HIGHER:
            import higher

            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            with higher.innerloop_ctx(model, sgd, copy_initial_weights=False) as (fast, optimizer):
                for _ in range(steps):
                    optimizer.step(h(fast, x, y))
                torch.autograd.grad(g(fast, xv, yv), lam)
            return
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, hypergrad=ENGINES[name]) as loop:
            loop.run(steps, x, y, outer=(xv, yv))
            loop.hypergrad(lam)

    started = time.perf_counter()
    for _ in range(3):
        torch.autograd.grad(h(model, x, y), list(model.parameters()))
    gradient = (time.perf_counter() - started) / 3
    if live:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
        held = most = 0
        for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return {"live": most}
    before, started = resident(), time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return {"resident": resident() - before, "seconds": seconds, "gradients": seconds / (steps * gradient)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000, help="training and validation samples (default 5000)")
    parser.add_argument("--steps", type=int, default=100, help="inner steps K (default 100)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine, interleaved; medians are printed")
    parser.add_argument("--case", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.samples, args.steps, args.live)))
        return

    def measure(name: str, *flags: str) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.memory", "--case", name, *flags]
        command += ["--samples", str(args.samples), "--steps", str(args.steps)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for _ in range(args.repeat):
        for name, found in runs.items():
            found.append(measure(name))
    rows = {
        name: measure(name, "--live") | {key: statistics.median(r[key] for r in found) for key in found[0]}
        for name, found in runs.items()
    }
    base = rows["unroll"]
    print(
        f"MLP 784-300-10, {args.samples} samples full batch, K = {args.steps}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, medians of {args.repeat}; in brackets: relative to unroll"
    )
    if HIGHER not in rows:
        print("higher is not installed; pip install 'bilevel_plugin[benchmarks]' for its row")
    print(f"{'engine':<28}{'live MB':>16}{'resident MB':>16}{'seconds':>16}{'x K gradients':>15}")
    for name, row in rows.items():
        cells = (
            f"{row[key] / unit:.0f} ({row[key] / base[key]:.2f})" for key, unit in (("live", 1e6), ("resident", 1e6))
        )
        seconds = f"{row['seconds']:.1f} ({row['seconds'] / base['seconds']:.2f})"
        print(f"{name:<28}" + "".join(f"{cell:>16}" for cell in (*cells, seconds)) + f"{row['gradients']:>15.2f}")


if __name__ == "__main__":
    main()
