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
from torch import Tensor, nn

from ..autograd.graph import leaf_of, nodes
from ..autograd.trees import Pairs, State, tensors_of
from ..guards.holding import Snapshot, leaves_of, mark
from ..model.model import Model
from ..model.session import NESTED
from .conditions import Conditions


class Record:
    """What an evaluation used, and what it found: values, and the outer variables in its graph."""

    __slots__ = ("conditions", "cut", "held", "k", "leaves", "of", "samples", "seals", "used", "values")

    def __init__(self, k: int, conditions: Conditions, cut: Pairs, held: Snapshot, *, of: str = "") -> None:
        self.held = held
        self.k, self.conditions, self.cut = k, conditions, cut
        self.of = of  # what was evaluated, if it is not a step
        self.leaves: list[Tensor] = []
        self.used = 0  # how many of the leaves, the first ones, were found in the graphs of the losses
        self.values: tuple[float | Tensor, ...] = ()  # the values of the losses on this process
        self.samples: list[tuple[str, Any, Any]] = []  # what its batches held, with marks of their values
        self.seals: list[tuple[str, Tensor, int]] = []  # what it used, with the versions of then

    @property
    def where(self) -> str:
        return f"{self.of} after step k = {self.k}" if self.of else f"step k = {self.k}"

    def note(self, values: Iterable[Tensor], leaves: Sequence[Tensor], batches: Sequence[tuple[str, Any]]) -> None:
        """Record the values of the losses, the outer variables that they use, and the tensors of their batches."""
        self.values = tuple(x.item() if x.device.type == "cpu" else x for x in values)
        self.leaves = list(leaves)
        self.samples = [(n, x, mark(x, sampled=True)) for n, b in batches for x in leaves_of(b)]
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

    def check_leaves(self, losses: Sequence[Tensor]) -> None:
        """Raise if a graph lacks an outer variable that it had: then the values are right and the gradient is not."""
        missing = {id(x): x for x in self.leaves[: self.used]}
        made: list[torch.Size] = []  # the shapes of parameters that only this evaluation has
        for node in nodes(losses) if missing else ():
            if (leaf := leaf_of(node)) is None:
                continue
            if missing.pop(id(leaf), None) is None and isinstance(leaf, nn.Parameter):
                made.append(leaf.shape)
            if not missing:
                return
        for x in missing.values():
            if isinstance(x, nn.Parameter) and x.shape in made:
                continue  # a loss that copies a model makes other parameters each time
            raise RuntimeError(
                f"bilevel.inner: {self.where} used an outer variable (shape {tuple(x.shape)}), which it does not use "
                f"where it is run again for the hypergradient: it is detached there, or another. {self._cause()}"
            )

    def differs(self) -> RuntimeError:
        """Return the error for a repetition with another result."""
        if self.of:
            what = f"{self.where}, evaluated again for the hypergradient, has another value"
        else:
            what = f"{self.where}, run again for the hypergradient, ended elsewhere or saw another loss"
        return RuntimeError(f"bilevel.inner: {what}. {self._cause()}")

    def _cause(self) -> str:
        """Say what has changed since."""
        for name, x, then in self.samples:
            if mark(x, sampled=True) != then:
                shape = f" (shape {tuple(x.shape)})" if hasattr(x, "shape") else ""
                return (
                    f"A {type(x).__name__} in the batch of {name}{shape} was changed after the step used it. Give each "
                    "step a batch of its own (.clone(), .copy()), or take the hypergradient before changing it."
                )
        return self.held.cause()

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
