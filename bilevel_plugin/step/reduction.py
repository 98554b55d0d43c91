"""Whether a loss is the mean or the sum of its values on the parts of a batch, which micro= has to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..autograd.trees import State
from ..kernels.switches import EXCLUSIVE
from ..model.losses import Loss, code_of
from ..model.model import Model
from .batches import Micro, Reduction, choose, samples_of, split
from .conditions import Conditions, drawn_from, random_states, undisturbed
from .piece import Term, value_alone


def reductions_of(
    known: dict[object, Reduction],
    model: Model,
    z: State,
    buffers: State,
    terms: Sequence[Term],
    parts: int,
    reduction: Reduction | None,
    check: Callable[[Model, State, State, Term, Reduction], None],
) -> Micro:
    """Return how losses are split into parts. Whether one is a mean or a sum is found out once, and `known` then.

    `check` raises if its derivatives are not the mean or the sum that its values are.
    """
    modes = tuple(m.training for m in model.modules)
    found: list[tuple[str, Reduction]] = []
    for t in terms:
        key = t.name, code_of(t.loss), parts, reduction, modes
        if (its := known.get(key)) is None:
            its, where = reduction, (model, z, buffers, t.name, t.loss, t.given(), parts)
            if reduction is not None:
                refuse_batch_statistics(*where)
            else:
                its = find_reduction(*where, unit=Conditions(model).unit)
                if its is not None and parts > 1:
                    check(model, z, buffers, t, its)
            if its is not None:
                known[key] = its
        found.append((t.name, its or "mean"))  # a loss that is not finite is reported by the step
    return Micro(parts, tuple(found))


def find_reduction(
    model: Model, z: State, buffers: State, name: str, loss: Loss, batch: tuple[Any, ...], parts: int, unit: float
) -> Reduction | None:
    """Find out from its values at z whether the loss is the mean or the sum over samples; None if none is finite.

    Samples are drawn into groups of the size of two parts. The loss of each group is compared with those of its two
    halves. This is done without a graph, so that it takes no more memory than a part of the step with its graph. A
    loss that draws random numbers is evaluated in eval mode. If it still draws some, its values can't be compared.
    `unit` is the rounding unit.
    """
    dimension = model.tasks.batch_dimension
    n = samples_of(name, batch, dimension)
    if n is None or min(n, parts) <= 1:
        return "mean"
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    count = min(n, parts) // 2
    groups = [order[i::count] for i in range(count)]
    not_finite = 0
    fits: set[Reduction] = {"mean", "sum"}

    def value(rows: list[int]) -> float:
        chosen = tuple(choose(x, rows, n, dimension) for x in batch)
        return float(model.at(z, buffers, lambda evaluation: value_alone(model, name, loss, evaluation, chosen)))

    with EXCLUSIVE, torch.no_grad(), undisturbed(model), _refusing_batch_statistics(name), _explained(name):
        if _draws_random_numbers(model, lambda: value(groups[0])):
            model.module.eval()
            if _draws_random_numbers(model, lambda: value(groups[0])):
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


def _draws_random_numbers(model: Model, call: Callable[[], object]) -> bool:
    before = random_states(model.devices)
    call()
    return drawn_from(before, random_states(model.devices)) is not None


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
    model: Model, z: State, buffers: State, name: str, loss: Loss, batch: tuple[Any, ...], parts: int
) -> None:
    """Evaluate the loss on the first part, and raise if a layer normalises by the statistics of its batch."""
    part = split(name, batch, parts, model.tasks.batch_dimension)[0]
    with EXCLUSIVE, undisturbed(model), _refusing_batch_statistics(name), torch.enable_grad():
        model.at(z, buffers, lambda evaluation: value_alone(model, name, loss, evaluation, part.batch))


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
