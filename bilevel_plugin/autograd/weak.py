"""Sets of tensors that do not keep their tensors alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class WeakTensors:
    """A set of tensor objects. No attribute is set on them, so they can be saved and copied as any other."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, x: Tensor) -> None:
        key, refs = id(x), self._refs
        if x not in self:
            refs[key] = weakref.ref(x, lambda ref: refs.pop(key, None) if refs.get(key) is ref else None)

    def __contains__(self, x: Any) -> bool:
        ref = self._refs.get(id(x))
        return ref is not None and ref() is x


COMPUTED = WeakTensors()  # the leaves that stand for what was computed from the weights of a loop (loop.compute)


def with_computed(inputs: Sequence[Tensor] | None, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors to differentiate with respect to: the inputs and computed values, or all leaves if None."""
    if inputs is None:
        return leaves
    more = [x for x in leaves if x in COMPUTED and not any(x is y for y in inputs)]
    return [*inputs, *more] if more else inputs
