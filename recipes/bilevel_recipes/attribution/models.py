"""The trainings of the command: a linear model or a small network on features, smooth in the weights of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

LENGTH = 3.0  # of a row of features, on average: rates are then the same for all data


@dataclass(frozen=True)
class Plan:
    """How a model is trained."""

    model: str = "linear"
    """What is trained on the features: linear, or mlp for a network with 64 hidden units (tanh)."""
    epochs: int = 20
    """How often each row is seen."""
    steps: int = 5
    """Batches in an epoch. Large batches keep the training smooth."""
    rate: float = 0.5
    """Learning rate of plain SGD."""
    decay: float = 1e-3
    """Weight decay."""
    seed: int = 0
    """Seed of the initial weights and of the batches."""


def scaled(x: Any) -> Tensor:
    """Return the features as a tensor whose rows have the same length on average, whatever their number."""
    features = torch.as_tensor(x, dtype=torch.float32)
    return features * (LENGTH / features.norm(dim=1).square().mean().sqrt().clamp_min(1e-12))


def network(plan: Plan, features: int, classes: int) -> nn.Module:
    torch.manual_seed(plan.seed)
    if plan.model == "linear":
        return nn.Linear(features, classes)
    if plan.model == "mlp":
        return nn.Sequential(nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, classes))
    raise ValueError(f"bilevel-attribute: there is no model {plan.model!r}; choose linear or mlp.")


def training(plan: Plan, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Iterator[Any]]:
    """Return the function that trains with a weight for each row, as `Attribution` takes it."""
    size = -(-len(x) // max(1, plan.steps))

    def h(model: nn.Module, i: Tensor, weights: Tensor) -> Tensor:
        return (weights[i] * cross_entropy(model(x[i]), y[i], reduction="none")).mean()

    def train(weights: Tensor) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(plan.seed)
        sgd = torch.optim.SGD(model.parameters(), lr=plan.rate, weight_decay=plan.decay)
        with bilevel.inner(model, h, solver="gd", optimizer=sgd) as loop:
            for _ in range(plan.epochs):
                for i in torch.randperm(len(x), generator=generator).split(size):
                    loop.step(i, weights)
            yield loop

    return train
