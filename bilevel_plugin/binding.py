"""From a model and a loss to a function of the weights, and what it takes to call that function again.

`Binding` swaps weights and buffers into the user's own module for the time of one call (what
`torch.func.functional_call` does, with the places looked up once), so h and g stay as they are and the module is left
as it was.
`Conditions` remembers what such a call saw besides its arguments.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

State = dict[str, Tensor]
Loss = Callable[..., Tensor]
# Held while a loss runs: weights are in the user's module then, and the kernels of attention, cuDNN and the random
# numbers that are switched and put back are the process's, not the thread's. Re-entrant, for a loop inside a loss.
EXCLUSIVE = threading.RLock()
_DEVICE_TYPES = {"cpu", *([a.type] if (a := torch.accelerator.current_accelerator()) else [])}


class Binding:
    """The model as a function of the weights w (its trainable parameters) and of its buffers.

    With an optimizer, w is what the optimizer holds; any other trainable parameter stays in the model and
    may be an outer variable.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        _refuse(model)
        self.model = model
        self.group: Any = None  # of processes that take part
        self.parameters = _inner_parameters(model, optimizer)
        self.buffers: State = {n: b for n, b in model.named_buffers() if b is not None}
        self.modules = tuple(model.modules())
        tensors = {id(t): n for n, t in (*self.parameters.items(), *self.buffers.items())}
        # every place that holds one of them: tied weights have several, a submodule under two names is one place
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (holder, name, tensors[id(t)])
            for module in self.modules
            for holder in (vars(module)["_parameters"], vars(module)["_buffers"])
            for name, t in holder.items()
            if id(t) in tensors
        ]
        held = (*model.parameters(), *self.buffers.values())
        self.devices = {t.device for t in held if t.device.type not in ("cpu", "meta")}
        self.device_types = sorted({"cpu", *(d.type for d in self.devices)})
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.modules)
        self._weight_norm = any(type(m).__name__ == "_WeightNorm" for m in self.modules)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells whether another binding does the same."""
        return tuple((id(holder), name, n) for holder, name, n in self._places)

    def start(self) -> State:
        """w_0, still attached to the model's parameters."""
        with torch.enable_grad():
            return {n: self.each(p) for n, p in self.parameters.items()}

    def each(self, x: Tensor) -> Tensor:
        """A tensor of the model, once for every inner problem."""
        return x

    def mean(self, name: str, value: Tensor) -> Tensor:
        """The loss of this name over all processes that take part."""
        return value

    def once(self, x: Tensor) -> Tensor:
        """A tensor that a step uses outside of the losses: a rate, an option of an optimizer."""
        return x

    def own(self, w: State) -> State:
        """The weights as the losses see them."""
        return w

    def check_same(self, tensors: State) -> None:
        """Raise if the processes that take part hold different numbers."""

    def agree(self, ok: bool) -> bool:
        """Whether all is well in every process that takes part."""
        return ok

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number among the processes that take part."""
        return numbers

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients for the inputs, from the parts that this process has of them."""
        return list(parts)

    def call(
        self, function: Callable[..., Any], w: State, buffers: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, State]:
        """function(model, *args) at the weights w; also the buffers as that call left them."""
        before = [holder[name] for holder, name, _ in self._places]
        try:
            for holder, name, n in self._places:
                holder[name] = w[n] if n in w else buffers[n]
            out = function(self.model, *args, **kwargs)
            after: dict[str, Any] = {n: holder[name] for holder, name, n in self._places if n in buffers}
            return out, after
        finally:
            for (holder, name, _), tensor in zip(self._places, before, strict=True):
                holder[name] = tensor

    def total(self, value: Tensor) -> Tensor:
        """One number for the loss."""
        return value

    def check_batch(self, name: str, batch: tuple[Any, ...]) -> None:
        """Raise if the batch of the loss can't be what it should be."""

    def loss(self, name: str, loss: Loss, w: State, buffers: State, batch: tuple[Any, ...]) -> tuple[Tensor, State]:
        """loss(model, *batch) at w, checked. To be called under `twice_differentiable`."""
        self.check_batch(name, batch)
        try:
            value, buffers = self.call(lambda *args: scalar(name, loss(*args)), w, buffers, batch, {})
        except TypeError as error:
            _check_arguments(name, loss, self.model, batch, error)
            raise
        finally:
            # autocast keeps a copy of every weight until its block ends: K sets of them, some made under no_grad,
            # and two losses that share a copy would add their gradients in low precision
            torch.clear_autocast_cache()
        return self.mean(name, self.total(value)), buffers

    def twice_differentiable(self) -> AbstractContextManager[None]:
        """Keep out the kernels whose second derivative is missing or wrong."""
        return self._plain_kernels() if self._recurrent or self._weight_norm else _MATH_ATTENTION

    @contextmanager
    def _plain_kernels(self) -> Generator[None]:
        no_cudnn = torch.backends.cudnn.flags(enabled=False) if self._recurrent and self.devices else nullcontext()
        plain = _PlainWeightNorm() if self._weight_norm else nullcontext()
        with _MATH_ATTENTION, no_cudnn, plain:
            yield


class _MathAttention(AbstractContextManager[None]):
    """Attention on the one kernel that has a second derivative, as sdpa_kernel(MATH) does at six times the price.

    The switches are the process's, and so this holds EXCLUSIVE.
    """

    def __init__(self) -> None:
        self._before: list[list[bool]] = []  # a loop may be inside a loss

    def __enter__(self) -> None:
        EXCLUSIVE.acquire()
        self._before.append([enabled() for enabled, _, _ in _ATTENTION])
        for _, enable, wanted in _ATTENTION:
            enable(wanted)

    def __exit__(self, *error: object) -> None:
        for (_, enable, _), on in zip(_ATTENTION, self._before.pop(), strict=True):
            enable(on)
        EXCLUSIVE.release()


_ATTENTION = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
]
_MATH_ATTENTION = _MathAttention()


class _PlainWeightNorm(TorchFunctionMode):
    """w = g·v/‖v‖ written out: the fused kernel of torch.nn.utils.parametrizations.weight_norm fails gradgradcheck."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            v, g, dim = args
            return v * (g / torch.norm_except_dim(v, 2, dim))
        return func(*args, **(kwargs or {}))


class Conditions:
    """What a call saw besides its arguments: train/eval modes, autocast, random numbers."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._modes = [m.training for m in binding.modules]
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in binding.device_types}
        self._random: dict[torch.device | None, Tensor] | None = _random_states(binding.devices)

    def __eq__(self, other: object) -> bool:
        """Whether two calls that drew no random numbers saw the same."""
        if not isinstance(other, Conditions) or self.draws or other.draws or self._binding is not other._binding:
            return False
        return self._modes == other._modes and self._autocast == other._autocast

    @property
    def draws(self) -> bool:
        """Whether the call drew random numbers."""
        return self._random is not None

    @property
    def autocast(self) -> bool:
        return any(on for on, _ in self._autocast.values())

    def settle(self) -> None:
        """Called after the call: drop the random state if nothing was drawn from it."""
        now = _random_states(self._binding.devices)
        if self._random is not None and all(torch.equal(s, now[d]) for d, s in self._random.items()):
            self._random = None

    @property
    def precision(self) -> float:
        """The rounding unit of the coarsest type that the call computed in."""
        types = [p.dtype for p in self._binding.parameters.values()]
        types += [dtype for on, dtype in self._autocast.values() if on]
        return max(torch.finfo(t).eps for t in types)

    @contextmanager
    def again(self) -> Generator[None]:
        """The same conditions once more; those of the caller come back at the end."""
        modules = self._binding.modules
        with EXCLUSIVE, ExitStack() as stack:
            modes = [m.training for m in modules]
            random = None if self._random is None else _random_states(self._binding.devices)
            for kind, (on, dtype) in self._autocast.items():
                if (on, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            try:
                _set_modes(modules, self._modes)
                _set_random_states(self._random)
                yield
            finally:
                _set_modes(modules, modes)
                _set_random_states(random)


def full_precision() -> AbstractContextManager[Any]:
    """Autocast off: it is for the forward pass, and derivatives keep the types of the operations they belong to."""
    on = [kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return _without_autocast(on) if on else _NOTHING


@contextmanager
def _without_autocast(kinds: list[str]) -> Generator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


_NOTHING = nullcontext()


def scalar(name: str, value: object) -> Tensor:
    """The value of a loss, or an error that says what is wrong with it."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"bilevel.inner: {name} must return a scalar tensor, got {type(value).__name__}. Return the loss itself, "
            "not loss.item() or a tuple."
        )
    if value.shape != ():
        raise ValueError(
            f"bilevel.inner: {name} must return a scalar, got a tensor of shape {tuple(value.shape)}. Reduce it, "
            "with .mean() or .sum()."
        )
    if not value.is_floating_point():
        raise TypeError(f"bilevel.inner: {name} must return a real floating-point loss, got {value.dtype}.")
    return value


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tuple, list or dict of anything."""
    leaves = tree if _flat(tree) else pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor)]


def _flat(tree: Any) -> bool:
    """A plain tuple of tensors, as most batches are: no need for the slow general way."""
    return type(tree) is tuple and all(isinstance(x, Tensor) for x in tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with every tensor replaced."""
    if _flat(tree):
        return tuple(map(function, tree))
    return pytree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def _set_modes(modules: tuple[nn.Module, ...], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.training = mode


def _random_states(devices: set[torch.device]) -> dict[torch.device | None, Tensor]:
    states: dict[torch.device | None, Tensor] = {None: torch.get_rng_state()}
    for d in devices:
        module = torch.get_device_module(d)
        states[d] = module.get_rng_state() if d.type == "mps" else module.get_rng_state(d)
    return states


def _set_random_states(states: dict[torch.device | None, Tensor] | None) -> None:
    for d, state in (states or {}).items():
        if d is None:
            torch.set_rng_state(state)
        elif d.type == "mps":
            torch.get_device_module(d).set_rng_state(state)
        else:
            torch.get_device_module(d).set_rng_state(state, d)


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bilevel.inner: model must be an nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"the submodule {name!r}" if name else "the model"
            raise TypeError(
                f"bilevel.inner: {where} is torch.compile'd, and a compiled module has no second derivative. "
                "Pass the module as it was before compiling (compiled._orig_mod)."
            )


def _inner_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    named = dict(model.named_parameters())
    inner: State = {n: p for n, p in named.items() if p.requires_grad}
    if optimizer is not None:
        names = {id(p): n for n, p in named.items()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
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
    return inner


def _check_arguments(name: str, loss: Loss, model: nn.Module, batch: tuple[Any, ...], error: TypeError) -> None:
    """Raise a better error, if what went wrong is that the loss takes other arguments than the batch gives."""
    try:
        inspect.signature(loss).bind(model, *batch)
    except TypeError as misfit:
        where = "outer=(...)" if name == "g" else "loop.step(...)"
        raise TypeError(
            f"bilevel.inner: {name}(model, *batch) was called with a batch of {len(batch)}, but {misfit}. "
            f"Its batch is what is given to {where}."
        ) from error
    except ValueError:  # a built-in without a signature
        pass
