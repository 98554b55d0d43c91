"""The outer gradient of a block: its outer losses, and the sweep back over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .autograd.derive import Gradients, is_finite, without_hooks
from .autograd.graph import find_leaves
from .autograd.missing import explained
from .autograd.trees import State, tensors_of
from .collect import after_hooks, collected, in_sweeps
from .guards.seals import versions_of
from .inputs import Inputs, as_tuple, as_weight, flatten
from .kernels.switches import EXCLUSIVE, full_precision
from .model.losses import Loss, scalar
from .outer import LossGiven, LossOfBatch
from .run import Run
from .step.conditions import undisturbed
from .update.solvers import Value


def hypergrad(
    run: Run,
    inputs: Inputs,
    outer: Any,
    loss: Tensor | None,
    allow_unused: bool,
    create_graph: bool,
    retain_graph: bool,
    queries: int | None,
) -> Tensor | list[Tensor] | dict[str, Tensor]:
    """Return the gradients of the outer loss for the inputs, in their structure."""
    tensors = flatten(inputs)
    wanted = list(tensors.values())

    def gradients(chosen: slice, retain: bool) -> tuple[list[Tensor], int | None]:
        return _gradients(run, wanted, outer, loss, allow_unused, create_graph, retain, chosen)

    grads = in_sweeps(gradients, run.engine, queries, retain_graph)
    grads = after_hooks(run.model, wanted, grads, create_graph)
    named = dict(zip(tensors, grads, strict=True))
    if isinstance(inputs, Tensor):
        return named[""]
    return named if isinstance(inputs, (Mapping, nn.Module)) else list(named.values())


def _gradients(
    run: Run,
    wanted: list[Tensor],
    outer: Any,
    loss: Tensor | None,
    allow_unused: bool,
    create_graph: bool,
    retain_graph: bool,
    chosen: slice | None,
) -> tuple[list[Tensor], int | None]:
    """Return the gradients for these entries of a vector (None refuses one), and how many entries it has."""
    inner = {id(p) for p in run.model.parameters.values()}
    if not run.tape.reaches_start and any(id(x) in inner for x in wanted):
        raise ValueError(
            f"bilevel.inner: engine={type(run.engine).__name__} does not go back to the initial weights of "
            "the model. Use Reverse() without truncate, or Unroll()."
        )
    once = list({id(x): x for x in wanted}.values())  # an input may be given under two names
    if run.engine.keeps_graphs or run.engine.traces_steps:
        _refuse_late(run, once)
    if run.model.own:  # in the graphs these are w_k; the gradient for w_0 is the adjoint
        once = [x for x in once if id(x) not in inner]
    found, start, count = pull(run, once, outer, loss, create_graph, chosen)
    of_rows = None if count is None or chosen is None else len(range(count)[chosen])
    return collected(run, wanted, found, start, allow_unused, retain_graph, of_rows), count


def backward(run: Run, inputs: Inputs | None, outer: Any, loss: Tensor | None, retain_graph: bool) -> None:
    """Add the gradients of the outer variables to their `.grad`."""
    if inputs is not None:
        wanted = list(flatten(inputs).values())
        grads, _ = _gradients(run, wanted, outer, loss, False, False, retain_graph, None)
        with without_hooks(run.model.parameters.values()):
            torch.autograd.backward(wanted, grads)
        return
    found, *_ = pull(run, None, outer, loss, False)
    pairs = [*found.direct.values(), *found.cut.values()]
    if not pairs:
        raise ValueError(
            "bilevel.inner: backward() found no outer variable: nothing that h or g uses requires grad, besides "
            "the inner weights. Set requires_grad on it before the first step."
        )
    if run.model.ranks.share != 1:  # leaf by leaf, since each gradient is summed over the ranks
        behind = [leaf for x, _ in found.cut.values() for leaf in find_leaves(x)[0]]
        leaves = list({id(x): x for x in (*(x for x, _ in found.direct.values()), *behind)}.values())
        torch.autograd.backward(leaves, collected(run, leaves, found, {}, True, retain_graph))
        return
    with explained():
        torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs], retain_graph=retain_graph)


def _refuse_late(run: Run, inputs: list[Tensor]) -> None:
    for x in inputs:
        noted = run.model.seen.constants.get(id(x))
        if noted is not None and noted() is x and run.k:
            raise ValueError(
                f"bilevel.inner: an input (shape {tuple(x.shape)}) did not require grad when the losses were first "
                "evaluated, so the graphs of those steps lack it. Set requires_grad before the first step, "
                "or use engine='reverse'."
            )


def pull(
    run: Run,
    wanted: list[Tensor] | None,
    outer: Any,
    loss: Tensor | None,
    create_graph: bool,
    rows: slice | None = None,
) -> tuple[Gradients, State, int | None]:
    """Return the gradients of the outer loss, its gradient with respect to w_0, and its number of entries.

    `rows` are the entries of a vector that are differentiated; None refuses a vector. A scalar has no entries.
    """
    model = run.model
    run.held.check(run.z_now, run.k)
    run.seals.check_batches()
    run.seals.check_variables()
    run.monitor.raise_if_not_finite()
    model.ranks.means({}, f"hypergrad by {run.engine}")
    model.ranks.check_same(run.z, model.seen.statistics)
    if run.added and (outer is not None or loss is not None):
        raise ValueError(
            "bilevel.inner: losses were added by loop.add_outer_loss, and the hypergradient is that of their sum. "
            "Add this one as well, loop.add_outer_loss(outer=...) or loop.add_outer_loss(loss=...), and leave out "
            "outer= and loss= here."
        )
    end = None if run.added else _end(run, outer, loss)
    run.tape.rows = rows
    versions = versions_of([*model.parameters.values(), *model.buffers.values()] if model.holds else [])
    try:
        with EXCLUSIVE, torch.enable_grad(), undisturbed(model):
            with full_precision():
                found, start = run.tape.pull(end, wanted, create_graph)
            batch = None if loss is not None else run.outer if outer is None else as_tuple(outer)
            _examine(run, run.outer_of_added if run.added else batch)
            finite = is_finite(found.values())
            if model.ranks.largest(int(not finite)) != (0,):
                where = run.tape.first_not_finite(end) or "somewhere"
                raise FloatingPointError(
                    f"bilevel.inner: the hypergradient is not finite: it stops being so {where}, going backwards. "
                    "A smaller rate, or a loss without √0, 0/0 or log 0 there, may help."
                )
    finally:
        run.tape.rows = slice(None)
        model.hold(run.z_now, run.buffers_now)
        versions.close()  # a loss= that was computed from these weights can be differentiated again
        model.note_versions()
    value = run.added[0] if end is None else end.value
    return found, start, len(value) if value.dim() else None


def _examine(run: Run, batch: tuple[Any, ...] | None) -> None:
    """Let the sentinel compare derivatives with differences, where it has not done so before."""
    for step in run.kinds.values():
        if run.sentinel.is_due(step):
            run.sentinel.examine(step, run.z_now, run.buffers_now, batch, run.trained)


def value_of_outer_loss(run: Run) -> Tensor:
    """Return g at the current weights on its last batch, or the sum of the losses that were added."""
    run.held.check(run.z_now, run.k)
    run.monitor.raise_if_not_finite()
    run.model.ranks.means({}, "value")
    if run.added:
        return sum(run.added[1:], run.added[0])
    end = _end(run, None, None)
    assert isinstance(end, LossOfBatch)
    with torch.no_grad():
        return end.evaluated()


def add_outer_loss(run: Run, weight: Value, outer: Any, loss: Tensor | None) -> Tensor:
    """Add an outer loss at the current weights to the objective, and return its value."""
    model = run.model
    run.held.check(run.z_now, run.k)
    run.seals.check_variables()
    model.ranks.means({}, "add_outer_loss")
    run.check_batch("weight=", (weight,))
    with EXCLUSIVE, torch.enable_grad(), undisturbed(model), full_precision():
        end = _end(run, outer, loss, as_weight(weight))
        end.like = run.added[0] if run.added else None
        try:
            run.tape.add_loss(end)
        finally:
            model.hold(run.z_now, run.buffers_now)
        value = end.value
        run.added.append((end.weight * value).detach())
    if loss is None:
        run.outer_of_added = run.outer if outer is None else as_tuple(outer)
        if run.engine.keeps_graphs:
            run.seals.note_batch(run.k, "g", run.outer_of_added)
    if run.engine.keeps_graphs or run.engine.traces_steps:
        run.seals.note_variables(end.leaves)
    return value


def _end(run: Run, outer: Any, loss: Tensor | None, weight: Value = 1.0) -> LossOfBatch | LossGiven:
    """Return the outer loss at the current weights."""
    if loss is not None and outer is not None:
        raise ValueError("bilevel.inner: give outer= or loss=, not both: a loss that you computed had its batch.")
    if loss is not None:
        return LossGiven(run, scalar("loss=", loss, vector=True), weight)
    batch = run.outer if outer is None else as_tuple(outer)
    run.check_batch("outer=", batch)
    run.model.tasks.check_batch("g", batch)
    return LossOfBatch(run, _outer_loss(run), batch, weight)


def _outer_loss(run: Run) -> Loss:
    if run.g is None:
        raise TypeError(
            "bilevel.inner: there is no g to evaluate. Give it: bilevel.inner(model, h, g), or pass a loss= that "
            "is computed from loop(x)."
        )
    return run.g


def call_model(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return model(*args, **kwargs) at the current weights."""
    run.mark_weights()
    result = run.inside(lambda evaluation: run.model.call(_forward, evaluation, args, kwargs))
    if not torch.is_grad_enabled() and run.model.tasks.count is None:
        for x in tensors_of(result):
            if x.is_floating_point():
                run.model.seen.derived.add(x)  # without a graph, a batch would take it for a constant
    return result


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
