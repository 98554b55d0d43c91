"""A derivative against central differences of fourth order. The sentinel, `gradcheck` and `check_loop` all use it.

With D(ε) = (f(ε) − f(−ε)) / 2ε, the derivative is

    f′(0) = (4·D(ε) − D(2ε)) / 3 + O(ε⁴),

and D(ε) − D(2ε), with the rounding of f over ε, estimates the error of the differences themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")
REPRODUCED = 1e-11  # how much a value may change from one evaluation to the next, relative to it or its derivative
NOISE = "the losses return a different value at each evaluation (random numbers?)"
_ROUGH = 0.4  # differences that are off by more tell nothing
_WITHIN = 100.0  # parts of one group differ by less than this factor, so that no part drowns in another


class NotChecked(Exception):
    """The reason why a derivative could not be compared with differences."""


@dataclass(frozen=True)
class Scale:
    """The steps ε of the differences, in the order in which they are tried, and how exact they can be."""

    epsilons: tuple[float, ...]
    tol: float  # the relative error to allow
    unit: float  # the rounding unit of the function

    @staticmethod
    def of(tensors: Sequence[Tensor], tol: float | None = None) -> Scale:
        """Return the scale for a training in the precision of these tensors, along directions of unit variance."""
        fine = all(x.dtype == torch.float64 for x in tensors if x.is_floating_point())
        eps, allowed, unit = (1e-4, 1e-6, 2**-53) if fine else (5e-3, 1e-2, 2**-24)
        return Scale((eps, eps / 8, 8 * eps), tol or allowed, unit)


@dataclass(frozen=True)
class Difference:
    """How far a derivative is from the differences, and how exact these are, both relative to the larger of the two."""

    error: float
    rough: float
    tol: float

    @property
    def verdict(self) -> str:
        """The verdict: "ok", "WRONG", or "?" where the differences are too rough to tell."""
        return "ok" if self.error <= self.tol else "?" if self.error <= self.rough or self.rough > _ROUGH else "WRONG"


def compare(
    got: Tensor | float,
    f: Callable[[float], Tensor],
    scale: Scale,
    *,
    typical: float = 0.0,
    here: Tensor | None = None,
) -> Difference:
    """Compare a derivative with the differences of f, whose values are tensors of float64.

    Args:
        got: f′(0), as it is to be tested.
        typical: the size of such a derivative. The error is relative to the largest of this, `got` and the differences.
        here: f(0), if it is known. Then a one-sided difference, which costs one evaluation, is tried first, and an f
            that is not the same at each evaluation raises `NotChecked`: the disagreement of random numbers would
            pass for rough differences, and hide any error.
    """
    got = torch.as_tensor(got, dtype=torch.float64)
    if here is not None:
        if (found := agrees(got, f, scale, here, typical)) is not None:
            return found
        _refuse_noise(f, here, float(got.norm()))
    tried: list[Difference] = []
    for eps in scale.epsilons:
        tried.append(_central(got, f, eps, scale, typical))
        if tried[-1].error <= scale.tol:
            return tried[-1]
    return next((d for d in tried if d.rough <= scale.tol), min(tried, key=lambda d: d.rough))


def agrees(
    got: Tensor | float, f: Callable[[float], Tensor], scale: Scale, here: Tensor, typical: float
) -> Difference | None:
    """Return how far the derivative is from a one-sided difference, if they agree well; otherwise None."""
    eps = scale.epsilons[0]
    ahead = f(eps)
    got = torch.as_tensor(got, dtype=torch.float64).to(ahead.device)
    found = _judge(got, (ahead - here) / eps, _rounding(ahead, scale, eps), scale, typical)
    return found if max(found.error, found.rough) <= scale.tol / 10 else None


def _refuse_noise(f: Callable[[float], Tensor], here: Tensor, size: float) -> None:
    again = f(0.0)
    if not float((again - here).norm()) <= REPRODUCED * max(float(here.norm()), size):
        raise NotChecked(NOISE)


def _central(got: Tensor, f: Callable[[float], Tensor], eps: float, scale: Scale, typical: float) -> Difference:
    ahead, behind = f(eps), f(-eps)
    near, far = (ahead - behind) / (2 * eps), (f(2 * eps) - f(-2 * eps)) / (4 * eps)
    expected = (4 * near - far) / 3
    rough = float((near - far).norm()) + _rounding(ahead, scale, eps)
    return _judge(got.to(expected.device), expected, rough, scale, typical)


def _rounding(ahead: Tensor, scale: Scale, eps: float) -> float:
    return 4 * scale.unit * float(ahead.norm()) / eps


def _judge(got: Tensor, expected: Tensor, rough: float, scale: Scale, typical: float) -> Difference:
    size = max(float(expected.norm()), float(got.norm()), typical)
    if size == 0:
        return Difference(0.0, 0.0, scale.tol)
    error = float((got - expected).norm()) / size
    return Difference(math.inf if math.isnan(error) else error, rough / size, scale.tol)


def groups(sizes: Mapping[K, float]) -> list[list[K]]:
    """Put parts into groups of similar size, the largest first; each group is compared by one difference.

    An error in a part is then not small beside the whole group. What autograd says is 0 makes a group of its own.
    """
    found: list[list[K]] = []
    top = math.inf
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not found or size * _WITHIN < top or (size == 0 and top != 0):
            found.append([])
            top = size
        found[-1].append(key)
    return found
