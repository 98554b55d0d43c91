"""The contract of the pullbacks: each gives, under every update, what `unroll` gives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from problems import relative, weighted
from torch import nn

import bilevel_plugin as bilevel
from benchmarks.measure import Counter
from bilevel_plugin.pullback import lean


class Residual(nn.Module):
    """A block, of which the model of the contract has two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x):
        return x + self.layers(x)


LOOPS = {
    "plain": {"lr": 0.3},
    "momentum": {"optimizer": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, weight_decay=0.01, nesterov=True)},
    "adam": {"optimizer": lambda p: torch.optim.Adam(p, 0.05)},
    "adamw, clip": {"optimizer": lambda p: torch.optim.AdamW(p, 0.05), "clip": 0.05},
    "rmsprop": {"optimizer": lambda p: torch.optim.RMSprop(p, 0.02)},
    "adagrad": {"optimizer": lambda p: torch.optim.Adagrad(p, 0.05)},
    "clip": {"lr": 0.3, "clip": 0.05},
    "momentum, clip": {"optimizer": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), "clip": 0.05},
    "tasks": {"lr": 0.3, "tasks": 3},
    "tasks, momentum": {"optimizer": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), "tasks": 3},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has some of its own
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("micro", [None, 5])
def test_every_pullback_under_every_update(pullback, micro, loop, left_out):
    """The gradients for λ, a tensor of the batch and w_0 are those of `unroll`, to 1e-10, in one go and in parts."""
    how, engine = pullback
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Residual(), Residual(), nn.Linear(5, 3)).double()
    options = dict(LOOPS[loop])
    if "optimizer" in options:
        options["optimizer"] = options["optimizer"](model.parameters())
    tasks = (options["tasks"],) if "tasks" in options else ()
    lam, raw = torch.zeros(12).double().requires_grad_(), torch.randn(*tasks, 12, 4).double().requires_grad_()
    x, y = torch.randn(*tasks, 12, 4).double(), torch.randint(3, (*tasks, 12))
    rows = torch.arange(12).expand(*tasks, 12)

    def h(model, x, y, i):
        return (lam[i].sigmoid() * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model, x, y):
        return F.cross_entropy(model(x), y)

    def gradients(engine, micro=None):
        with bilevel.inner(model, h, g, engine=engine, **options) as loop:
            loop.run(5, x + raw.tanh(), y, rows, outer=(x, y), micro=micro)
            return loop.hypergrad([lam, raw, *model.parameters()])

    expected = gradients("unroll")
    says = (
        "compile=True does not apply to steps with micro="
        if how == "compiled" and micro
        else "blocks= is off"
        if how == "blocks" and tasks
        else ""
    )
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        found = gradients(engine, micro)
    if how in ("plain", "lean"):
        in_parts = micro is not None and not tasks  # the update is not a part's
        assert any(left_out) == (how == "lean" and (loop in ("plain", "momentum", "adam") or in_parts))
    for mine, theirs in zip(found, expected, strict=True):
        assert float(theirs.norm()) > 0
        assert relative(mine, theirs) < 1e-10


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_costs_no_product_more(momentum, monkeypatch):
    """Five matrix products for a step and its derivative, as for a plain step (tests/test_waste.py)."""
    monkeypatch.setattr(lean, "LARGE", 0)  # as for a large model
    torch.manual_seed(0)
    model, x, y = nn.Linear(7, 3), torch.randn(20, 7), torch.randint(3, (20,))
    lam = torch.zeros(20, requires_grad=True)
    h, g = weighted(lam)

    def products(steps):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        with Counter() as count, bilevel.inner(model, h, g, solver="gd", optimizer=optimizer, check=False) as loop:
            loop.run(steps, x, y, outer=(x, y))
            loop.hypergrad(lam)
        return count.of("mm", "addmm", "bmm")

    assert (products(8) - products(4)) / 4 == 5
