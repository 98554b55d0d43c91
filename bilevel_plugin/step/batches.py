"""A batch in parts along its samples.

    mean: ℓ(batch) = Σ_i n_i/n·ℓ(part_i)        sum: ℓ(batch) = Σ_i ℓ(part_i)

The derivatives of a loss are then the sums of those of its parts with the same factors, so that one graph at a time
is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Reduction = Literal["mean", "sum"]


class Micro(NamedTuple):
    """The number of parts of the batches of a step, and by the name of each loss whether it is a mean or a sum."""

    parts: int
    reductions: tuple[tuple[str, Reduction], ...]


class Part(NamedTuple):
    """A part of a batch, and its share of the samples."""

    batch: tuple[Any, ...]
    share: float


def checked(micro: Any, reduction: Any) -> tuple[int, Reduction | None] | None:
    """Check the arguments `micro=` and `reduction=` of a step, and return them; None if they were not given."""
    if micro is None:
        if reduction is not None:
            raise ValueError(
                "bilevel.inner: reduction= says how the parts of micro= add up, but micro= was not given. Give micro=, "
                "or leave out reduction=."
            )
        return None
    if isinstance(micro, bool) or not isinstance(micro, int) or micro < 1:
        raise ValueError(f"bilevel.inner: micro= is the number of parts of the batch, at least 1, got {micro!r}.")
    if reduction is not None and reduction not in get_args(Reduction):
        raise ValueError(f"bilevel.inner: reduction= takes 'mean' or 'sum', got {reduction!r}.")
    return micro, reduction


# --- splitting a batch ---


def split(name: str, batch: tuple[Any, ...], parts: int, dimension: int) -> list[Part]:
    """Split the batch into `parts` parts, or fewer if it has fewer samples; their sizes differ by 1 at most.

    Every tensor that has the samples in this dimension is sliced, and so is a list with one entry for each sample.
    Numbers, and tensors of size 1 in this dimension, have no samples; they go whole to every part.
    """
    n = samples_of(name, batch, dimension)
    if n is None:
        if name == "h":
            raise TypeError(
                "bilevel.inner: micro= splits the batch of h, but the batch has no tensor with samples. Pass the data "
                "of h as arguments of loop.step(...): tensors that h closes over are not split."
            )
        return [Part(batch, 1.0)]
    count = max(1, min(parts, n))
    bounds = [(i * (n // count) + min(i, n % count)) for i in range(count + 1)]
    pieces: list[Part] = []
    with torch.enable_grad():
        for start, stop in itertools.pairwise(bounds):
            sliced = tuple(_slice(x, start, stop, n, dimension) for x in batch)
            pieces.append(Part(sliced, (stop - start) / n if n else 1.0))
    return pieces


def _is_list(x: Any) -> bool:
    """Whether x is a list, tuple or range without tensors, which may have one entry for each sample."""
    return isinstance(x, (list, tuple, range)) and not any(
        isinstance(y, (Tensor, slice)) or _is_array(y) for y in pytree.tree_leaves(x)
    )


def _is_array(x: Any) -> bool:
    return not isinstance(x, Tensor) and hasattr(x, "__array__") and hasattr(x, "shape")


def samples_of(name: str, batch: tuple[Any, ...], dimension: int) -> int | None:
    """Return the number of samples in the batch; None if it has no tensor with samples."""
    sizes: dict[int, tuple[int, ...]] = {}
    has_tensor = False
    for x in pytree.tree_leaves(batch, is_leaf=lambda x: x is not batch and _is_list(x)):
        if isinstance(x, Tensor) or _is_array(x):
            if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
                raise TypeError(
                    f"bilevel.inner: micro= can't split a tensor in the batch of {name} that is not dense "
                    f"({x.layout}). Give its dense form, or leave out micro=."
                )
            shape = tuple(x.shape)
            if len(shape) > dimension:
                has_tensor = True
                if shape[dimension] != 1:
                    sizes.setdefault(shape[dimension], shape)
        elif isinstance(x, slice):
            raise TypeError(
                f"bilevel.inner: micro= can't split a slice in the batch of {name}. Give the rows as a tensor: "
                "torch.arange(start, stop)."
            )
        elif not isinstance(x, (str, bytes, list, tuple, range, nn.Module)) and hasattr(x, "__len__"):
            raise TypeError(
                f"bilevel.inner: micro= does not know how to split a {type(x).__name__} in the batch of {name}. Give "
                "its tensors: a tuple, list or dict of them, or arguments by name (loop.step(**batch))."
            )
    if len(sizes) > 1:
        one, other, *_ = sizes.values()
        raise ValueError(
            f"bilevel.inner: micro= splits the batch of {name} along dimension {dimension}, but its tensors have "
            f"different sizes there: shapes {one} and {other}. If one of them has no samples and belongs whole to "
            "every part (class weights, a table), let h and g close over it, or give it a first dimension of 1."
        )
    return next(iter(sizes)) if sizes else 1 if has_tensor else None


def _slice(tree: Any, start: int, stop: int, n: int, dimension: int) -> Any:
    """Return the samples from start to stop, as views."""

    def one(x: Any) -> Any:
        return x.narrow(dimension, start, stop - start) if isinstance(x, Tensor) else x[start:stop]

    return _map_samples(one, tree, n, dimension)


def choose(tree: Any, rows: list[int], n: int, dimension: int) -> Any:
    """Return these samples in this order, as copies."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.index_select(dimension, torch.tensor(rows, device=x.device))
        return x[rows] if _is_array(x) else [x[i] for i in rows]

    return _map_samples(one, tree, n, dimension)


def _map_samples(function: Callable[[Any], Any], tree: Any, n: int, dimension: int) -> Any:
    """Return the tree with function(x) in place of every x that has n samples."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor) or _is_array(x):
            return function(x) if tuple(x.shape[dimension : dimension + 1]) == (n,) else x
        return function(x) if isinstance(x, (list, tuple, range)) and len(cast("list[Any]", x)) == n else x

    return tree if n == 1 else pytree.tree_map(one, tree, is_leaf=_is_list)
