"""`bilevel.inner`: the block around a training loop, and the handle that takes its steps."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from . import hypergrad as engines
from . import solvers
from .binding import EXCLUSIVE, Binding, Loss, State, full_precision, scalar
from .hypergrad import Engine
from .hypergrad.base import finite
from .hypergrad.plan import Plan
from .solvers import Rate, StepRule
from .step import Gradients, Pairs, Traced, Watch, cut_batch, disconnected, walk
from .tasks import TaskBinding
from .updates import FromOptimizer, Plain

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")
Inputs = Tensor | Iterable[Tensor] | Mapping[str, Tensor] | nn.Module
_OWNER = "_bilevel_loop"


class Losses(NamedTuple):
    """The losses that a step evaluated, before it moved; None for one that has weight 0 in it."""

    h: Tensor | None
    g: Tensor | None


def inner(
    model: nn.Module,
    h: Loss,
    g: Loss,
    *,
    solver: str | StepRule = "bigsam",
    lr: Rate | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    hypergrad: str | Engine = "reverse",
    tasks: int | None = None,
    group: ProcessGroup | None = None,
    local: Inputs = (),
) -> Inner:
    """Make the loop in this block the inner problem of min_λ g(w_K(λ), λ), w⁺ = Φ_k(w, λ).

    Use it as `with inner(...) as loop:`, or as a decorator of `def train(loop, ...)`.

    Args:
        model: any nn.Module; its trainable parameters are the inner variable w. It is left as it is.
        h: the inner loss, h(model, *batch) -> scalar: the loss of the loop you have.
        g: the outer loss, g(model, *outer) -> scalar.
        solver: "bigsam", "gd", "bda", "penalty", or an object such as BiGSAM(t, s, alpha, every).
        lr: the rates t and s of a named solver (1e-3 if not given).
        optimizer: an SGD, Adam or AdamW of torch.optim over (a part of) the model. Its rule is applied to the
            solver's direction; it is read, never stepped.
        hypergrad: "reverse", "unroll", "forward", "cg", "neumann", or an object such as Reverse(checkpoint="sqrt").
        tasks: N inner problems at once; batches carry the tasks as first dimension, losses are summed.
        group: processes of torch.distributed that solve one inner problem together. Each steps on batches of its own,
            all hold the same w; h and g are the means over the ranks of what the losses return there.
        local: with group, outer variables of this rank alone, such as the weights of its own samples. Gradients for
            any other are summed over the ranks.

    The outer variable λ needs no registration: it is whatever else requires grad and is used by h or g.
    """
    return Inner(model, h, g, solver, lr, optimizer, hypergrad, tasks, group, local)


class Inner:
    """What `inner` returns: a context manager and decorator that opens a `Loop`."""

    def __init__(
        self,
        model: nn.Module,
        h: Loss,
        g: Loss,
        solver: str | StepRule,
        lr: Rate | None,
        optimizer: torch.optim.Optimizer | None,
        hypergrad: str | Engine,
        tasks: int | None,
        group: ProcessGroup | None,
        local: Inputs,
    ) -> None:
        for name, loss in (("h", h), ("g", g)):
            if not callable(loss):
                raise TypeError(
                    f"bilevel.inner: {name} must be a function of (model, *batch), got {type(loss).__name__}."
                )
        self._losses = h, g
        self._rule = solvers.resolve(solver, lr, optimizer is not None)
        self._engine = engines.resolve(hypergrad)
        self._model, self._optimizer, self._tasks = model, optimizer, tasks
        self._group = None if group is None else weakref.ref(group)  # held past its end, it aborts the process (gloo)
        self._local = () if isinstance(local, tuple) and not local else tuple(flatten(local).values())
        if group is None and self._local:
            raise ValueError("bilevel.inner: local= is for a group of processes, and there is no group=.")
        if group is not None and tasks is not None:
            raise ValueError(
                "bilevel.inner: tasks= and group= were both given. Tasks do not share weights: give each rank tasks of "
                "its own, without group=, and put what they share (an encoder) under DistributedDataParallel."
            )
        if group is not None and self._engine.alone:
            raise ValueError(f"bilevel.inner: {self._engine.alone}; hypergrad='reverse' takes a group.")
        self._open: defaultdict[int, list[Loop]] = defaultdict(list)  # of each thread: a decorator may run in two
        _, update = self._bind()
        for need in self._engine.needs:
            why = self._rule.lacks(need) or update.lacks(need)
            if why:
                raise ValueError(
                    f"bilevel.inner: hypergrad={type(self._engine).__name__} needs a {need} of the step, and {why}. "
                    "hypergrad='reverse' takes any solver."
                )

    def _bind(self) -> tuple[Binding, Plain | FromOptimizer]:
        model, optimizer = self._model, self._optimizer
        with EXCLUSIVE:  # the weights of another thread's loop may be in the model
            if self._tasks is not None:
                binding = TaskBinding(model, optimizer, self._tasks)
            elif self._group is not None:
                from .parallel import ParallelBinding

                group = self._group()
                if group is None:
                    raise RuntimeError("bilevel.inner: the group of processes has ended (destroy_process_group).")
                binding = ParallelBinding(model, optimizer, group, self._local)
            else:
                binding = Binding(model, optimizer)
        if optimizer is None:
            return binding, Plain()
        return binding, FromOptimizer(optimizer, {p: n for n, p in binding.parameters.items()}, binding.once)

    def __enter__(self) -> Loop:
        binding, update = self._bind()  # anew each time: a decorator outlives changes of the model
        loop = Loop(binding, self._losses, self._rule, update, self._engine)
        self._open[get_ident()].append(loop)
        return loop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open[get_ident()].pop().close()

    def __call__(self, function: Callable[Concatenate[Loop, P], R]) -> Callable[P, R]:
        """Decorate `def train(loop, ...)`: each call of `train(...)` opens a block of its own."""

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self as loop:
                return function(loop, *args, **kwargs)

        return wrapped


class Loop:
    """The handle of a block: takes the inner steps and gives the gradients of the outer loss."""

    def __init__(
        self,
        binding: Binding,
        losses: tuple[Loss, Loss],
        rule: StepRule,
        update: Plain | FromOptimizer,
        engine: Engine,
    ) -> None:
        _refuse_inference_mode()
        self._binding, self._rule, self._update, self._engine = binding, rule, update, engine
        self._h, self._g = losses
        self._origin = binding.start()
        self._tape = engine.tape()
        self._z = self._tape.start({**self._origin, **{n: binding.each(x) for n, x in update.start.items()}})
        self._buffers = {n: b.detach().clone() for n, b in binding.buffers.items()}
        self._outer: tuple[Any, ...] = ()
        self._watch = Watch()
        self._lent: State = {}  # what the weights were when the user got hold of them
        self._k = 0
        self._token = object()
        self._closed = False

    # --- the inner loop ---

    def step(self, *batch: Any, outer: Any = None) -> Losses:
        """One inner step: w ← w − c_h·∇h(w, *batch) − c_g·∇g(w, *outer), or the optimizer's rule on it.

        `outer` is the batch of g; it stays until another one is given. Returns the losses before the step.
        """
        self._check_open()
        self._check_lent()
        self._outer = self._outer if outer is None else as_tuple(outer)
        losses = (("h", self._h, batch), ("g", self._g, self._outer))
        update = self._update.at_step()
        phi = self._tape.phi(
            self._k + 1, self._binding, self._rule, update, losses, self._buffers, self._watch, self._tape.again
        )
        self._z = self._tape.step(phi, self._z)
        self._k, self._buffers, self._lent = phi.k, phi.buffers_after, {}
        for x in self._z.values():
            setattr(x, _OWNER, self._token)  # to tell a loss= of earlier weights
        values = phi.take_values()
        return Losses(values.get("h"), values.get("g"))

    def run(self, steps: int, *batch: Any, outer: Any = None) -> Losses:
        """`steps` inner steps on the same batch. Returns the losses before the last of them."""
        if steps < 1:
            raise ValueError(f"bilevel.inner: run takes at least one step, got {steps}.")
        for _ in range(steps - 1):
            self.step(*batch, outer=outer)
        return self.step(*batch, outer=outer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """model(*args, **kwargs) at the current weights. A loss made from it can go to `hypergrad(loss=)`."""
        self._check_open()
        buffers = {n: b.clone() for n, b in self._buffers.items()}
        with self._binding.twice_differentiable():
            return self._binding.call(_forward, self._binding.own(self._weights), buffers, args, kwargs)[0]

    @property
    def _weights(self) -> State:
        return {n: self._z[n] for n in self._binding.parameters}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name (with tasks: a leading task dimension). Not to be changed in place."""
        self._check_open()
        self._lent = self._lent or {n: x.detach().clone() for n, x in self._weights.items()}
        return self._weights

    @property
    def steps(self) -> int:
        """How many inner steps were taken."""
        return self._k

    @property
    def plan(self) -> Plan | None:
        """What Reverse() keeps of the loop so far and which steps it will run again; None for other engines."""
        self._check_open()
        return self._tape.plan()

    @property
    def value(self) -> Tensor:
        """g at the current weights, on its last batch (with tasks: summed over them)."""
        self._check_open()
        self._watch.ask()
        with torch.no_grad():
            return self._outer_loss(self._outer)

    def commit_(self) -> None:
        """Write the current weights and buffers into the model, as a warm start for what comes after the block."""
        self._check_open()
        self._watch.ask()
        if isinstance(self._binding, TaskBinding):
            raise RuntimeError(
                f"bilevel.inner: commit_() has {self._binding.tasks} sets of weights for one model. Take the one you "
                "want from loop.weights, whose first dimension is the task, and load it with load_state_dict."
            )
        with torch.no_grad():
            for n, p in self._binding.parameters.items():
                p.copy_(self._z[n])
            for n, b in self._binding.buffers.items():
                b.copy_(self._buffers[n])

    # --- the outer gradient ---

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
        """d g(w_K(λ), λ)/dλ for the inputs, in their structure, as torch.autograd.grad would give it.

        Args:
            inputs: a tensor, a list, a dict, or a module (a dict of its trainable parameters). The parameters of
                the inner model itself stand for its initial weights w_0.
            outer: the batch of g, if it is not that of the last step.
            loss: another outer loss in place of g, computed from `loop(x)` or `loop.weights`.
            allow_unused: give zeros for an input that no loss reaches, instead of an error.
            create_graph: make the result differentiable (hypergrad="unroll" only).
            retain_graph: keep the graph behind tensors of the batch (an encoder's), to go through it again.
        """
        tensors = flatten(inputs)
        grads = self._gradients(list(tensors.values()), outer, loss, allow_unused, create_graph, retain_graph)
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
        """Add d g(w_K(λ), λ)/dλ into the `.grad` of every leaf that h or g reaches, as loss.backward() would.

        The weights of the inner model are no outer variable and get nothing, unless `inputs` names them (as in
        learning an initialisation). `inputs` restricts the gradient to what it names.
        """
        if inputs is not None:
            wanted = list(flatten(inputs).values())
            grads = self._gradients(wanted, outer, loss, False, False, retain_graph)
            torch.autograd.backward(wanted, grads)
            return
        found, _ = self._pull(None, outer, loss, False)
        pairs = [*found.direct.values(), *found.cut.values()]
        if not pairs:
            raise ValueError(
                "bilevel.inner: backward() found no outer variable: nothing that h or g uses requires grad, besides "
                "the inner weights. Set requires_grad on it before the first step."
            )
        if self._binding.group is not None:  # leaf by leaf, since each has to be summed over the ranks
            behind = [leaf for x, _ in found.cut.values() for leaf in walk(x, ())[0]]
            leaves = list({id(x): x for x in (*(x for x, _ in found.direct.values()), *behind)}.values())
            torch.autograd.backward(leaves, self._collect(leaves, found, {}, True, retain_graph))
            return
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
        if not self._tape.whole and any(x is p for x in wanted for p in self._binding.parameters.values()):
            raise ValueError(
                f"bilevel.inner: hypergrad={type(self._engine).__name__} does not go back to the initial weights of "
                "the model. Use Reverse() without truncate, or Unroll()."
            )
        once = list({id(x): x for x in wanted}.values())  # an input may be given under two names
        found, start = self._pull(once, outer, loss, create_graph)
        return self._collect(wanted, found, start, allow_unused, retain_graph)

    def _collect(
        self, wanted: list[Tensor], found: Gradients, start: State, allow_unused: bool, retain_graph: bool
    ) -> list[Tensor]:
        """The gradients of what is wanted, through the graphs behind cut tensors and w_0 as well."""
        behind = [*found.cut.values(), *((self._origin[n], d) for n, d in start.items() if n in self._origin)]
        through: Sequence[Tensor | None] = [None] * len(wanted)
        if behind:  # once through what lies behind the cut tensors and w_0
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
                raise ValueError(
                    f"bilevel.inner: neither loss depends on input {i} (shape {tuple(x.shape)}), so it has no "
                    "hypergradient. Check that h or g uses this very tensor, or pass allow_unused=True for zeros."
                )
            grads.append(torch.zeros_like(x) if grad is None else grad)
        return grads

    def _pull(
        self, wanted: list[Tensor] | None, outer: Any, loss: Tensor | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        self._check_open()
        self._check_lent()
        self._watch.ask()
        self._binding.check_same(self._z)
        with torch.enable_grad():
            end = self._end(outer, loss)
            with full_precision():
                found, start = self._tape.pull(end, wanted, create_graph)
        if not self._binding.agree(finite(found.values())):
            k = self._tape.blame(end)
            at = "" if k is None else " in the outer loss itself" if k > self._k else f" at step k = {k}"
            raise FloatingPointError(
                f"bilevel.inner: the hypergradient is not finite: it stops being so{at or ' somewhere'}, going "
                "backwards. A smaller rate, or a loss without √0, 0/0 or log 0 there, may help."
            )
        return found, start

    def _end(self, outer: Any, loss: Tensor | None) -> Traced:
        """The outer loss at z_K, with its graph."""
        if loss is not None and outer is not None:
            raise ValueError("bilevel.inner: give outer= or loss=, not both: a loss that you computed had its batch.")
        pairs: Pairs = []
        if loss is not None:
            name, value = "loss=", self._binding.mean("loss=", scalar("loss=", loss))
        else:
            batch = self._outer if outer is None else as_tuple(outer)
            if self._tape.again:
                batch = cut_batch(batch, pairs)
            name, value = "g", self._outer_loss(batch)
            self._watch.see(self._k + 1, name, value.detach(), self._weights)
        leaves, connected = walk(value, self._z.values(), [stand_in for _, stand_in in pairs])
        if any(getattr(x, _OWNER, None) is self._token for x in leaves):
            raise ValueError(
                "bilevel.inner: loss= was computed from weights of an earlier step. Compute it from loop(x) after "
                "the last step; hypergrad='unroll' takes losses of several steps."
            )
        if not (connected or (value.requires_grad and not self._tape.again)):  # unroll takes losses of any step
            raise disconnected(name)
        return Traced(self._z, {"g": value}, pairs, leaves)

    def _outer_loss(self, batch: tuple[Any, ...]) -> Tensor:
        buffers = {n: b.clone() for n, b in self._buffers.items()}
        with self._binding.twice_differentiable():
            return self._binding.loss("g", self._g, self._binding.own(self._weights), buffers, batch)[0]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "bilevel.inner: this loop's block has ended and its steps are forgotten. Call it inside the `with`; "
                "commit_() keeps the weights."
            )
        _refuse_inference_mode()

    def _check_lent(self) -> None:
        changed = [n for n, x in self._lent.items() if x.device.type != "meta" and not _same(x, self._z[n])]
        if changed:
            raise RuntimeError(
                f"bilevel.inner: the weight {changed[0]!r} was changed by hand after step k = {self._k}, and the "
                "derivative of that change is not known. Work on copies of loop.weights; what a step should do to the "
                "weights (a projection, say) belongs into h, as a function of them."
            )

    def close(self) -> None:
        """Forget everything that the loop holds."""
        self._closed = True
        self._binding.group = None
        self._z, self._origin, self._buffers, self._outer, self._lent = {}, {}, {}, (), {}
        self._tape = self._engine.tape()
        self._watch.before = None  # which knows its watch
        self._watch = Watch()


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, as far as numbers go: nan is nan."""
    return bool(torch.isclose(x, y.detach(), rtol=0, atol=0, equal_nan=True).all())


def as_tuple(outer: Any) -> tuple[Any, ...]:
    """The batch of g: a tuple or list is its arguments, anything else the one argument."""
    return tuple(outer) if isinstance(outer, (tuple, list)) else (outer,)


def flatten(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors of a hypergrad() argument by name, checked."""
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


def _refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "bilevel.inner: torch.inference_mode is on, and nothing can be differentiated in it. Leave it for this "
            "block; torch.no_grad is fine."
        )
