"""The record of an evaluation of losses: what it used, with which it is repeated, and what the repetition must find.

The outer variables of an evaluation need no registration. They are found in the autograd graph of its losses.

- A tensor of the batch that requires grad is *cut*: the losses get a leaf in its place. The gradient with respect to
  that leaf is summed over all steps, and then passed on to the graph of the tensor in one backward pass.
- Any other tensor that requires grad (closed over, a parameter of another module, a rate) is a *leaf* of the graph.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..autograd.trees import Pairs, State, tensors_of
from ..model.model import Model
from ..model.session import NESTED
from .conditions import Conditions

_CHANGED = (
    "Something that h, g or direction= reads has changed since, and is no tensor of the batch: a closed-over tensor or "
    "number, Python's or NumPy's random numbers, a counter in the model. Pass it in the batch, draw with torch, or use "
    "engine='unroll', which runs nothing again."
)


class Record:
    """What an evaluation used, and what it found: values, and the outer variables in its graph."""

    __slots__ = ("conditions", "cut", "k", "leaves", "of", "seals", "values")

    def __init__(self, k: int, conditions: Conditions, cut: Pairs, *, of: str = "") -> None:
        self.k, self.conditions, self.cut = k, conditions, cut
        self.of = of  # what was evaluated, if it is not a step
        self.leaves: list[Tensor] = []
        self.values: tuple[float | Tensor, ...] = ()  # the values of the losses on this process
        self.seals: list[tuple[str, Tensor, int]] = []  # what it used, with the versions of then

    @property
    def where(self) -> str:
        return f"{self.of} after step k = {self.k}" if self.of else f"step k = {self.k}"

    def note(self, values: Iterable[Tensor], leaves: Sequence[Tensor], batches: Sequence[tuple[str, Any]]) -> None:
        """Record the values of the losses, the outer variables that they use, and the tensors of their batches."""
        self.values = tuple(x.item() if x.device.type == "cpu" else x for x in values)
        self.leaves = list(leaves)
        self.seals = [(f"a tensor in the batch of {n}", x, x._version) for n, b in batches for x in tensors_of(b)]

    def seal(self, leaves: Iterable[Tensor], model: Model) -> None:
        """Record the versions of outer variables, but not of parameters that blocks write to.

        These are the parameters of blocks inside a loss, and those of this block. The latter are leaves, and stand for
        w_0, where a loss uses what was computed from them before the block.
        """
        written = NESTED.union(map(id, model.parameters.values()))
        self.seals += [("an outer variable", x, x._version) for x in leaves if id(x) not in written]

    @contextmanager
    def repeating(self) -> Generator[None]:
        """Restore the conditions of the evaluation inside this context, after checking that it can be repeated."""
        for what, x, version in self.seals:
            if x._version != version:
                raise RuntimeError(
                    f"bilevel.inner: {what} (shape {tuple(x.shape)}) was changed in place after {self.where} used "
                    "it, so that it can't be run again as it was. Take the hypergradient before changing it, or use a "
                    "clone."
                )
        with self.conditions.replaying():
            yield

    def check(self, values: State) -> None:
        """Raise if a loss has another value than at first."""
        for value, before in zip(values.values(), self.values, strict=True):
            if value.device.type == "meta" or (isinstance(before, float) and value.item() == before):
                continue
            unit = torch.finfo(value.dtype).eps
            allowed = 1000 * unit if value.device.type == "cpu" else max(1000 * unit, self.conditions.precision**0.5)
            if not abs(float(value) - float(before)) <= allowed * abs(float(before)) + torch.finfo(value.dtype).tiny:
                raise self.differs()

    def differs(self) -> RuntimeError:
        """Return the error for a repetition with another result."""
        if self.of:
            what = f"{self.where}, evaluated again for the hypergradient, has another value"
        else:
            what = f"{self.where}, run again for the hypergradient, ended elsewhere or saw another loss"
        return RuntimeError(f"bilevel.inner: {what}. {_CHANGED}")

    def share_with(self, before: Record) -> None:
        """Share equal objects with the record before, since a loop may have thousands of them."""
        self.conditions.share_with(before.conditions)
        for name in ("conditions", "cut", "leaves", "seals"):
            if holds_same_objects(mine := getattr(before, name), getattr(self, name)):
                setattr(self, name, mine)


def holds_same_objects(x: Any, y: Any) -> bool:
    """Return whether two nested containers hold the same tensor objects, and equal numbers and names."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(holds_same_objects, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(holds_same_objects(x[n], y[n]) for n in x)
    return isinstance(x, (int, float, str, Conditions)) and x == y
