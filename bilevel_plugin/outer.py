"""Outer losses: g on a batch, or a loss that the user has computed, at the weights of some step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .autograd import rows
from .autograd.derive import Gradients, Traced, vjp
from .autograd.graph import find_leaves, has_older_nodes, sequence_number
from .autograd.trees import Pairs, State, cut_graph
from .engine import OuterLoss
from .guards.evaluation import disconnected, refuse_hidden_parameter
from .guards.held import warn_if_read
from .guards.holding import snapshot
from .kernels.switches import EXCLUSIVE
from .model.losses import Loss
from .model.model import Evaluation, Model
from .model.ranks import Alone
from .model.tasks import joined, row_of
from .step.conditions import Conditions, set_modes, undisturbed
from .step.piece import value_of
from .step.record import Record
from .step.sums import plus
from .update.solvers import Value

if TYPE_CHECKING:
    from .run import Run

T = TypeVar("T")


class LossOfBatch(OuterLoss):
    """The outer loss c·g on a batch, as a function of z."""

    def __init__(self, run: Run, g: Loss, batch: tuple[Any, ...], weight: Value = 1.0) -> None:
        self._run, self._g, self._z, self._buffers = run, g, run.z_now, run.buffers_now
        pairs: Pairs = []
        given = batch, weight
        self.batch, self.weight = cut_graph(given, pairs) if run.tape.replays else given
        self.cut = pairs
        self.value = self._here = torch.zeros(())  # the last values of g: over all ranks, and on this one
        self._k = run.k
        self._recording: Record | None = None  # the record of an evaluation under way
        self._record: Record | None = None  # what it takes to evaluate the loss at this state again

    def _evaluate(
        self, z: State | None, use: Callable[[Evaluation, Traced], T], *, twice: bool, alone: bool = False
    ) -> list[T]:
        """Return what `use` makes of the loss, for each task that is taken by itself. One graph at a time is kept.

        `alone`: the value alone is wanted, whatever it is.
        """
        run, model = self._run, self._run.model
        z = self._z if z is None else z
        found: list[T] = []
        here: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(EXCLUSIVE)
            stack.enter_context(undisturbed(model))
            if self._record is not None:
                stack.enter_context(self._record.repeating())
            stack.enter_context(torch.enable_grad())
            self.leaves = ()
            modes = [m.training for m in model.modules]
            for row in model.tasks.rows:
                set_modes(model.modules, modes)  # the loss may have changed them
                names = (*model.parameters, *model.seen.statistics)
                mine = z if row is None else row_of({n: z[n] for n in names if n in z}, row)

                def evaluate(evaluation: Evaluation, row: int | None = row, since: int = sequence_number()) -> T:
                    return use(evaluation, self._traced(evaluation, row, since, twice, alone))

                follow, one = bool(model.seen.moving), row is not None
                buffers = row_of(self._buffers, row)
                found.append(model.at(mine, buffers, evaluate, graph=True, follow=follow, twice=twice, one=one))
                here.append(self._here)
            if self._recording is not None:
                self._recording.conditions.end_of_call()
        self._here = here[0] if len(here) == 1 else torch.stack(here).sum()
        self.value = model.ranks.means({"g": self._here})["g"]
        if self._record is not None:
            self._record.check(_entries(self._here))
        if not alone:
            run.monitor.record_loss(self._k + 1, "g", rows.largest(self.value), {})
        return found

    def _traced(self, evaluation: Evaluation, row: int | None, since: int, twice: bool, alone: bool) -> Traced:
        """Return the loss with its graph, while the model holds its weights."""
        run, model = self._run, self._run.model
        one = model.tasks.count is None  # under vmap the entries of a vector would be summed with the tasks
        value = value_of(model, "g", self._g, evaluation, row_of(self.batch, row), vector=one)
        _check_vector(model, "g", value, self.like)
        self._here = value.detach()
        value = value if isinstance(self.weight, float) and self.weight == 1 else self.weight * value
        at = {**evaluation.leaves, **evaluation.statistics}
        if alone:
            return Traced(at, {"g": value}, [], [])
        state = [*self._z.values(), *at.values()]
        # with own parameters, a tensor that was computed from w_0 would have its gradient at w_k
        older = since if model.own else None
        leaves, connected = find_leaves(value, state, [x for _, x in self.cut], since=older)
        if not model.own:
            refuse_hidden_parameter("g", value, state, leaves, model)
        if not (connected or (value.requires_grad and not run.tape.replays)):
            raise disconnected("g")
        self.leaves = list({id(x): x for x in (*self.leaves, *leaves)}.values())
        retain = twice or has_older_nodes(value, since)
        return Traced(at, {"g": value}, [*self.cut], leaves, model.ranks.share, retain)

    def evaluated(self) -> Tensor:
        """Return the mean of the loss over the ranks, without a derivative."""
        self._evaluate(None, lambda evaluation, traced: None, twice=False, alone=True)
        return self.value

    def _warn(self, evaluation: Evaluation, value: Tensor) -> None:
        if evaluation.watched:
            grads = vjp({"g": value}, {"g": torch.ones_like(value)}, list(evaluation.watched.values()))
            warn_if_read(self._run.model, dict(zip(evaluation.watched, grads, strict=True)))

    def traced(self, run: Callable[[Traced], T]) -> T:
        """Return run(the loss with its graph); tasks that are taken one by one are summed."""
        model, tape = self._run.model, self._run.tape
        parts: list[Traced] = []

        def use(evaluation: Evaluation, traced: Traced) -> T | None:
            self._warn(evaluation, traced.to["g"])
            parts.append(traced)
            if len(model.tasks.rows) > 1:
                return None
            return run(traced)

        found = self._evaluate(None, use, twice=True)
        if len(found) == 1:
            return found[0]  # pyright: ignore[reportReturnType]
        assert not tape.replays
        total = torch.stack([traced.to["g"] for traced in parts]).sum()
        return run(Traced(self._z, {"g": total}, [*self.cut], list(self.leaves), model.ranks.share))

    @property
    def numbers(self) -> Sequence[Tensor]:
        return self.value, torch.as_tensor(self.weight, dtype=torch.float64, device="cpu")

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        model = self._run.model

        def gradient(evaluation: Evaluation, traced: Traced) -> State:
            self._warn(evaluation, traced.to["g"])
            return traced.vjp({"g": self._run.tape.along(traced.to["g"])}, inputs, into)

        found = self._evaluate(z, gradient, twice=False)
        return _over_ranks(model, found[0] if model.tasks.rows == (None,) else joined(found))

    def kept(self) -> OuterLoss:
        """Record this loss, which is evaluated again when the sweep reaches its step."""
        model = self._run.model
        held = snapshot(model, [self._g])
        conditions = Conditions(model, others=held.plan.draws)
        record = self._recording = Record(self._k, conditions, self.cut, held, of="the outer loss")
        self._evaluate(None, lambda evaluation, traced: None, twice=False)
        record.note(_entries(self._here).values(), self.leaves, [("g", (self.batch, self.weight))])
        record.seal(self.leaves, model)
        self._record, self._recording, self._z = record, None, {}  # the sweep has the state
        return self


class LossGiven(OuterLoss):
    """A loss that the user computed from loop(x), loop.weights or the model, times its weight."""

    is_function = False

    def __init__(self, run: Run, loss: Tensor, weight: Value = 1.0) -> None:
        self._run, self.weight, self._plain = run, weight, run.model.tasks.total(loss) if loss.dim() == 0 else loss
        self._loss = self._plain if isinstance(weight, float) and weight == 1 else weight * self._plain
        self.value = torch.zeros_like(loss.detach())  # without the weight, over all ranks
        self.batch: tuple[Any, ...] = ()

    def _traced(self) -> list[Traced]:
        """Return the loss as a function of the weights, and of the parameters that hold them in the model."""
        run, model, z = self._run, self._run.model, self._run.z_now
        _check_vector(model, "loss=", self._plain, self.like)
        own = model.parameters if model.own else {}
        earlier = ValueError(
            "bilevel.inner: loss= was computed from weights of an earlier step. Compute it from loop(x) after "
            "the last step; loop.add_outer_loss(loss=...) takes losses of several steps, each right after its step."
        )
        try:
            state = (*(x for x in z.values() if x.requires_grad), *own.values(), *run.tape.start_of_graph())
            leaves, connected = find_leaves(self._loss, state, since=run.mark if own else None)
        except ValueError:
            raise earlier from None
        now = {id(x) for x in z.values()}
        if any(x in model.seen.states and id(x) not in now for x in leaves):
            raise earlier
        if not model.own:
            refuse_hidden_parameter("loss=", self._loss, state, leaves, model)
        if not (connected or (self._loss.requires_grad and not run.tape.replays)):
            raise disconnected("loss=")
        self.leaves = leaves
        self.value = model.ranks.means({"g": self._plain.detach()})["g"]
        run.monitor.record_loss(run.k, "loss=", rows.largest(self.value), {})
        at = [{n: x for n, x in z.items() if x.requires_grad}, *([own] if own else [])]
        return [Traced(x, {"g": self._loss}, [], leaves if i == 0 else [], model.ranks.share) for i, x in enumerate(at)]

    def traced(self, run: Callable[[Traced], T]) -> T:
        found = self._traced()[0]
        return self._run.inside(lambda evaluation: run(found))

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        one = self._run.tape.along(self._loss)
        by_weights, *by_parameters = self._traced()

        def gradients(evaluation: Evaluation) -> State:
            a = by_weights.vjp({"g": one}, inputs, into)
            for traced in by_parameters:  # the gradient with respect to λ is in the sums already
                a = plus(a, traced.vjp({"g": one}, (), into))
            return a

        return _over_ranks(self._run.model, self._run.inside(gradients))

    def kept(self) -> OuterLoss:
        """Compute the gradients now, since a later step overwrites the weights that the graph of the loss uses."""
        found = Gradients()
        return LossTaken(self._run, self._plain.detach(), self.pull(None, found), found, self.leaves)


class LossTaken(OuterLoss):
    """The gradients of a loss that the user computed at an earlier step."""

    def __init__(self, run: Run, value: Tensor, a: State, found: Gradients, leaves: Sequence[Tensor]) -> None:
        self._run, self._value, self._a, self._found, self.leaves = run, value, a, found, leaves

    @property
    def numbers(self) -> Sequence[Tensor]:
        return *self._a.values(), *self._found.values()

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        for x in inputs or ():
            if not x.is_leaf:
                raise ValueError(
                    f"bilevel.inner: an input (shape {tuple(x.shape)}) was computed from others, and the gradient of a "
                    "loss= that was added is known for leaves alone. Name the leaves that it was computed from, or add "
                    "the loss as g, with the input in outer=."
                )
        chosen, tape = None if inputs is None else {id(x) for x in inputs}, self._run.tape
        tape.along(self._value)  # which may refuse a vector
        for x, grad in self._found.direct.values():
            if chosen is None or id(x) in chosen:
                into.add(into.direct, x, tape.chosen(self._value, grad))
        return {n: tape.chosen(self._value, x) for n, x in self._a.items()}

    def traced(self, run: Callable[[Traced], T]) -> T:
        raise NotImplementedError

    def kept(self) -> OuterLoss:
        return self


def _over_ranks(model: Model, a: State) -> State:
    """Return ∇_z of an outer loss, summed over the ranks for the weights."""
    names = list(model.parameters)
    weights = model.ranks.sum([a.get(n) for n in names], list(model.parameters.values()))
    rest = {n: x for n, x in a.items() if n not in model.parameters}
    return {**rest, **{n: x for n, x in zip(names, weights, strict=True) if x is not None}}


def _entries(value: Tensor) -> State:
    """Return a loss, or each entry of a vector of losses, under a name."""
    return {"g": value} if value.dim() == 0 else {f"g[{i}]": x for i, x in enumerate(value.unbind())}


def _check_vector(model: Model, name: str, value: Tensor, like: Tensor | None) -> None:
    """Raise if the value is a vector in a block whose adjoints have no rows, or does not fit one that was added."""
    if like is not None and like.shape != value.shape:
        had, has = (f"a vector of {len(x)}" if x.dim() else "a scalar" for x in (like, value))
        raise ValueError(
            f"bilevel.inner: the outer losses that were added are summed, and {name} is {has}, while an earlier one "
            f"is {had}. Add losses of one shape, or sum each of them before it is added."
        )
    if value.dim() == 0:
        return
    for option, used in (("tasks=", model.tasks.count is not None), ("group=", type(model.ranks) is not Alone)):
        if used:
            raise ValueError(
                f"bilevel.inner: with {option} an outer loss is a scalar, and {name} is a vector of {len(value)}. Take "
                "one loss at a time: loop.hypergrad(lam, loss=losses[i])."
            )
