"""The baselines of the bilevel verdict: a classifier of the checked samples alone, and cleanlab."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .clean import Pair, batches


def fit(
    model: nn.Module, data: Pair, steps: int = 200, lr: float = 3e-3, batch_size: int | None = None, seed: int = 0
) -> nn.Module:
    """Return a copy of the model, trained by Adam on all data. All rows of the table share this ordinary training."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    torch.manual_seed(seed)
    feed = batches(data, batch_size, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        x, y, _ = next(feed)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits in evaluation mode, computed in chunks."""
    model.eval()
    return torch.cat([model(part).float() for part in x.split(1000)])


def accuracy(model: nn.Module, data: Pair) -> float:
    return float((predict(model, data[0]).argmax(1) == data[1]).float().mean())


def by_validation(model: nn.Module, train: Pair, validation: Pair, **options: Any) -> tuple[Tensor, Tensor]:
    """Train on the checked samples alone. Return which labels that classifier agrees with, and its probabilities."""
    fitted = fit(model, validation, **options)
    logits = predict(fitted, train[0])
    return (logits.argmax(1) == train[1]).cpu(), logits.softmax(1).cpu()


def by_cleanlab(labels: Tensor, probabilities: Tensor) -> Tensor:
    """Return which labels confident learning keeps (Northcutt et al. 2021), given out-of-sample probabilities."""
    from cleanlab.filter import find_label_issues

    return ~torch.from_numpy(find_label_issues(labels.cpu().numpy(), probabilities.double().numpy(), n_jobs=1))


def cross_validated(model: nn.Module, train: Pair, folds: int = 5, **options: Any) -> Tensor:
    """Return each noisy sample's probabilities by a model of the other folds, as cleanlab's manual demands."""
    n = len(train[1])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(options.get("seed", 0)))
    probabilities = None
    for held in order.chunk(folds):
        seen = torch.ones(n, dtype=torch.bool)
        seen[held] = False
        fitted = fit(model, (train[0][seen], train[1][seen]), **options)
        part = predict(fitted, train[0][held]).softmax(1).cpu()
        probabilities = torch.zeros(n, part.shape[1]) if probabilities is None else probabilities
        probabilities[held] = part
    assert probabilities is not None
    return probabilities
