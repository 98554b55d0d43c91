"""`bilevel.inner`: the block around a training loop. Its arguments, what is refused, context manager and decorator."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from . import engine as engines
from .autograd.trees import State
from .check import watching
from .engine import Engine
from .guards.opening import inner_parameters, refuse_inference_mode, refuse_model, refuse_shared_memory
from .inputs import Inputs, flatten
from .kernels.switches import EXCLUSIVE
from .loop import Loop, Losses
from .model.losses import Loss, evaluating_loss
from .model.model import Model
from .model.ranks import Alone
from .model.tasks import Tasks
from .run import Check, Run
from .update import solvers
from .update.companions import Companions, Rule
from .update.direction import Transform, bound_clip, checked_direction, observed, resolve_clip
from .update.optimizer import OptimizerRule
from .update.prepared import Preparation
from .update.registry import Formula
from .update.sam import refuse_unclear
from .update.solvers import Rate, StepRule
from .update.update import DescentRule, UpdateRule
from .update.watch import resolve_optimizer

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

_NEEDS = {"fixed point": "a fixed point of the step", "symmetry": "a step with a symmetric Jacobian"}
P = ParamSpec("P")
R = TypeVar("R")


def inner(
    model: nn.Module,
    h: Loss,
    g: Loss | None = None,
    *,
    solver: str | StepRule = "bigsam",
    lr: Rate | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Formula | None = None,
    direction: Transform | None = None,
    clip: float | Transform | None = None,
    unused: Literal["skip", "zero"] = "skip",
    engine: str | Engine = "reverse",
    tasks: int | None = None,
    group: ProcessGroup | None = None,
    local: Inputs = (),
    check: Check = "first",
    companions: Mapping[nn.Module, Rule] | None = None,
) -> Inner:
    """Make the loop in this block the inner problem of min_λ g(w_K(λ), λ), w⁺ = Φ_k(w, λ).

    Use it as `with inner(...) as loop:`, or as a decorator of `def train(loop, ...)`. Inside the block the model holds
    the current weights w_k. After the block it is as it was before.

    Args:
        model: any nn.Module; its trainable parameters are the inner variable w.
        h: the inner loss, h(model, *batch) -> scalar: the loss of the loop you have.
        g: the outer loss, g(model, *outer) -> scalar. It may be left out if nothing needs it, that is, with
            solver="gd" and `hypergrad(loss=...)`.
        solver: "bigsam", "gd", "bda", "penalty", or an object such as BiGSAM(t, s, alpha, every).
        lr: the rate of a solver that is given by name (default 1e-3). Together with an optimizer, it is a tensor or a
            function of k that multiplies the optimizer's rates. So a rate can be learned under a scheduler of torch.
        optimizer: an optimizer of torch.optim over (a part of) the model, or several over parts of it. Their rules are
            applied to the solver's direction. They are read, never stepped. It may also be a rule of your own, a
            function rule(w, d, state, *, lr, count) -> (new w, new state) of one weight: see `optimizer_rule`.
        direction: what your loop does to .grad before it clips and steps, as a function from a dict of tensors, keyed
            by the names of the weights, to another such dict. A function of two arguments is given the weights too.
        clip: the largest norm of the direction, as in torch.nn.utils.clip_grad_norm_; or `clip_norm(..., over=...)`, or
            `clip_value(...)`.
        unused: what a step does to weights that its losses do not use. "skip" leaves them alone, as zero_grad() does.
            "zero" gives a weight that had a gradient before one of zeros, as zero_grad(set_to_none=False) does, so that
            momentum and weight decay go on.
        engine: "reverse", "unroll", "forward", "cg", "neumann", or an object such as Reverse(checkpoint="sqrt").
        tasks: the number N of inner problems to solve at once. The first dimension of a batch is the task, and losses
            are summed over the tasks. The model keeps its weights; `loop(x)` and `loop.weights` have those of the
            tasks.
        group: processes of torch.distributed that solve one inner problem together. Each process steps on its own
            batches, and all hold the same w. h and g are the means over the ranks of what the losses return.
        local: with group, outer variables that belong to this rank alone, such as the weights of its own samples. The
            gradients of all other outer variables are summed over the ranks.
        check: "first" compares derivatives with finite differences in the first hypergradient of a model with these
            losses, at the cost of a few plain steps. It warns (`DerivativeWarning`) if one is wrong. "always"
            does so in every hypergradient, False never.
        companions: modules that follow the weights, each with its rule: `ema(decay)`, `copy(every)`, or a function
            (state, weights) -> state of the companion's parameters and the model's, by name, after each step. A step
            takes a companion for a constant, and the hypergradient does not. In the block it holds its current
            numbers.

    The outer variable λ needs no registration: it is every other tensor that requires grad and is used by h or g.

    Examples:
        One step of rate 0.5 goes to λ itself, so dg/dλ = 2·(λ − 1).

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> lam = torch.tensor(0.5, requires_grad=True)
        >>> h = lambda m: (m.weight - lam).square().sum()
        >>> g = lambda m: (m.weight - 1).square().sum()
        >>> with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
        ...     _ = loop.step()
        ...     print(loop.hypergrad(lam))
        tensor(-1.)
    """
    return Inner(
        model, h, g, solver, lr, optimizer, direction, clip, unused, engine, tasks, group, local, check, companions
    )


class Inner:
    """What `inner` returns: a context manager and decorator that opens a `Loop`."""

    def __init__(
        self,
        model: nn.Module,
        h: Loss,
        g: Loss | None,
        solver: str | StepRule,
        lr: Rate | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Formula | None,
        direction: Transform | None,
        clip: float | Transform | None,
        unused: Literal["skip", "zero"],
        engine: str | Engine,
        tasks: int | None,
        group: ProcessGroup | None,
        local: Inputs,
        check: Check,
        companions: Mapping[nn.Module, Rule] | None,
    ) -> None:
        _refuse_losses(h, g)
        if check not in ("first", "always", False):
            raise ValueError(f"bilevel.inner: check= takes 'first', 'always' or False, got {check!r}.")
        self._losses = h, g
        self._check: Check = check
        self._optimizers, self._formula = resolve_optimizer(optimizer)
        if self._optimizers:
            _refuse_rate(lr)
        self._rule, self._rate = solvers.resolve(solver, lr, optimizer is not None)
        self._engine = engines.resolve(engine)
        self._direction, self._clip = checked_direction(direction), resolve_clip(clip, model, self._optimizers)
        refuse_unclear(h, model, self._optimizers)
        self._optimizers = observed(self._clip, self._optimizers)
        if unused not in ("skip", "zero"):
            raise ValueError(f"bilevel.inner: unused= takes 'skip' or 'zero', got {unused!r}.")
        self._unused = unused
        if optimizer is None and self._rate is None:
            _refuse_transforms(clip=clip, direction=direction)
        self._model, self._tasks, self._companions = model, tasks, companions or {}
        if self._companions and (tasks is not None or group is not None or "fixed point" in self._engine.needs):
            raise ValueError(
                "bilevel.inner: companions= is for one inner problem on one process, and for engines that go back over "
                "the steps. Leave out tasks= and group=, and use engine='reverse', 'unroll' or 'forward'."
            )
        self._group = None if group is None else weakref.ref(group)  # gloo aborts if it is referenced past its end
        self._local = () if isinstance(local, tuple) and not local else tuple(flatten(local).values())
        self._refuse_group()
        self._open: defaultdict[int, list[Loop]] = defaultdict(list)  # by thread, since a decorator may run in several
        _, update = self._bind()
        self._refuse_needs(update)

    def _refuse_group(self) -> None:
        if self._group is None and self._local:
            raise ValueError("bilevel.inner: local= is for a group of processes. Give group=, or leave out local=.")
        if self._group is not None and self._tasks is not None:
            raise ValueError(
                "bilevel.inner: tasks= and group= were both given. Tasks do not share weights. Give each rank its own "
                "tasks, without group=, and wrap what they share (an encoder) in DistributedDataParallel."
            )
        if self._group is not None and self._engine.refuses_group:
            raise ValueError(f"bilevel.inner: {self._engine.refuses_group}; engine='reverse' takes a group.")

    def _refuse_needs(self, update: UpdateRule) -> None:
        for need in self._engine.needs:
            why = self._rule.lacks(need) or update.lacks(need)
            if why:
                raise ValueError(
                    f"bilevel.inner: engine={type(self._engine).__name__} needs {_NEEDS.get(need, need)}, and {why}. "
                    "engine='reverse' takes any solver."
                )

    def _bind(self) -> tuple[Model, UpdateRule]:
        """Return the model and the update of a new block, since both may have changed since the last one."""
        engine, optimizers = self._engine, self._optimizers
        with EXCLUSIVE:  # the weights of another thread's loop may be in the model
            refuse_model(self._model)
            parameters = inner_parameters(self._model, optimizers)
            refuse_shared_memory(self._model, parameters)
            tasks = None if self._tasks is None else Tasks(self._tasks, self._model, parameters)
            swaps = self._group is not None and (engine.keeps_graphs or engine.traces_steps)
            ranks = None if self._group is None else self._ranks(parameters, own=not swaps)
            followers = Companions(self._companions, self._model) if self._companions else None
            model = Model(
                self._model,
                parameters,
                tasks,
                ranks,
                graphs_are_kept=engine.keeps_graphs,
                swaps=swaps,
                notes_leaves=engine.traces_steps,
                companions=followers,
            )
        once, tasks = model.ranks.once, model.tasks
        if not optimizers and self._formula is None:
            return model, DescentRule(self._rate, once)
        names = {p: n for n, p in parameters.items()}
        rate = 1e-3 if self._formula is not None and self._rate is None else self._rate
        repeat = lambda x: tasks.repeat(once(x))  # noqa: E731
        return model, OptimizerRule(optimizers, self._formula, names, rate, once, repeat, tasks.vmapped)

    def _ranks(self, parameters: State, *, own: bool) -> Alone:
        from .model.group import Group

        group = None if self._group is None else self._group()
        if group is None:
            raise RuntimeError("bilevel.inner: the group of processes has ended (destroy_process_group).")
        return Group(group, self._local, next(iter(parameters.values())), own=own)

    def __getattr__(self, name: str) -> Any:
        hint = f" Open the block first: with bilevel.inner(...) as loop: loop.{name}" if hasattr(Loop, name) else ""
        raise AttributeError(f"bilevel.inner: the block itself has no attribute {name!r}.{hint}")

    def __enter__(self) -> Loop:
        refuse_inference_mode()
        if evaluating_loss() and torch.is_grad_enabled() and self._engine.tape().replays:
            raise RuntimeError(
                f"bilevel.inner: a block inside of a loss has engine={type(self._engine).__name__}, whose result has "
                "no graph that the loss could be differentiated through. Use engine='unroll' for it, or "
                "torch.no_grad() around it if it is meant to be a constant."
            )
        model, update = self._bind()  # bound anew, since the model may change between the calls of a decorator
        functions = self._direction, bound_clip(self._clip, model.parameters)
        prepare = Preparation(
            model.parameters,
            model.tasks.map,
            [f for f in functions if f is not None],
            zeros=self._unused == "zero",
            checks=self._check is not False,
            has_no_rate=update.has_no_rate,
        )
        loop = Loop(Run(model, self._losses, self._rule, update, prepare, self._engine, self._check))
        self._open[get_ident()].append(loop)
        watching.opened(self, loop)
        return loop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open[get_ident()].pop().close(announce=kind is None)

    def __call__(self, function: Callable[Concatenate[Loop, P], R]) -> Callable[P, R]:
        """Decorate `def train(loop, ...)`, so that each call of `train(...)` opens a new block."""

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self as loop:
                return function(loop, *args, **kwargs)

        return wrapped


def _refuse_losses(h: Loss, g: Loss | None) -> None:
    for name, loss in (("h", h), ("g", g)):
        if not callable(loss) and not (name == "g" and loss is None):
            raise TypeError(
                f"bilevel.inner: {name} must be a function of (model, *batch), got {type(loss).__name__}. The "
                "order of the arguments is bilevel.inner(model, h, g)."
            )
        if hasattr(loss, "_torchdynamo_orig_callable"):
            raise TypeError(
                f"bilevel.inner: {name} is torch.compile'd, and a compiled function has no second derivative. Give "
                "the function as it was before compiling; Reverse(compile=True) compiles the steps."
            )


def _refuse_rate(lr: Rate | None) -> None:
    if isinstance(lr, (int, float)):
        raise ValueError(
            f"bilevel.inner: lr={lr} and optimizer= were both given, but the optimizer has its own rate. Leave out "
            "lr=, or leave out optimizer=. (If lr= is a tensor or a function of k, it multiplies the optimizer's "
            "rates.)"
        )


def _refuse_transforms(**given: float | Transform | None) -> None:
    for name, function in given.items():
        if function is not None:
            raise ValueError(
                f"bilevel.inner: {name}= and a solver object were both given. The rates of a solver object are part "
                "of the direction. Give the rate by lr= or optimizer=, and the solver by name."
            )


__all__ = ["Inner", "Loop", "Losses", "inner"]
