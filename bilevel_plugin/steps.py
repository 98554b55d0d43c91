"""The steps of a block: losses on a batch become the pieces of a step, which is closed by the update."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd.graph import sequence_number
from .autograd.trees import Pairs, State, as_leaves, cut_graph
from .check.reduction import check_reduction
from .inputs import Only, as_tuple, names_of
from .kernels.switches import EXCLUSIVE, full_precision
from .model.losses import Loss, WithKeywords, code_of
from .run import Run
from .step.batches import Micro, Reduction, checked
from .step.computed import Computed
from .step.fetching import Fetched, Source
from .step.piece import Piece, Term
from .step.pieces import pieces_of
from .step.reduction import reductions_of
from .step.step import Step
from .update.prepared import Call, Prepared
from .update.solvers import Value
from .update.update import Update


class Losses(NamedTuple):
    """The losses that a step evaluated, before it moved. A loss with weight 0 in the step is None.

    aux is what h returned beside its value (`return loss, logits`), without a graph. With micro= it is a list with
    one entry for each part of the batch, while h and g are those of the whole batch.
    """

    h: Tensor | None
    g: Tensor | None
    aux: Any = None


def take_step(
    run: Run,
    batch: tuple[Any, ...],
    named: dict[str, Any],
    outer: Any,
    only: Only | None,
    h: Loss | None,
    micro: int | None,
    reduction: Reduction | None,
    fetch: Callable[[], Any] | None,
) -> Losses:
    """Take one step on a batch, or on what was accumulated."""
    parts, gathered = checked(micro, reduction), run.accumulated
    if gathered and (batch or named or h is not None or fetch is not None):
        raise TypeError(
            "bilevel.inner: after loop.accumulate(...) the step is taken on what was gathered: call loop.step() "
            "without a batch. Give this batch to loop.accumulate(...) first, if it belongs to the step."
        )
    names = _names_of(run, only)
    if names is not None and not _gathered_for(run) <= names:
        raise ValueError(
            "bilevel.inner: loop.accumulate(...) has gathered gradients for weights that only= of this step leaves "
            "alone. Give only= to loop.accumulate(...) as well, and take the step of one part before the other's."
        )
    run.outer = run.outer if outer is None else as_tuple(outer)
    c_h, c_g = _weights_of_losses(run, run.k + 1)
    with _given(run, fetch, batch, named) as given:
        terms = [] if gathered else [_term(run, h, *given, c_h)]
        if isinstance(c_g, Tensor) or c_g != 0:
            terms.append(_outer_term(run, c_g))
        means = _take(run, terms, names, parts, close=True)
    value = sum(gathered[1:], gathered[0]) if gathered else means.get("h")
    return Losses(value, means.get("g"), run.model.seen.aux.get("h"))


def accumulate(
    run: Run,
    batch: tuple[Any, ...],
    named: dict[str, Any],
    only: Only | None,
    h: Loss | None,
    micro: int | None,
    reduction: Reduction | None,
    fetch: Callable[[], Any] | None,
) -> Losses:
    """Add the gradient of h on this batch to that of the next step."""
    parts = checked(micro, reduction)
    if "fixed point" in run.engine.needs:
        raise ValueError(
            f"bilevel.inner: engine={type(run.engine).__name__} differentiates the fixed point of one step, and "
            "with accumulate() a step is made of several. Use engine='reverse'."
        )
    names, (c_h, _) = _names_of(run, only), _weights_of_losses(run, run.k + 1)
    with _given(run, fetch, batch, named) as given:
        means = _take(run, [_term(run, h, *given, c_h)], names, parts, close=False)
    value = means.get("h")
    run.accumulated.append(torch.zeros(()) if value is None else value)
    return Losses(value, None, run.model.seen.aux.get("h"))


def _take(
    run: Run,
    terms: list[Term],
    only: frozenset[str] | None,
    parts: tuple[int, Reduction | None] | None,
    *,
    close: bool,
) -> State:
    cut = list[tuple[Tensor, Tensor]]()
    if run.tape.replays:
        terms = [t if isinstance(t.batch, Fetched) else t._replace(batch=cut_graph(t.batch, cut)) for t in terms]
    micro = None
    if parts is not None:
        micro = reductions_of(run.reductions, run.model, run.z_now, run.buffers_now, terms, *parts, check_reduction)
    return take(run, run.k + 1, terms, cut, only, micro, close)


@contextmanager
def _given(
    run: Run, fetch: Callable[[], Any] | None, batch: tuple[Any, ...], named: dict[str, Any]
) -> Generator[tuple[tuple[Any, ...] | Source, dict[str, Any]]]:
    """Yield the batch of h and its keyword arguments; a batch that is fetched is its source."""
    if fetch is None:
        yield batch, named
        return
    if batch or named:
        raise TypeError(
            "bilevel.inner: a step was given a batch, and fetch= to get one. Give one of the two; what h takes "
            "besides the batch can be returned by fetch as well."
        )
    with EXCLUSIVE:  # no other thread may draw between the readings of the random states
        named, source = Source.of(run.k + 1, fetch, run.model)
        again = run.tape.replays and not run.engine.keeps_graphs  # kept graphs refer to the batch anyway
        whole = source.batch()
        yield source if again else whole[: len(whole) - len(named)], named


def _term(run: Run, h: Loss | None, batch: tuple[Any, ...] | Source, named: dict[str, Any], weight: Value) -> Term:
    loss = run.h if h is None else h
    if not callable(loss):
        raise TypeError(
            f"bilevel.inner: h= of a step is another inner loss, a function of (model, *batch), got "
            f"{type(loss).__name__}. A batch whose argument is called h has to be given by position."
        )
    if named:
        loss = WithKeywords(loss, tuple(named))
    if isinstance(batch, Source):
        return Term("h", loss, Fetched(batch), weight)
    batch = (*batch, *named.values())
    run.check_batch("the batch of h", batch)
    return Term("h", loss, batch, weight)


def _outer_term(run: Run, weight: Value) -> Term:
    if run.g is None:
        raise TypeError(
            f"bilevel.inner: step k = {run.k + 1} of {type(run.rule).__name__} descends g as well, and there is no "
            "g. Give it: bilevel.inner(model, h, g), or take solver='gd'."
        )
    run.check_batch("outer=", run.outer)
    return Term("g", run.g, run.outer, weight)


def _names_of(run: Run, only: Only | None) -> frozenset[str] | None:
    """Return the names of the weights that `only=` selects."""
    if only is not None and "fixed point" in run.engine.needs:
        raise ValueError(
            f"bilevel.inner: engine={type(run.engine).__name__} differentiates the fixed point of one step, and "
            "with only= several steps take turns. Use engine='reverse'."
        )
    return names_of(only, run.model, run.update)


def _weights_of_losses(run: Run, k: int) -> list[Value]:
    """Return how much of ∇h and of ∇g goes into step k."""
    # a rate that is a tensor may be written to later, so its value is recorded
    return [c.clone() if isinstance(c, Tensor) and not c.requires_grad else c for c in run.rule.weights(k)]


def _gathered_for(run: Run) -> set[str]:
    """Return the weights that an open step has gathered gradients for."""
    open = None if run.open is None else run.open.open
    return set() if open is None else set(open.sums.direction)


def take(
    run: Run,
    k: int,
    terms: Sequence[Term],
    cut: Pairs,
    only: frozenset[str] | None,
    micro: Micro | None,
    close: bool,
) -> State:
    """Evaluate losses as pieces of step k, and close the step if they are its last; return their means."""
    model, tape = run.model, run.tape
    run.held.check(run.z_now, run.k, numbers=False)
    run.update.check()
    run.seals.check_variables()
    model.seen.aux.clear()
    step = run.open or Step(k, model, run.buffers, only)
    before, hooks, pieces = (list(step.pieces), step.open, step.calls), run.prepare.hooks(k), list[Piece]()
    means: State = {}
    step.action = "step" if close else "accumulate"
    with EXCLUSIVE:
        try:
            if run.open is None:
                tape.begin(step, run.z, whole=close)
            if terms or not step.pieces:
                pieces = pieces_of(model, terms, only, micro)
                if hooks is not None and (step.pieces or not close):
                    pieces[-1].hooks = lambda d: hooks(d, {})
                means = tape.evaluate(step, run.z, pieces, cut, run.monitor)
            else:
                model.ranks.means({}, step.action)
            run.held.check_not_written(run.z, k)
            run.open = step
            if close:
                _close(run, step, _update_of(run, step, only, hooks))
        except BaseException:
            step.pieces, step.open, step.calls = before  # what this call has added is dropped
            run.open = step if step.calls else None
            raise
        model.hold(run.z_now, run.buffers_now)
    _note_kept_graph(run, pieces)
    run.mark = sequence_number()
    return means


def _update_of(run: Run, step: Step, only: frozenset[str] | None, hooks: Call | None) -> Update:
    update = run.prepare(run.update.at_step(step.k), step.k, only)
    if hooks is not None and all(piece.hooks is None for piece in step.pieces):
        update = Prepared([hooks], update)
    return update


def _close(run: Run, step: Step, update: Update) -> None:
    assert step.open is not None
    buffers = step.open.buffers
    to = run.tape.close(step, run.z, update)
    run.update.count(step.moved)
    run.prepare.count(step.moved)
    run.trained.update(step.moved)
    run.z, run.buffers = as_leaves(to) if run.tape.replays else to, buffers
    run.open, run.k, run.accumulated = None, step.k, []
    for piece in step.pieces:
        if piece.terms:
            run.kinds[piece.only, tuple((t.name, code_of(t.loss)) for t in piece.terms)] = step


def _note_kept_graph(run: Run, pieces: Sequence[Piece]) -> None:
    """Record what kept graphs refer to, so that a later change of it is noticed."""
    for piece in pieces:
        if run.engine.keeps_graphs:
            run.seals.note_held(piece.record.k, piece.record.held)
            for t in piece.terms:
                run.seals.note_batch(piece.record.k, t.name, t.batch)
        if run.engine.keeps_graphs or run.engine.traces_steps:
            run.seals.note_variables(piece.record.leaves)


def compute(run: Run, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return function(model, *args) at the current weights, a constant for the steps that take it."""
    if not callable(function):
        raise TypeError(
            f"bilevel.inner: loop.compute takes a function of (model, *args), got {type(function).__name__}."
        )
    model = run.model
    if model.tasks.count is not None or model.ranks.share != 1:
        raise ValueError(
            "bilevel.inner: loop.compute is for one inner problem on one process, and the block has tasks= or "
            "group=. Compute the value inside h, and keep it as bilevel.stop_gradient(...)."
        )
    run.held.check(run.z_now, run.k)
    run.seals.check_variables()
    value = Computed(model, run.k, function, args, run.buffers_now, replays=run.tape.replays)
    run.check_batch(f"the arguments of {value.name}", args)
    with EXCLUSIVE, full_precision():
        given, z = run.tape.compute(value, run.z_now)
        if z is not run.z_now:
            run.z = {n: z[n] for n in run.z}
        model.hold(run.z_now, run.buffers_now)
    if run.engine.keeps_graphs or run.engine.traces_steps:
        run.seals.note_variables(value.leaves)
    run.mark = sequence_number()
    return given
