"""The handle of a block takes the inner steps and computes the gradients of the outer loss."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from .autograd.derive import Gradients, Traced, is_finite, vjp, without_hooks
from .autograd.graph import find_leaves, has_older_nodes, reaches, sequence_number
from .autograd.missing import explained
from .autograd.trees import Pairs, State, as_leaves, cut_graph, tensors_of  # fmt: skip
from .check.sentinel import Sentinel
from .engine import Engine
from .engine.base import End, OuterLoss
from .engine.plan import Plan
from .kernels.switches import EXCLUSIVE, full_precision
from .model.losses import Loss, WithKeywords, code_of, evaluating_loss, scalar
from .model.model import AUX, OWNER, Binding, InnerProblem, Inside
from .model.session import NESTED
from .step.accumulation import Accumulate, AfterAccumulation
from .step.conditions import set_modes, undisturbed
from .step.fetching import Source
from .step.parts import Micro, Reduction, checked, find_reduction, refuse_batch_statistics
from .step.record import Conditions, RecordedLoss, RecordedStep, refuse_hidden_parameter
from .step.step import LossMonitor, Moved, Step, Term, disconnected
from .update.direction import Transform, Transformed, hooks_of
from .update.solvers import StepRule, Value
from .update.update import SUM, Update, UpdateRule

Inputs = Tensor | Iterable[Tensor] | Mapping[str, Tensor] | nn.Module
Only = torch.optim.Optimizer | nn.Module | Tensor | Iterable[Tensor]
Check = Literal["first", "always", False]


class Losses(NamedTuple):
    """The losses that a step evaluated, before it moved. A loss with weight 0 in the step is None.

    aux is what h returned beside its value (`return loss, logits`), without a graph. With micro= it is a list with
    one entry for each part of the batch, while h and g are those of the whole batch.
    """

    h: Tensor | None
    g: Tensor | None
    aux: Any = None


class Loop:
    """The handle of a block. It takes the inner steps and computes the gradients of the outer loss."""

    def __init__(
        self,
        binding: Binding,
        losses: tuple[Loss, Loss | None],
        rule: StepRule,
        update: UpdateRule,
        direction: Transform | None,
        clip: Transform | None,
        engine: Engine,
        check: Check,
    ) -> None:
        refuse_inference_mode()
        if evaluating_loss() and torch.is_grad_enabled() and engine.tape().replays:
            raise RuntimeError(
                f"bilevel.inner: a block inside of a loss has engine={type(engine).__name__}, whose result has no "
                "graph that the loss could be differentiated through. Use engine='unroll' for it, or torch.no_grad() "
                "around it if it is meant to be a constant."
            )
        self._binding, self._rule, self._update, self._engine = binding, rule, update, engine
        self._direction, self._clip = direction, clip
        self._h, self._g = losses
        self._origin = binding.initial_weights()
        binding.open()
        try:
            self._tape = engine.tape()
            statistics = {n: binding.buffers[n].detach().clone() for n in binding.statistics}
            numbers = {**self._origin, **update.start, **statistics}
            self._z = self._tape.start(numbers, binding.remembered_weights)
            self._buffers = {n: b.detach().clone() for n, b in binding.buffers.items() if n not in statistics}
            binding.hold(self._z, self._buffers)
        except BaseException:
            binding.close()
            raise
        self._outer: tuple[Any, ...] = ()
        self._monitor = LossMonitor()
        self._sentinel = Sentinel(binding, losses[1], check, sparing=engine.spares_memory)
        binding.warns = check is not False
        binding.graphs_are_kept = engine.keeps_graphs
        binding.notes_leaves = engine.keeps_graphs or engine.traces_steps
        self._last: dict[object, RecordedStep] = {}  # the last step of each kind
        self._accumulated: list[Tensor] = []  # the losses that were accumulated since the last step
        self._reductions: dict[object, Reduction] = {}  # whether a loss is a mean or a sum, for micro=
        self._trained: set[str] = set()  # the weights that some step has moved
        self._samples: list[tuple[int, str, Tensor, Tensor]] = []  # some entries of the batches that graphs refer to
        self._outer_variables: list[tuple[Tensor, int]] = []  # outer variables of kept graphs, with their versions
        self._added: list[Tensor] = []  # the values of the added outer losses, times their weights
        self._outer_of_added: tuple[Any, ...] | None = None  # the last batch of g among the added losses
        self._k = 0
        self._mark = sequence_number()
        self._closed = False

    # --- the inner loop ---

    def step(
        self,
        *batch: Any,
        outer: Any = None,
        only: Only | None = None,
        h: Loss | None = None,
        micro: int | None = None,
        reduction: Reduction | None = None,
        fetch: Callable[[], Any] | None = None,
        **named: Any,
    ) -> Losses:
        """Take one inner step: w ← w − c_h·∇h(w, *batch) − c_g·∇g(w, *outer), or the optimizer's rule for it.

        Args:
            batch: the arguments of h after the model. Keyword arguments are passed on (`loop.step(**batch)`).
            outer: the batch of g. It is used until another one is given.
            only: an optimizer of this loop, a module, or parameters. The gradient is taken for these weights, and no
                others change.
            h: another inner loss, for this step.
            micro: split the batches of h and g into this many parts along their first dimension. Only the graph of one
                part exists at a time, in the step and in its derivative; the result is the same. The losses must be
                means or sums over samples. This is tested on their values, once for each loss.
            reduction: "mean" or "sum" states which the losses are, and skips that test.
            fetch: a function without arguments that returns the batch of h: a tuple, or a dict of keyword arguments.
                It is called again when the step is replayed, with the same random numbers, so the batch is not kept. A
                batch that differs is an error. See `fetched`.

        After `accumulate`, a step takes no batch and uses the sum of the gradients. Returns the losses before the step.

        Examples:
            Each step of rate 0.5 goes half of the way to c.

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> h = lambda m, c: 0.5 * (m.weight - c).square().sum()
            >>> with bilevel.inner(model, h, solver="gd", lr=0.5) as loop:
            ...     for c in (2.0, 4.0):
            ...         _ = loop.step(c)
            ...         print(model.weight.item())
            1.0
            2.5
        """
        self._check_open()
        parts = checked(micro, reduction)
        with self._fetched(fetch, batch, named) as (batch, named, source):
            return self._step(batch, named, source, outer, only, h, parts)

    def _step(
        self,
        batch: tuple[Any, ...],
        named: dict[str, Any],
        source: tuple[Source, Conditions] | None,
        outer: Any,
        only: Only | None,
        h: Loss | None,
        parts: tuple[int, Reduction | None] | None,
    ) -> Losses:
        names = self._names_of(only)
        if self._accumulated and (batch or named or h is not None):
            raise TypeError(
                "bilevel.inner: after loop.accumulate(...) the step is taken on what was gathered: call loop.step() "
                "without a batch. Give this batch to loop.accumulate(...) first, if it belongs to the step."
            )
        gathered_for = {n.removesuffix(SUM) for n in self._z if n.endswith(SUM)}
        if names is not None and not gathered_for <= names:
            raise ValueError(
                "bilevel.inner: loop.accumulate(...) has gathered gradients for weights that only= of this step leaves "
                "alone. Give only= to loop.accumulate(...) as well, and take the step of one part before the other's."
            )
        k = self._k + 1
        self._outer = self._outer if outer is None else as_tuple(outer)
        weights = self._weights_of_losses(k)
        terms = [] if self._accumulated else [self._term(h, batch, named)]
        weights_of_terms = weights[:1] if terms else []
        if isinstance(weights[1], Tensor) or weights[1] != 0:
            if self._g is None:
                raise TypeError(
                    f"bilevel.inner: step k = {k} of {type(self._rule).__name__} descends g as well, and there is no "
                    "g. Give it: bilevel.inner(model, h, g), or take solver='gd'."
                )
            self._check_batch("outer=", self._outer)
            terms.append(Term("g", self._g, self._outer))
            weights_of_terms.append(weights[1])
        moved = self._take(k, terms, weights_of_terms, self._update_at(k), names, parts, source)
        self._k = k
        gathered, self._accumulated = self._accumulated, []
        value = sum(gathered[1:], gathered[0]) if gathered else moved.means.get("h")
        return Losses(value, moved.means.get("g"), self._binding.aux.get("h"))

    def accumulate(
        self,
        *batch: Any,
        only: Only | None = None,
        h: Loss | None = None,
        micro: int | None = None,
        reduction: Reduction | None = None,
        fetch: Callable[[], Any] | None = None,
        **named: Any,
    ) -> Losses:
        """Add the gradient of h on this micro-batch to that of the next step, as .backward() does without a step.

        `loop.step()`, without a batch, then takes the step. The graph of each micro-batch is freed at once. The
        gradients are summed: divide the loss by their number if you want the mean, as in the plain loop. To split one
        batch without changing the result, use `micro`. `micro` and `fetch` are explained in `step`.

        Examples:
            The gradients of both are summed, so the step goes from 0 to 0.25·(2 + 4).

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> h = lambda m, c: 0.5 * (m.weight - c).square().sum()
            >>> with bilevel.inner(model, h, solver="gd", lr=0.25) as loop:
            ...     for c in (2.0, 4.0):
            ...         _ = loop.accumulate(c)
            ...     _ = loop.step()
            ...     print(model.weight.item())
            1.5
        """
        self._check_open()
        parts = checked(micro, reduction)
        if "fixed point" in self._engine.needs:
            raise ValueError(
                f"bilevel.inner: engine={type(self._engine).__name__} differentiates the fixed point of one step, and "
                "with accumulate() a step is made of several. Use engine='reverse'."
            )
        k = self._k + 1
        weights = self._weights_of_losses(k)[:1]
        hooks = self._hooks()
        update = Accumulate() if hooks is None else Transformed([hooks], Accumulate(), closes_over=True)
        with self._fetched(fetch, batch, named) as (batch, named, source):
            terms = [self._term(h, batch, named)]
            moved = self._take(k, terms, weights, update, self._names_of(only), parts, source)
        value = moved.means.get("h")
        self._accumulated.append(torch.zeros(()) if value is None else value)
        return Losses(value, None, self._binding.aux.get("h"))

    def _take(
        self,
        k: int,
        terms: list[Term],
        weights: list[Value],
        update: Update,
        only: frozenset[str] | None,
        parts: tuple[int, Reduction | None] | None,
        source: tuple[Source, Conditions] | None,
    ) -> Moved:
        """Take a step and record it."""
        binding = self._binding
        binding.check_held(self._z, self._k, numbers=False)
        self._update.check()
        self._check_outer_variables()
        binding.aux.clear()
        cut: Pairs = []
        if self._tape.replays:
            terms = [Term(t.name, t.loss, cut_graph(t.batch, cut)) for t in terms]
        step = self._tape.make_step(k, binding, terms, weights, update, only)
        if parts is not None:
            step.micro = self._micro(step, *parts)
        where, conditions = source or (None, None)
        recorded = RecordedStep(step, self._buffers, cut, where, conditions)
        with EXCLUSIVE:
            moved = self._tape.step(recorded, self._z, self._monitor)
            self._update.count(moved.moved)
            self._trained.update(moved.moved)
            self._z = as_leaves(moved.to) if self._tape.replays else moved.to
            self._buffers = moved.buffers
            binding.hold(self._z, self._buffers)
        self._note_kept_graph(k, recorded.leaves, step.terms)
        if step.terms:
            kind = only, tuple((t.name, code_of(t.loss)) for t in step.terms)
            self._last[kind] = recorded
        for x in self._z.values():
            setattr(x, OWNER, self._binding.token)  # to tell a loss= of earlier weights
        self._mark = sequence_number()
        return moved

    def _note_kept_graph(self, k: int, leaves: Iterable[Tensor], terms: Sequence[Term]) -> None:
        """Record what the kept graphs of step k refer to, so that a later change of it is noticed."""
        if self._engine.keeps_graphs:
            self._sample(k, terms)
        if self._engine.keeps_graphs or self._engine.traces_steps:
            known = {id(x) for x in (*(x for x, _ in self._outer_variables), *self._binding.parameters.values())}
            self._outer_variables += [(x, x._version) for x in leaves if id(x) not in known | NESTED]

    @contextmanager
    def _fetched(
        self, fetch: Callable[[], Any] | None, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> Generator[tuple[tuple[Any, ...], dict[str, Any], tuple[Source, Conditions] | None]]:
        """Yield the batch of h, and its source if it is to be fetched again instead of being kept."""
        if fetch is None:
            yield batch, named, None
            return
        if batch or named:
            raise TypeError(
                "bilevel.inner: a step was given a batch, and fetch= to get one. Give one of the two; what h takes "
                "besides the batch can be returned by fetch as well."
            )
        with EXCLUSIVE:  # no other thread may draw between this reading of the random states and that after the step
            conditions = Conditions(self._binding, others=True)
            args, named, source = Source.of(fetch)
            again = self._tape.replays and not self._engine.keeps_graphs  # kept graphs refer to the batch anyway
            yield args, named, (source, conditions) if again else None

    def _micro(self, step: Step, parts: int, reduction: Reduction | None) -> Micro:
        """Return how a step is split into parts. Whether a loss is a mean or a sum is found out once."""
        binding = self._binding
        modes = tuple(m.training for m in binding.modules)
        found: list[tuple[str, Reduction]] = []
        for t in step.terms:
            key = t.name, code_of(t.loss), parts, reduction, modes
            if (known := self._reductions.get(key)) is None:
                known = reduction
                where = binding, self._z, self._buffers, t.name, t.loss, t.batch, parts
                if reduction is not None:
                    refuse_batch_statistics(*where)
                else:
                    known = find_reduction(*where, unit=Conditions(binding).unit)
                if known is not None:
                    self._reductions[key] = known
            found.append((t.name, known or "mean"))  # a loss that is not finite is reported by the step
        return Micro(parts, tuple(found))

    def _weights_of_losses(self, k: int) -> list[Value]:
        # a rate that is a tensor may be written to later, so its value is recorded
        return [c.clone() if isinstance(c, Tensor) and not c.requires_grad else c for c in self._rule.weights(k)]

    def _term(self, h: Loss | None, batch: tuple[Any, ...], named: dict[str, Any]) -> Term:
        loss = self._h if h is None else h
        if not callable(loss):
            raise TypeError(
                f"bilevel.inner: h= of a step is another inner loss, a function of (model, *batch), got "
                f"{type(loss).__name__}. A batch whose argument is called h has to be given by position."
            )
        if named:
            loss, batch = WithKeywords(loss, tuple(named)), (*batch, *named.values())
        self._check_batch("the batch of h", batch)
        return Term("h", loss, batch)

    def _names_of(self, only: Only | None) -> frozenset[str] | None:
        """Return the names of the weights that `only=` selects."""
        if only is None:
            return None
        if "fixed point" in self._engine.needs:
            raise ValueError(
                f"bilevel.inner: engine={type(self._engine).__name__} differentiates the fixed point of one step, and "
                "with only= several steps take turns. Use engine='reverse'."
            )
        if isinstance(only, torch.optim.Optimizer):
            names = self._update.names_held_by(only)
            if names is None:
                raise ValueError(
                    "bilevel.inner: only= got an optimizer that is not one of this loop's. Give it to the block: "
                    "bilevel.inner(..., optimizer=[one, other])."
                )
            return frozenset(names)
        wanted: list[Any] = []
        if isinstance(only, nn.Module):
            wanted = list(only.parameters())
        elif isinstance(only, Tensor):
            wanted = [only]
        elif isinstance(only, Iterable) and not isinstance(only, (str, Mapping)):  # pyright: ignore
            wanted = list(only)
        ids = {id(p): n for n, p in self._binding.parameters.items()}
        held = [p for p in wanted if id(p) in ids or not isinstance(only, nn.Module)]
        strangers = [p for p in held if id(p) not in ids]
        if strangers or not held:
            stranger = strangers[0] if strangers else only
            got = f"a tensor of shape {tuple(stranger.shape)}" if isinstance(stranger, Tensor) else f"{stranger!r:.40}"
            raise ValueError(
                "bilevel.inner: only= takes an optimizer of this loop, a part of the model, or parameters that the "
                f"loop trains, got {got}."
            )
        return frozenset(ids[id(p)] for p in held)

    def _hooks(self) -> Transform | None:
        hooks = hooks_of(self._binding.parameters)
        if hooks is not None and self._update.has_no_rate:
            raise ValueError(
                "bilevel.inner: a parameter has a hook on its gradient, and the rates are the solver object's: the "
                "hook would see the gradient times the rate. Give the rate by lr= or optimizer=, and the solver by "
                "name."
            )
        return None if hooks is None else lambda d: self._binding.map_over_tasks(hooks, d)

    def _update_at(self, k: int) -> Update:
        """Return Υ_k, preceded by hooks on parameters, the accumulated gradients, direction= and clip=."""
        update, each, hooks = self._update.at_step(k), self._binding.map_over_tasks, self._hooks()
        transforms = [t for t in (self._direction, self._clip) if t is not None]
        own = self._direction is not None or getattr(self._clip, "may_close_over", self._clip is not None)
        if transforms:
            update = Transformed(
                [lambda d, t=t: each(t, d) for t in transforms], update, closes_over=own or update.closes_over
            )
        if self._accumulated:
            update = AfterAccumulation(update)
        return update if hooks is None else Transformed([hooks], update, closes_over=True)

    def run(self, steps: int, *batch: Any, outer: Any = None, **named: Any) -> Losses:
        """Take `steps` inner steps on the same batch, with the options of `step`. Returns the losses before the last.

        Examples:
            K steps of rate t from 0 end at (1 − (1 − t)^K)·c.

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> h = lambda m, c: 0.5 * (m.weight - c).square().sum()
            >>> with bilevel.inner(model, h, solver="gd", lr=0.5) as loop:
            ...     _ = loop.run(3, 8.0)
            ...     print(model.weight.item())
            7.0
        """
        if steps < 1:
            raise ValueError(f"bilevel.inner: run takes at least one step, got {steps}.")
        for _ in range(steps - 1):
            self.step(*batch, outer=outer, **named)
        return self.step(*batch, outer=outer, **named)

    def train(self, mode: bool = True) -> Loop:
        """Set the model to training mode. Its modes are restored after the block."""
        self._check_open()
        self._binding.model.train(mode)
        return self

    def eval(self) -> Loop:
        """Set the model to evaluation mode. Its modes are restored after the block."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of model.state_dict() at the current weights, without a graph."""
        self._check_open()
        self._refuse_tasks("state_dict()")
        current = {**self._buffers, **self._z}
        return {
            n: current[n].detach().clone() if n in current else x.clone() if isinstance(x, Tensor) else x
            for n, x in self._binding.model.state_dict().items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return model(*args, **kwargs) at the current weights. A loss made from it can go to `hypergrad(loss=)`."""
        self._check_open()
        with self._inside() as inside:
            return self._binding.call(_forward, inside, args, kwargs)

    @contextmanager
    def _inside(self) -> Generator[Inside]:
        """Put the current weights into the model, so that they can be differentiated for."""
        grad, binding = torch.is_grad_enabled(), self._binding
        with (
            EXCLUSIVE,
            binding.inside(self._z, self._buffers, graph=True, statistics=bool(binding.moving)) as inside,
            torch.set_grad_enabled(grad),
        ):
            yield inside

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name (with tasks: a leading task dimension). Do not change them in place."""
        self._check_open()
        weights = {n: self._z[n] for n in self._binding.parameters}
        # in a graph that is kept, backward sums the gradients for the weights over the ranks
        return weights if self._binding.own_parameters else self._binding.weights_for_losses(weights)

    @property
    def steps(self) -> int:
        """The number of inner steps that were taken."""
        return self._k

    @property
    def plan(self) -> Plan | None:
        """What Reverse() has stored so far and how many steps it will run again. None for other engines."""
        self._check_open()
        return self._tape.plan()

    @property
    def value(self) -> Tensor:
        """The value that `hypergrad` differentiates: g at the current weights on its last batch, summed over tasks.

        After `add_outer_loss` it is the sum of the losses that were added, each times its weight.
        """
        self._check_open()
        self._binding.check_held(self._z, self._k)
        self._monitor.raise_if_not_finite()
        self._binding.announce("value")
        if self._added:
            return sum(self._added[1:], self._added[0])
        with EXCLUSIVE, torch.no_grad(), undisturbed(self._binding), self._inside() as inside:
            value = self._binding.loss("g", self._outer_loss(), inside, self._outer)
            return self._binding.means_of_losses({"g": value.detach()})["g"]

    def commit_(self, *, optimizer: bool = False) -> None:
        """Write the current weights and buffers into the model, as a warm start for what comes after the block.

        With `optimizer`, momentum, moments and step counts are written into the state of the optimizers too.

        Examples:
            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> h = lambda m: 0.5 * (m.weight - 1).square().sum()
            >>> for keep in (False, True):
            ...     with bilevel.inner(model, h, solver="gd", lr=1.0) as loop:
            ...         _ = loop.step()
            ...         if keep:
            ...             loop.commit_()
            ...     print(model.weight.item())
            0.0
            1.0
        """
        self._check_open()
        self._monitor.raise_if_not_finite()
        self._refuse_tasks("commit_()")
        self._binding.check_held(self._z, self._k)
        if optimizer:
            self._update.write_state(self._z)
        self._binding.keep()

    def _refuse_tasks(self, call: str) -> None:
        if self._binding.tasks is not None:
            raise RuntimeError(
                f"bilevel.inner: {call} has {self._binding.tasks} sets of weights for one model. Take the one you "
                "want from loop.weights, whose first dimension is the task, and load it with load_state_dict."
            )

    # --- the outer gradient ---

    def add_outer_loss(self, *, weight: Value = 1.0, outer: Any = None, loss: Tensor | None = None) -> Tensor:
        """Add weight·g at the current weights to the objective: Σ_j c_j·g_j(w_{k_j}, λ) in place of g(w_K, λ).

        From then on `hypergrad`, `backward` and `value` use the sum of all losses that were added, at any steps. g
        at the last weights is part of it only if it was added too. A call of `hypergrad` leaves the sum as it is.

        Args:
            weight: c_j, a number or a scalar tensor, which may be an outer variable.
            outer: the batch of g, if it differs from that of the last step.
            loss: another loss instead of g, computed from `loop(x)` or `loop.weights` since the last step. Engines that
                run steps again compute its gradient at once, and store it in as much memory as the weights take.

        Its graph is kept only if the engine keeps the graphs of the steps. Returns its value, without the weight.

        Examples:
            Steps of rate 0.5 from 0 to λ are at λ/2 and 3/4·λ, so dΣ/dλ = 1/2·(w_1 − 1) + 3/4·(w_2 − 1).

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> lam = torch.tensor(4.0, requires_grad=True)
            >>> h = lambda m: 0.5 * (m.weight - lam).square().sum()
            >>> g = lambda m: 0.5 * (m.weight - 1).square().sum()
            >>> with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
            ...     for _ in range(2):
            ...         _ = loop.step()
            ...         _ = loop.add_outer_loss()
            ...     print(loop.hypergrad(lam))
            tensor(2.)
        """
        self._check_open()
        binding = self._binding
        binding.check_held(self._z, self._k)
        self._check_outer_variables()
        binding.announce("add_outer_loss")
        self._check_batch("weight=", (weight,))
        with EXCLUSIVE, torch.enable_grad(), undisturbed(binding), full_precision():
            end = self._end(outer, loss, as_weight(weight))
            try:
                self._tape.add_loss(end)
            finally:
                binding.hold(self._z, self._buffers)
            value = end.value
            self._added.append((end.weight * value).detach())
        terms: list[Term] = []
        if loss is None:
            self._outer_of_added = self._outer if outer is None else as_tuple(outer)
            terms = [Term("g", self._outer_loss(), self._outer_of_added)]
        self._note_kept_graph(self._k, end.leaves, terms)
        return value

    @overload
    def hypergrad(  # pyright: ignore[reportOverlappingOverload]  (a Tensor is an Iterable[Tensor] too)
        self, inputs: Tensor, *, outer: Any = ..., loss: Tensor | None = ..., allow_unused: bool = ...,
        create_graph: bool = ..., retain_graph: bool = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def hypergrad(
        self, inputs: Mapping[str, Tensor] | nn.Module, *, outer: Any = ..., loss: Tensor | None = ...,
        allow_unused: bool = ..., create_graph: bool = ..., retain_graph: bool = ...,
    ) -> dict[str, Tensor]: ...  # fmt: skip
    @overload
    def hypergrad(
        self, inputs: Iterable[Tensor], *, outer: Any = ..., loss: Tensor | None = ..., allow_unused: bool = ...,
        create_graph: bool = ..., retain_graph: bool = ...,
    ) -> list[Tensor]: ...  # fmt: skip
    def hypergrad(
        self,
        inputs: Inputs,
        *,
        outer: Any = None,
        loss: Tensor | None = None,
        allow_unused: bool = False,
        create_graph: bool = False,
        retain_graph: bool = False,
    ) -> Tensor | list[Tensor] | dict[str, Tensor]:
        """Return d g(w_K(λ), λ)/dλ for the inputs, in their structure, as torch.autograd.grad would.

        Args:
            inputs: a tensor, a list, a dict, or a module (a dict of its trainable parameters). The parameters of
                the inner model itself stand for its initial weights w_0.
            outer: the batch of g, if it differs from that of the last step.
            loss: another outer loss instead of g, computed from `loop(x)` or `loop.weights`.
            allow_unused: return zeros for an input that no loss depends on, instead of an error.
            create_graph: make the result differentiable (engine="unroll" only).
            retain_graph: keep the graph behind tensors of the batch (an encoder's), so that it can be used again.

        Examples:
            Two steps of rate 0.5 from 0 end at w = 0.75·λ, so dg/dλ = (w − 1)·0.75.

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> lam = torch.tensor(2.0, requires_grad=True)
            >>> h = lambda m: 0.5 * (m.weight - lam).square().sum()
            >>> g = lambda m: 0.5 * (m.weight - 1).square().sum()
            >>> with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
            ...     _ = loop.run(2)
            ...     print(loop.hypergrad(lam))
            ...     print(loop.hypergrad({"strength": lam}))
            ...     print(loop.hypergrad(lam, loss=3 * loop.weights["weight"].sum()))  # 3·0.75
            tensor(0.3750)
            {'strength': tensor(0.3750)}
            tensor(2.2500)
        """
        tensors = flatten(inputs)
        grads = self._gradients(list(tensors.values()), outer, loss, allow_unused, create_graph, retain_graph)
        grads = self._after_hooks(list(tensors.values()), grads, create_graph)
        named = dict(zip(tensors, grads, strict=True))
        if isinstance(inputs, Tensor):
            return named[""]
        return named if isinstance(inputs, (Mapping, nn.Module)) else list(named.values())

    def backward(
        self,
        inputs: Inputs | None = None,
        *,
        outer: Any = None,
        loss: Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add d g(w_K(λ), λ)/dλ to the `.grad` of every leaf that h or g uses, as loss.backward() would.

        The weights of the inner model are not an outer variable and get no gradient, unless `inputs` names them (to
        learn an initialisation). `inputs` restricts the gradient to the tensors it names.

        Examples:
            Two steps of rate 0.5 from 0 end at w = 0.75·λ, so dg/dλ = (w − 1)·0.75.

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> lam = torch.tensor(2.0, requires_grad=True)
            >>> h = lambda m: 0.5 * (m.weight - lam).square().sum()
            >>> g = lambda m: 0.5 * (m.weight - 1).square().sum()
            >>> with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
            ...     _ = loop.run(2)
            ...     loop.backward()
            >>> lam.grad
            tensor(0.3750)
        """
        if inputs is not None:
            wanted = list(flatten(inputs).values())
            grads = self._gradients(wanted, outer, loss, False, False, retain_graph)
            with without_hooks(self._binding.parameters.values()):
                torch.autograd.backward(wanted, grads)
            return
        found, _ = self._pull(None, outer, loss, False)
        pairs = [*found.direct.values(), *found.cut.values()]
        if not pairs:
            raise ValueError(
                "bilevel.inner: backward() found no outer variable: nothing that h or g uses requires grad, besides "
                "the inner weights. Set requires_grad on it before the first step."
            )
        if self._binding.share != 1:  # leaf by leaf, since each gradient is summed over the ranks
            behind = [leaf for x, _ in found.cut.values() for leaf in find_leaves(x)[0]]
            leaves = list({id(x): x for x in (*(x for x, _ in found.direct.values()), *behind)}.values())
            torch.autograd.backward(leaves, self._collect(leaves, found, {}, True, retain_graph))
            return
        with explained():
            torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs], retain_graph=retain_graph)

    def _gradients(
        self,
        wanted: list[Tensor],
        outer: Any,
        loss: Tensor | None,
        allow_unused: bool,
        create_graph: bool,
        retain_graph: bool,
    ) -> list[Tensor]:
        inner = {id(p) for p in self._binding.parameters.values()}
        if not self._tape.reaches_start and any(id(x) in inner for x in wanted):
            raise ValueError(
                f"bilevel.inner: engine={type(self._engine).__name__} does not go back to the initial weights of "
                "the model. Use Reverse() without truncate, or Unroll()."
            )
        once = list({id(x): x for x in wanted}.values())  # an input may be given under two names
        if self._engine.keeps_graphs or self._engine.traces_steps:
            self._refuse_late(once)
        if self._binding.own_parameters:  # in the graphs these are w_k; the gradient for w_0 is the adjoint
            once = [x for x in once if id(x) not in inner]
        found, start = self._pull(once, outer, loss, create_graph)
        return self._collect(wanted, found, start, allow_unused, retain_graph)

    def _after_hooks(self, inputs: list[Tensor], grads: list[Tensor], create_graph: bool) -> list[Tensor]:
        """Apply the hooks on outer variables once, as torch.autograd.grad does. Those on the weights are for steps."""
        inner = {id(p) for p in self._binding.parameters.values()}
        hooked = [bool(x._backward_hooks) and id(x) not in inner for x in inputs]
        return [
            torch.autograd.grad(x, x, grad, create_graph=create_graph)[0] if has_hook else grad
            for x, grad, has_hook in zip(inputs, grads, hooked, strict=True)
        ]

    def _refuse_late(self, inputs: list[Tensor]) -> None:
        for x in inputs:
            noted = self._binding.noted.get(id(x))
            if noted is not None and noted() is x and self._k:
                raise ValueError(
                    f"bilevel.inner: an input (shape {tuple(x.shape)}) did not require grad when the losses were first "
                    "evaluated, so the graphs of those steps lack it. Set requires_grad before the first step, "
                    "or use engine='reverse'."
                )

    def _collect(
        self, wanted: list[Tensor], found: Gradients, start: State, allow_unused: bool, retain_graph: bool
    ) -> list[Tensor]:
        """Return the gradients for the wanted tensors, also through the graphs that lead to cut tensors and to w_0."""
        behind = [*found.cut.values(), *((self._origin[n], d) for n, d in start.items() if n in self._origin)]
        through: Sequence[Tensor | None] = [None] * len(wanted)
        if behind:  # one backward pass for all cut tensors and w_0
            with explained(), without_hooks(wanted):
                through = torch.autograd.grad(
                    [x for x, _ in behind], wanted, [d for _, d in behind], allow_unused=True, retain_graph=retain_graph
                )
        parts: list[Tensor | None] = []
        for x, extra in zip(wanted, through, strict=True):
            both = [d for d in (found.direct.get(id(x), (x, None))[1], extra) if d is not None]
            parts.append(sum(both[1:], both[0]) if both else None)
        grads: list[Tensor] = []
        for i, (x, grad) in enumerate(zip(wanted, self._binding.gather(wanted, parts), strict=True)):
            if grad is None and not allow_unused:
                before = " No step was taken yet, so h plays no part." if self._k == 0 else ""
                raise ValueError(
                    f"bilevel.inner: neither loss depends on input {i} (shape {tuple(x.shape)}), so it has no "
                    f"hypergradient.{before} Check that h or g uses this very tensor, and not behind a .detach() "
                    "(bilevel.stop_gradient is the one that keeps a derivative), or pass allow_unused=True for zeros."
                )
            grads.append(torch.zeros_like(x) if grad is None else grad)
        return grads

    def _pull(
        self, wanted: list[Tensor] | None, outer: Any, loss: Tensor | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        self._check_open()
        binding = self._binding
        binding.check_held(self._z, self._k)
        self._check_samples()
        self._check_outer_variables()
        self._monitor.raise_if_not_finite()
        binding.announce(f"hypergrad by {self._engine}")
        binding.check_same_on_all_ranks(self._z)
        if self._added and (outer is not None or loss is not None):
            raise ValueError(
                "bilevel.inner: losses were added by loop.add_outer_loss, and the hypergradient is that of their sum. "
                "Add this one as well, loop.add_outer_loss(outer=...) or loop.add_outer_loss(loss=...), and leave out "
                "outer= and loss= here."
            )
        end = None if self._added else self._end(outer, loss)
        try:
            with EXCLUSIVE, torch.enable_grad(), undisturbed(binding):
                with full_precision():
                    found, start = self._tape.pull(end, wanted, create_graph)
                batch = None if loss is not None else self._outer if outer is None else as_tuple(outer)
                batch = self._outer_of_added if self._added else batch
                for recorded in self._last.values():
                    if self._sentinel.is_due(recorded.step):
                        with recorded.given() as step:
                            if step.micro is not None:  # one part has the same derivatives to test
                                step = step.parts()[0].step
                            self._sentinel.examine(
                                step, recorded.conditions, self._z, self._buffers, batch, self._trained
                            )
                if not binding.all_agree(is_finite(found.values())):
                    where = self._tape.first_not_finite(end) or "somewhere"
                    raise FloatingPointError(
                        f"bilevel.inner: the hypergradient is not finite: it stops being so {where}, going backwards. "
                        "A smaller rate, or a loss without √0, 0/0 or log 0 there, may help."
                    )
        finally:
            binding.hold(self._z, self._buffers)
        return found, start

    def _end(self, outer: Any, loss: Tensor | None, weight: Value = 1.0) -> _OuterLoss | _GivenLoss:
        """Return the outer loss at the current weights."""
        if loss is not None and outer is not None:
            raise ValueError("bilevel.inner: give outer= or loss=, not both: a loss that you computed had its batch.")
        if loss is not None:
            return _GivenLoss(self, scalar("loss=", loss), weight)
        batch = self._outer if outer is None else as_tuple(outer)
        self._check_batch("outer=", batch)
        return _OuterLoss(self, self._outer_loss(), batch, weight)

    def _outer_loss(self) -> Loss:
        if self._g is None:
            raise TypeError(
                "bilevel.inner: there is no g to evaluate. Give it: bilevel.inner(model, h, g), or pass a loss= that "
                "is computed from loop(x)."
            )
        return self._g

    # --- checks for changes between the steps ---

    def _refuse_graph_to_weights(self, where: str, batch: tuple[Any, ...]) -> None:
        """Refuse a batch that was computed from the weights of this loop, since a step would cut its graph."""
        tensors = [x for x in tensors_of(batch) if x.requires_grad]
        if tensors:
            inner = {id(p) for p in self._binding.parameters.values()} | {id(x) for x in self._z.values()}
            stop = {x.grad_fn for x in self._z.values()} - {None}
            itself = any(id(x) in inner or self.is_of_earlier_weights(x) for x in tensors)
            if itself or reaches([x for x in tensors if not x.is_leaf], inner, stop, self._binding.opened):
                raise ValueError(
                    f"bilevel.inner: a tensor in {where} was computed from the weights of this loop, and carries a "
                    "graph back to them, which a step would cut. Compute it inside h (or g), or "
                    ".detach() it if it is meant to be a constant."
                )

    def _check_batch(self, where: str, batch: tuple[Any, ...]) -> None:
        self._refuse_graph_to_weights(where, batch)
        if any(getattr(x, AUX, None) is self._binding.token for x in tensors_of(batch)):
            raise ValueError(
                f"bilevel.inner: a tensor in {where} is what a loss of this loop returned beside its value: it depends "
                "on the weights, and a step would take it for a constant. Keep it in a buffer of the model, "
                "model.hidden = bilevel.stop_gradient(hidden) inside h, and it is part of the loop; or .detach() it "
                "if it is meant to be a constant."
            )
        if self._tape.replays and any(hasattr(x, "__next__") for x in batch):
            raise TypeError(
                "bilevel.inner: a batch holds an iterator, which is used up when the step is run again. Give the step "
                "what it yields (next(iterator)), or use engine='unroll'."
            )

    def _check_outer_variables(self) -> None:
        """Where graphs are kept, refuse an outer variable that has changed since a graph used it."""
        for x, version in self._outer_variables:
            if not x.requires_grad:
                raise RuntimeError(
                    f"bilevel.inner: requires_grad of an outer variable (shape {tuple(x.shape)}) was switched off in "
                    "the block, and later steps would leave out its gradient. Leave it on, and .detach() it "
                    "in the loss where it is meant to be a constant."
                )
            if x._version != version:
                raise RuntimeError(
                    f"bilevel.inner: an outer variable (shape {tuple(x.shape)}) was changed in place after a step used "
                    "it. Take the hypergradient before changing it."
                )

    def _sample(self, k: int, terms: Sequence[Term]) -> None:
        """Store some entries of each batch that a kept graph uses, to notice changes that leave versions unchanged."""
        known = {id(x) for _, _, x, _ in self._samples[-8:]}
        for name, _, batch in terms:
            for x in tensors_of(batch):
                if id(x) not in known and x.device.type == "cpu" and x.layout == torch.strided and x.is_contiguous():
                    self._samples.append((k, name, x, _some_of(x)))

    def _check_samples(self) -> None:
        for k, name, x, before in self._samples:
            if not torch.equal(_some_of(x), before) and not bool(torch.isnan(before.double()).any()):
                raise RuntimeError(
                    f"bilevel.inner: a tensor in the batch of {name} (shape {tuple(x.shape)}) was changed after step "
                    f"k = {k} used it (by NumPy, or through .data), and the graph of that step refers to it. Give each "
                    "step a batch of its own, or take the hypergradient before refilling it."
                )

    def is_of_earlier_weights(self, leaf: Tensor) -> bool:
        """Return whether a leaf holds weights of an earlier step of this loop."""
        return getattr(leaf, OWNER, None) is self._binding.token

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "bilevel.inner: this loop's block has ended and its steps are forgotten. Call it inside the `with`; "
                "commit_() keeps the weights."
            )
        refuse_inference_mode()

    def close(self, *, announce: bool = False) -> None:
        """Release everything that the loop holds, and restore the model."""
        if self._closed:
            return
        self._closed = True
        try:
            if announce:
                self._binding.announce("end")
        finally:
            self._binding.close()
            self._z, self._origin, self._buffers, self._outer, self._last = {}, {}, {}, (), {}
            self._samples, self._outer_variables, self._accumulated, self._added = [], [], [], []
            self._outer_of_added = None
            self._tape = self._engine.tape()
            self._monitor = LossMonitor()


class _OuterLoss(End):
    """The outer loss c·g on a batch, as a function of z."""

    def __init__(self, loop: Loop, g: Loss, batch: tuple[Any, ...], weight: Value = 1.0) -> None:
        self._loop, self._g, self._k, self._buffers = loop, g, loop._k, loop._buffers
        self._watched: State = {}
        pairs: Pairs = []
        given = batch, weight
        self._batch, self.weight = cut_graph(given, pairs) if loop._tape.replays else given
        self.cut = pairs
        self.value = self._here = torch.zeros(())  # the last values of g: over all ranks, and on this one
        self._recorded: RecordedLoss | None = None  # what it takes to evaluate the loss at this state again

    @contextmanager
    def traced(self, z: State | None = None) -> Generator[Traced]:
        with self._conditions(), self._graph(z) as traced:
            self._note_value()
            yield traced

    @contextmanager
    def _conditions(self) -> Generator[None]:
        binding = self._loop._binding
        repeating = nullcontext() if self._recorded is None else self._recorded.repeating()
        with EXCLUSIVE, undisturbed(binding), repeating, torch.enable_grad():
            self.leaves = ()
            yield

    @contextmanager
    def _graph(self, z: State | None, *, problem: InnerProblem | None = None, once: bool = False) -> Generator[Traced]:
        """Yield the loss with its graph, for all inner problems or one. With `once`, its gradient frees the graph."""
        loop, since = self._loop, sequence_number()
        z, buffers, batch, binding = loop._z if z is None else z, self._buffers, self._batch, loop._binding
        if problem is not None:
            z, buffers, batch = problem.leaves(z), problem.rows(buffers), problem.rows(batch)
            binding = problem.binding
        follow = bool(binding.moving)
        with binding.inside(z, buffers, graph=True, statistics=follow, twice=not once) as inside, torch.enable_grad():
            value = binding.loss("g", self._g, inside, batch)
            self._here = value.detach()
            value = value if isinstance(self.weight, float) and self.weight == 1 else self.weight * value
            stand_ins = [x for _, x in self.cut]
            at = {**z, **inside.leaves, **inside.statistics}
            # with own parameters, a tensor that was computed from w_0 would have its gradient at w_k
            older = since if binding.own_parameters else None
            leaves, connected = find_leaves(value, at.values(), stand_ins, since=older)
            if not binding.own_parameters:
                refuse_hidden_parameter("g", value, at.values(), leaves, binding)
            if not (connected or (value.requires_grad and not loop._tape.replays)):
                raise disconnected("g")
            self.leaves = list({id(x): x for x in (*self.leaves, *leaves)}.values())
            self._watched = inside.watched
            retain = not once or has_older_nodes(value, since)
            at = {**inside.leaves, **inside.statistics}
            yield Traced(at, {"g": value}, [*self.cut], leaves, binding.share, retain)

    def _note_value(self) -> None:
        """Record the value of the loss, and check it."""
        loop = self._loop
        self.value = loop._binding.means_of_losses({"g": self._here})["g"]
        if self._recorded is not None:
            self._recorded.check(self._here)
        loop._monitor.record_loss(self._k + 1, "g", self.value, {})

    def _evaluate(self, use: Callable[[Traced], State], z: State | None = None) -> State:
        """Return what `use` makes of the loss, or of the loss of each inner problem. One graph at a time is kept."""
        binding = self._loop._binding
        problems = binding.separate()
        if not problems:
            with self._graph(z, once=True) as traced:
                self._note_value()
                return use(traced)
        binding.check_batch("g", self._batch)
        found: list[State] = []
        values: list[Tensor] = []
        modes = [m.training for m in binding.modules]
        for problem in problems:
            set_modes(binding.modules, modes)  # the loss may have changed them
            with self._graph(z, problem=problem, once=True) as traced:
                found.append(use(traced))
                values.append(self._here)
        self._here = torch.stack(values).sum()
        self._note_value()
        return binding.joined(found)

    @property
    def numbers(self) -> Sequence[Tensor]:
        return self.value, torch.as_tensor(self.weight, dtype=torch.float64, device="cpu")

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        def gradient(traced: Traced) -> State:
            self.warn_of_buffers(traced.to["g"])
            return _pull_loss(traced, self._loop._binding, inputs, into)

        with self._conditions():
            return self._evaluate(gradient, z)

    def kept(self) -> OuterLoss:
        """Record this loss, which is evaluated again when the sweep reaches its step."""
        recorded = RecordedLoss(self._k, Conditions(self._loop._binding))
        with self._conditions():
            self._evaluate(lambda traced: {})
            recorded.note(self._here, (self._batch, self.weight), self.leaves, self._loop._binding)
        self._recorded = recorded
        return self

    def warn_of_buffers(self, value: Tensor) -> None:
        if self._watched:
            grads = vjp({"g": value}, {"g": torch.ones_like(value)}, list(self._watched.values()))
            self._loop._binding.warn_if_read(dict(zip(self._watched, grads, strict=True)))


class _GivenLoss(End):
    """A loss that the user computed from loop(x), loop.weights or the model, times its weight."""

    is_function = False

    def __init__(self, loop: Loop, loss: Tensor, weight: Value = 1.0) -> None:
        self._loop, self.weight, self._plain = loop, weight, loop._binding.total(loss)
        self._loss = self._plain if isinstance(weight, float) and weight == 1 else weight * self._plain
        self.value = torch.zeros(())  # without the weight, over all ranks

    @contextmanager
    def traced(self, z: State | None = None) -> Generator[Traced]:
        loop, binding = self._loop, self._loop._binding
        own = {f"{n} ": p for n, p in binding.parameters.items()} if binding.own_parameters else {}
        at = {**{n: x for n, x in loop._z.items() if x.requires_grad}, **own}
        earlier = ValueError(
            "bilevel.inner: loss= was computed from weights of an earlier step. Compute it from loop(x) after "
            "the last step; loop.add_outer_loss(loss=...) takes losses of several steps, each right after its step."
        )
        try:
            state = (*at.values(), *loop._tape.start_of_graph())
            leaves, connected = find_leaves(self._loss, state, since=loop._mark if own else None)
        except ValueError:
            raise earlier from None
        if any(loop.is_of_earlier_weights(x) for x in leaves):
            raise earlier
        if not binding.own_parameters:
            refuse_hidden_parameter("loss=", self._loss, state, leaves, binding)
        if not (connected or (self._loss.requires_grad and not loop._tape.replays)):
            raise disconnected("loss=")
        self.leaves = leaves
        self.value = binding.means_of_losses({"g": self._plain.detach()})["g"]
        loop._monitor.record_loss(loop._k, "loss=", self.value, {})
        with loop._inside():
            yield Traced(at, {"g": self._loss}, [], leaves, binding.share)

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        with self.traced() as traced:
            found = _pull_loss(traced, self._loop._binding, inputs, into)
        a: State = {}
        for n, x in found.items():  # by loop.weights, and by the model's own parameters
            name = n.rstrip(" ")
            a[name] = a[name] + x if name in a else x
        return a

    def kept(self) -> OuterLoss:
        """Compute the gradients now, since a later step overwrites the weights that the graph of the loss uses."""
        found = Gradients()
        return _TakenLoss(self.pull(None, found), found, self.leaves)


class _TakenLoss(OuterLoss):
    """The gradients of a loss that the user computed at an earlier step."""

    def __init__(self, a: State, found: Gradients, leaves: Sequence[Tensor]) -> None:
        self._a, self._found, self.leaves = a, found, leaves

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
        chosen = None if inputs is None else {id(x) for x in inputs}
        for x, grad in self._found.direct.values():
            if chosen is None or id(x) in chosen:
                into.add(into.direct, x, grad)
        return self._a


def _pull_loss(traced: Traced, binding: Binding, inputs: Sequence[Tensor] | None, into: Gradients) -> State:
    """Return ∇_z of the traced loss, reduced over ranks, and add its direct gradient for λ to the sums."""
    a = traced.vjp({"g": torch.ones_like(traced.to["g"])}, inputs, into)
    weights = [n for n in traced.at if n.rstrip(" ") in binding.parameters]
    summed = binding.sum_over_ranks([a.get(n) for n in weights], [traced.at[n] for n in weights])
    a.update({n: x for n, x in zip(weights, summed, strict=True) if x is not None})
    return a


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _some_of(x: Tensor) -> Tensor:
    flat = x.detach().view(-1)
    return flat[:: max(1, len(flat) // 257)].clone()


def as_weight(c: Value) -> Value:
    """Check the weight of an outer loss. A tensor that does not require grad is copied, as it may be written to."""
    if isinstance(c, Tensor) and c.shape == () and c.is_floating_point():
        return c if c.requires_grad else c.clone()
    if isinstance(c, (int, float)) and math.isfinite(c):
        return float(c)
    raise ValueError(f"bilevel.inner: weight= of add_outer_loss is a finite number or a scalar tensor, got {c!r:.80}.")


def as_tuple(outer: Any) -> tuple[Any, ...]:
    """Return the arguments of g after the model: the entries of a tuple or list, or anything else as the only one."""
    return tuple(outer) if isinstance(outer, (tuple, list)) else (outer,)


def flatten(inputs: Inputs) -> dict[str, Tensor]:
    """Check the inputs of `hypergrad`, and return them as tensors by name."""
    tensors: dict[str, Tensor] = {}
    if isinstance(inputs, Tensor):
        tensors[""] = inputs
    elif isinstance(inputs, nn.Module):
        with EXCLUSIVE:
            tensors.update((n, p) for n, p in inputs.named_parameters() if p.requires_grad)
    elif isinstance(inputs, Mapping):
        tensors.update(cast("Mapping[str, Tensor]", inputs))
    else:
        tensors.update((str(i), x) for i, x in enumerate(inputs))
    if not tensors:
        raise ValueError("bilevel.inner: there is nothing to differentiate for: the inputs are empty.")
    for n, x in tensors.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"bilevel.inner: the inputs must be tensors, got {type(x).__name__} for {n or 'it'!r}.")
        if not x.requires_grad:
            raise ValueError(
                f"bilevel.inner: the input {n or 'given'} (shape {tuple(x.shape)}, {x.dtype}) does not require grad. "
                "Set requires_grad_() on it before the first step; only floating-point tensors can have it."
            )
    return tensors


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "bilevel.inner: torch.inference_mode is on, and nothing can be differentiated in it. Leave it for this "
            "block; torch.no_grad is fine."
        )
