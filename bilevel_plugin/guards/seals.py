"""What kept graphs refer to must stay as it was: outer variables, and the tensors of batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

from ..autograd.trees import tensors_of
from ..model.model import Model
from ..model.session import NESTED
from .holding import Snapshot

_RECENT = 8  # a batch that one of so many tensors before it was is sampled once


class Seals:
    """The outer variables and batches of kept graphs, as they were when the graphs were made."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._variables: list[tuple[Tensor, int]] = []  # with their versions
        self._held: list[tuple[int, Snapshot]] = []
        self._samples: list[tuple[int, str, Tensor, Tensor]] = []  # some entries of the tensors of batches

    def note_variables(self, leaves: Iterable[Tensor]) -> None:
        """Note the outer variables that a graph uses."""
        known = {id(x) for x in (*(x for x, _ in self._variables), *self._model.parameters.values())}
        self._variables += [(x, x._version) for x in leaves if id(x) not in known | NESTED]

    def note_batch(self, k: int, name: str, batch: object) -> None:
        """Note some entries of a batch, to notice changes that leave versions unchanged."""
        known = {id(x) for _, _, x, _ in self._samples[-_RECENT:]}
        for x in tensors_of(batch):
            if id(x) not in known and x.device.type == "cpu" and x.layout == torch.strided and x.is_contiguous():
                self._samples.append((k, name, x, _some_of(x)))

    def note_held(self, k: int, held: Snapshot) -> None:
        """Note what the losses of a graph held."""
        if not self._held or self._held[-1][1].marks is not held.marks:  # else nothing has changed in between
            self._held.append((k, held))

    def check_variables(self) -> None:
        """Refuse an outer variable that has changed since a graph used it."""
        for x, version in self._variables:
            if not x.requires_grad:
                raise RuntimeError(
                    f"bilevel.inner: requires_grad of an outer variable (shape {tuple(x.shape)}) was switched off in "
                    "the block, and later steps would leave out its gradient. Leave it on, and .detach() it "
                    "in the loss where it is meant to be a constant."
                )
            if x._version != version:
                raise RuntimeError(
                    f"bilevel.inner: an outer variable (shape {tuple(x.shape)}) was changed in place after a step used "
                    "it. Take the hypergradient before changing it."
                )

    def check_batches(self) -> None:
        """Refuse a batch, or a tensor that a loss holds, that was refilled since a graph used it."""
        for k, held in self._held:
            if (what := held.refilled()) is not None:
                raise RuntimeError(
                    f"bilevel.inner: {what} was changed after step k = {k} used it (by NumPy, or through .data), and "
                    "the graph of that step may refer to it. Give each step a tensor of its own (.clone()), in its "
                    "batch, or take the hypergradient before refilling it."
                )
        for k, name, x, before in self._samples:
            if not torch.equal(_some_of(x), before) and not bool(torch.isnan(before.double()).any()):
                raise RuntimeError(
                    f"bilevel.inner: a tensor in the batch of {name} (shape {tuple(x.shape)}) was changed after step "
                    f"k = {k} used it (by NumPy, or through .data), and the graph of that step refers to it. Give each "
                    "step a batch of its own, or take the hypergradient before refilling it."
                )


def _some_of(x: Tensor) -> Tensor:
    flat = x.detach().view(-1)
    return flat[:: max(1, len(flat) // 257)].clone()


def versions_of(tensors: Iterable[Tensor]) -> ExitStack:
    """Return a stack that, when it is closed, sets the versions of these tensors to what they are at this call.

    Graphs that have saved a tensor are valid again if it has the same values as at that time, and refuse it by its
    version.
    """
    stack = ExitStack()
    for x in tensors:
        stack.enter_context(torch.autograd._unsafe_preserve_version_counter(x))  # pyright: ignore
    return stack
