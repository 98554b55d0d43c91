"""Losses that are not finite are reported with the step that they occur in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..autograd.trees import State


class LossMonitor:
    """Finds losses that are not finite, and their steps: at once on the CPU, in `raise_if_not_finite` on a device."""

    def __init__(self) -> None:
        self._later: list[tuple[int, str, Tensor]] = []

    def record_loss(self, k: int, name: str, value: Tensor, w: State, number: float | Tensor | None = None) -> None:
        """Record the value of a loss at these weights; `number` is the value where it was read already."""
        if value.device.type == "cpu":
            if not math.isfinite(number if isinstance(number, float) else value.item()):
                raise self._error(k, name, value, w)
        elif value.device.type != "meta":
            self._later.append((k, name, value))

    def raise_if_not_finite(self) -> None:
        """Raise if a recorded loss was not finite."""
        later, self._later = self._later, []
        if later and not bool(torch.isfinite(torch.stack([value.float() for _, _, value in later])).all()):
            raise self._error(*next(entry for entry in later if not bool(torch.isfinite(entry[2]))), {})

    @staticmethod
    def _error(k: int, name: str, value: Tensor, w: State) -> FloatingPointError:
        broken = [n for n, x in w.items() if not bool(torch.isfinite(x).all())]
        why = (
            f"The weight {broken[0]!r} is not finite after the step before. A smaller rate may help."
            if broken
            else "A smaller rate may help."
        )
        return FloatingPointError(f"bilevel.inner: {name} is {float(value)} at step k = {k}. {why}")
