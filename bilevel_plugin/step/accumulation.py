"""Gradient accumulation as updates of the state: the sum of the directions is a part of z until a step uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..autograd.trees import State
from ..update.update import SUM, PulledUpdate, Update


@dataclass(frozen=True)
class Accumulate(Update):
    """Add the direction to the sum, grad⁺ = grad + d, and leave the weights unchanged."""

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def reads_direction(self) -> bool:
        return False

    def moves(self, z: State, d: State) -> Iterable[str]:
        return ()

    def __call__(self, z: State, d: State) -> State:
        return {**z, **{f"{n}{SUM}": z[f"{n}{SUM}"] + x if f"{n}{SUM}" in z else x for n, x in d.items()}}

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        with torch.no_grad():
            u = {n: a[f"{n}{SUM}"] for n in d if f"{n}{SUM}" in a}
            weights = {n: x for n, x in z.items() if not n.endswith(SUM)}  # z may lack the sum
            return PulledUpdate(weights, dict(a), u, [None] * len(wanted))


@dataclass(frozen=True)
class AfterAccumulation(Update):
    """Apply Υ to the sum, z⁺ = Υ(z, grad + d), and drop the sum."""

    update: Update

    @property
    def options(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update.options

    @property
    def reads_direction(self) -> bool:
        return self.update.reads_direction

    @property
    def closes_over(self) -> bool:
        return self.update.closes_over

    def _total(self, z: State, d: State) -> State:
        held = {key.removesuffix(SUM): x for key, x in z.items() if key.endswith(SUM)}
        return {**d, **{n: x + d[n] if n in d else x for n, x in held.items()}}

    def moves(self, z: State, d: State) -> Iterable[str]:
        return tuple(self._total(z, d))

    def __call__(self, z: State, d: State) -> State:
        return self.update({n: x for n, x in z.items() if not n.endswith(SUM)}, self._total(z, d))

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        with torch.no_grad():
            total = self._total(z, d)
        pulled = self.update.pull({n: x for n, x in z.items() if not n.endswith(SUM)}, total, a, wanted, end=end)
        u = pulled.cotangent
        pulled.adjoint.update({n: u[w] for n in z if n.endswith(SUM) and (w := n.removesuffix(SUM)) in u})
        return replace(pulled, cotangent={n: x for n, x in u.items() if n in d})
