"""Memory: the bytes that a graph keeps alive, and the largest number that a call holds at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import nodes
from .missing import explained
from .trees import State, tensors_of


def graph_bytes(to: State, at: State, given: Iterable[Tensor]) -> int:
    """Return the bytes that a graph keeps alive, without those of its result and of the given tensors."""
    excluded = {x.untyped_storage().data_ptr() for x in (*given, *at.values(), *to.values()) if not _has_no_storage(x)}
    found: dict[int, int] = {}
    with explained():
        for node in nodes(to.values(), {x.grad_fn for x in at.values()}):
            saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
            for x in tensors_of([*saved, getattr(node, "saved_tensors", ())]):
                if not _has_no_storage(x):
                    found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(size for where, size in found.items() if where not in excluded)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the largest number of bytes, over all devices, that tensors made during `run` hold at the same time."""
    with _PeakBytes() as counted:
        run()
    return counted.peak


class _PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate, until these are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._counted: set[int] = set()
        self._bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_of([args, kwargs]):
            self._add(x, made=False)
        result = func(*args, **(kwargs or {}))
        for x in tensors_of([result]):
            self._add(x, made=True)
        return result

    def _add(self, x: Tensor, made: bool) -> None:
        if _has_no_storage(x):
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if made else 0  # pyright: ignore[reportPrivateUsage]
        if key not in self._counted:
            self._counted.add(key)
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self._bytes -= size


def _has_no_storage(x: Tensor) -> bool:
    """Whether a tensor is sparse or jagged, or one of the zeros that forward mode makes (torch.func.jvp)."""
    return x.layout != torch.strided or x._is_zerotensor()
