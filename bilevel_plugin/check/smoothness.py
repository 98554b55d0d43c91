"""`bilevel.metasmoothness` says whether the trained weights follow the outer variable in a straight line."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..loop import Inputs
from .trainings import Outcome, Train, Trainings, like


def metasmoothness(
    train: Train,
    lam: Inputs,
    *,
    direction: Tensor | Sequence[Tensor] | None = None,
    step: float = 0.1,
    seed: int = 0,
) -> float:
    """Return the metasmoothness of a training at λ, in [−1, 1], from three trainings.

    With θ(s) the trained weights at λ + s·v, it is the share of the movement |θ(2h) − θ(0)| in those weights whose
    first move, θ(h) − θ(0), and second move, θ(2h) − θ(h), have the same sign, minus the share in the others. Near 1,
    the weights follow λ in a straight line and a gradient predicts well. Near 0, they jump.

    Args:
        train: a function that trains and tells its weights, as for `forecast`.
        lam: the outer variable.
        direction: v; by default normal random numbers, times the root mean square of λ (or 1, if λ is 0).
        step: h.
        seed: of the random direction.

    Reference: Engstrom et al. (2025), arXiv 2503.13751, Definition 2.

    Examples:
        Weights that are linear in λ are as smooth as can be.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> lam = torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> h = lambda m: (m.weight - lam).square().sum()
        >>> def train(lam):
        ...     with bilevel.inner(model, h, solver="gd", lr=0.5) as loop:
        ...         _ = loop.step()
        ...         yield loop
        >>> bilevel.metasmoothness(train, lam)
        1.0
    """
    runs = Trainings(train, lam, lambda _: torch.zeros(()))
    if direction is None:
        v = random_direction(runs.tensors, seed)
    else:
        v = like([direction] if isinstance(direction, Tensor) else list(direction), runs.tensors)
    here = runs.at(None)
    if not here.weights:
        raise ValueError(
            "bilevel.metasmoothness: the function that trains did not tell its weights. Let it yield its loop inside "
            "of the block, or return (outer loss, gradient, weights)."
        )
    return smoothness_of(runs, here, v, step)


def smoothness_of(runs: Trainings, here: Outcome, v: Sequence[Tensor], step: float) -> float:
    first = here.weights
    second, third = (runs.at([k * step * x for x in v]).weights for k in (1, 2))
    agree = total = 0.0
    for a, b, c in zip(first, second, third, strict=True):
        moved = (c.double() - a.double()).abs()
        agree += float((moved * torch.sign(b - a) * torch.sign(c - b)).sum())
        total += float(moved.sum())
    return agree / total if total else math.nan


def random_direction(lam: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for x in lam:
        v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        found.append(v * (float(x.detach().square().mean().sqrt()) or 1.0))
    return found
