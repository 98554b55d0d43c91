"""The model as a function of its weights and buffers.

The weights can enter a loss in two ways.

- *Own parameters*: w_k is written into the model's own parameters, which are the leaves for which derivatives are
  taken. The loss runs as it does in the plain loop: aliases, hooks, closures over `model.parameters()` and backward
  passes that run a part of the model again all see the right weights. This is for engines that keep no graph from one
  step to the next.
- *Swapped in*: the weights are separate tensors, with a graph (`unroll`, `memory=`) or of one of several tasks. They
  replace the parameters while losses and their derivatives are computed, by `torch.func.functional_call`.

Buffers are swapped in either way, so that a loss may update them in place. Between the steps the model's own tensors
hold the values of the current state.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ..autograd.derive import without_hooks
from ..autograd.graph import sequence_number
from ..autograd.trees import State
from ..autograd.weak import WeakTensors
from ..kernels.replace import Kernels, replaced
from ..kernels.statistics import NORMALISATIONS, RunningStatistics
from ..kernels.stopping import Differentiation, constant_in_step, evaluating
from .losses import active_models
from .ranks import Alone
from .session import Session
from .tasks import OneProblem

if TYPE_CHECKING:
    from ..update.companions import Companions

T = TypeVar("T")
_RUNNING = ("running_mean", "running_var")
# Those of torch. (bitsandbytes computes differentiable products of dequantised weights, which is exact.)
QUANTISED = (
    "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized", "torch.nn.quantized",
)  # fmt: skip
_NOTHING = nullcontext()
Place = tuple[dict[str, Any], str, str]  # (the dict of a module, the key there, the name of the tensor)


@dataclass
class Evaluation:
    """The tensors that are in the model while losses are evaluated."""

    weights: State  # what the losses use; the direction is the gradient with respect to these
    leaves: State  # what the step started from; the step is differentiated with respect to these
    statistics: State  # the buffers that are part of the state, as leaves
    watched: State  # the other buffers that a step has changed, as leaves
    taking: Differentiation
    left: Callable[[], State]  # returns the buffers as the losses have left them
    tasks: State | None = None  # the tensors of all tasks, if the losses are mapped over them
    running: RunningStatistics | None = None  # who normalises
    kernels: Kernels | None = None  # the mode that the model runs in

    @contextmanager
    def with_kernels(self) -> Generator[None]:
        """Have the kernels on inside this context, and not only where the model is called."""
        kernels, self.kernels = self.kernels, None
        try:
            with kernels or _NOTHING:
                yield
        finally:
            self.kernels = kernels


@dataclass
class Seen:
    """What the evaluations of a loop have shown of its model and losses so far."""

    statistics: tuple[str, ...]  # the buffers that are part of the state
    running: tuple[str, ...]  # those of normalisations
    moving: set[str] = field(default_factory=set[str])  # the statistics that a step has changed
    changing: set[str] = field(default_factory=set[str])  # the other floating-point buffers that a step has changed
    stops: bool = False  # a loss has called `stop_gradient`
    derives: bool = False  # a loss takes derivatives of its own
    recomputes: bool = False  # a part of a loss is under activation checkpointing
    eager_only: str = ""  # why the losses can't run as compiled code, where no function is replaced
    unknown: tuple[str, str] | None = None  # why the derivative of running statistics is not known, and a fix
    outside: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # statistics of other modules, updated here
    constants: dict[int, Any] = field(default_factory=dict[int, Any])  # leaves of losses that do not require grad
    aux: dict[str, Any] = field(default_factory=dict[str, Any])  # what the losses last returned beside their values
    states: WeakTensors = field(default_factory=WeakTensors)  # weights of steps that the user was given
    derived: WeakTensors = field(default_factory=WeakTensors)  # what depends on the weights, and has no graph
    small: set[object] = field(default_factory=set[object])  # kinds of pieces that have no large product
    plans: dict[object, Any] = field(default_factory=dict[object, Any])  # where its losses hold what (guards/holding)
    warns: bool = True  # whether a buffer that is changed and read is warned of


class Model:
    """The model as a function of the inner variable w, its trainable parameters, and of its buffers.

    With optimizers, w is what they hold: `parameters`. Any other trainable parameter stays in the model, and may be an
    outer variable. `tasks` and `ranks` are what several inner problems, and several processes, change. With `swaps`,
    weights are swapped in although no graph outlives its step. With `notes_leaves`, leaves of losses that do not
    require grad are remembered: a step that has run can't be differentiated with respect to them.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: State,
        tasks: OneProblem | None = None,
        ranks: Alone | None = None,
        *,
        graphs_are_kept: bool = False,
        swaps: bool = False,
        notes_leaves: bool = False,
        companions: Companions | None = None,
    ) -> None:
        self.module, self.parameters, self.companions = module, parameters, companions
        followers = [] if companions is None else companions.modules
        self._host = _Host(module, followers)
        self.tasks, self.ranks = tasks or OneProblem(), ranks or Alone()
        # A block inside a loss, on the same model as that loss, must not write to the model: the graph of the loss is
        # still being built. The weights of such a block are only swapped in, as those of tasks are.
        nested = any(id(m) in modules for modules in active_models() for m in module.modules())
        self.holds = self.tasks.count is None and not nested
        self.graphs_are_kept, self._notes_leaves = graphs_are_kept, notes_leaves or graphs_are_kept
        self.own = self.tasks.count is None and not (graphs_are_kept or swaps)
        self.modules = (*module.modules(), *(m for follower in followers for m in follower.modules()))
        self.ids = frozenset(map(id, self.modules))
        # a buffer that requires grad is an outer variable, and is not swapped
        self.buffers: State = {n: b for n, b in module.named_buffers() if b is not None and not b.requires_grad}
        if companions is not None:  # they are part of the state as running statistics are
            self.buffers.update({**companions.parameters, **companions.buffers})
        self.places = list(_places(self.modules, {**parameters, **self.buffers}))
        self._slots = _slots(self._host, {**parameters, **self.buffers})
        self._buffer_places = [place for place in self.places if place[2] in self.buffers]
        tracked = {
            id(b)
            for m in self.modules
            if isinstance(m, NORMALISATIONS)
            for n, b in m.named_buffers(recurse=False)
            if n in _RUNNING
        }
        running = tuple(n for n, b in self.buffers.items() if id(b) in tracked)
        self.seen = Seen(running, running)
        if companions is not None:
            self.seen.statistics += tuple(companions.parameters)
            self.seen.moving.update(companions.parameters)
        self.buffers = self.tasks.repeated(self.buffers)
        held = (*module.parameters(), *self.buffers.values())
        self.devices = {t.device for t in held if t.device.type not in ("cpu", "meta")}
        self.device_types = sorted({"cpu", *(d.type for d in self.devices)})
        self._recurrent_on_gpu = bool(self.devices) and any(isinstance(m, nn.RNNBase) for m in self.modules)
        self.quantised = any(type(m).__module__.startswith(QUANTISED) for m in self.modules)
        self.parametrized = any(parametrize.is_parametrized(m) for m in self.modules)
        self.session: Session | None = None
        self.opened = 0  # autograd's sequence number at which the block was opened
        self.held: State | None = None  # the state whose values the model's own tensors hold
        self.held_buffers: State = {}
        self.versions: list[int] = []

    def structure(self) -> tuple[object, ...]:
        """Return a key that is equal for models of the same structure in the same modes."""
        shapes = tuple((n, p.shape, p.dtype) for n, p in self.parameters.items())
        return tuple((type(m), m.training) for m in self.modules), shapes

    def initial_weights(self) -> State:
        """Return w_0, with the graph that leads to the model's parameters."""
        self.ranks.check_start(self.parameters)
        with torch.enable_grad():
            return {n: self.tasks.repeat(self.ranks.once(p)) for n, p in self.parameters.items()}

    # --- the block: what the model held before it, and what it holds now ---

    def open(self) -> None:
        """Save the values of the model's tensors, which `close` restores."""
        written = (*self.parameters.values(), *self.buffers.values()) if self.holds else ()
        module = self.module if self.companions is None else self._host
        self.session = Session.open(module, self.parameters, written, self.note_versions)
        for p in () if self.companions is None else self.companions.parameters.values():
            p.requires_grad_(False)  # a step takes no gradient with respect to it
        self.opened = sequence_number()

    def close(self) -> None:
        """Restore the values that `open` saved."""
        if self.session is not None:
            self.session.close()
        self.session = self.held = None
        self.ranks.close()

    def hold(self, z: State, buffers: State) -> None:
        """Write the values of this state into the model's own tensors."""
        if not self.holds or self.held is z:
            return
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters.values()), [z[n] for n in self.parameters])  # pyright: ignore
            for n, b in self.buffers.items():
                new = z[n] if n in z else buffers[n]
                if new is not b:
                    b.copy_(new)
        self.held, self.held_buffers = z, buffers
        self.note_versions()

    def note_versions(self) -> None:
        """Record the versions of the parameters after a write of this loop. A later change is one by hand."""
        self.versions = [p._version for p in self.parameters.values()]

    # --- the model as a function ---

    def at(
        self,
        z: State,
        buffers: State,
        run: Callable[[Evaluation], T],
        *,
        graph: bool = False,
        follow: bool = False,
        twice: bool | None = None,
        one: bool = False,
        first: bool = False,
    ) -> T:
        """Return run(evaluation) with the weights of z, and copies of its buffers, in the model.

        With `graph`, a gradient can be differentiated a second time, unless `twice` is False. With `graph` and
        `follow`, running statistics can be differentiated with respect to. `one`: z is the state of one of the tasks.
        `first`: a step is taken, and not run again; then alone statistics of modules outside of the model are updated.
        """
        taking = Differentiation()
        copies, statistics, watched = self._copies(z, buffers, graph, follow)
        if self.own:
            self.hold(z, buffers)
            leaves = weights = self.parameters
        else:
            leaves = {n: z[n] for n in self.parameters}
            weights = self.ranks.entering(leaves)
            if any(x.grad_fn is not None for x in weights.values()):
                if self.seen.derives:  # what a loss derives must not go through the weights into earlier steps
                    weights = {n: constant_in_step(taking, x) for n, x in weights.items()}
                else:
                    taking.behind = tuple(weights.values())
            copies.update(weights)
        mapped = self.tasks.count is not None and not one
        left = (lambda: {n: copies[n] for n in self.buffers}) if mapped else self.present_buffers
        evaluation = Evaluation(weights, leaves, statistics, watched, taking, left, copies if mapped else None)
        with (
            self.kernels(
                evaluation,
                graph=graph,
                twice=graph if twice is None else twice,
                follow=bool(statistics),
                first=first,
            ),
            evaluating(taking),
            # hooks on parameters belong to the direction (see update/direction.py), and not to its derivative
            without_hooks(self.parameters.values()) if self.own else _NOTHING,
        ):
            try:
                return run(evaluation) if mapped else self.swapped(copies, lambda: run(evaluation))
            finally:
                seen = self.seen
                seen.stops, seen.derives = seen.stops or taking.stops, seen.derives or taking.derives
                seen.eager_only = seen.eager_only or taking.eager_only
                seen.recomputes = seen.recomputes or (evaluation.kernels is not None and evaluation.kernels.recomputes)
                torch.clear_autocast_cache()  # a backward pass that ran code again may have left copies there

    def swapped(self, tensors: State, run: Callable[[], T]) -> T:
        """Return run(), with these tensors in place of the parameters and buffers of the same names."""
        given = {slot: tensors[n] for slot, n in self._slots if n in tensors}
        if not given:
            return run()
        before = [(holder, key, holder[key]) for holder, key, n in self.places if n in tensors]
        try:
            return functional_call(self._host, given, (run,), tie_weights=False)
        finally:
            for holder, key, x in before:  # also if a loss has removed a tensor from its module
                if holder.get(key) is not x:
                    holder[key] = x

    def call(self, function: Callable[..., Any], evaluation: Evaluation, args: Any, kwargs: Any = None) -> Any:
        """Return function(model, *args, **kwargs), mapped over the tasks if there are several."""
        if evaluation.kernels is None:  # they are on, or this is compiled code
            return self._call(function, evaluation, args, kwargs or {})
        with evaluation.kernels:
            return self._call(function, evaluation, args, kwargs or {})

    def _call(self, function: Callable[..., Any], evaluation: Evaluation, args: Any, kwargs: Any) -> Any:
        if evaluation.tasks is None:
            return function(self.module, *args, **kwargs)
        return self.tasks.mapped(self, function, evaluation.tasks, (args, kwargs))

    def present_buffers(self, modules: Iterable[nn.Module] | None = None) -> State:
        """Return the buffers that are in the model now, or in some of its modules."""
        holders = None if modules is None else {id(m._buffers) for m in modules}
        return {n: holder[key] for holder, key, n in self._buffer_places if holders is None or id(holder) in holders}

    def put_buffers(self, buffers: State) -> None:
        """Replace the buffers of the same names by these, for the rest of an evaluation."""
        for holder, key, n in self._buffer_places if buffers else ():
            if n in buffers:
                holder[key] = buffers[n]

    def _copies(self, z: State, buffers: State, graph: bool, follow: bool) -> tuple[State, State, State]:
        """Return copies of the buffers for the losses, and the leaves among what they are copies of."""
        copies: State = {}
        leaves: tuple[State, State] = {}, {}
        with torch.set_grad_enabled(graph):
            for n in self.buffers:
                old = z[n] if n in z else buffers[n]
                followed = graph and follow and n in z and n in self.seen.statistics
                if followed or (graph and n in self.seen.changing):
                    leaf = old if followed and old.requires_grad else old.detach().requires_grad_()
                    leaves[0 if followed else 1][n] = leaf
                    copies[n] = leaf.clone()
                else:
                    copies[n] = old.detach().clone()
        return copies, *leaves

    def kernels(
        self,
        evaluation: Evaluation,
        *,
        graph: bool = True,
        twice: bool = True,
        follow: bool = False,
        first: bool = False,
    ) -> AbstractContextManager[Any]:
        """Replace the functions whose derivative with respect to the weights is missing or wrong, in what `call` runs.

        With `graph`, a derivative is taken of more than the direction of a step; with `twice`, that of the direction.
        """
        taking, seen = evaluation.taking, self.seen
        taking.unknown = seen.unknown
        evaluation.running = RunningStatistics(
            taking, self.present_buffers, seen.outside, differentiable=follow, first=first, warns=seen.warns
        )
        # the weights of one task are in the model only while a loss runs, not in the backward pass
        kept = self.graphs_are_kept or self.tasks.count is not None
        mode = evaluation.kernels = Kernels(
            taking,
            differentiated=graph,
            statistics=evaluation.running,
            noted=seen.constants if kept or self._notes_leaves else None,
            graphs_are_kept=kept,
        )
        mode.recomputes = seen.recomputes
        # on a device the kernels of the plain loop may draw different random numbers
        fused = not (twice or self.devices or evaluation.tasks is not None)
        return replaced(mode, fused=fused, recurrent_on_gpu=self._recurrent_on_gpu)


class _Host(nn.Module):
    """A module that holds the model and runs a function, so that `functional_call` swaps tensors around any code."""

    def __init__(self, model: nn.Module, companions: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.model = model
        self.companions = nn.ModuleList(companions)

    def __call__(self, run: Callable[[], T]) -> T:  # not `forward`: the user's global hooks never see it
        return run()


def _places(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> Iterable[Place]:
    """Yield each place that holds one of these tensors; tied weights have several, a module of two names is one."""
    names = {id(t): n for n, t in tensors.items()}
    for m in modules:
        for holder in (m._parameters, m._buffers):
            yield from ((holder, key, names[id(t)]) for key, t in holder.items() if id(t) in names)


def _slots(host: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the same places by the names that `functional_call` of the host takes, with the names of the tensors."""
    names = {id(t): n for n, t in tensors.items()}
    return [
        (f"{prefix}.{key}", names[id(t)])
        for prefix, m in host.named_modules()
        for held in (m._parameters, m._buffers)
        for key, t in held.items()
        if id(t) in names
    ]
