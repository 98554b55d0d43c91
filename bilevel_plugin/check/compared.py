"""The parts of a derivative, for the weights and for each outer variable, and their comparison with differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.trees import State
from .differences import Difference, Scale, agrees, compare, groups
from .double import random_like

TOLERANCE = 1e-4
SCALE = Scale((1e-7, 1e-9, 1e-5), TOLERANCE, 2**-53)
_FLOOR = 1e-6  # the size of a part, relative to the largest, below which its error is measured by this size
WEIGHTS = "the weights"
_FAR = 1e3  # parts that differ by more are not moved together
# (by, the weights to move, the values of outer variables) → the value, and which outer variables were read
Function = Callable[[float, Collection[str], Mapping[int, Tensor]], tuple[Tensor, set[int]]]


@dataclass(frozen=True)
class Compared:
    """The comparison of one part: what was moved, how far the derivative is off, and whether it is not just 0 = 0."""

    what: str
    difference: Difference
    says_something: bool


class Outer(NamedTuple):
    """An outer variable, and the leaves of a graph that stand for it."""

    variable: Tensor
    value: Tensor  # in float64
    leaves: list[Tensor]


class Parts:
    """The parts of a derivative: for the weights, numbers along their directions; for outer variables, gradients."""

    def __init__(self, t: State, outer: Sequence[Outer]) -> None:
        self._t, self._outer = t, outer
        self._along: dict[str, float] = {}  # the derivatives along the directions in the weights that the value reads
        self._grads: dict[int, Tensor] = {}

    def differentiate(self, value: Tensor) -> None:
        """Take the derivative of the value for every part."""
        inputs = [*self._t.values(), *(x for o in self._outer for x in o.leaves)]
        grads = grad([value], inputs, [None]) if value.requires_grad else [None] * len(inputs)
        self._along = {name: float(g) for name, g in zip(self._t, grads, strict=False) if g is not None}
        rest = iter(grads[len(self._t) :])
        for x, value, leaves in self._outer:
            found = [g.detach().double() for _, g in zip(leaves, rest, strict=False) if g is not None]
            self._grads[id(x)] = sum(found, torch.zeros_like(value))

    def in_outer_variables(self) -> dict[str, Tensor]:
        """Return the gradients with respect to the outer variables by what they are."""
        return {
            f"the gradient with respect to the outer variable {i} of shape {tuple(x.shape)}": self._grads[id(x)]
            for i, (x, *_) in enumerate(self._outer)
        }

    def compared(self, f: Function, here: Tensor, trained: Collection[str]) -> list[Compared]:
        """Compare the parts with differences of f, whose value is `here`; weights that nothing trains stay."""
        still = {id(x): value for x, value, _ in self._outer}
        along = {key: _along(self._grads[key], value) for key, value in still.items()}
        sizes = {key: float((self._grads[key] * v).sum()) for key, v in along.items()}
        moving = {*trained, *self._along} & self._t.keys()
        in_weights = sum(self._along.values())
        floor = _FLOOR * max(float(here.abs()), abs(in_weights), *sizes.values(), 0.0)
        names = {id(x): f"the outer variable of shape {tuple(x.shape)}" for x, *_ in self._outer}
        read: set[int] = set()

        def moved(weights: Collection[str], factors: Mapping[int, float]) -> Callable[[float], Tensor]:
            def at(by: float) -> Tensor:
                outer = {key: x + by * factors[key] * along[key] if key in factors else x for key, x in still.items()}
                value, seen = f(by, weights, {key: x.detach().requires_grad_() for key, x in outer.items()})
                read.update(seen)
                return value

            return at

        def one(weights: Collection[str], keys: Collection[int], got: float, what: str) -> Compared:
            found = compare(got, moved(weights, dict.fromkeys(keys, 1.0)), SCALE, typical=floor, here=here)
            return Compared(what, found, got != 0 or found.error > 0)

        # all parts at once, each moved so far that its share is that of the others, and none can drown
        comparable = {key: size for key, size in sizes.items() if size and 1 / _FAR < abs(in_weights / size) < _FAR}
        equal = {key: in_weights / size for key, size in comparable.items()}
        got = in_weights + sum(equal[key] * sizes[key] for key in equal)
        together = agrees(got, moved(moving, equal), SCALE, here, floor) if in_weights else None
        if together is not None:
            result = [Compared(what, together, True) for what in (WEIGHTS, *(names[key] for key in equal))]
        else:
            result, equal = [one(moving, (), in_weights, WEIGHTS)], {}
        # what was not read a second time is a leaf that the loss itself makes, as gradient penalties do
        for keys in groups({key: size for key, size in sizes.items() if key in read and key not in equal}):
            whole = one((), keys, sum(sizes[key] for key in keys), " and ".join(names[key] for key in keys))
            apart = keys if _is_wrong(whole) and len(keys) > 1 else []
            result += [x for key in apart if _is_wrong(x := one((), [key], sizes[key], names[key]))] or [whole]
        return result


def _is_wrong(x: Compared) -> bool:
    return x.difference.verdict == "WRONG"


def _along(g: Tensor, x: Tensor) -> Tensor:
    """Return the direction of a difference in an outer variable: its derivative, as long as the variable itself."""
    if not bool(g.any()):
        return random_like(x).double()
    size = float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64)) or 1.0
    return g * (size / float(g.norm()))
