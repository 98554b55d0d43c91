"""Peak memory and time of one hypergradient, engine by engine: MLP 784-300-10, 5,000 samples, full batch, K = 100.

Data cleaning with plain GD inner steps. Each case runs in a process of its own; memory is the peak resident size
above that of the same process after set-up and one plain gradient.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import bilevel_plugin as bilevel

ENGINES = {
    "unroll": bilevel.Unroll(),
    "reverse": bilevel.Reverse(),
    "reverse, checkpoint='sqrt'": bilevel.Reverse(checkpoint="sqrt"),
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def case(name: str, samples: int, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    x, y, xv, yv = (make() for make in (lambda: torch.rand(samples, 784), lambda: torch.randint(10, (samples,))) * 2)
    lam = torch.zeros(samples, requires_grad=True)

    def h(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    started = time.perf_counter()
    for _ in range(3):
        torch.autograd.grad(h(model, x, y), list(model.parameters()))
    gradient = (time.perf_counter() - started) / 3
    before, started = peak(), time.perf_counter()
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, hypergrad=ENGINES[name]) as loop:
        loop.run(steps, x, y, outer=(xv, yv))
        grad = loop.hypergrad(lam)
    seconds = time.perf_counter() - started
    return {
        "bytes": peak() - before,
        "seconds": seconds,
        "gradients": seconds / (steps * gradient),
        "norm": float(grad.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000, help="training and validation samples (default 5000)")
    parser.add_argument("--steps", type=int, default=100, help="inner steps K (default 100)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine, interleaved; medians are printed")
    parser.add_argument("--case", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.samples, args.steps)))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for _ in range(args.repeat):
        for name in ENGINES:
            command = [sys.executable, "-m", "benchmarks.memory", "--case", name]
            command += ["--samples", str(args.samples), "--steps", str(args.steps)]
            runs[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    median = {name: {key: statistics.median(r[key] for r in found) for key in found[0]} for name, found in runs.items()}
    base = median["unroll"]
    print(f"MLP 784-300-10, {args.samples} samples full batch, K = {args.steps}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads, medians of {args.repeat}")  # fmt: skip
    print(f"{'engine':<28}{'peak MB':>9}{'of unroll':>11}{'seconds':>9}{'of unroll':>11}{'x K gradients':>15}")
    for name, m in median.items():
        print(
            f"{name:<28}{m['bytes'] / 1e6:>9.0f}{m['bytes'] / base['bytes']:>11.3f}"
            f"{m['seconds']:>9.2f}{m['seconds'] / base['seconds']:>11.2f}{m['gradients']:>15.2f}"
        )


if __name__ == "__main__":
    main()
