"""One block: the state of its loop, the steps that it takes, and the gradients of its outer losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .autograd.derive import Gradients, is_finite
from .autograd.graph import sequence_number
from .autograd.trees import Pairs, State, as_leaves
from .check.sentinel import Sentinel
from .engine import Engine
from .guards.evaluation import check_batch
from .guards.held import Held
from .guards.seals import Seals
from .inputs import as_tuple, as_weight
from .kernels.switches import EXCLUSIVE, full_precision
from .model.losses import Loss, code_of, scalar
from .model.model import Evaluation, Model
from .outer import LossGiven, LossOfBatch
from .step.batches import Micro
from .step.computed import Computed
from .step.conditions import undisturbed
from .step.monitor import LossMonitor
from .step.piece import Piece, Term
from .step.pieces import pieces_of
from .step.step import Step
from .update.prepared import Preparation, Prepared
from .update.solvers import StepRule, Value
from .update.update import Update, UpdateRule

T = TypeVar("T")
Check = Literal["first", "always", False]


class Run:
    """The state of a loop, z_k, and everything that its steps and hypergradients need."""

    def __init__(
        self,
        model: Model,
        losses: tuple[Loss, Loss | None],
        rule: StepRule,
        update: UpdateRule,
        prepare: Preparation,
        engine: Engine,
        check: Check,
    ) -> None:
        self.model, self.rule, self.update, self.engine = model, rule, update, engine
        self.prepare = prepare  # what comes between the gradient and Υ
        self.h, self.g = losses
        self.origin = model.initial_weights()
        model.open()
        try:
            update.open(lambda: self.z)
            self.tape = engine.tape()
            statistics = {n: model.buffers[n].detach().clone() for n in model.seen.statistics}
            numbers = {**self.origin, **update.start, **statistics}
            self.z = self.tape.start(numbers, self._remembered())
            self.buffers = {n: b.detach().clone() for n, b in model.buffers.items() if n not in statistics}
            model.hold(self.z, self.buffers)
        except BaseException:
            update.close()
            model.close()
            raise
        self.held, self.seals, self.monitor = Held(model), Seals(model), LossMonitor()
        self.sentinel = Sentinel(model, losses[1], check, sparing=engine.spares_memory)
        model.seen.warns = check is not False
        self.open: Step | None = None  # a step that has been given pieces, and not yet closed
        self.outer: tuple[Any, ...] = ()  # the last batch of g
        self.kinds: dict[object, Step] = {}  # the last step of each kind, for the sentinel
        self.accumulated: list[Tensor] = []  # the losses that were accumulated since the last step
        self.trained: set[str] = set()  # the weights that some step has moved
        self.added: list[Tensor] = []  # the values of the added outer losses, times their weights
        self.outer_of_added: tuple[Any, ...] | None = None  # the last batch of g among the added losses
        self.k = 0
        self.mark = sequence_number()
        self.closed = False

    def _remembered(self) -> State:
        """Return the saved values of w_0, which are restored after the block and never written to."""
        session, model = self.model.session, self.model
        assert session is not None
        held = {id(t): saved for t, saved in session.values} if model.tasks.count is None else {}
        return {n: held[id(p)] for n, p in model.parameters.items() if id(p) in held}

    # --- the state ---

    @property
    def z_now(self) -> State:
        """The state, with the statistics that the pieces of an open step have changed."""
        open = None if self.open is None else self.open.open
        return self.z if open is None else open.sums.at(self.z)

    @property
    def buffers_now(self) -> State:
        """The buffers that are not part of the state, as the last piece has left them."""
        open = None if self.open is None else self.open.open
        return self.buffers if open is None else open.buffers

    def mark_weights(self) -> None:
        """Remember the weights that the user is given, to tell a loss= of earlier weights."""
        for n in self.model.parameters:
            self.model.seen.states.add(self.z[n])

    def gathered_for(self) -> set[str]:
        """Return the weights that an open step has gathered gradients for."""
        open = None if self.open is None else self.open.open
        return set() if open is None else set(open.sums.direction)

    def inside(self, run: Callable[[Evaluation], T]) -> T:
        """Return run(evaluation) with the current state in the model, so that it can be differentiated."""
        grad, model = torch.is_grad_enabled(), self.model

        def with_mode(evaluation: Evaluation) -> T:
            with torch.set_grad_enabled(grad):
                return run(evaluation)

        with EXCLUSIVE:
            follow = bool(model.seen.moving)
            return model.at(self.z_now, self.buffers_now, with_mode, graph=True, follow=follow)

    # --- the inner loop ---

    def take(
        self,
        k: int,
        terms: Sequence[Term],
        cut: Pairs,
        only: frozenset[str] | None,
        micro: Micro | None,
        close: bool,
    ) -> State:
        """Evaluate losses as pieces of step k, and close the step if they are its last; return their means."""
        model, tape = self.model, self.tape
        self.held.check(self.z_now, self.k, numbers=False)
        self.update.check()
        self.seals.check_variables()
        model.seen.aux.clear()
        step = self.open or Step(k, model, self.buffers, only)
        before, hooks, pieces = (list(step.pieces), step.open, step.calls), self.prepare.hooks(k), list[Piece]()
        means: State = {}
        step.action = "step" if close else "accumulate"
        with EXCLUSIVE:
            try:
                if self.open is None:
                    tape.begin(step, self.z, whole=close)
                if terms or not step.pieces:
                    pieces = pieces_of(model, terms, only, micro)
                    if hooks is not None and (step.pieces or not close):
                        pieces[-1].hooks = lambda d: hooks(d, {})
                    means = tape.evaluate(step, self.z, pieces, cut, self.monitor)
                else:
                    model.ranks.means({}, step.action)
                self.held.check_not_written(self.z, k)
                self.open = step
                if close:
                    update = self.prepare(self.update.at_step(k), k, only)
                    if hooks is not None and all(piece.hooks is None for piece in step.pieces):
                        update = Prepared([hooks], update)
                    self._close(step, update)
            except BaseException:
                step.pieces, step.open, step.calls = before  # what this call has added is dropped
                self.open = step if step.calls else None
                raise
            model.hold(self.z_now, self.buffers_now)
        self._note_kept_graph(pieces)
        self.mark = sequence_number()
        return means

    def _close(self, step: Step, update: Update) -> None:
        assert step.open is not None
        buffers = step.open.buffers
        to = self.tape.close(step, self.z, update)
        self.update.count(step.moved)
        self.prepare.count(step.moved)
        self.trained.update(step.moved)
        self.z, self.buffers = as_leaves(to) if self.tape.replays else to, buffers
        self.open, self.k, self.accumulated = None, step.k, []
        for piece in step.pieces:
            if piece.terms:
                self.kinds[piece.only, tuple((t.name, code_of(t.loss)) for t in piece.terms)] = step

    def _note_kept_graph(self, pieces: Sequence[Piece]) -> None:
        """Record what kept graphs refer to, so that a later change of it is noticed."""
        for piece in pieces:
            if self.engine.keeps_graphs:
                for t in piece.terms:
                    self.seals.note_batch(piece.record.k, t.name, t.batch)
            if self.engine.keeps_graphs or self.engine.traces_steps:
                self.seals.note_variables(piece.record.leaves)

    def weights_of_losses(self, k: int) -> list[Value]:
        """Return how much of ∇h and of ∇g goes into step k."""
        # a rate that is a tensor may be written to later, so its value is recorded
        return [c.clone() if isinstance(c, Tensor) and not c.requires_grad else c for c in self.rule.weights(k)]

    # --- outer losses ---

    def outer_loss(self) -> Loss:
        if self.g is None:
            raise TypeError(
                "bilevel.inner: there is no g to evaluate. Give it: bilevel.inner(model, h, g), or pass a loss= that "
                "is computed from loop(x)."
            )
        return self.g

    def check_batch(self, where: str, batch: tuple[Any, ...]) -> None:
        check_batch(self.model, where, batch, self.z, replays=self.tape.replays)

    def end(self, outer: Any, loss: Tensor | None, weight: Value = 1.0) -> LossOfBatch | LossGiven:
        """Return the outer loss at the current weights."""
        if loss is not None and outer is not None:
            raise ValueError("bilevel.inner: give outer= or loss=, not both: a loss that you computed had its batch.")
        if loss is not None:
            return LossGiven(self, scalar("loss=", loss), weight)
        batch = self.outer if outer is None else as_tuple(outer)
        self.check_batch("outer=", batch)
        self.model.tasks.check_batch("g", batch)
        return LossOfBatch(self, self.outer_loss(), batch, weight)

    def value(self) -> Tensor:
        """Return g at the current weights on its last batch, or the sum of the losses that were added."""
        self.held.check(self.z_now, self.k)
        self.monitor.raise_if_not_finite()
        self.model.ranks.means({}, "value")
        if self.added:
            return sum(self.added[1:], self.added[0])
        end = self.end(None, None)
        assert isinstance(end, LossOfBatch)
        with torch.no_grad():
            return end.evaluated()

    def add_outer_loss(self, weight: Value, outer: Any, loss: Tensor | None) -> Tensor:
        """Add an outer loss at the current weights to the objective, and return its value."""
        model = self.model
        self.held.check(self.z_now, self.k)
        self.seals.check_variables()
        model.ranks.means({}, "add_outer_loss")
        self.check_batch("weight=", (weight,))
        with EXCLUSIVE, torch.enable_grad(), undisturbed(model), full_precision():
            end = self.end(outer, loss, as_weight(weight))
            try:
                self.tape.add_loss(end)
            finally:
                model.hold(self.z_now, self.buffers_now)
            value = end.value
            self.added.append((end.weight * value).detach())
        if loss is None:
            self.outer_of_added = self.outer if outer is None else as_tuple(outer)
            if self.engine.keeps_graphs:
                self.seals.note_batch(self.k, "g", self.outer_of_added)
        if self.engine.keeps_graphs or self.engine.traces_steps:
            self.seals.note_variables(end.leaves)
        return value

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return function(model, *args) at the current weights, a constant for the steps that take it."""
        model = self.model
        if model.tasks.count is not None or model.ranks.share != 1:
            raise ValueError(
                "bilevel.inner: loop.compute is for one inner problem on one process, and the block has tasks= or "
                "group=. Compute the value inside h, and keep it as bilevel.stop_gradient(...)."
            )
        self.held.check(self.z_now, self.k)
        self.seals.check_variables()
        value = Computed(model, self.k, function, args, self.buffers_now, replays=self.tape.replays)
        self.check_batch(f"the arguments of {value.name}", args)
        with EXCLUSIVE, full_precision():
            given, z = self.tape.compute(value, self.z_now)
            if z is not self.z_now:
                self.z = {n: z[n] for n in self.z}
            model.hold(self.z_now, self.buffers_now)
        if self.engine.keeps_graphs or self.engine.traces_steps:
            self.seals.note_variables(value.leaves)
        self.mark = sequence_number()
        return given

    # --- the outer gradient ---

    def pull(
        self, wanted: list[Tensor] | None, outer: Any, loss: Tensor | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        """Return the gradients of the outer loss, and its gradient with respect to w_0."""
        model = self.model
        self.held.check(self.z_now, self.k)
        self.seals.check_batches()
        self.seals.check_variables()
        self.monitor.raise_if_not_finite()
        model.ranks.means({}, f"hypergrad by {self.engine}")
        model.ranks.check_same(self.z, model.seen.statistics)
        if self.added and (outer is not None or loss is not None):
            raise ValueError(
                "bilevel.inner: losses were added by loop.add_outer_loss, and the hypergradient is that of their sum. "
                "Add this one as well, loop.add_outer_loss(outer=...) or loop.add_outer_loss(loss=...), and leave out "
                "outer= and loss= here."
            )
        end = None if self.added else self.end(outer, loss)
        try:
            with EXCLUSIVE, torch.enable_grad(), undisturbed(model):
                with full_precision():
                    found, start = self.tape.pull(end, wanted, create_graph)
                batch = None if loss is not None else self.outer if outer is None else as_tuple(outer)
                self._examine(self.outer_of_added if self.added else batch)
                finite = is_finite(found.values())
                if model.ranks.largest(int(not finite)) != (0,):
                    where = self.tape.first_not_finite(end) or "somewhere"
                    raise FloatingPointError(
                        f"bilevel.inner: the hypergradient is not finite: it stops being so {where}, going backwards. "
                        "A smaller rate, or a loss without √0, 0/0 or log 0 there, may help."
                    )
        finally:
            model.hold(self.z_now, self.buffers_now)
        return found, start

    def _examine(self, batch: tuple[Any, ...] | None) -> None:
        """Let the sentinel compare derivatives with differences, where it has not done so before."""
        for step in self.kinds.values():
            if self.sentinel.is_due(step):
                self.sentinel.examine(step, self.z_now, self.buffers_now, batch, self.trained)

    def close(self, *, announce: bool = False) -> None:
        """Release everything that the loop holds, and restore the model."""
        self.closed = True
        try:
            if announce:
                self.model.ranks.means({}, "end")
        finally:
            self.update.close()
            with EXCLUSIVE:
                self.model.close()
            self.z, self.origin, self.buffers, self.outer, self.kinds, self.open = {}, {}, {}, (), {}, None
            self.accumulated, self.added, self.outer_of_added = [], [], None
            self.seals, self.monitor, self.tape = Seals(self.model), LossMonitor(), self.engine.tape()
