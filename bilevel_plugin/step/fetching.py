"""Batches that are fetched again where a step is replayed, so that the reverse sweep holds none of them.

In place of the batch, its step keeps the function that returns it, and a checksum. The random numbers that the function
draws are part of the conditions of the step (see conditions.py).
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from ..autograd.trees import tensors_of
from ..model.model import Model
from .conditions import Conditions

_SAMPLED = 1009  # the number of entries of a tensor on a device that go into a checksum


class _FromRows:
    """A function that returns some samples of a data set as a batch."""

    __slots__ = ("_collate", "_dataset", "_indices")

    def __init__(self, dataset: Any, indices: Iterable[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate_fn
        rows = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        whole = all(isinstance(i, int) for i in rows)
        self._indices: Sequence[Any] = array("q", rows) if whole else rows  # an index takes 8 bytes instead of 36

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
    return _FromRows(dataset, indices, collate_fn)


class Source:
    """The function that returns the batch of a step, and what the batch is compared with when it is fetched again.

    The batch is held until `release`: while the step is taken, and while it is run again.
    """

    __slots__ = ("_checksum", "_fetch", "_held", "_names", "conditions", "k", "shapes")

    def __init__(
        self, k: int, fetch: Callable[[], Any], names: tuple[str, ...], batch: tuple[Any, ...], conditions: Conditions
    ) -> None:
        self.k, self._fetch, self._names, self.conditions = k, fetch, names, conditions
        self._checksum = checksum(batch)
        self.shapes = _shapes(batch)
        self._held: tuple[Any, ...] | None = batch

    @staticmethod
    def of(k: int, fetch: Callable[[], Any], model: Model) -> tuple[dict[str, Any], Source]:
        """Fetch the batch of step k; return its keyword arguments, and the source that holds it."""
        if not callable(fetch):
            raise TypeError(
                "bilevel.inner: fetch= takes a function without arguments that returns the batch, got "
                f"{type(fetch).__name__}. bilevel.fetched(dataset, indices) makes one."
            )
        conditions = Conditions(model, others=True)
        args, named = _call(fetch)
        return named, Source(k, fetch, tuple(named), (*args, *named.values()), conditions)

    def release(self) -> None:
        """Forget the batch until it is asked for again."""
        self._held = None

    def share_with(self, before: Source) -> None:
        """Share objects with the source of another step, where they are equal."""
        self.shapes = before.shapes if before.shapes == self.shapes else self.shapes
        self._names = before._names if before._names == self._names else self._names
        self.conditions.share_with(before.conditions)

    def batch(self, *, flow: bool = False) -> tuple[Any, ...]:
        """Return the batch that is held, or fetch it again and raise if it differs.

        With `flow` the random numbers that it draws are the next ones, and what comes after goes on with those that
        follow: the conditions of the fetch are those of its only piece.
        """
        if self._held is not None:
            return self._held
        with nullcontext() if flow else self.conditions.replaying(), torch.no_grad():
            args, named = _call(self._fetch)
        differs = "its keywords differ" if named.keys() != set(self._names) else ""
        batch = args if differs else (*args, *(named[n] for n in self._names))
        if not differs and _shapes(batch) != self.shapes:
            differs = f"shapes {self._listed(batch)} in place of {', '.join(str(tuple(s)) for s, _ in self.shapes)}"
        if not differs and checksum(batch) != self._checksum:
            differs = "its values differ"
        if differs:
            raise RuntimeError(
                f"bilevel.inner: fetch= returned a different batch when step k = {self.k} was run again for the "
                f"hypergradient ({differs}). It must return the same batch each time: by indices into a data set that "
                "does not change, with random numbers from torch's, Python's or NumPy's global generator. An iterator, "
                "or a DataLoader with workers, moves on to the next batch: pass the batch itself."
            )
        self._held = batch
        return batch

    @staticmethod
    def _listed(batch: tuple[Any, ...]) -> str:
        return ", ".join(str(tuple(s)) for s, _ in _shapes(batch)) or "none"


class Fetched:
    """The batch of a piece that is fetched: the whole batch of its source, or a part of it."""

    __slots__ = ("flow", "part", "source")

    def __init__(self, source: Source, part: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None) -> None:
        self.source, self.part = source, part
        self.flow = False  # whether its piece is the only one of the call

    def again(self) -> tuple[Any, ...]:
        batch = self.source.batch(flow=self.flow)
        return batch if self.part is None else self.part(batch)


def _call(fetch: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        returned = fetch()
    except StopIteration:
        raise RuntimeError(
            "bilevel.inner: fetch= raised StopIteration: an iterator in it is used up. It is called again where the "
            "step is replayed, and must return the same batch then: bilevel.fetched(dataset, indices). Or pass the "
            "batch itself, which is then kept."
        ) from None
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
        raise TypeError(
            f"bilevel.inner: fetch= returned a dict with the keys {list(named)}. The keys must be the names of "
            "arguments of h, as strings."
        )
    for x in pytree.tree_leaves((args, named)):
        _refuse_incomparable(x)
    return args, named


def _refuse_incomparable(x: Any) -> None:
    if isinstance(x, Tensor):
        if x.requires_grad:
            raise ValueError(
                f"bilevel.inner: fetch= returned a tensor (shape {tuple(x.shape)}) that requires grad. Its "
                "gradient would be lost, because each call returns a new tensor. Compute it inside h, or pass the "
                "batch itself."
            )
        if x.is_nested or x.layout not in (torch.strided, torch.sparse_coo):
            raise TypeError(
                f"bilevel.inner: fetch= returned a tensor that is neither dense nor sparse_coo ({x.layout}), which "
                "can't be compared when it is fetched again. Pass the batch itself."
            )
    elif not isinstance(x, (int, float, complex, str, bytes, type(None))) and not _is_array(x):
        raise TypeError(
            f"bilevel.inner: fetch= returned a {type(x).__name__} in its batch, which can't be compared when it "
            "is fetched again. Return tensors, arrays, numbers and strings, or pass the batch itself."
        )


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") and hasattr(x, "tobytes")


def _shapes(batch: tuple[Any, ...]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((x.shape, x.dtype) for x in tensors_of(batch))


def checksum(batch: Any) -> int:
    """Return a checksum of a batch: of all its bytes on the host, and of some of its entries on a device."""
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
        flat = flat[:: max(1, len(flat) // _SAMPLED)].cpu()
    flat = flat.contiguous()
    if not flat.numel():
        return start
    return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()), start)
