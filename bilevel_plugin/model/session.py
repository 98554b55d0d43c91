"""Sessions: what a block found in a model, which is restored when the block ends. Sessions can be nested."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..autograd.trees import State
from ..kernels.switches import EXCLUSIVE
from .losses import evaluating_loss

NESTED: set[int] = set()  # ids of the parameters that blocks inside losses have trained since it was last cleared


class Session:
    """The tensors, modes and flags that a block found in the model, to be restored when the block ends.

    Sessions on one model are nested: each restores what it found. `written` are the tensors whose values the block
    changes. `note_versions` is called when an inner session has restored the values that this one was working with.
    """

    _open: ClassVar[dict[int, list[Session]]] = {}  # the open sessions of each parameter, by id, the innermost last

    def __init__(
        self, model: nn.Module, parameters: State, written: Sequence[Tensor], note_versions: Callable[[], None]
    ) -> None:
        self.thread = get_ident()
        self._parameters, self._written, self._note_versions = tuple(parameters.values()), written, note_versions
        modules = tuple(model.modules())
        self._modes = [(m, m.training) for m in modules]
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        # attributes that are tensors or lists of tensors: `_flat_weights` of RNNs, `weight` of old-style prune
        self._attributes = [
            (vars(m), name, value, list(value) if isinstance(value, list) else None)
            for m in modules
            for name, value in vars(m).items()
            if isinstance(value, Tensor) or (isinstance(value, list) and any(isinstance(x, Tensor) for x in value))
        ]
        self._sparse = [m for m in modules if isinstance(m, nn.Embedding) and m.sparse]
        self._places = [
            (holder, name, t)
            for m in modules
            for holder in (vars(m)["_parameters"], vars(m)["_buffers"])
            for name, t in holder.items()
        ]
        self.values: list[tuple[Tensor, Tensor]] = []
        self.remember_values()

    def remember_values(self) -> None:
        """Take the present values as those to restore."""
        self.values = [(t, t.detach().clone()) for t in self._written]

    @classmethod
    def open(
        cls, model: nn.Module, parameters: State, written: Sequence[Tensor], note_versions: Callable[[], None]
    ) -> Session:
        """Open a session; raise if another thread has one on this model."""
        with EXCLUSIVE:
            for p in parameters.values():
                stack = cls._open.get(id(p), [])
                if stack and stack[-1].thread != get_ident():
                    raise RuntimeError(
                        "bilevel.inner: another thread has a block open on this model, and the model holds only one "
                        "set of weights. Give each thread its own copy: copy.deepcopy(model)."
                    )
            session = cls(model, parameters, written, note_versions)
            for p in session._parameters:
                cls._open.setdefault(id(p), []).append(session)
            if evaluating_loss():
                NESTED.update(map(id, session._parameters))
            for m in session._sparse:  # a sparse gradient has no derivative; the dense one has the same values
                m.sparse = False
            return session

    def check_innermost(self) -> None:
        """Raise if a nested session on the same model is still open."""
        for p in self._parameters:
            if self._open[id(p)][-1] is not self:
                raise RuntimeError(
                    "bilevel.inner: a nested block is still open on the same model, and its weights are in it. Close "
                    "the inner block first, or give it a copy of the model."
                )

    def close(self) -> None:
        """Restore what the session found."""
        above: dict[int, Session] = {}
        for p in self._parameters:
            stack = self._open[id(p)]
            at = stack.index(self)
            if at + 1 < len(stack):
                above[id(p)] = stack[at + 1]
            del stack[at]
            if not stack:
                del self._open[id(p)]
        with torch.no_grad():
            later = next(iter(above.values()), None)
            if later is not None:  # closed out of order: the block that is still open restores the model in the end
                mine = {id(t): saved for t, saved in self.values}
                later.values = [(t, mine.get(id(t), saved)) for t, saved in later.values]
                later._modes, later._flags = self._modes, self._flags
                later._attributes, later._places = self._attributes, self._places
                return
            for t, saved in self.values:
                if not t.is_meta and t.dtype == saved.dtype:
                    t.copy_(saved)
                elif t.dtype != saved.dtype:
                    t.data = saved
        for holder, name, t in self._places:
            holder[name] = t
        for holder, name, value, items in self._attributes:
            if items is not None:
                cast("list[Any]", value)[:] = items
            holder[name] = value
        for p, flag in self._flags:
            p.requires_grad_(flag)
        for m, mode in self._modes:
            m.training = mode
        for m in self._sparse:
            m.sparse = True
        for stack in (self._open.get(id(p)) for p in self._parameters):
            if stack:
                stack[-1]._note_versions()
