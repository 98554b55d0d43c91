"""The quality of a verdict, and the figures that the paper printed."""

from __future__ import annotations

from typing import Any

import numpy as np

# F1 of the clean class, Table 1 of the paper: data set -> ρ -> (improved, basic), mean over five runs.
PAPER: dict[str, dict[float, tuple[float, float]]] = {
    "MNIST": {0.9: (0.618, 0.527), 0.8: (0.781, 0.721), 0.6: (0.898, 0.877)},
    "Fashion-MNIST": {0.9: (0.569, 0.519), 0.8: (0.736, 0.697), 0.6: (0.851, 0.839)},
    "QMNIST": {0.9: (0.615, 0.531), 0.8: (0.780, 0.721), 0.6: (0.900, 0.873)},
    "SVHN": {0.9: (0.404, 0.279), 0.8: (0.536, 0.443), 0.6: (0.646, 0.614)},
    "CIFAR-10": {0.9: (0.321, 0.289), 0.8: (0.499, 0.456), 0.6: (0.649, 0.621)},
}

# The row of the paper's table that a data set belongs to.
_ROWS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "qmnist": "QMNIST", "mnist-qmnist-labels": "QMNIST",
         "svhn": "SVHN", "cifar10": "CIFAR-10"}  # fmt: skip


def paper(dataset: str, rho: float) -> tuple[float, float] | None:
    """Return the paper's F1 of the improved and of the basic model, or None for a cell that it does not have."""
    return PAPER.get(_ROWS.get(dataset, ""), {}).get(rho)


def f1(called: Any, real: Any) -> float:
    """Return 2·|called ∩ real| / (|called| + |real|), or 0 if both are empty."""
    called, real = np.asarray(called, bool), np.asarray(real, bool)
    total = called.sum() + real.sum()
    return float(2 * (called & real).sum() / total) if total else 0.0


def verdict(kept: Any, clean: Any) -> dict[str, float]:
    """Return F1 of both classes, and precision and recall of the list of suspects.

    The paper's F1 is that of the clean class: keeping what is clean is the positive prediction.
    """
    kept, clean = np.asarray(kept, bool), np.asarray(clean, bool)
    caught = float((~kept & ~clean).sum())
    return {
        "f1_clean": f1(kept, clean),
        "f1_corrupted": f1(~kept, ~clean),
        "precision": caught / max(1, int((~kept).sum())),
        "recall": caught / max(1, int((~clean).sum())),
    }
