"""A hypergradient that is killed and goes on: what the processes of tests/hypergrad/test_journal.py run."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bilevel_plugin as bilevel

STEPS = 12
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has but the second, and ends the process at once
KILLED = -KILL if os.name == "posix" else int(KILL)  # what the parent is told


def solve(
    folder, kill_at=None, steps=STEPS, scale=1.0, resume=True, inputs="lam", first=0.0, weight=0.0, every=0.0, **options
):
    """The hypergradient, and how often h was evaluated; killed in the middle of that evaluation of h."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    lam, mu = torch.full((10,), weight, requires_grad=True), torch.zeros((), requires_grad=True)
    data = [(torch.randn(10, 4), torch.randint(3, (10,))) for _ in range(4)]
    data[0][0][0, 0] += first
    calls = []

    def h(model, x, y):
        calls.append(1)
        if len(calls) == kill_at:
            os.kill(os.getpid(), KILL)
        return (1 + mu) * (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    g = lambda model, x, y: scale * F.cross_entropy(model(x), y)
    engine = bilevel.Reverse(store=Path(folder), resume=resume, every=every, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with bilevel.inner(model, h, g, solver="bigsam", optimizer=sgd, engine=engine, check=False) as loop:
        for k in range(steps):
            loop.step(*data[k % 3], outer=data[3])
        if inputs == "backward":
            loop.backward()
        wanted = {"lam": lam, "other": mu, "both": [lam, model[0].weight]}[inputs]
        found = loop.hypergrad(wanted)
    return (found if isinstance(found, list) else [found]), len(calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, out, kill_at, checkpoint = sys.argv[1:]
    found = solve(
        folder, int(kill_at), inputs="both", checkpoint=int(checkpoint) if checkpoint.isdigit() else checkpoint
    )
    torch.save(found, out)
