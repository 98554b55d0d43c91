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

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

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
from .losses import Loss, active_models, check_arguments, code_of, value_and_aux
from .models import has_weight_norm, inner_parameters, refuse_model, refuse_shared_memory
from .session import Session

_RUNNING = ("running_mean", "running_var")
OWNER = "_bilevel_loop"  # the attribute of a tensor that says whose weights it holds
AUX = "_bilevel_aux"  # the attribute of a tensor that a loss returned beside its value, and that depends on the weights


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
        refuse_model(model)
        # A block inside of a loss, on the very model of that loss, must not write to it: the loss is in the midst of
        # its graph. The weights of such a block are swapped in alone, as those of tasks are.
        self.holds = not any(id(m) in modules for modules in active_models() for m in model.modules())
        self.model, self.own_parameters = model, own_parameters
        self.parameters = inner_parameters(model, optimizers)
        self.modules = tuple(model.modules())
        self._module_ids = frozenset(map(id, self.modules))
        self._children = [(m._modules, tuple(m._modules.values())) for m in self.modules]
        # a buffer that requires grad is an outer variable, and stays where it is
        self.buffers: State = {n: b for n, b in model.named_buffers() if b is not None and not b.requires_grad}
        refuse_shared_memory(model, self.parameters)
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
        self.weight_norm = any(map(has_weight_norm, self.modules))
        self.padded = any(isinstance(m, nn.Embedding) and m.padding_idx is not None for m in self.modules)
        self.long_attention = False  # whether a loss calls F.scaled_dot_product_attention by a name of its own
        self._parametrized = any(parametrize.is_parametrized(m) for m in self.modules)
        self._session: Session | None = None
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

    def repeat_for_tasks(self, x: Tensor) -> Tensor:
        """A tensor of the model, once for every inner problem."""
        return x

    def map_over_tasks(self, function: Callable[[State], State], d: State) -> State:
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
            return {n: self.repeat_for_tasks(p) for n, p in self.parameters.items()}

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
        written = (*self.parameters.values(), *self.buffers.values()) if self.holds else ()
        self._session = Session.open(self.model, self.parameters, written, self.note_versions)
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
        active_models().append(self._module_ids)
        inside.taking.losses += 1
        inside.taking.evaluating = True
        before = [x._version for x in inside.weights.values()]
        try:
            with self._first_look(name, loss):
                value, aux = self.call(lambda *args: value_and_aux(name, loss(*args)), inside, batch)
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
        active_models().append(self._module_ids)
        try:
            return self.total(self.call(lambda *args: value_and_aux(name, loss(*args))[0], inside, batch))
        finally:
            active_models().pop()

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


def _places(
    modules: Iterable[nn.Module], kind: str, tensors: Mapping[str, Tensor]
) -> list[tuple[dict[str, Any], str, str]]:
    """Every place that holds one of them: tied weights have several, a submodule under two names is one place."""
    names = {id(t): n for n, t in tensors.items()}
    return [(vars(m)[kind], name, names[id(t)]) for m in modules for name, t in vars(m)[kind].items() if id(t) in names]
