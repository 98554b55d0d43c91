"""The handle of a block takes the inner steps and computes the gradients of the outer loss."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from .autograd.derive import without_hooks
from .autograd.graph import find_leaves
from .autograd.missing import explained
from .autograd.trees import State, cut_graph
from .check.reduction import check_reduction
from .collect import after_hooks, collected, in_sweeps
from .engine.schedule import Plan
from .guards.opening import refuse_inference_mode
from .inputs import Inputs, Only, as_tuple, flatten, names_of
from .kernels.replace import EXCLUSIVE
from .model.losses import Loss, WithKeywords
from .run import Run
from .step.batches import Reduction, checked
from .step.fetching import Fetched, Source
from .step.piece import Term
from .step.reduction import reductions_of
from .update.solvers import Value


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

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reductions: dict[object, Reduction] = {}  # whether a loss is a mean or a sum, for micro=

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
        run = self._checked()
        parts, gathered = checked(micro, reduction), run.accumulated
        if gathered and (batch or named or h is not None or fetch is not None):
            raise TypeError(
                "bilevel.inner: after loop.accumulate(...) the step is taken on what was gathered: call loop.step() "
                "without a batch. Give this batch to loop.accumulate(...) first, if it belongs to the step."
            )
        names = self._names_of(only)
        if names is not None and not run.gathered_for() <= names:
            raise ValueError(
                "bilevel.inner: loop.accumulate(...) has gathered gradients for weights that only= of this step leaves "
                "alone. Give only= to loop.accumulate(...) as well, and take the step of one part before the other's."
            )
        run.outer = run.outer if outer is None else as_tuple(outer)
        c_h, c_g = run.weights_of_losses(run.k + 1)
        with self._given(fetch, batch, named) as given:
            terms = [] if gathered else [self._term(h, *given, c_h)]
            if isinstance(c_g, Tensor) or c_g != 0:
                terms.append(self._outer_term(c_g))
            means = self._take(terms, names, parts, close=True)
        value = sum(gathered[1:], gathered[0]) if gathered else means.get("h")
        return Losses(value, means.get("g"), run.model.seen.aux.get("h"))

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
        run = self._checked()
        parts = checked(micro, reduction)
        if "fixed point" in run.engine.needs:
            raise ValueError(
                f"bilevel.inner: engine={type(run.engine).__name__} differentiates the fixed point of one step, and "
                "with accumulate() a step is made of several. Use engine='reverse'."
            )
        names, (c_h, _) = self._names_of(only), run.weights_of_losses(run.k + 1)
        with self._given(fetch, batch, named) as given:
            means = self._take([self._term(h, *given, c_h)], names, parts, close=False)
        value = means.get("h")
        run.accumulated.append(torch.zeros(()) if value is None else value)
        return Losses(value, None, run.model.seen.aux.get("h"))

    def _take(
        self,
        terms: list[Term],
        only: frozenset[str] | None,
        parts: tuple[int, Reduction | None] | None,
        *,
        close: bool,
    ) -> State:
        run, cut = self._run, list[tuple[Tensor, Tensor]]()
        if run.tape.replays:
            terms = [t if isinstance(t.batch, Fetched) else t._replace(batch=cut_graph(t.batch, cut)) for t in terms]
        micro = None
        if parts is not None:
            micro = reductions_of(
                self._reductions, run.model, run.z_now, run.buffers_now, terms, *parts, check_reduction
            )
        return run.take(run.k + 1, terms, cut, only, micro, close)

    @contextmanager
    def _given(
        self, fetch: Callable[[], Any] | None, batch: tuple[Any, ...], named: dict[str, Any]
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
        run = self._run
        with EXCLUSIVE:  # no other thread may draw between the readings of the random states
            named, source = Source.of(run.k + 1, fetch, run.model)
            again = run.tape.replays and not run.engine.keeps_graphs  # kept graphs refer to the batch anyway
            whole = source.batch()
            yield source if again else whole[: len(whole) - len(named)], named

    def _term(self, h: Loss | None, batch: tuple[Any, ...] | Source, named: dict[str, Any], weight: Value) -> Term:
        loss = self._run.h if h is None else h
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
        self._run.check_batch("the batch of h", batch)
        return Term("h", loss, batch, weight)

    def _outer_term(self, weight: Value) -> Term:
        run = self._run
        if run.g is None:
            raise TypeError(
                f"bilevel.inner: step k = {run.k + 1} of {type(run.rule).__name__} descends g as well, and there is no "
                "g. Give it: bilevel.inner(model, h, g), or take solver='gd'."
            )
        run.check_batch("outer=", run.outer)
        return Term("g", run.g, run.outer, weight)

    def _names_of(self, only: Only | None) -> frozenset[str] | None:
        """Return the names of the weights that `only=` selects."""
        run = self._run
        if only is not None and "fixed point" in run.engine.needs:
            raise ValueError(
                f"bilevel.inner: engine={type(run.engine).__name__} differentiates the fixed point of one step, and "
                "with only= several steps take turns. Use engine='reverse'."
            )
        return names_of(only, run.model, run.update)

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
        self._checked().model.module.train(mode)
        return self

    def eval(self) -> Loop:
        """Set the model to evaluation mode. Its modes are restored after the block."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of model.state_dict() at the current weights, without a graph."""
        run = self._checked()
        self._refuse_tasks("state_dict()")
        current = {**run.buffers_now, **run.z_now}
        return {
            n: current[n].detach().clone() if n in current else x.clone() if isinstance(x, Tensor) else x
            for n, x in run.model.module.state_dict().items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return model(*args, **kwargs) at the current weights. A loss made from it can go to `hypergrad(loss=)`."""
        run = self._checked()
        run.mark_weights()
        return run.inside(lambda evaluation: run.model.call(_forward, evaluation, args, kwargs))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name (with tasks: a leading task dimension). Do not change them in place."""
        run = self._checked()
        run.mark_weights()
        weights = {n: run.z[n] for n in run.model.parameters}
        # in a graph that is kept, backward sums the gradients for the weights over the ranks
        return weights if run.model.own else run.model.ranks.entering(weights)

    @property
    def steps(self) -> int:
        """The number of inner steps that were taken."""
        return self._run.k

    @property
    def plan(self) -> Plan | None:
        """What Reverse() has stored so far and how many steps it will run again. None for other engines."""
        return self._checked().tape.plan()

    @property
    def value(self) -> Tensor:
        """The value that `hypergrad` differentiates: g at the current weights on its last batch, summed over tasks.

        After `add_outer_loss` it is the sum of the losses that were added, each times its weight.
        """
        return self._checked().value()

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
        run = self._checked()
        run.monitor.raise_if_not_finite()
        self._refuse_tasks("commit_()")
        run.held.check(run.z_now, run.k)
        if optimizer:
            run.update.write_state(run.z)
        assert run.model.session is not None
        run.model.session.remember_values()

    def _refuse_tasks(self, call: str) -> None:
        if (count := self._run.model.tasks.count) is not None:
            raise RuntimeError(
                f"bilevel.inner: {call} has {count} sets of weights for one model. Take the one you "
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
        return self._checked().add_outer_loss(weight, outer, loss)

    @overload
    def hypergrad(  # pyright: ignore[reportOverlappingOverload]  (a Tensor is an Iterable[Tensor] too)
        self, inputs: Tensor, *, outer: Any = ..., loss: Tensor | None = ..., allow_unused: bool = ...,
        create_graph: bool = ..., retain_graph: bool = ..., queries: int | None = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def hypergrad(
        self, inputs: Mapping[str, Tensor] | nn.Module, *, outer: Any = ..., loss: Tensor | None = ...,
        allow_unused: bool = ..., create_graph: bool = ..., retain_graph: bool = ..., queries: int | None = ...,
    ) -> dict[str, Tensor]: ...  # fmt: skip
    @overload
    def hypergrad(
        self, inputs: Iterable[Tensor], *, outer: Any = ..., loss: Tensor | None = ..., allow_unused: bool = ...,
        create_graph: bool = ..., retain_graph: bool = ..., queries: int | None = ...,
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
        queries: int | None = None,
    ) -> Tensor | list[Tensor] | dict[str, Tensor]:
        """Return d g(w_K(λ), λ)/dλ for the inputs, in their structure, as torch.autograd.grad would.

        If g, or `loss`, is a vector of Q losses, the result has one more dimension in front: a row for each of them,
        all from one sweep.

        Args:
            inputs: a tensor, a list, a dict, or a module (a dict of its trainable parameters). The parameters of
                the inner model itself stand for its initial weights w_0.
            outer: the batch of g, if it differs from that of the last step.
            loss: another outer loss instead of g, computed from `loop(x)` or `loop.weights`.
            allow_unused: return zeros for an input that no loss depends on, instead of an error.
            create_graph: make the result differentiable (engine="unroll" only).
            retain_graph: keep the graph behind tensors of the batch (an encoder's), so that it can be used again.
            queries: how many rows of a vector go through one sweep, which takes the memory of as many adjoints. By
                default it is all of them.

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

            A row for each of three losses, w, 2·w and 3·w:

            >>> with bilevel.inner(model, h, lambda m, c: c * m.weight.sum(), solver="gd", lr=0.5) as loop:
            ...     _ = loop.run(2, outer=torch.tensor([1.0, 2.0, 3.0]))
            ...     print(loop.hypergrad(lam))
            tensor([0.7500, 1.5000, 2.2500])
        """
        tensors = flatten(inputs)
        wanted = list(tensors.values())

        def gradients(chosen: slice, retain: bool) -> tuple[list[Tensor], int | None]:
            return self._gradients(wanted, outer, loss, allow_unused, create_graph, retain, chosen)

        grads = in_sweeps(gradients, self._run.engine, queries, retain_graph)
        grads = after_hooks(self._run.model, wanted, grads, create_graph)
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
        run = self._checked()
        if inputs is not None:
            wanted = list(flatten(inputs).values())
            grads, _ = self._gradients(wanted, outer, loss, False, False, retain_graph, None)
            with without_hooks(run.model.parameters.values()):
                torch.autograd.backward(wanted, grads)
            return
        found, *_ = run.pull(None, outer, loss, False)
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

    def _gradients(
        self,
        wanted: list[Tensor],
        outer: Any,
        loss: Tensor | None,
        allow_unused: bool,
        create_graph: bool,
        retain_graph: bool,
        chosen: slice | None,
    ) -> tuple[list[Tensor], int | None]:
        """Return the gradients for these entries of a vector (None refuses one), and how many entries it has."""
        run = self._checked()
        inner = {id(p) for p in run.model.parameters.values()}
        if not run.tape.reaches_start and any(id(x) in inner for x in wanted):
            raise ValueError(
                f"bilevel.inner: engine={type(run.engine).__name__} does not go back to the initial weights of "
                "the model. Use Reverse() without truncate, or Unroll()."
            )
        once = list({id(x): x for x in wanted}.values())  # an input may be given under two names
        if run.engine.keeps_graphs or run.engine.traces_steps:
            self._refuse_late(once)
        if run.model.own:  # in the graphs these are w_k; the gradient for w_0 is the adjoint
            once = [x for x in once if id(x) not in inner]
        found, start, count = run.pull(once, outer, loss, create_graph, chosen)
        of_rows = None if count is None or chosen is None else len(range(count)[chosen])
        return collected(run, wanted, found, start, allow_unused, retain_graph, of_rows), count

    def _refuse_late(self, inputs: list[Tensor]) -> None:
        for x in inputs:
            noted = self._run.model.seen.constants.get(id(x))
            if noted is not None and noted() is x and self._run.k:
                raise ValueError(
                    f"bilevel.inner: an input (shape {tuple(x.shape)}) did not require grad when the losses were first "
                    "evaluated, so the graphs of those steps lack it. Set requires_grad before the first step, "
                    "or use engine='reverse'."
                )

    def _checked(self) -> Run:
        if self._run.closed:
            raise RuntimeError(
                "bilevel.inner: this loop's block has ended and its steps are forgotten. Call it inside the `with`; "
                "commit_() keeps the weights."
            )
        refuse_inference_mode()
        return self._run

    def close(self, *, announce: bool = False) -> None:
        """Release everything that the loop holds, and restore the model."""
        if not self._run.closed:
            self._run.close(announce=announce)


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
