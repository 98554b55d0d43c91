"""Reverse("reversible"): every state comes out bit for bit, and so does the hypergradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

SGD, Adam, AdamW, NAdam, RAdam, RMSprop = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop
)  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9),
    "sgd, decay": lambda p: SGD(p, 0.1, momentum=0.99, weight_decay=0.01),
    "sgd, dampening": lambda p: SGD(p, 0.1, momentum=0.5, dampening=0.3),
    "sgd, nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd, maximize": lambda p: SGD(p, 0.01, momentum=0.9, maximize=True),
    "adam": lambda p: Adam(p, 0.01),
    "adam, decay": lambda p: Adam(p, 0.01, weight_decay=0.1),
    "adam, amsgrad": lambda p: Adam(p, 0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1),
    "adamw, β₁ = 0": lambda p: AdamW(p, 0.01, betas=(0.0, 0.95)),
    "nadam": lambda p: NAdam(p, 0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: RAdam(p, 0.01),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.9, centered=True),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


def solve(
    engine: Any,
    optimizer: Any = OPTIMIZERS["sgd"],
    make: Any = mlp,
    steps: int = 12,
    dtype: torch.dtype = torch.float32,
    schedule: bool = False,
    only: bool = False,
    accumulate: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Hypergradients for weights of the samples, a regulariser, a rate and w_0; twice, and on from there."""
    torch.manual_seed(0)
    model = make().to(dtype)
    x, y = torch.randn(30, 5, dtype=dtype), torch.randint(3, (30,))
    lam, mu, rate = torch.zeros(30, dtype=dtype), torch.tensor(-3.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    inputs = [lam.requires_grad_(), mu.requires_grad_(), rate.requires_grad_()]

    def h(model: nn.Module, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in model.parameters())
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean() + mu.exp() * decay

    g = lambda model, x, y: F.cross_entropy(model(x), y)
    optimizer = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) if schedule else None
    found: list[Tensor] = []
    with bilevel.inner(
        model, h, g, solver="gd", optimizer=optimizer, lr=rate, engine=engine, check=False, **options
    ) as loop:
        for turn in range(2):
            for k in range(steps):
                i = torch.randperm(30)[:10]
                part = [model[0].weight] if only and k % 3 == 1 else None
                if accumulate and k % 2:
                    loop.accumulate(x[i], y[i], i)
                    loop.accumulate(x, y, torch.arange(30))
                    loop.step()
                else:
                    loop.step(x[i], y[i], i, only=part)
                if scheduler is not None:
                    scheduler.step()
            model.train(turn == 0)
            for _ in range(2):
                found += loop.hypergrad([*inputs, *model.parameters()], outer=(x, y))
            model.train()
    return found


def agree(*args: Any, plain: Any = "reverse", **options: Any) -> None:
    mine, theirs = solve(bilevel.Reverse("reversible"), *args, **options), solve(plain, *args, **options)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_optimizer_runs_backwards_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    agree(OPTIMIZERS[name], dtype=dtype)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": True}, {"only": True}, {"clip": 0.1}, {"make": cnn}, {"accumulate": True},
        {"direction": lambda d: {n: x + 0.01 * torch.randn_like(x) for n, x in d.items()}},
    ],
    ids=["schedule", "only", "clip", "cnn", "accumulate", "noise"],
)  # fmt: skip
def test_whatever_the_step_has_besides(name: str, options: dict[str, Any]) -> None:
    agree(OPTIMIZERS[name], **options)
