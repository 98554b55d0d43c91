"""What each step of a loop reads besides the weights, so that two runs of the loop can be compared.

A reading has an entry for every tensor and number in the batch, for all that the losses close over, for the rates of
the optimizers, and for the random state. What carries a graph is left out: its derivative is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .double import random_like
from .held import held

Reading = dict[str, object]
RANDOM, RATE, START = "the random state", "the option ", "the weights at the start of the block"


@dataclass
class Reader:
    """Takes readings of one loop. `known` are the ids of tensors that are not read: λ and what the model holds."""

    functions: Mapping[str, Callable[..., Any]]
    optimizers: Sequence[torch.optim.Optimizer]
    known: Collection[int]
    _numbers: dict[int, tuple[Tensor, int, float]] = field(default_factory=dict[int, tuple[Tensor, int, float]])

    def read(self, batch: Any) -> Reading:
        """Return what a step on this batch reads."""
        found: Reading = {RANDOM: _number(torch.get_rng_state())}
        for path, x in pytree.tree_flatten_with_path(batch)[0]:
            self._add(found, f"the batch{pytree.keystr(path)}", x)
        for name, function in self.functions.items():
            for path, x in held(function):
                if path:
                    self._add(found, f"{path} (read by {name})", x)
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for option, x in group.items():
                    if option != "params":
                        self._add(found, f"{RATE}{option!r} of optimizer {i}, group {j}", x)
        return found

    def _add(self, found: Reading, name: str, x: Any) -> None:
        if isinstance(x, nn.Module):
            for n, y in (*x.named_parameters(), *x.named_buffers()):
                self._add(found, f"{name.partition(' ')[0]}.{n} {name.partition(' ')[2]}", y)
        elif isinstance(x, Tensor):
            attached = x.requires_grad and not x.is_leaf
            if id(x) not in self.known and not attached and x.layout == torch.strided:
                found[name] = self._of_tensor(x)
        elif isinstance(x, (int, float, complex, str, type(None))):
            found[name] = x

    def _of_tensor(self, x: Tensor) -> float:
        before = self._numbers.get(id(x))
        if before is None or before[0] is not x or before[1] != x._version:
            before = self._numbers[id(x)] = x, x._version, _number(x)
        return before[2]


def _number(x: Tensor) -> float:
    """Return a number that differs for tensors with different values."""
    y = x.detach().to(torch.float64) if not x.is_complex() else torch.view_as_real(x.detach()).double()
    return float((y * random_like(torch.ones_like(y))).sum())


def changed(one: Sequence[Reading], other: Sequence[Reading]) -> dict[str, int]:
    """Return the first step k = 1, 2, … at which each entry differs between two runs."""
    found: dict[str, int] = {}
    for k, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        for name in a.keys() & b.keys():
            if a[name] != b[name] and not (a[name] != a[name] and b[name] != b[name]):
                found.setdefault(name, k)
    # what a step draws, and its rates, come before what follows from them
    return dict(sorted(found.items(), key=lambda item: (item[1], not item[0].startswith((RANDOM, RATE)))))
