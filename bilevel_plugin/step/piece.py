"""A piece of a step: losses on a batch, whose gradient is one summand of the direction.

The whole batch is one piece. With micro= each part of it is one, with tasks that are taken one after the other each
task is one, and so is each batch that is accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.missing import explained
from ..autograd.trees import Pairs, State, with_fresh_containers
from ..guards.evaluation import as_aux, leaves_of_loss, refusing_quantised, watched, writes_to_weight
from ..guards.holding import snapshot
from ..kernels.stopping import is_stopped
from ..kernels.switches import full_precision
from ..model.losses import Loss, active_models, check_arguments, value_and_aux
from ..model.model import Evaluation, Model
from ..model.tasks import row_of
from ..update.solvers import Value
from .conditions import Conditions
from .fetching import Fetched
from .record import Record, holds_same_objects

T = TypeVar("T")


class Term(NamedTuple):
    """A loss with its batch, its weight in the step, and its share in the loss on the whole batch."""

    name: str
    loss: Loss
    batch: tuple[Any, ...] | Fetched
    weight: Value = 1.0
    share: float = 1.0

    def given(self) -> tuple[Any, ...]:
        """Return the batch, which may have to be fetched, in containers of its own: a loss may pop from them."""
        return self.batch.again() if isinstance(self.batch, Fetched) else with_fresh_containers(self.batch)


@dataclass
class Found:
    """What the evaluation of a piece has found."""

    weighted: list[Tensor]  # each loss times weight and share, with its graph
    values: State  # each loss times its share, by name
    direction: State  # the gradient of their sum; a weight that no loss uses has none
    left: State  # the buffers as the losses have left them
    stopped: frozenset[str] = frozenset()  # those that were left as `stop_gradient` of something


First = Callable[["Piece", State], Found | None]
"""Another way to evaluate a piece for the first time; None if it does not apply to the piece"""


class Piece:
    """Losses on a batch, at the weights of all tasks or of one (`row`), for all weights or for `only` some."""

    __slots__ = (
        "_record", "buffers", "hooks", "last", "model", "only", "part", "row", "runs_into_other_graphs", "seen",
        "terms",
    )  # fmt: skip

    def __init__(
        self, model: Model, terms: Sequence[Term], only: frozenset[str] | None = None, row: int | None = None
    ) -> None:
        self.model, self.only, self.row = model, only, row
        self.terms = tuple(t for t in terms if isinstance(t.weight, Tensor) or t.weight != 0)
        self.buffers: State = {}  # the buffers before it that are not part of the state
        self.runs_into_other_graphs = True  # whether a loss uses a tensor with a graph; known after the evaluation
        self.part = False  # whether it is a part of a batch (micro=)
        self.last = False  # whether it is the last one of a call
        self.hooks: Callable[[State], State] | None = None  # what the gradient of the call goes through
        self.seen: Sequence[Tensor] | None = None  # the tensors that require grad in a compiled evaluation
        self._record: Record | None = None

    def at(self, z: State, run: Callable[[Evaluation], T], **how: Any) -> T:
        """Return run(evaluation) with the model at z, or at this piece's row of it."""
        if self.row is None:
            return self.model.at(z, self.buffers, run, **how)
        names = (*self.model.parameters, *self.model.seen.statistics)
        mine = row_of({n: z[n] for n in names if n in z}, self.row)
        return self.model.at(mine, row_of(self.buffers, self.row), run, one=True, **how)

    def losses(self, evaluation: Evaluation) -> tuple[list[Tensor], State]:
        """Return each loss times its weight, with a graph, and the values of the losses."""
        weighted: list[Tensor] = []
        values: State = {}
        with torch.enable_grad():
            for term in self.terms:
                name, loss, _, weight, share = term
                value = value_of(self.model, name, loss, evaluation, term.given())
                value = value if share == 1 else value * share
                values[name] = value.detach()
                weighted.append(value if isinstance(weight, float) and weight == 1 else weight * value)
        return weighted, values

    def gradient(self, weighted: list[Tensor], evaluation: Evaluation, create_graph: bool) -> State:
        """Return ∇_w of the sum as dense tensors, for every weight that it depends on; `stop_gradient` is in effect."""
        if not weighted:
            return {}
        weights, taking = evaluation.weights, evaluation.taking
        if self.only is not None:
            weights = {n: x for n, x in weights.items() if n in self.only}
        taking.on = True
        try:
            with torch.enable_grad():
                total = weighted[0] if len(weighted) == 1 else sum(weighted[1:], weighted[0])
            if not total.requires_grad:
                return {}
            with full_precision(), explained():
                inputs = list(weights.values())
                grads = grad([total], inputs, [None], create_graph=create_graph, retain_graph=create_graph)
        finally:
            taking.on = False
        return {n: d.to_dense() if d.is_sparse else d for n, d in zip(weights, grads, strict=True) if d is not None}

    def evaluate(
        self,
        z: State,
        use: Callable[[Evaluation, Found], T],
        *,
        graph: bool = False,
        follow: bool = False,
        first: bool = False,
    ) -> T:
        """Return what `use` makes of the losses and their gradient at z, while the model holds its weights.

        `first` says that a step is taken, and not run again.
        """

        def run(evaluation: Evaluation) -> T:
            weighted, values = self.losses(evaluation)
            d = self.gradient(weighted, evaluation, graph)
            left = evaluation.left()
            stopped = frozenset(n for n, b in left.items() if b.requires_grad and is_stopped(b))
            return use(evaluation, Found(weighted, values, d, left, stopped))

        return self.at(z, run, graph=graph, follow=follow, first=first)

    def begin(self, k: int, cut: Pairs, buffers: State) -> None:
        """Record the conditions of the first evaluation, which begins now."""
        self.buffers = buffers
        held = snapshot(self.model, [t.loss for t in self.terms])
        fetched = next((t.batch for t in self.terms if isinstance(t.batch, Fetched)), None)
        if fetched is not None and fetched.flow:
            conditions = fetched.source.conditions
        else:
            conditions = Conditions(self.model, others=fetched is not None or held.plan.draws)
        self._record = Record(k, conditions, cut, held)

    def note(self, evaluation: Evaluation, found: Found, since: int) -> None:
        """Record what the first evaluation has used."""
        record, model = self.record, self.model
        own = model.parameters if model.own else {}
        state = [*evaluation.leaves.values(), *evaluation.statistics.values(), *own.values()]
        older: list[Any] = []
        leaves: dict[int, Tensor] = {}
        for term, value in zip(self.terms, found.weighted, strict=False):
            new = leaves_of_loss(model, term.name, value, state, record.cut, since, older)
            leaves.update((id(x), x) for x in new)
        self.runs_into_other_graphs = bool(older)
        self._note(found.values, list(leaves.values()))
        record.used = len(leaves)

    def note_compiled(self, values: State, seen: Sequence[Tensor]) -> None:
        """Record what a compiled evaluation has used; it has no graph to search."""
        self.seen = seen
        cut = {id(x) for _, x in self.record.cut}
        self._note(values, [x for x in seen if id(x) not in cut])

    def _note(self, values: State, leaves: Sequence[Tensor]) -> None:
        held = [(t.name, t.batch) for t in self.terms if not isinstance(t.batch, Fetched)]
        self.record.note(values.values(), leaves, held)
        self.record.seal(leaves, self.model)

    def use(self, leaves: Sequence[Tensor]) -> None:
        """Record outer variables that hooks or the update use, with those of this piece."""
        record = self.record
        known = {id(x) for x in (*record.leaves, *(x for _, x in record.cut))}
        new = [x for x in {id(x): x for x in leaves}.values() if id(x) not in known]
        if new:
            record.leaves = [*record.leaves, *new]
            record.seal(new, self.model)

    def share_with(self, before: Piece) -> None:
        """Share equal objects with a piece of the step before."""
        for name in ("terms", "buffers"):
            if holds_same_objects(mine := getattr(before, name), getattr(self, name)):
                setattr(self, name, mine)
        self.record.share_with(before.record)

    @property
    def record(self) -> Record:
        """What the first evaluation has used; there is one as soon as it begins."""
        assert self._record is not None
        return self._record

    def release(self) -> None:
        """Forget a batch that can be fetched again."""
        for t in self.terms:
            if isinstance(t.batch, Fetched):
                t.batch.source.release()


def value_of(
    model: Model, name: str, loss: Loss, evaluation: Evaluation, batch: tuple[Any, ...], *, vector: bool = False
) -> Tensor:
    """Return the value of loss(model, *batch), or raise an error that says what is wrong with it.

    `vector`: it may be a vector of losses.
    """
    taking = evaluation.taking
    active_models().append(model.ids)
    taking.losses += 1
    taking.evaluating = True
    before = [x._version for x in evaluation.weights.values()]
    try:
        with refusing_quantised(model):
            run = watched(model, evaluation, lambda *args: value_and_aux(name, loss(*args), vector=vector))
            value, aux = model.call(run, evaluation, batch)
        model.seen.aux[name] = as_aux(model, aux)
    except TypeError as error:
        check_arguments(name, loss, model.module, batch, error)
        raise
    except RuntimeError as error:
        if not model.own and any(text in str(error) for text in ("deepcopy protocol", "of leaf variables")):
            raise RuntimeError(
                f"bilevel.inner: {name} treats the weights as leaves (copy.deepcopy, requires_grad_), and with "
                "this engine they have a graph. Use engine='reverse' without memory= and tasks=, or torch.func."
                "functional_call in place of a copy."
            ) from error
        raise
    finally:
        active_models().pop()
        taking.evaluating = False
        # autocast caches a copy of every weight until its block ends. That would be K sets of copies, some made
        # under no_grad, and two losses that share a copy would add their gradients in low precision.
        torch.clear_autocast_cache()
    # a block inside the loss, on the same model, has written to the model and restored it
    versions = model.versions if evaluation.weights is model.parameters else before
    for (n, x), version in zip(evaluation.weights.items(), versions, strict=True):
        if x._version != version:
            raise RuntimeError(writes_to_weight(name, n))
    return model.tasks.total(value)


def value_alone(model: Model, name: str, loss: Loss, evaluation: Evaluation, batch: tuple[Any, ...]) -> Tensor:
    """Return the value of loss(model, *batch), without any check or record."""
    active_models().append(model.ids)
    try:
        return model.tasks.total(model.call(lambda *args: value_and_aux(name, loss(*args))[0], evaluation, batch))
    finally:
        active_models().pop()
