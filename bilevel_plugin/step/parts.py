"""A batch in parts along its samples, and whether a loss is the mean or the sum of its values on the parts.

    mean: ℓ(batch) = Σ_i n_i/n·ℓ(part_i)        sum: ℓ(batch) = Σ_i ℓ(part_i)

The derivatives of a loss are then the sums of those of its parts with the same factors, so that one graph at a time
is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.trees import State
from ..kernels.switches import EXCLUSIVE
from ..model.losses import Loss
from ..model.model import Binding
from .conditions import drawn_from, random_states, undisturbed

Reduction = Literal["mean", "sum"]


class Micro(NamedTuple):
    """The number of parts of the batches of a step, and by the name of each loss whether it is a mean or a sum."""

    parts: int
    reductions: tuple[tuple[str, Reduction], ...]


class Piece(NamedTuple):
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


def split(name: str, batch: tuple[Any, ...], parts: int, dimension: int) -> list[Piece]:
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
        return [Piece(batch, 1.0)]
    count = max(1, min(parts, n))
    bounds = [(i * (n // count) + min(i, n % count)) for i in range(count + 1)]
    pieces: list[Piece] = []
    with torch.enable_grad():
        for start, stop in itertools.pairwise(bounds):
            sliced = tuple(_slice(x, start, stop, n, dimension) for x in batch)
            pieces.append(Piece(sliced, (stop - start) / n if n else 1.0))
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


def _choose(tree: Any, rows: list[int], n: int, dimension: int) -> Any:
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


# --- mean or sum ---


def find_reduction(
    binding: Binding, z: State, buffers: State, name: str, loss: Loss, batch: tuple[Any, ...], parts: int, unit: float
) -> Reduction | None:
    """Find out from its values at z whether the loss is the mean or the sum over samples; None if none is finite.

    Samples are drawn into groups of the size of two parts. The loss of each group is compared with those of its two
    halves. This is done without a graph, so that it takes no more memory than a part of the step with its graph. A
    loss that draws random numbers is evaluated in eval mode. If it still draws some, its values can't be compared.
    `unit` is the rounding unit.
    """
    dimension = binding.batch_dimension
    n = samples_of(name, batch, dimension)
    if n is None or min(n, parts) <= 1:
        return "mean"
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    count = min(n, parts) // 2
    groups = [order[i::count] for i in range(count)]
    not_finite = 0
    fits: set[Reduction] = {"mean", "sum"}

    def value(rows: list[int]) -> float:
        chosen = tuple(_choose(x, rows, n, dimension) for x in batch)
        with binding.inside(z, buffers) as inside:
            return float(binding.value(name, loss, inside, chosen))

    with EXCLUSIVE, torch.no_grad(), undisturbed(binding), _refusing_batch_statistics(name), _explained(name):
        if _draws_random_numbers(binding, lambda: value(groups[0])):
            binding.model.eval()
            if _draws_random_numbers(binding, lambda: value(groups[0])):
                raise ValueError(
                    f"bilevel.inner: {name} draws random numbers in eval mode as well, so that its values on the "
                    "batch and on the parts of micro= can't be compared. Say whether it is the mean or the sum over "
                    "the samples: loop.step(..., micro=..., reduction='mean'), or 'sum'."
                )
        for group in groups:
            both = group[: len(group) // 2], group[len(group) // 2 :]
            whole, *values = map(value, (group, *both))
            if not math.isfinite(whole):
                not_finite += 1
                continue
            mean, total = sum(len(rows) * x for rows, x in zip(both, values, strict=True)) / len(group), sum(values)
            allowed = unit * sum(map(abs, values))
            fits &= {r for r, x in (("mean", mean), ("sum", total)) if abs(whole - x) <= allowed}
            if not fits:
                raise ValueError(
                    f"bilevel.inner: {name} is neither the mean nor the sum over the samples. On {len(group)} of them "
                    f"it is {whole:.6g}, while the mean of two parts is {mean:.6g} and their sum is {total:.6g}. "
                    "micro= is not exact for a loss that compares samples with each other (contrastive), divides by "
                    "weights or lengths summed over its batch (class-weighted cross entropy, padded tokens), or adds "
                    "a regulariser to a sum. Leave out micro=, or write the loss as a mean or sum over samples. "
                    "reduction='mean' or 'sum' skips this test."
                )
    if not_finite == count:  # the step will raise an error
        return None
    if not_finite:
        raise ValueError(
            f"bilevel.inner: {name} is not finite on some of the samples alone, and finite on others. It may divide by "
            "a sum over its batch (padded tokens), and micro= is not exact then. Leave out micro=, or write the loss "
            "as a mean or sum over samples. reduction='mean' or 'sum' skips this test."
        )
    if len(fits) == 2:
        raise ValueError(
            f"bilevel.inner: {name} is 0 on these samples, so that it may be their mean or their sum. Say which one: "
            "loop.step(..., micro=..., reduction='mean'), or 'sum'."
        )
    return next(iter(fits))


def _draws_random_numbers(binding: Binding, call: Callable[[], object]) -> bool:
    before = random_states(binding.devices)
    call()
    return drawn_from(before, random_states(binding.devices)) is not None


@contextmanager
def _explained(name: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "must match" in str(error) or "to match target" in str(error):
            raise ValueError(
                f"bilevel.inner: {name} can't be evaluated on a part of its batch (micro=): {error} If it closes over "
                "a tensor with an entry for each sample, pass that tensor in the batch, or index it by the rows of "
                "the batch (lam[i])."
            ) from error
        if "does not require grad" not in str(error) and "doesn't require grad" not in str(error):
            raise
        raise ValueError(
            f"bilevel.inner: {name} takes a derivative itself. So it can't be evaluated without a graph, as micro= "
            "does to find out whether it is a mean or a sum over samples. Say which one: "
            "loop.step(..., micro=..., reduction='mean'), or 'sum'."
        ) from error


def refuse_batch_statistics(
    binding: Binding, z: State, buffers: State, name: str, loss: Loss, batch: tuple[Any, ...], parts: int
) -> None:
    """Evaluate the loss on the first part, and raise if a layer normalises by the statistics of its batch."""
    piece = split(name, batch, parts, binding.batch_dimension)[0]
    with (
        EXCLUSIVE,
        undisturbed(binding),
        _refusing_batch_statistics(name),
        binding.inside(z, buffers) as inside,
        torch.enable_grad(),
    ):
        binding.value(name, loss, inside, piece.batch)


@contextmanager
def _refusing_batch_statistics(name: str) -> Generator[None]:
    def refuse(module: nn.Module, args: Any) -> None:
        batch_norm = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
        if isinstance(module, batch_norm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"bilevel.inner: {name} runs a {type(module).__name__} in training mode, which under micro= would use "
                "the statistics of a part in place of those of the batch. Put the layer into eval mode, use GroupNorm "
                "or LayerNorm, or leave out micro=."
            )

    handle = nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
