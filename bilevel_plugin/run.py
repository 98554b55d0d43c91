"""One block: the state of its loop, and everything that its steps and hypergradients need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .autograd.graph import sequence_number
from .autograd.trees import State
from .check.sentinel import Sentinel
from .engine import Engine
from .guards.evaluation import check_batch
from .guards.held import Held
from .guards.opening import refuse_inference_mode
from .guards.seals import Seals
from .kernels.switches import EXCLUSIVE
from .model.losses import Loss
from .model.model import Evaluation, Model
from .step.batches import Reduction
from .step.monitor import LossMonitor
from .step.step import Step
from .update.prepared import Preparation
from .update.solvers import StepRule
from .update.update import UpdateRule

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
        self.reductions: dict[object, Reduction] = {}  # whether a loss is a mean or a sum, for micro=
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

    def checked(self) -> Run:
        """Return this run, or raise if its block has ended."""
        if self.closed:
            raise RuntimeError(
                "bilevel.inner: this loop's block has ended and its steps are forgotten. Call it inside the `with`; "
                "commit_() keeps the weights."
            )
        refuse_inference_mode()
        return self

    def mark_weights(self) -> None:
        """Remember the weights that the user is given, to tell a loss= of earlier weights."""
        for n in self.model.parameters:
            self.model.seen.states.add(self.z[n])

    def inside(self, run: Callable[[Evaluation], T]) -> T:
        """Return run(evaluation) with the current state in the model, so that it can be differentiated."""
        grad, model = torch.is_grad_enabled(), self.model

        def with_mode(evaluation: Evaluation) -> T:
            with torch.set_grad_enabled(grad):
                return run(evaluation)

        with EXCLUSIVE:
            follow = bool(model.seen.moving)
            return model.at(self.z_now, self.buffers_now, with_mode, graph=True, follow=follow)

    def check_batch(self, where: str, batch: tuple[Any, ...]) -> None:
        check_batch(self.model, where, batch, self.z, replays=self.tape.replays)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of model.state_dict() at the current weights, without a graph."""
        self._refuse_tasks("state_dict()")
        current = {**self.buffers_now, **self.z_now}
        return {
            n: current[n].detach().clone() if n in current else x.clone() if isinstance(x, Tensor) else x
            for n, x in self.model.module.state_dict().items()
        }

    def commit(self, optimizer: bool) -> None:
        """Leave the current values in the model, and in the optimizers, when the block ends."""
        self.monitor.raise_if_not_finite()
        self._refuse_tasks("commit_()")
        self.held.check(self.z_now, self.k)
        if optimizer:
            self.update.write_state(self.z)
        assert self.model.session is not None
        self.model.session.remember_values()

    def _refuse_tasks(self, call: str) -> None:
        if (count := self.model.tasks.count) is not None:
            raise RuntimeError(
                f"bilevel.inner: {call} has {count} sets of weights for one model. Take the one you "
                "want from loop.weights, whose first dimension is the task, and load it with load_state_dict."
            )

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
