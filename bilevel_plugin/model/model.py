"""The model as a function of its weights and buffers. After the block the model is restored to what it was.

The weights can enter a loss in two ways.

- *Own parameters*: w_k is written into the model's own parameters. These are the leaves for which derivatives are
  taken. The loss runs as it does in the plain loop: aliases, hooks, closures over `model.parameters()` and backward
  passes that run a part of the model again all see the right weights. This is for engines that keep no graph from one
  step to the next.
- *Swapped in*: the weights are separate tensors, with a graph (`unroll`, `memory=`) or a task dimension. They replace
  the parameters while a loss and its derivative are computed, as in `torch.func.functional_call`. Where the
  parameters are in the model is looked up only once.

Buffers are swapped in either way, so that a loss may update them in place. Between the steps the model's own tensors
hold the values of the current state.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..autograd.derive import without_hooks
from ..autograd.graph import sequence_number
from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State, as_leaves, map_tensors, same_bits, tensors_of
from ..kernels.replace import Kernels, replaced
from ..kernels.statistics import NORMALISATIONS, RunningStatistics
from ..kernels.stopping import Evaluation, constant_in_step, evaluating, is_stopped, stop_gradient
from ..kernels.switches import EXCLUSIVE
from .given import inner_parameters, refuse_model, refuse_shared_memory
from .losses import Loss, active_models, check_arguments, value_and_aux
from .session import Session

_RUNNING = ("running_mean", "running_var")
OWNER = "_bilevel_loop"  # the attribute of a tensor that names the loop whose weights it holds
AUX = "_bilevel_aux"  # the attribute of a tensor that a loss returned beside its value, if it depends on the weights


_NOTHING = nullcontext()


@dataclass
class Inside:
    """The tensors that are in the model while a loss runs."""

    weights: State  # the weights that the losses use; the direction is the gradient for these
    leaves: State  # the weights that the step started from; the step is differentiated for these
    statistics: State  # the buffers that are part of the state and can be differentiated for
    watched: State  # other buffers that a step has changed
    buffers: Callable[[], State]
    swapped: State  # all tensors that replace tensors of the model
    taking: Evaluation
    statistics_of: RunningStatistics | None = None  # who normalises
    mode: AbstractContextManager[Any] = _NOTHING  # in which losses run


@dataclass(frozen=True)
class InnerProblem:
    """One of several inner problems: the row of all states and batches that is its own."""

    binding: Binding
    row: int

    def rows(self, tree: Any) -> Any:
        """Return its part of every tensor. The leading dimension stays, with size 1."""
        with torch.enable_grad():
            return map_tensors(lambda x: x[self.row : self.row + 1], tree)

    def leaves(self, z: State) -> State:
        """Return its part of a state as new leaves."""
        return as_leaves(self.rows(z))


class Binding:
    """The model as a function of the weights w (its trainable parameters) and of its buffers.

    With an optimizer, w is what the optimizer holds. Any other trainable parameter stays in the model, and may be an
    outer variable.
    """

    tasks: int | None = None
    vmaps_losses: bool = False
    batch_dimension: int = 0  # the dimension of the tensors of a batch that counts the samples
    share: float = 1.0  # the weight of this process in a mean over all ranks

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *, own_parameters: bool = True
    ) -> None:
        refuse_model(model)
        # A block inside a loss, on the same model as that loss, must not write to the model: the graph of the loss is
        # still being built. The weights of such a block are only swapped in, as those of tasks are.
        self.holds = not any(id(m) in modules for modules in active_models() for m in model.modules())
        self.model, self.own_parameters = model, own_parameters
        self.parameters = inner_parameters(model, optimizers)
        self.modules = tuple(model.modules())
        self._module_ids = frozenset(map(id, self.modules))
        self._children = [(m._modules, tuple(m._modules.values())) for m in self.modules]
        # a buffer that requires grad is an outer variable, and is not swapped
        self.buffers: State = {n: b for n, b in model.named_buffers() if b is not None and not b.requires_grad}
        refuse_shared_memory(model, self.parameters)
        tracked = {
            id(b)
            for m in self.modules
            if isinstance(m, NORMALISATIONS)
            for n, b in m.named_buffers(recurse=False)
            if n in _RUNNING
        }
        self.running = self.statistics = tuple(n for n, b in self.buffers.items() if id(b) in tracked)
        self.moving: set[str] = set()  # the statistics that a step of this loop has changed
        self.changing: set[str] = set()  # the other floating-point buffers that a step of this loop has changed
        self.stops_gradients = False  # whether a loss has called `stop_gradient`
        self.derives = False  # whether a loss takes derivatives of its own
        self.eager_only = ""  # why the losses can't run as compiled code, where no function is replaced
        self.aux: dict[str, Any] = {}  # what the losses last returned beside their values
        self.warns = True
        self.token = object()  # marks the weights of every step of this loop
        self.noted: dict[int, Any] = {}  # the leaves that losses use and that do not require grad, by id
        self.graphs_are_kept = self.notes_leaves = False
        self.outside: dict[int, Tensor] = {}  # the running statistics of other modules that a step has updated
        self.unknown: tuple[str, str] | None = None  # why the derivative of running statistics is not known
        self._parameter_places = _places(self.modules, "_parameters", self.parameters)
        self._buffer_places = _places(self.modules, "_buffers", self.buffers)
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        held = (*model.parameters(), *self.buffers.values())
        self.devices = {t.device for t in held if t.device.type not in ("cpu", "meta")}
        self.device_types = sorted({"cpu", *(d.type for d in self.devices)})
        self._recurrent_on_gpu = bool(self.devices) and any(isinstance(m, nn.RNNBase) for m in self.modules)
        self._quantised = any(type(m).__module__.startswith(_QUANTISED) for m in self.modules)
        self._parametrized = any(parametrize.is_parametrized(m) for m in self.modules)
        self._session: Session | None = None
        self.opened = 0  # autograd's sequence number at which the block was opened
        self._held: State | None = None  # the state whose values the model's own tensors hold
        self._buffers: State = {}
        self._versions: list[int] = []

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for bindings with the same places in the same modules."""
        return tuple((id(holder), name, n) for holder, name, n in (*self._parameter_places, *self._buffer_places))

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for models of the same structure in the same modes."""
        shapes = tuple((n, p.shape, p.dtype) for n, p in self.parameters.items())
        return tuple((type(m), m.training) for m in self.modules), shapes

    # --- hooks for several inner problems (tasks.py) and for several processes (parallel.py) ---

    def repeat_for_tasks(self, x: Tensor) -> Tensor:
        """Return a tensor of the model, repeated for each inner problem."""
        return x

    def map_over_tasks(self, function: Callable[[State], State], d: State) -> State:
        """Return function(d), computed for each inner problem."""
        return function(d)

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function of the tensors of one inner problem into a function of the tensors of all of them."""
        return function

    def total(self, value: Tensor) -> Tensor:
        """Return the loss as a scalar: its sum over the tasks."""
        return value

    def separate(self) -> Sequence[InnerProblem]:
        """Return the inner problems if each is differentiated by itself, so that one graph at a time is enough."""
        return ()

    def joined(self, parts: Sequence[State]) -> State:
        """Return the state, or the gradient for it, from the parts of all inner problems; a missing part is 0."""
        found = {n: x for part in parts for n, x in part.items()}
        return {n: torch.cat([p[n] if n in p else torch.zeros_like(x) for p in parts]) for n, x in found.items()}

    def joined_buffers(self, parts: Sequence[State]) -> State:
        """Return the buffers that the inner problems have left."""
        stopped = {n for n in parts[0] if all(is_stopped(part[n]) for part in parts)}
        # the concatenation of stopped tensors is not one
        return {n: stop_gradient(x) if n in stopped else x for n, x in self.joined(parts).items()}

    def joined_aux(self, parts: Sequence[Any]) -> Any:
        """Return what a loss has returned beside its value, from what it returned for each inner problem."""
        return parts[0]

    def check_batch(self, name: str, batch: tuple[Any, ...]) -> None:
        """Raise if the batch can't be one of this loss."""

    def initial_weights(self) -> State:
        """Return w_0, with the graph that leads to the model's parameters."""
        with torch.enable_grad():
            return {n: self.repeat_for_tasks(p) for n, p in self.parameters.items()}

    def means_of_losses(self, values: State, what: str = "") -> State:
        """Average the values of the losses over the ranks. Raise unless `what` is the same on each of them."""
        return values

    def mean_of_direction(self, d: State) -> State:
        """Return the gradient of the mean loss over the ranks, from the gradient of this process's loss."""
        return d

    def sum_over_ranks(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Reduce over ranks: sum what the loss of each process contributes to the adjoint."""
        return grads

    def weights_for_losses(self, w: State) -> State:
        """Return the weights that the losses of this process use, where graphs are kept."""
        return w

    def count_once_across_ranks(self, x: Tensor) -> Tensor:
        """Count once the gradient of a tensor that each rank uses outside the losses, such as a rate or an option."""
        return x

    def check_same_on_all_ranks(self, tensors: State) -> None:
        """Raise if the values of these tensors differ between ranks."""

    def announce(self, action: str) -> None:
        """Raise if the ranks are about to do different things."""

    def all_agree(self, ok: bool) -> bool:
        """Return whether this is true on every rank."""
        return ok

    def largest_on_any_rank(self, *numbers: int) -> tuple[int, ...]:
        """Return the maximum of each number over the ranks."""
        return numbers

    shards: bool = False  # whether each rank stores only its part of a state

    def shard(self, z: State) -> State:
        """Return the part of a state that this process stores."""
        return z

    def unshard(self, kept: State) -> State:
        """Return the whole state, from the parts that the ranks store."""
        return kept

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients for the inputs, from the contributions of this process."""
        return list(parts)

    # --- the block: what the model held before it, and what it holds now ---

    def open(self) -> None:
        """Save the values of the model's tensors, which `close` restores."""
        written = (*self.parameters.values(), *self.buffers.values()) if self.holds else ()
        self._session = Session.open(self.model, self.parameters, written, self.note_versions)
        self.opened = sequence_number()

    def close(self) -> None:
        """Restore the values that `open` saved."""
        if self._session is not None:
            with EXCLUSIVE:
                self._session.close()
            self._session = None
        self._held = None

    def keep(self) -> None:
        """Keep the present values of the model after the block."""
        assert self._session is not None
        self._session.remember_values()

    @property
    def remembered_weights(self) -> State:
        """The saved values of w_0, which are restored after the block and never written to."""
        assert self._session is not None
        held = {id(t): saved for t, saved in self._session.values} if self.tasks is None else {}
        return {n: held[id(p)] for n, p in self.parameters.items() if id(p) in held}

    def hold(self, z: State, buffers: State) -> None:
        """Write the values of this state into the model's own tensors."""
        if not self.holds or self._held is z:
            return
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters.values()), [z[n] for n in self.parameters])  # pyright: ignore
            for n, b in self.buffers.items():
                new = z[n] if n in z else buffers[n]
                if new is not b:
                    b.copy_(new)
        self._held, self._buffers = z, buffers
        self.note_versions()

    def note_versions(self) -> None:
        """Record the versions of the parameters after a write of this loop. A later change is one by hand."""
        self._versions = [p._version for p in self.parameters.values()]

    def check_held(self, z: State, k: int, *, numbers: bool = True) -> None:
        """Raise if the model was changed since the last step.

        Without `numbers`, the values of weights with an unchanged version are not compared. The step that follows
        compares them in any case (`check_not_written`).
        """
        assert self._session is not None
        self._session.check_innermost()
        if not self.holds:
            return
        for holder, name, n in (*self._parameter_places, *self._buffer_places):
            if holder.get(name) is not (self.parameters[n] if n in self.parameters else self.buffers[n]):
                raise RuntimeError(
                    f"bilevel.inner: {n!r} of the model was replaced in the block, after step k = {k}, and may carry a "
                    "graph. Compute it inside h; build the model before the block, and open a new block after such a "
                    "change."
                )
        if any(len(now) != len(then) or tuple(now.values()) != then for now, then in self._children):
            raise RuntimeError(
                f"bilevel.inner: the layers of the model have changed in the block, after step k = {k}: one was "
                "replaced, added or removed. Build the model before the block, and open a new block after such a "
                "change."
            )
        for p in self._trainable:
            if not p.requires_grad:
                raise RuntimeError(self._flag("frozen (requires_grad was set to False)", p, k))
        for p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(self._flag("unfrozen (requires_grad was set to True)", p, k))
        for (n, p), version in zip(self.parameters.items(), self._versions, strict=True):
            x = z[n]
            same = p._version == version and p.shape == x.shape and p.dtype == x.dtype
            if p.device.type == "cpu" and (numbers or not same):  # values may be back
                same = same_bits(p, x)
            if not same and not p.is_meta:
                raise RuntimeError(
                    f"bilevel.inner: the weight {n!r} was changed by hand after step k = {k}, and the derivative of "
                    "that change is not known. In the block it is loop.step that trains: leave out optimizer.step(), "
                    "load_state_dict and writing to the weights. What a step should do to them (a projection, say) "
                    "belongs into h, as a function of them."
                )
        self.note_versions()
        for n, b in self.buffers.items():
            x = z[n] if n in z else self._buffers[n]
            if b.shape != x.shape or (b.device.type == "cpu" and not same_bits(b, x)):
                raise RuntimeError(
                    f"bilevel.inner: the buffer {n!r} was changed in the block, after step k = {k}, and the derivative "
                    "of that change is not known. A look at the model in training mode updates running statistics: "
                    "call model.eval() before it, or loop(x) in place of model(x). What belongs to a step goes into h."
                )
        if self._parametrized and parametrize._cache_enabled:  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError(
                "bilevel.inner: parametrize.cached() is on, and the cached weights are not those of the current step. "
                "Use it inside h and g, not around the block."
            )

    def check_not_written(self, z: State, k: int) -> None:
        """Raise if a loss has written to the weights in a way that leaves their version unchanged."""
        if self.holds:
            for n, p in self.parameters.items():
                if p.device.type == "cpu" and not same_bits(p, z[n]):
                    raise RuntimeError(
                        f"bilevel.inner: the weight {n!r} was changed by hand after step k = {k - 1}, or a loss writes "
                        "to it (a projection), and the derivative of that change is not known. Leave it to loop.step, "
                        "or write it as a function of the weights that the loss uses: a parametrization, or a term of "
                        "the loss."
                    )

    def _flag(self, what: str, p: Tensor, k: int) -> str:
        name = next(n for n, q in self.model.named_parameters() if q is p)
        return (
            f"bilevel.inner: the parameter {name!r} was {what} in the block, after step k = {k}. Set requires_grad "
            "before the block, and open a new block for another set of weights."
        )

    def warn_if_read(self, grads: Mapping[str, Tensor | None]) -> None:
        """Warn once if a loss uses a buffer that a step has changed by a rule whose derivative is not known."""
        for n, grad in grads.items():
            if self.warns and grad is not None and (grad.is_meta or bool(grad.any())):
                self.warns = False
                warnings.warn(
                    f"bilevel.inner: the buffer {n!r} is changed by a step and read by a loss after it. The derivative "
                    "of that change is not known (that of running statistics of BatchNorm and InstanceNorm is), and "
                    "the hypergradient leaves it out. Leave it as bilevel.stop_gradient(...) in the loss that changes "
                    "it, and it is part of the loop; or check=False if you know.",
                    DerivativeWarning,
                    stacklevel=8,
                )

    # --- the model as a function ---

    @contextmanager
    def inside(
        self,
        z: State,
        buffers: State,
        *,
        graph: bool = False,
        statistics: bool = False,
        twice: bool | None = None,
        first: bool = False,
    ) -> Generator[Inside]:
        """Put weights and buffers into the model, to compute losses and their derivatives.

        With `graph`, a gradient can be differentiated a second time, unless `twice` is False. With `graph` and
        `statistics`, the buffers that are part of the state can be differentiated for. `first` says that a step is
        taken, and not run again: then alone it may update running statistics of modules outside of the model.
        """
        follow = {n for n in self.statistics if n in z} if graph and statistics else set[str]()
        followed: State = {}
        watched: State = {}
        copies: State = {}
        taking = Evaluation()
        with torch.set_grad_enabled(graph):
            for n in self.buffers:
                old = z[n] if n in z else buffers[n]
                if n in follow:
                    followed[n] = old if old.requires_grad else old.detach().requires_grad_()
                    copies[n] = followed[n].clone()
                elif n in self.changing and graph:
                    watched[n] = old.detach().requires_grad_()
                    copies[n] = watched[n].clone()
                else:
                    copies[n] = old.detach().clone()
        if self.own_parameters:
            self.hold(z, buffers)
            leaves = weights = self.parameters
        else:
            leaves = {n: z[n] for n in self.parameters}
            weights = self.weights_for_losses(leaves)
            if any(x.grad_fn is not None for x in weights.values()):
                if self.derives:  # what a loss derives by itself must not go through the weights into earlier steps
                    weights = {n: constant_in_step(taking, x) for n, x in weights.items()}
                else:
                    taking.behind = tuple(weights.values())
            copies.update(weights)
        with (
            self.swapped(copies, taking) as inside,
            self.kernels(inside, graph, graph if twice is None else twice, follow=bool(follow), first=first),
            evaluating(inside.taking),
            # hooks on parameters belong to the direction (see updates.py), and not to its derivative
            without_hooks(self.parameters.values()) if self.own_parameters else _NOTHING,
        ):
            inside.weights, inside.leaves, inside.statistics, inside.watched = weights, leaves, followed, watched
            try:
                yield inside
            finally:
                self.stops_gradients = self.stops_gradients or inside.taking.stops
                self.eager_only = self.eager_only or inside.taking.eager_only
                self.derives = self.derives or inside.taking.derives
                torch.clear_autocast_cache()  # a backward pass that ran code again may have left copies there

    @contextmanager
    def swapped(self, tensors: State, taking: Evaluation | None = None) -> Generator[Inside]:
        """Replace the parameters and buffers of the same names by these tensors."""
        places = [place for place in (*self._parameter_places, *self._buffer_places) if place[2] in tensors]
        before = [holder[name] for holder, name, _ in places]
        try:
            for holder, name, n in places:
                holder[name] = tensors[n]
            yield Inside(tensors, tensors, {}, {}, self._buffers_inside, tensors, taking or Evaluation())
        finally:
            for (holder, name, _), tensor in zip(places, before, strict=True):
                holder[name] = tensor

    def _buffers_inside(self) -> State:
        return {n: holder[name] for holder, name, n in self._buffer_places}

    def buffers_of(self, modules: Sequence[nn.Module]) -> State:
        """Return the present buffers of these modules."""
        holders = {id(m._buffers) for m in modules}
        return {n: holder[name] for holder, name, n in self._buffer_places if id(holder) in holders}

    def put_buffers(self, buffers: State) -> None:
        """Replace the buffers of the same names by these, for the rest of an evaluation."""
        for holder, name, n in self._buffer_places if buffers else ():
            if n in buffers:
                holder[name] = buffers[n]

    def kernels(
        self, inside: Inside, graph: bool = True, twice: bool = True, *, follow: bool = False, first: bool = False
    ) -> AbstractContextManager[Any]:
        """Replace the functions whose derivative with respect to the weights is missing or wrong, while losses run.

        With `graph`, a derivative is taken of more than the direction of a step; with `twice`, that of the direction.
        """
        inside.statistics_of = RunningStatistics(
            inside.taking, self._buffers_inside, self.outside, differentiable=follow, first=first, warns=self.warns
        )
        inside.taking.unknown = self.unknown
        # the weights of one task are in the model only while a loss runs, not in the backward pass
        kept = self.graphs_are_kept or self.tasks is not None
        inside.mode = mode = Kernels(
            inside.taking,
            differentiated=graph,
            statistics=inside.statistics_of,
            noted=self.noted if kept or self.notes_leaves else None,
            graphs_are_kept=kept,
        )
        # on a device the kernels of the plain loop may draw different random numbers
        fused = not (twice or self.devices or self.vmaps_losses)
        return replaced(mode, fused=fused, recurrent_on_gpu=self._recurrent_on_gpu)

    def call(self, function: Callable[..., Any], inside: Inside, args: tuple[Any, ...], kwargs: Any = {}) -> Any:  # noqa: B006
        """Return function(model, *args), with the tensors of `inside` in the model."""
        return function(self.model, *args, **kwargs)

    def loss(self, name: str, loss: Loss, inside: Inside, batch: tuple[Any, ...]) -> Tensor:
        """Return the value of loss(model, *batch), or raise an error that says what is wrong with it."""
        self.check_batch(name, batch)
        active_models().append(self._module_ids)
        inside.taking.losses += 1
        inside.taking.evaluating = True
        before = [x._version for x in inside.weights.values()]
        try:
            with _refusing_quantised(self.model) if self._quantised else _NOTHING, inside.mode:
                value, aux = self.call(self._watched(name, loss, inside), inside, batch)
            self.aux[name] = map_tensors(self._as_aux, aux)
        except TypeError as error:
            check_arguments(name, loss, self.model, batch, error)
            raise
        except RuntimeError as error:
            if not self.own_parameters and any(
                text in str(error) for text in ("deepcopy protocol", "of leaf variables")
            ):
                raise RuntimeError(
                    f"bilevel.inner: {name} treats the weights as leaves (copy.deepcopy, requires_grad_), and with "
                    "this engine they have a graph. Use engine='reverse' without memory= and tasks=, or torch.func."
                    "functional_call in place of a copy."
                ) from error
            raise
        finally:
            active_models().pop()
            inside.taking.evaluating = False
            # autocast caches a copy of every weight until its block ends. That would be K sets of copies, some made
            # under no_grad, and two losses that share a copy would add their gradients in low precision.
            torch.clear_autocast_cache()
        # a block inside the loss, on the same model, has written to the model and restored it
        versions = self._versions if inside.weights is self.parameters else before
        for (n, x), version in zip(inside.weights.items(), versions, strict=True):
            if x._version != version:
                raise RuntimeError(writes_to_weight(name, n))
        return self.total(value)

    def value(self, name: str, loss: Loss, inside: Inside, batch: tuple[Any, ...]) -> Tensor:
        """Return the value of loss(model, *batch), without any check or record."""
        active_models().append(self._module_ids)
        try:
            with inside.mode:
                return self.total(self.call(lambda *args: value_and_aux(name, loss(*args))[0], inside, batch))
        finally:
            active_models().pop()

    def _watched(self, name: str, loss: Loss, inside: Inside) -> Callable[..., Any]:
        """Return the loss with its aux; where a step is taken, it notes statistics that the model updates itself."""

        def run(*args: Any) -> Any:
            statistics = inside.statistics_of
            before = [] if statistics is None else statistics.versions(self.running)
            returned = value_and_aux(name, loss(*args))
            if statistics is not None:
                if found := statistics.foreign(before):
                    self.unknown = inside.taking.unknown = found
                weights = [holder[n] for holder, n, _ in self._parameter_places]
                self.put_buffers(statistics.unknown(self.running, weights))
            return returned

        return run

    def _as_aux(self, x: Tensor) -> Tensor:
        """Detach a tensor that a loss returned beside its value, and mark it, so that no later batch can have it."""
        held = {_address(t) for t in (*self.parameters.values(), *self.buffers.values())} - {None}
        y = x.detach().clone() if _address(x) in held else x.detach()  # the next step changes what the model holds
        if x.requires_grad:
            setattr(y, AUX, self.token)
        return y


def _address(x: Tensor) -> int | None:
    return None if x.is_meta or x.layout != torch.strided else x.data_ptr()


@contextmanager
def _refusing_quantised(model: nn.Module) -> Generator[None]:
    """Refuse quantised modules whose input requires grad: they have no derivative with respect to it."""
    names = {id(m): n for n, m in model.named_modules()}

    def watch(module: nn.Module, args: Any) -> None:
        home = type(module).__module__
        if home.startswith(_QUANTISED) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(args)):
            raise TypeError(
                f"bilevel.inner: the layer {names.get(id(module), '')!r} ({type(module).__name__} of {home}) is "
                "quantised, and what comes to it depends on the weights: it has no derivative. "
                "Load the model without quantisation, or dequantise the layer; a quantised part that comes before all "
                "that is trained is fine."
            )

    handle = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        yield
    finally:
        handle.remove()


# Those of torch. (bitsandbytes computes differentiable products of dequantised weights, which is exact.)

_QUANTISED = (
    "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized", "torch.nn.quantized",
)  # fmt: skip


def writes_to_weight(name: str, weight: str) -> str:
    return (
        f"bilevel.inner: {name} writes to the weight {weight!r} (nn.Embedding(max_norm=...), or a projection), and the "
        "derivative of that is not known. Write it as a function of the weights that the loss uses: a parametrization, "
        "or a term of the loss."
    )


def _places(
    modules: Iterable[nn.Module], kind: str, tensors: Mapping[str, Tensor]
) -> list[tuple[dict[str, Any], str, str]]:
    """Return each place that holds one of these tensors.

    Tied weights have several places. A submodule under two names is one place.
    """
    names = {id(t): n for n, t in tensors.items()}
    return [(vars(m)[kind], name, names[id(t)]) for m in modules for name, t in vars(m)[kind].items() if id(t) in names]
