"""The handle of a block takes the inner steps and computes the gradients of the outer loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from torch import Tensor, nn

from .engine.schedule import Plan
from .gradients import add_outer_loss, backward, call_model, hypergrad, value_of_outer_loss
from .inputs import Inputs, Only
from .model.losses import Loss
from .run import Run
from .step.batches import Reduction
from .steps import Losses, accumulate, compute, take_step
from .update.solvers import Value


class Loop:
    """The handle of a block. It takes the inner steps and computes the gradients of the outer loss."""

    def __init__(self, run: Run) -> None:
        self._run = run

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
        return take_step(self._checked(), batch, named, outer, only, h, micro, reduction, fetch)

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
        return accumulate(self._checked(), batch, named, only, h, micro, reduction, fetch)

    def run(self, steps: int, *batch: Any, outer: Any = None, **named: Any) -> Losses:
        """Take `steps` inner steps on the same batch, with the options of `step`. Return the losses before the last.

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

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(model, *args) at the current weights, for later steps to take as a constant.

        It is for what a loop computes from the weights between its steps: targets, advantages, pseudo-labels, losses
        of samples as their weights. Steps take it, or parts of it, in their batch, or close over it. The hypergradient
        goes through it to the weights from which it was computed. Write the function without torch.no_grad().

        Args:
            function: returns a tensor, or tensors in tuples, lists and dicts.
            args: its arguments after the model. Earlier computed values may be among them.

        Examples:
            A step of rate 1 to y = 2·w_0 ends there, so dw_1/dw_0 = 2.

            >>> import torch, bilevel_plugin as bilevel
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> h = lambda m, y: 0.5 * (m.weight - y).square().sum()
            >>> with bilevel.inner(model, h, lambda m: m.weight.sum(), solver="gd", lr=1.0) as loop:
            ...     y = loop.compute(lambda m: 2 * m.weight)
            ...     _ = loop.step(y)
            ...     print(loop.hypergrad(model.weight))
            tensor([[2.]])
        """
        return compute(self._checked(), function, args)

    def train(self, mode: bool = True) -> Loop:
        """Set the model to training mode. Its modes are restored after the block."""
        self._checked().model.module.train(mode)
        return self

    def eval(self) -> Loop:
        """Set the model to evaluation mode. Its modes are restored after the block."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of model.state_dict() at the current weights, without a graph."""
        return self._checked().state_dict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return model(*args, **kwargs) at the current weights. A loss made from it can go to `hypergrad(loss=)`."""
        return call_model(self._checked(), args, kwargs)

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
        return value_of_outer_loss(self._checked())

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
        self._checked().commit(optimizer)

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
        return add_outer_loss(self._checked(), weight, outer, loss)

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
        options = allow_unused, create_graph, retain_graph, queries
        return hypergrad(self._checked(), inputs, outer, loss, *options)

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
        backward(self._checked(), inputs, outer, loss, retain_graph)

    def _checked(self) -> Run:
        return self._run.checked()

    def close(self, *, announce: bool = False) -> None:
        """Release everything that the loop holds, and restore the model."""
        if not self._run.closed:
            self._run.close(announce=announce)
