"""What the user's optimizers hold while a block is open: read at its beginning, and not to be changed in it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .registry import Formula

Entry = tuple[Any, int]  # an object of an optimizer's state, and the version of a tensor


def resolve_optimizer(given: Any) -> tuple[tuple[torch.optim.Optimizer, ...], Formula | None]:
    """Return the optimizers that `optimizer=` was given, or the rule that it was given."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        return (() if given is None else (given,)), None
    if isinstance(given, (list, tuple)):
        several = cast("Sequence[Any]", given)
        if several and all(isinstance(o, torch.optim.Optimizer) for o in several):
            return tuple(several), None
    elif callable(given) and not isinstance(given, type):
        return (), cast("Formula", given)
    raise TypeError(
        "bilevel.inner: optimizer= takes an optimizer of torch.optim, a list of them, or a function "
        f"rule(w, d, state, *, lr, count) -> (new w, new state), got {given!r}."
    )


class Watch:
    """The states, groups and hooks of some optimizers, which a block compares with what they were."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = self._ids()
        # before the first step the state may be loaded anew (accelerate does); later that would undo what steps did
        self._is_kept: Callable[[Entry, Entry], bool] = _is_equal
        self.renew()

    def renew(self) -> None:
        """Take the present states as those to compare with."""
        self._state = self._entries()

    def check(self) -> None:
        """Raise if the optimizers were changed in a way that a step would not notice."""
        before, now = self._state, self._entries()
        if before.keys() != now.keys() or not all(self._is_kept(before[n], now[n]) for n in now):
            raise RuntimeError(
                "bilevel.inner: the state of the optimizer has changed in the block (load_state_dict, or momentum that "
                "was reset). It is read when the block is opened, and never again. Keep the weights by commit_() "
                "before such a change, and open a new block after it."
            )
        self._state, self._is_kept = now, _is_same
        if self._ids() != self._groups:
            raise RuntimeError(
                "bilevel.inner: the param_groups of the optimizer have changed in the block (add_param_group). Set "
                "them up before the block, and open a new block after such a change."
            )
        for optimizer in self._optimizers:
            refuse_hooks(optimizer)

    def _ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for o in self._optimizers for group in o.param_groups]

    def _entries(self) -> dict[tuple[int, int, str], Entry]:
        """Return the state of each optimizer, and what it holds for each weight, with the versions of tensors."""
        found: dict[tuple[int, int, str], Entry] = {}
        for i, optimizer in enumerate(self._optimizers):
            found[i, 0, ""] = optimizer.state, 0
            for p, held in optimizer.state.items():
                for key, x in held.items():
                    found[i, id(p), key] = x, x._version if isinstance(x, Tensor) else 0
        return found


def _is_same(before: Entry, now: Entry) -> bool:
    """Whether an entry of an optimizer's state is the object that was there before, and was not written to."""
    return before[0] is now[0] and before[1] == now[1]


def _is_equal(before: Entry, now: Entry) -> bool:
    """Whether it is that object, or another one with the same values."""
    (x, version), (y, _) = before, now
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return x is y or (type(x) is type(y) and (isinstance(x, dict) or bool(x == y)))  # a dict is the whole state
    kept = x._version == version and x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    return kept and (x is y or x.is_meta or torch.equal(x, y))


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    own = (getattr(optimizer, kind, None) for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        if hooks:
            raise ValueError(
                "bilevel.inner: the optimizer has a hook on its step. A block reads the optimizer and never steps it, "
                "so the hook would not run. Remove it; what it does to the gradient can be written as direction=, a "
                "function of the direction."
            )
