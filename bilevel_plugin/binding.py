"""The model as a function of its weights and buffers, and the model as it was, to be put back.

There are two ways for weights to enter a loss.

- *Own parameters*: w_k is written into the model's own parameters, which are the leaves that derivatives are taken
  for. The loss runs as it does in the plain loop: aliases, hooks, closures over `model.parameters()` and backward
  passes that run a part of the model again see the right weights by construction. This is for engines that keep no
  graph from one step to the next.
- *Swapped in*: the weights are tensors of their own, with a graph (`unroll`, `memory=`) or a task dimension. They
  take the places of the parameters while a loss and its derivative are computed, as in `torch.func.functional_call`,
  with the places looked up once.

Buffers are swapped in both ways, so that a loss may update them in place. Between the steps the model's own tensors
hold the numbers of the current state.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .graph import DerivativeWarning, FirstLook, State, map_tensors, same_bits, sequence_number, tensors_of
from .kernels import (
    EXCLUSIVE,
    FIRST_ORDER,
    NORMALISATIONS,
    LongAttention,
    TakingDirection,
    evaluating,
    twice_differentiable,
)

Loss = Callable[..., Tensor]
_RUNNING = ("running_mean", "running_var")
_EVALUATING = threading.local()
OWNER = "_bilevel_loop"  # the attribute of a tensor that says whose weights it holds
AUX = "_bilevel_aux"  # the attribute of a tensor that a loss returned beside its value, and that depends on the weights


NESTED: set[int] = set()  # ids of the parameters that blocks inside of losses have trained, since it was last cleared


def evaluating_loss() -> bool:
    """Whether a loss is being evaluated in this thread."""
    return bool(_active())


def _active() -> list[frozenset[int]]:
    """The ids of the modules of each model whose loss is being evaluated in this thread, one inside the other."""
    if not hasattr(_EVALUATING, "models"):
        _EVALUATING.models = []
    return _EVALUATING.models


@dataclass
class Inside:
    """What is in the model while a loss runs."""

    weights: State  # as the losses see them: a direction is taken for these
    leaves: State  # as the step began from them: a step is differentiated for these
    statistics: State  # buffers that are state, and can be differentiated for
    watched: State  # other buffers that a step has changed
    buffers: Callable[[], State]
    swapped: State  # every tensor that takes the place of one of the model's
    taking: TakingDirection


class Binding:
    """The model as a function of the weights w (its trainable parameters) and of its buffers.

    With an optimizer, w is what the optimizer holds; any other trainable parameter stays in the model and may be an
    outer variable.
    """

    tasks: int | None = None
    vmaps_losses: bool = False
    batch_dimension: int = 0  # of the tensors of a batch: the one that has the samples
    share: float = 1.0  # of this process in a mean over all processes that take part

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *, own_parameters: bool = True
    ) -> None:
        _refuse_model(model)
        # A block inside of a loss, on the very model of that loss, must not write to it: the loss is in the midst of
        # its graph. The weights of such a block are swapped in alone, as those of tasks are.
        self.holds = not any(id(m) in modules for modules in _active() for m in model.modules())
        self.model, self.own_parameters = model, own_parameters
        self.parameters = _inner_parameters(model, optimizers)
        self.modules = tuple(model.modules())
        self._module_ids = frozenset(map(id, self.modules))
        self._children = [(m._modules, tuple(m._modules.values())) for m in self.modules]
        # a buffer that requires grad is an outer variable, and stays where it is
        self.buffers: State = {n: b for n, b in model.named_buffers() if b is not None and not b.requires_grad}
        _refuse_shared_memory(model, self.parameters)
        tracked = {
            id(b)
            for m in self.modules
            if isinstance(m, NORMALISATIONS)
            for n, b in m.named_buffers(recurse=False)
            if n in _RUNNING
        }
        self.statistics = tuple(n for n, b in self.buffers.items() if id(b) in tracked)
        self.moving: set[str] = set()  # the statistics that a step of this loop has changed
        self.changing: set[str] = set()  # the other buffers, of floating-point numbers, that it has
        self.stops_gradients = False  # a loss has called `stop_gradient`
        self.aux: dict[str, Any] = {}  # what the losses returned beside their values, the last time
        self.warns = True
        self.token = object()  # on the weights of every step of this loop
        self.looked_at: set[object] = set()  # losses that were evaluated before
        self.noted: dict[int, Any] = {}  # leaves that they use and that do not require grad, by id
        self.graphs_are_kept = False
        self._parameter_places = _places(self.modules, "_parameters", self.parameters)
        self._buffer_places = _places(self.modules, "_buffers", self.buffers)
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        held = (*model.parameters(), *self.buffers.values())
        self.devices = {t.device for t in held if t.device.type not in ("cpu", "meta")}
        self.device_types = sorted({"cpu", *(d.type for d in self.devices)})
        self._recurrent_on_gpu = bool(self.devices) and any(isinstance(m, nn.RNNBase) for m in self.modules)
        self.weight_norm = any(map(_has_weight_norm, self.modules))
        self.padded = any(isinstance(m, nn.Embedding) and m.padding_idx is not None for m in self.modules)
        self.long_attention = False  # whether a loss calls F.scaled_dot_product_attention by a name of its own
        self._parametrized = any(parametrize.is_parametrized(m) for m in self.modules)
        self._session: _Session | None = None
        self.opened = 0  # when the block was opened, in autograd's own count
        self._held: State | None = None  # the state whose numbers the model's own tensors have
        self._buffers: State = {}
        self._versions: list[int] = []

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for bindings that do the same."""
        return tuple((id(holder), name, n) for holder, name, n in (*self._parameter_places, *self._buffer_places))

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for models of the same structure in the same modes."""
        shapes = tuple((n, p.shape, p.dtype) for n, p in self.parameters.items())
        return tuple((type(m), m.training) for m in self.modules), shapes

    # --- several inner problems, or several processes, in one: see tasks.py and parallel.py ---

    def for_every_task(self, x: Tensor) -> Tensor:
        """A tensor of the model, once for every inner problem."""
        return x

    def each_task(self, function: Callable[[State], State], d: State) -> State:
        """function(d) for every inner problem."""
        return function(d)

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the tensors of one inner problem, for those of every one."""
        return function

    def total(self, value: Tensor) -> Tensor:
        """One number for the loss: its sum over the tasks."""
        return value

    def check_batch(self, name: str, batch: tuple[Any, ...]) -> None:
        """Raise if the batch of the loss can't be what it should be."""

    def initial_weights(self) -> State:
        """w_0, still attached to the model's parameters."""
        with torch.enable_grad():
            return {n: self.for_every_task(p) for n, p in self.parameters.items()}

    def means_of_losses(self, values: State, what: str = "") -> State:
        """The values of losses, by name, over all processes that take part, which all do `what`."""
        return values

    def mean_of_direction(self, d: State) -> State:
        """The gradient of the mean loss, from that of this process's loss."""
        return d

    def sum_over_ranks(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Adjoints of the weights, from what this process's loss gives to them."""
        return grads

    def weights_for_losses(self, w: State) -> State:
        """The weights as the losses of this process see them, where graphs are kept."""
        return w

    def count_once_across_ranks(self, x: Tensor) -> Tensor:
        """A tensor that every process uses in the same way outside of the losses: a rate, an option."""
        return x

    def check_same_on_all_ranks(self, tensors: State) -> None:
        """Raise if the processes that take part hold different numbers."""

    def announce(self, action: str) -> None:
        """Raise if the processes that take part are about to do different things."""

    def all_agree(self, ok: bool) -> bool:
        """Whether this is true in every process that takes part."""
        return ok

    def largest_on_any_rank(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number among the processes that take part."""
        return numbers

    shards: bool = False  # each of several processes keeps a part of a state that all of them hold

    def shard(self, z: State) -> State:
        """What this process keeps of a state."""
        return z

    def unshard(self, kept: State) -> State:
        """The state again, from what each process has kept of it."""
        return kept

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients for the inputs, from the parts that this process has of them."""
        return list(parts)

    # --- the block: what the model was, and what it holds now ---

    def open(self) -> None:
        """Save what is in the model, until `close`."""
        self._session = _Session.open(self)
        self.opened = sequence_number()

    def close(self) -> None:
        """Put back what was in the model."""
        if self._session is not None:
            with EXCLUSIVE:
                self._session.close()
            self._session = None
        self._held = None

    def keep(self) -> None:
        """Leave what is in the model now for after the block."""
        assert self._session is not None
        self._session.remember_values()

    @property
    def remembered_weights(self) -> State:
        """The numbers of w_0 that are put back after the block, which nobody writes to."""
        assert self._session is not None
        held = {id(t): saved for t, saved in self._session.values} if self.tasks is None else {}
        return {n: held[id(p)] for n, p in self.parameters.items() if id(p) in held}

    def hold(self, z: State, buffers: State) -> None:
        """Write the numbers of this state into the model's own tensors."""
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
        """The parameters were written to by us: only what comes after is a change by hand."""
        self._versions = [p._version for p in self.parameters.values()]

    def check_held(self, z: State, k: int, *, numbers: bool = True) -> None:
        """Raise if the model is not as the last step left it.

        Without `numbers`, weights whose version has not moved are taken for what they were: the step that follows
        compares them in any case (`check_not_written`).
        """
        assert self._session is not None
        self._session.check_on_top()
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
            if p.device.type == "cpu" and (numbers or not same):  # a change that was taken back is none
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
        """Raise if a loss has written to the weights in a way that does not move their version."""
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
        """Warn once that a loss reads a buffer that a step has changed by a rule whose derivative is not known."""
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
        self, z: State, buffers: State, *, graph: bool = False, statistics: bool = False, twice: bool | None = None
    ) -> Generator[Inside]:
        """Weights and buffers in the model, to compute losses and their derivatives in.

        With `graph`, buffers that are state can be differentiated if `statistics` says so, and so can a gradient, a
        second time, unless `twice` says otherwise.
        """
        follow = {n for n in self.statistics if n in z} if graph and statistics else set[str]()
        followed: State = {}
        watched: State = {}
        copies: State = {}
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
            copies.update(weights)
        hooks = (
            [p._backward_hooks for p in self.parameters.values() if p._backward_hooks] if self.own_parameters else []
        )
        with (
            self.swapped(copies) as inside,
            self.twice_differentiable(inside.taking if graph else None, statistics=bool(follow))
            if (graph if twice is None else twice) or not self._takes_kernels_of_plain_loop(graph, bool(follow))
            else FIRST_ORDER,
            evaluating(inside.taking),
            _silenced(hooks) if hooks else _NOTHING,
        ):
            inside.weights, inside.leaves, inside.statistics, inside.watched = weights, leaves, followed, watched
            try:
                yield inside
            finally:
                self.stops_gradients = self.stops_gradients or inside.taking.stops
                torch.clear_autocast_cache()  # what a backward pass ran again may have left copies there

    @contextmanager
    def swapped(self, tensors: State, taking: TakingDirection | None = None) -> Generator[Inside]:
        """These tensors in the places of the parameters and buffers of the same names."""
        places = [place for place in (*self._parameter_places, *self._buffer_places) if place[2] in tensors]
        before = [holder[name] for holder, name, _ in places]
        try:
            for holder, name, n in places:
                holder[name] = tensors[n]
            yield Inside(tensors, tensors, {}, {}, self._buffers_inside, tensors, taking or TakingDirection())
        finally:
            for (holder, name, _), tensor in zip(places, before, strict=True):
                holder[name] = tensor

    def _buffers_inside(self) -> State:
        return {n: holder[name] for holder, name, n in self._buffer_places}

    def buffers_of(self, modules: Sequence[nn.Module]) -> State:
        """The buffers that are in these modules just now."""
        holders = {id(m._buffers) for m in modules}
        return {n: holder[name] for holder, name, n in self._buffer_places if id(holder) in holders}

    def put_buffers(self, buffers: State) -> None:
        """Put these in the places of the buffers of the same names, for the rest of an evaluation."""
        for holder, name, n in self._buffer_places if buffers else ():
            if n in buffers:
                holder[name] = buffers[n]

    def _takes_kernels_of_plain_loop(self, graph: bool, follow: bool) -> bool:
        """Whether a gradient by the kernels of the plain loop is, to rounding, that of the others.

        On a device they may draw other random numbers. Running statistics and padded rows have a gradient in g, and
        none in the plain loop.
        """
        others = follow or (graph and self.padded)
        return not (others or self.devices or self.weight_norm or self.long_attention or self.vmaps_losses)

    def twice_differentiable(
        self, taking: TakingDirection | None = None, *, statistics: bool = True, compiled: bool = False
    ) -> AbstractContextManager[Any]:
        """Keep out the kernels whose second derivative is missing or wrong.

        With `taking`, so are those that are constant in the direction of a step and not in its derivative.
        """
        return twice_differentiable(
            recurrent_on_gpu=self._recurrent_on_gpu,
            weight_norm=self.weight_norm,
            long_attention=self.long_attention and not compiled,
            statistics=taking if statistics else None,
            padded=taking if self.padded else None,
        )

    def _first_look(self, name: str, loss: Loss) -> AbstractContextManager[Any]:
        if (key := (name, code_of(loss))) in self.looked_at:
            return _NOTHING
        self.looked_at.add(key)
        return self._looking(FirstLook(self.noted, graphs_are_kept=self.graphs_are_kept))

    @contextmanager
    def _looking(self, look: FirstLook) -> Generator[None]:
        with _first_look(look, self.model), LongAttention() as long:
            yield
        self.long_attention = self.long_attention or long.seen

    def call(self, function: Callable[..., Any], inside: Inside, args: tuple[Any, ...], kwargs: Any = {}) -> Any:  # noqa: B006
        """function(model, *args), with what is inside."""
        return function(self.model, *args, **kwargs)

    def loss(self, name: str, loss: Loss, inside: Inside, batch: tuple[Any, ...]) -> Tensor:
        """The value of loss(model, *batch), or an error that says what is wrong with it."""
        self.check_batch(name, batch)
        _active().append(self._module_ids)
        inside.taking.losses += 1
        inside.taking.evaluating = True
        before = [x._version for x in inside.weights.values()]
        try:
            with self._first_look(name, loss):
                value, aux = self.call(lambda *args: _split(name, loss(*args)), inside, batch)
            self.aux[name] = map_tensors(self._as_aux, aux)
        except TypeError as error:
            _check_arguments(name, loss, self.model, batch, error)
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
            _active().pop()
            inside.taking.evaluating = False
            # autocast keeps a copy of every weight until its block ends: K sets of them, some made under no_grad,
            # and two losses that share a copy would add their gradients in low precision
            torch.clear_autocast_cache()
        # a block inside of the loss, on the same model, has written to it and put back what was there
        versions = self._versions if inside.weights is self.parameters else before
        for (n, x), version in zip(inside.weights.items(), versions, strict=True):
            if x._version != version:
                raise RuntimeError(writes_to_weight(name, n))
        return self.total(value)

    def value(self, name: str, loss: Loss, inside: Inside, batch: tuple[Any, ...]) -> Tensor:
        """The value of loss(model, *batch) alone: nothing of it is looked at or remembered."""
        _active().append(self._module_ids)
        try:
            return self.total(self.call(lambda *args: _split(name, loss(*args))[0], inside, batch))
        finally:
            _active().pop()

    def _as_aux(self, x: Tensor) -> Tensor:
        """What a loss returned beside its value, without its graph; marked, since a later batch must not have it."""
        held = {t.data_ptr() for t in (*self.parameters.values(), *self.buffers.values()) if not t.is_meta}
        y = x.detach().clone() if not x.is_meta and x.data_ptr() in held else x.detach()  # the model moves on
        if x.requires_grad:
            setattr(y, AUX, self.token)
        return y


@contextmanager
def _first_look(look: FirstLook, model: nn.Module) -> Generator[None]:
    """Watch operations, and calls of modules that are quantised: these have no derivative for their input."""
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
        with look:
            yield
    finally:
        handle.remove()


# torch's own. (bitsandbytes computes in differentiable products on dequantised weights, which is exact.)
_QUANTISED = (
    "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized", "torch.nn.quantized",
)  # fmt: skip


def writes_to_weight(name: str, weight: str) -> str:
    return (
        f"bilevel.inner: {name} writes to the weight {weight!r} (nn.Embedding(max_norm=...), or a projection), and the "
        "derivative of that is not known. Write it as a function of the weights that the loss uses: a parametrization, "
        "or a term of the loss."
    )


@contextmanager
def _silenced(hooks: list[Any]) -> Generator[None]:
    """Hooks on parameters belong to the direction (see updates.py), not to its derivative."""
    kept = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, items in zip(hooks, kept, strict=True):
            h.update(items)


_NOTHING = nullcontext()


class _Session:
    """What a block found in the model. Sessions on one model stack; each puts back what it found."""

    _open: ClassVar[dict[int, list[_Session]]] = {}  # of every parameter that is held, by id: the innermost is the last

    def __init__(self, binding: Binding) -> None:
        self.binding, self.thread = binding, get_ident()
        model = binding.model
        self._modes = [(m, m.training) for m in binding.modules]
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        # tensors and lists of tensors among the attributes: `_flat_weights` of RNNs, `weight` of old-style prune
        self._attributes = [
            (vars(m), name, value, list(value) if isinstance(value, list) else None)
            for m in binding.modules
            for name, value in vars(m).items()
            if isinstance(value, Tensor) or (isinstance(value, list) and any(isinstance(x, Tensor) for x in value))
        ]
        self._dense = [m for m in binding.modules if isinstance(m, nn.Embedding) and m.sparse]
        self._places = [
            (holder, name, t)
            for m in binding.modules
            for holder in (vars(m)["_parameters"], vars(m)["_buffers"])
            for name, t in holder.items()
        ]
        self.values: list[tuple[Tensor, Tensor]] = []
        self.remember_values()

    def remember_values(self) -> None:
        binding = self.binding
        written = () if not binding.holds else (*binding.parameters.values(), *binding.buffers.values())
        self.values = [(t, t.detach().clone()) for t in written]

    @classmethod
    def open(cls, binding: Binding) -> _Session:
        with EXCLUSIVE:
            for p in binding.parameters.values():
                stack = cls._open.get(id(p), [])
                if stack and stack[-1].thread != get_ident():
                    raise RuntimeError(
                        "bilevel.inner: another thread has a block open on this model, and there is one set of weights "
                        "in it. Give each thread a model of its own: copy.deepcopy(model)."
                    )
            session = cls(binding)
            for p in binding.parameters.values():
                cls._open.setdefault(id(p), []).append(session)
            if evaluating_loss():
                NESTED.update(map(id, binding.parameters.values()))
            for m in session._dense:  # a sparse gradient has no derivative; the dense one has the same numbers
                m.sparse = False
            return session

    def check_on_top(self) -> None:
        for p in self.binding.parameters.values():
            if self._open[id(p)][-1] is not self:
                raise RuntimeError(
                    "bilevel.inner: a nested block is still open on the same model, and its weights are in it. Close "
                    "the inner block first, or give it a copy of the model."
                )

    def close(self) -> None:
        above: dict[int, _Session] = {}
        for p in self.binding.parameters.values():
            stack = self._open[id(p)]
            at = stack.index(self)
            if at + 1 < len(stack):
                above[id(p)] = stack[at + 1]
            del stack[at]
            if not stack:
                del self._open[id(p)]
        with torch.no_grad():
            later = next(iter(above.values()), None)
            if later is not None:  # closed out of order: the block that is still open puts it back in the end
                mine = {id(t): saved for t, saved in self.values}
                later.values = [(t, mine.get(id(t), saved)) for t, saved in later.values]
                later._modes, later._flags = self._modes, self._flags
                later._attributes, later._places = self._attributes, self._places
                return
            for t, saved in self.values:
                if not t.is_meta and t.dtype == saved.dtype:
                    t.copy_(saved)
                elif t.dtype != saved.dtype:
                    t.data = saved
        for holder, name, t in self._places:
            holder[name] = t
        for holder, name, value, items in self._attributes:
            if items is not None:
                cast("list[Any]", value)[:] = items
            holder[name] = value
        for p, flag in self._flags:
            p.requires_grad_(flag)
        for m, mode in self._modes:
            m.training = mode
        for m in self._dense:
            m.sparse = True
        for stack in (self._open.get(id(p)) for p in self.binding.parameters.values()):
            if stack:
                stack[-1].binding.note_versions()


def _places(
    modules: Iterable[nn.Module], kind: str, tensors: Mapping[str, Tensor]
) -> list[tuple[dict[str, Any], str, str]]:
    """Every place that holds one of them: tied weights have several, a submodule under two names is one place."""
    names = {id(t): n for n, t in tensors.items()}
    return [(vars(m)[kind], name, names[id(t)]) for m in modules for name, t in vars(m)[kind].items() if id(t) in names]


def _has_weight_norm(module: nn.Module) -> bool:
    """Whether it is torch's parametrization, or has torch's older hook."""
    return any(type(x).__name__ in ("_WeightNorm", "WeightNorm") for x in (module, *module._forward_pre_hooks.values()))


def _split(name: str, returned: Any) -> tuple[Tensor, Any]:
    """The loss, and what was returned beside it."""
    if type(returned) is tuple and len(returned) == 2:
        return scalar(name, returned[0]), returned[1]
    return scalar(name, returned), None


def scalar(name: str, value: object) -> Tensor:
    """The value of a loss, or an error that says what is wrong with it."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"bilevel.inner: {name} must return a scalar tensor, got {type(value).__name__}. Return the loss itself, "
            "not loss.item(); what else you want of it comes second: return loss, logits."
        )
    if value.shape != ():
        raise ValueError(
            f"bilevel.inner: {name} must return a scalar, got a tensor of shape {tuple(value.shape)}. Reduce it, "
            "with .mean() or .sum()."
        )
    if not value.is_floating_point():
        raise TypeError(f"bilevel.inner: {name} must return a real floating-point loss, got {value.dtype}.")
    return value


def _refuse_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bilevel.inner: model must be an nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        where = f"the submodule {name!r}" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"bilevel.inner: {where} is a TorchScript module (torch.jit), whose derivatives can't be looked into. "
                "Pass the nn.Module that it was made from."
            )
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"bilevel.inner: {where} is torch.compile'd, and a compiled module has no second derivative. "
                "Pass the module as it was before compiling (compiled._orig_mod)."
            )
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise TypeError(
                f"bilevel.inner: {where} is wrapped in {kind}, which sums gradients outside of autograd's second "
                "derivative. Pass the module itself (model.module), and group= for several processes."
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise TypeError(
                f"bilevel.inner: {where} has a backward hook, and autograd would apply it to second derivatives as "
                "well. Remove it; what it does to the gradient can be an operation in the model, or direction=, a "
                "function of the direction."
            )
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise TypeError(
                f"bilevel.inner: {where} is an nn.Embedding with scale_grad_by_freq=True, whose second derivative is "
                "wrong in PyTorch. Set scale_grad_by_freq=False."
            )
    for name, buffer in model.named_buffers():
        if buffer is not None and buffer.grad_fn is not None:
            raise ValueError(
                f"bilevel.inner: the buffer {name!r} carries a graph of autograd. Compute it inside h, or register it "
                "detached."
            )


def _refuse_shared_memory(model: nn.Module, parameters: State) -> None:
    """Tied weights are one Parameter in two places; two tensors over the same memory train otherwise."""
    held = {id(p): n for n, p in parameters.items()}
    spans: list[tuple[int, int, str, bool]] = []
    attributes = [
        (f"{name}.{n}".lstrip("."), t)
        for name, m in model.named_modules()
        if not m._forward_pre_hooks  # old-style norms and pruning make theirs anew before each call
        for n, t in vars(m).items()
        if isinstance(t, Tensor)
    ]
    named = (*model.named_parameters(), *model.named_buffers(), *attributes)
    tensors = {id(t): (n, t) for n, t in named if t is not None}
    for key, (n, t) in tensors.items():
        if t.layout == torch.strided and t.numel() and not t.is_meta and not _lazy(t):
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), n, key in held))
    spans.sort()
    for (_, end, one, a), (begin, _, other, b) in itertools.pairwise(spans):
        if begin < end and (a or b):
            raise ValueError(
                f"bilevel.inner: {one!r} and {other!r} are tied: two tensors that share their memory, of which a step "
                "would see one. Tie weights by the parameter itself (model.b.weight = model.a.weight), and give a "
                "frozen copy or a buffer memory of its own (.clone())."
            )


def _lazy(t: Tensor) -> bool:
    return isinstance(t, torch.nn.parameter.UninitializedTensorMixin)  # pyright: ignore


def _inner_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    named = dict(model.named_parameters())
    inner: State = {n: p for n, p in named.items() if p.requires_grad}
    if optimizers:
        names = {id(p): n for n, p in named.items()}
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        twice = (
            next((p for i, p in enumerate(held) if any(p is q for q in held[:i])), None)
            if len(optimizers) > 1
            else None
        )
        if twice is not None:
            raise ValueError(
                f"bilevel.inner: two of the optimizers hold the parameter {names.get(id(twice), '')!r}. Give each "
                "optimizer a part of the model of its own; loop.step(..., only=optimizer) moves one part."
            )
        strangers = [tuple(p.shape) for p in held if id(p) not in names]
        if strangers:
            raise ValueError(
                f"bilevel.inner: the optimizer holds {len(strangers)} tensor(s) that are no parameters of the model "
                f"(the first has shape {strangers[0]}). Build it over model.parameters() or a part of them; outer "
                "variables have an optimizer of their own."
            )
        mine = {names[id(p)] for p in held}
        inner = {n: p for n, p in inner.items() if n in mine}
    if not inner:
        kinds = ", ".join(sorted({str(p.dtype) for p in named.values()})) or "none at all"
        raise ValueError(
            f"bilevel.inner: the model has no trainable parameter, so there is no inner variable (parameters: {kinds}; "
            "integer ones can't be trained). Set requires_grad on what the inner loop should train."
        )
    for n, p in inner.items():
        if _lazy(p):
            raise ValueError(
                f"bilevel.inner: the parameter {n!r} of a lazy module has no shape yet. Call the model once, on a "
                "batch, before the block."
            )
        if p.is_complex():
            raise TypeError(
                f"bilevel.inner: the parameter {n!r} is complex ({p.dtype}), and steps on complex weights are not "
                "supported. Hold its real and imaginary parts as two parameters (torch.view_as_complex in forward)."
            )
        if p.is_inference():
            raise RuntimeError(
                f"bilevel.inner: the parameter {n!r} was made under torch.inference_mode and can't be differentiated. "
                "Build the model outside of it."
            )
        hooks = getattr(p, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise ValueError(
                f"bilevel.inner: the parameter {n!r} has a post-accumulate hook, which reads .grad, and a block has "
                "none there. Remove it, and write what it does to the gradient as direction=, a function of it."
            )
    return inner


def code_of(loss: Any) -> object:
    """A key that is equal for a loss that is defined again for every block: its code, and the switches it closes over.

    The tensors and numbers that it closes over may differ each time.
    """
    if isinstance(loss, WithKeywords):
        return code_of(loss.loss)
    if isinstance(loss, functools.partial):
        return code_of(loss.func), *map(_switch, (*loss.args, *loss.keywords.values()))
    code = getattr(loss, "__code__", None)
    if code is None:
        return type(loss), *map(_switch, getattr(loss, "__dict__", {}).values())
    held = (*(loss.__defaults__ or ()), *(cell.cell_contents for cell in loss.__closure__ or () if _is_filled(cell)))
    return code, getattr(loss, "__self__", None) and id(loss.__self__), *map(_switch, held)


def _switch(x: object) -> object:
    return x if isinstance(x, (bool, str)) else getattr(x, "__code__", None)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@dataclass(frozen=True)
class WithKeywords:
    """A loss whose last arguments are given by name."""

    loss: Loss
    keywords: tuple[str, ...]

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(args) - len(self.keywords)
        return args[:n], dict(zip(self.keywords, args[n:], strict=True))

    def __call__(self, *args: Any) -> Tensor:
        positional, named = self._split(args)
        return self.loss(*positional, **named)

    def bind(self, *args: Any) -> None:
        positional, named = self._split(args)
        inspect.signature(self.loss).bind(*positional, **named)


def _check_arguments(name: str, loss: Loss, model: nn.Module, batch: tuple[Any, ...], error: TypeError) -> None:
    """Raise a better error, if what went wrong is that the loss takes other arguments than the batch gives."""
    try:
        if isinstance(loss, WithKeywords):
            loss.bind(model, *batch)
        else:
            inspect.signature(loss).bind(model, *batch)
    except TypeError as misfit:
        where = "outer=(...)" if name == "g" else "loop.step(...)"
        named = f" ({', '.join(loss.keywords)} by name)" if isinstance(loss, WithKeywords) else ""
        raise TypeError(
            f"bilevel.inner: {name}(model, *batch) was called with a batch of {len(batch)}{named}, but {misfit}. "
            f"Its batch is what is given to {where}."
        ) from error
    except ValueError:  # a built-in without a signature
        pass
