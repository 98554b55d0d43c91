"""Batches that are fetched again where a step is replayed, so that the reverse sweep holds none of them.

What is held of a batch is the function that gives it, and a checksum. The random numbers that it draws are part of the
conditions of its step (see replay.py).
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from .graph import tensors_of

_NUMBERS = 1009  # how many entries of a tensor on a device go into a checksum


class _Fetched:
    """Some samples of a data set: called, it gives them as a batch."""

    __slots__ = ("_collate", "_dataset", "_indices")

    def __init__(self, dataset: Any, indices: Iterable[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate_fn
        rows = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        whole = all(isinstance(i, int) for i in rows)
        self._indices: Sequence[Any] = array("q", rows) if whole else rows  # a number takes 8 bytes there, else 36

    def __call__(self) -> Any:
        rows = list(self._indices)
        at_once = getattr(self._dataset, "__getitems__", None)
        return self._collate(at_once(rows) if at_once else [self._dataset[i] for i in rows])


def fetched(
    dataset: Any, indices: Iterable[Any], collate_fn: Callable[[list[Any]], Any] = default_collate
) -> Callable[[], Any]:
    """collate_fn([dataset[i] for i in indices]), as a function for `loop.step(fetch=...)`.

    It holds the data set and the indices, and no sample. Augmentation in `dataset[i]` may draw from torch's global
    generator, from Python's `random` and from NumPy's global generator: a replay restores their states first.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> data = torch.utils.data.TensorDataset(torch.arange(10.0))
        >>> bilevel.fetched(data, [3, 1])()
        [tensor([3., 1.])]
    """
    return _Fetched(dataset, indices, collate_fn)


class Source:
    """Where the batch of a step comes from, and how to tell whether it is the same again."""

    __slots__ = ("_checksum", "_fetch", "_names", "shapes")

    def __init__(self, fetch: Callable[[], Any], names: tuple[str, ...], batch: tuple[Any, ...]) -> None:
        self._fetch, self._names = fetch, names
        self._checksum = checksum(batch)
        self.shapes = _shapes(batch)

    @staticmethod
    def of(fetch: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any], Source]:
        """The batch, by position and by name, and where it can be had again."""
        if not callable(fetch):
            raise TypeError(
                "bilevel.inner: fetch= takes a function without arguments that returns the batch, got "
                f"{type(fetch).__name__}. bilevel.fetched(dataset, indices) makes one."
            )
        args, named = _call(fetch)
        return args, named, Source(fetch, tuple(named), (*args, *named.values()))

    def share_with(self, before: Source) -> None:
        """Hold the same objects as the source of another step, where they are equal."""
        self.shapes = before.shapes if before.shapes == self.shapes else self.shapes
        self._names = before._names if before._names == self._names else self._names

    def fetch_again(self, k: int) -> tuple[Any, ...]:
        """The batch once more, as it was for step k."""
        with torch.no_grad():
            args, named = _call(self._fetch)
        differs = "its names do" if named.keys() != set(self._names) else ""
        batch = args if differs else (*args, *(named[n] for n in self._names))
        if not differs and _shapes(batch) != self.shapes:
            differs = f"shapes {self._listed(batch)} in place of {', '.join(str(tuple(s)) for s, _ in self.shapes)}"
        if not differs and checksum(batch) != self._checksum:
            differs = "its numbers do"
        if differs:
            raise RuntimeError(
                f"bilevel.inner: fetch= gave another batch than at first, when step k = {k} was run again for the "
                f"hypergradient ({differs}). It has to give the same batch each time: by indices into a data set that "
                "does not change, with random numbers from torch's, Python's or NumPy's global generator. An iterator "
                "or a DataLoader with workers goes on instead: give the batch itself."
            )
        return batch

    @staticmethod
    def _listed(batch: tuple[Any, ...]) -> str:
        return ", ".join(str(tuple(s)) for s, _ in _shapes(batch)) or "none"


def _call(fetch: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    returned = fetch()
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        named = dict(cast("Mapping[str, Any]", returned))
    elif isinstance(returned, (tuple, list)):
        args = tuple(cast("Sequence[Any]", returned))
    elif isinstance(returned, Tensor):
        args = (returned,)
    else:
        raise TypeError(
            "bilevel.inner: fetch= must return the batch as a tuple, or as a dict for arguments by name, got "
            f"{type(returned).__name__}."
        )
    if not all(isinstance(n, str) for n in named):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bilevel.inner: fetch= returned a dict whose keys are no names of arguments: {list(named)}.")
    for x in pytree.tree_leaves((args, named)):
        if isinstance(x, Tensor):
            if x.requires_grad:
                raise ValueError(
                    f"bilevel.inner: fetch= returned a tensor (shape {tuple(x.shape)}) that requires grad, whose "
                    "gradient would be lost: it is another tensor each time. Compute it inside h, or give the batch "
                    "itself."
                )
            if x.is_nested or x.layout not in (torch.strided, torch.sparse_coo):
                raise TypeError(
                    f"bilevel.inner: fetch= returned a tensor that is neither dense nor sparse_coo ({x.layout}), which "
                    "can't be compared with the one that is fetched again. Give the batch itself."
                )
        elif not isinstance(x, (int, float, complex, str, bytes, type(None))) and not _is_array(x):
            raise TypeError(
                f"bilevel.inner: fetch= returned a {type(x).__name__} in its batch, of which it can't be told whether "
                "it is the same when it is fetched again. Return tensors, arrays, numbers and strings, or give the "
                "batch itself."
            )
    return args, named


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") and hasattr(x, "tobytes")


def _shapes(batch: tuple[Any, ...]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((x.shape, x.dtype) for x in tensors_of(batch))


def checksum(batch: Any) -> int:
    """A number that tells whether a batch is the same: of all bytes, on a device of some of them."""
    leaves, spec = pytree.tree_flatten(batch)
    found = zlib.crc32(str(spec).encode())
    for x in leaves:
        if not isinstance(x, Tensor):
            found = zlib.crc32(x.tobytes() if _is_array(x) else repr(x).encode(), found)
            continue
        found = zlib.crc32(f"{tuple(x.shape)} {x.dtype} {x.layout}".encode(), found)
        if x.is_meta:
            continue
        for part in (x.coalesce().indices(), x.coalesce().values()) if x.layout == torch.sparse_coo else (x,):
            found = _of_bytes(part, found)
    return found


def _of_bytes(x: Tensor, start: int) -> int:
    flat = x.detach().reshape(-1)
    if x.device.type != "cpu":
        flat = flat[:: max(1, len(flat) // _NUMBERS)].cpu()
    flat = flat.contiguous()
    if not flat.numel():
        return start
    return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()), start)
