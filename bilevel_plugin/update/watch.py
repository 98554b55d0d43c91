"""What the user's optimizers hold while a block is open: read at its beginning, and not to be changed in it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .proof import refuse_other_step
from .registry import Formula

_OF_A_BLOCK = "_of_a_block"  # the attribute of a hook of this file
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
    """The states, groups and hooks of some optimizers, which a block compares with what they were.

    In the block, `optimizer.state_dict()` tells the state that the block has: `told` returns it, by weight. And
    `optimizer.step()`, which takes no part in the block, is refused if it would move weights.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = self._ids()
        self._handles: list[Any] = []
        self._told = _nothing
        self._idle = 0  # calls of optimizer.step() since the last step of the block
        # before the first step the state may be loaded anew (accelerate does); later that would undo what steps did
        self._is_kept: Callable[[Entry, Entry], bool] = _is_equal
        self.renew()

    def open(self, told: Callable[[torch.optim.Optimizer], dict[Tensor, dict[str, Any]]]) -> None:
        """Begin to listen to the optimizers. They refer to the block weakly, since they outlive it."""
        self._told = told
        me = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if me() is not None and any(
                p.grad is not None for group in optimizer.param_groups for p in group["params"]
            ):
                raise RuntimeError(
                    "bilevel.inner: optimizer.step() was called in the block, and would move the weights by the "
                    "gradients of a .backward(), without a record. In the block loop.step(batch) takes the step: "
                    "leave out optimizer.step() and loss.backward(), and set gradients from before to None "
                    "(optimizer.zero_grad())."
                )

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (watch := me()) is not None:
                watch._idle += 1
                if watch._idle > len(watch._optimizers):
                    watch._idle = -(2**62)  # once
                    warnings.warn(
                        "bilevel.inner: optimizer.step() was called in the block, where it moves nothing, and no "
                        "loop.step(batch) was taken since it was called before. loop.step is what trains.",
                        stacklevel=4,
                    )

        def tell(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
            watch = me()
            held = {} if watch is None else watch._told(optimizer)
            places = enumerate(p for group in optimizer.param_groups for p in group["params"])
            state = {i: {**found["state"].get(i, {}), **held.get(p, {})} for i, p in places}
            found["state"] = {**found["state"], **{i: entry for i, entry in state.items() if entry}}

        for hook in (before, after):
            setattr(hook, _OF_A_BLOCK, True)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
            self._handles.append(optimizer.register_state_dict_post_hook(tell))

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._told = [], _nothing

    def step_taken(self) -> None:
        """Note that the block took a step."""
        self._idle = min(self._idle, 0)
        for optimizer in self._optimizers:  # otherwise a scheduler would warn that the optimizer was not stepped
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

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


def _nothing(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {}


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
    """Raise if the optimizer's step is not that of its class alone: it has hooks, or was replaced on the object."""
    refuse_other_step(optimizer)
    own = (getattr(optimizer, kind, {}) for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        if any(not hasattr(hook, _OF_A_BLOCK) for hook in hooks.values()):
            raise ValueError(
                "bilevel.inner: the optimizer has a hook on its step. A block reads the optimizer and never steps it, "
                "so the hook would not run. Remove it; what it does to the gradient can be written as direction=, a "
                "function of the direction."
            )
