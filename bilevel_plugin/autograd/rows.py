"""The rows of many outer losses: adjoints with one more dimension, which are pulled back all at once.

The rows are vmapped over a backward pass. Where an operation, an `autograd.Function` or a recomputation in it can't be
batched, the rows are pulled back through the same graph one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._vmap_internals import _vmap  # pyright: ignore[reportPrivateUsage]

_ONE_BY_ONE: set[object] = set()  # kinds of graphs that could not be batched since `forget`
Found = tuple[Tensor | None, ...]


def number(like: Sequence[Tensor], along: Sequence[Tensor]) -> int | None:
    """Return how many rows the cotangents of these outputs have, or None if they have no dimension for rows."""
    return next((len(a) for x, a in zip(like, along, strict=True) if a.dim() > x.dim()), None)


def identity(value: Tensor, rows: slice) -> Tensor:
    """Return the cotangent of a scalar, 1; or those of these entries of a vector, which are rows of the identity."""
    if value.dim() == 0:
        return torch.ones_like(value)
    return torch.eye(len(value), dtype=value.dtype, device=value.device)[rows]


def as_one(value: Tensor) -> Tensor:
    """Return a scalar that depends on every entry of a vector: their sum, with different weights."""
    if value.dim() == 0:
        return value
    weights = torch.arange(1, 1 + len(value), dtype=value.dtype, device=value.device) / len(value)
    return (weights * value).sum()


def largest(value: Tensor) -> Tensor:
    """Return a scalar, or the largest size of the entries of a vector, which is finite only if all of them are."""
    return value if value.dim() == 0 else value.abs().max()


def forget() -> None:
    """Let every graph be batched again."""
    _ONE_BY_ONE.clear()


def pulled(pull: Callable[..., Found], outputs: Sequence[Tensor], along: Sequence[Tensor]) -> Found:
    """Return the rows of `pull(cotangents, retain_graph)`, whose cotangents have rows."""
    kind = tuple(type(x.grad_fn) for x in outputs)
    if kind not in _ONE_BY_ONE:
        try:
            # the graph is needed again if this fails
            return _vmap(lambda *a: pull(a, True), 0, 0, allow_none_pass_through=True)(*along)
        except Exception:  # of any kind: what is wrong with a row by itself is raised below
            _ONE_BY_ONE.add(kind)
    last = len(along[0]) - 1
    each = [pull(row, True) for row in zip(*(a[:last] for a in along), strict=True)]
    each.append(pull([a[last] for a in along]))
    return tuple(stacked(parts) for parts in zip(*each, strict=True))


def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return one tensor with these rows; a row that is None is 0, and None is returned if all of them are."""
    known: Any = next((x for x in parts if x is not None), None)
    if known is None:
        return None
    dense = [torch.zeros_like(known) if x is None else x for x in parts]
    return torch.stack([x if x.layout == torch.strided else x.to_dense() for x in dense])
