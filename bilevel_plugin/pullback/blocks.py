"""Forward over reverse, block by block: the derivative of a step in about the memory of a plain training step.

∇_(w, λ) ⟨∇ℓ, u⟩ is the tangent of the gradient of ℓ along u, if ∇ℓ is a gradient: second derivatives are symmetric. So
the losses run on dual numbers (w, u), and one backward pass gives gradients whose tangents are the result. A block f,
which is one of the repeated modules of the model, keeps only its input x and the tangent ẋ of x:

    forward    y, ẏ from (x, ẋ), without a graph
    backward   given ȳ and its tangent: run f again; x̄, θ̄ = ∇⟨ȳ, f⟩, with a graph; then the tangents of x̄ and θ̄ are
               ∇_(x, θ) [⟨(x̄, θ̄), (ẋ, u_θ)⟩ + ⟨ȳ̇, f⟩]

Operations outside the blocks run on dual numbers unchanged. (Kemaev et al. 2025, MixFlow-MG, have the idea in JAX.)
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..autograd.derive import grad, norm
from ..autograd.graph import leaf_of, nodes, sequence_number
from ..autograd.look import hooks_on_saved
from ..autograd.missing import explained
from ..autograd.trees import State
from ..kernels.stopping import Evaluation
from ..kernels.switches import full_precision
from ..model.losses import code_of
from ..model.model import Inside
from ..step.conditions import drawn_from, random_states, set_modes, set_random_states, undisturbed
from ..step.step import Step, is_same
from ..update.update import PulledUpdate, add
from . import lean
from .base import Pulled, joined, known_direction
from .lean import LeanProducts

Which = str | type[nn.Module] | nn.Module | Sequence[type[nn.Module] | nn.Module]
_tangents_enabled = forward_ad._set_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage]


class Unsuited(RuntimeError):
    """The reason why a step can't be differentiated block by block."""


class BlockByBlock:
    """A pullback that differentiates the chosen modules one by one; if that can't be done, it warns and uses `lean`."""

    def __init__(self, which: Which = "auto") -> None:
        self._which, self._disabled = checked(which), False

    def __call__(
        self, step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after: State | None = None
    ) -> Pulled:
        binding = step.binding
        if self._disabled:
            return lean.pull(step, z, buffers, a, wanted, after)
        modes, random = [m.training for m in binding.modules], random_states(binding.devices)
        found, why = None, "another rank can't differentiate its step block by block"
        try:
            found = self._pull(step, z, buffers, a, wanted, after)
        except Unsuited as error:
            why = str(error)
        if binding.all_agree(found is not None) and found is not None:
            return joined(step, *found)
        self._disabled = True
        set_modes(binding.modules, modes)  # `lean` starts under the same conditions
        set_random_states(random)
        warnings.warn(
            f"bilevel.Reverse: blocks= is off for this loop, which therefore needs the memory of whole steps: {why}.",
            stacklevel=2,
        )
        return lean.pull(step, z, buffers, a, wanted, after)

    def _pull(
        self, step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after: State | None
    ) -> _Found:
        """Return the parts of the derivative that `joined` adds up, over the ranks too."""
        binding = step.binding
        if not binding.own_parameters:
            raise Unsuited("with tasks= the weights have a task dimension, which blocks= does not support")
        if binding.stops_gradients:
            raise Unsuited("a loss calls stop_gradient, and the derivative of its gradient is not symmetric")
        if hooks_on_saved is None:
            raise Unsuited(f"torch {torch.__version__} can't list the hooks on saved tensors; a later release can")
        modules = chosen(binding.model, self._which)
        if not modules:
            raise Unsuited(
                "the model has no ModuleList or Sequential with several modules of one class; give a class of modules "
                "to blocks="
            )
        tangents = _Tangents(step, z, buffers, wanted, modules)
        d = known_direction(step, z, after)
        if d is None:
            with undisturbed(binding), binding.inside(z, buffers) as inside:
                d = binding.mean_of_direction(step.evaluate(inside, create_graph=False).direction)
        self._check_symmetry(step, tangents)
        update = step.update.pull(z, d, a, wanted, end=False)
        del d
        if not step.terms:  # an update alone: a step on accumulated gradients, or a rank without samples
            return update, {}, (), [None] * len(wanted), {}, {}  # it leaves the statistics, and their adjoint, as is
        u, update.cotangent = update.cotangent, {}
        if binding.share != 1:
            u = {n: x * binding.share for n, x in u.items()}
        through, of_wanted, values = tangents.along(u, a)
        return update, through, binding.statistics, of_wanted, {}, values

    def _check_symmetry(self, step: Step, tangents: _Tangents) -> None:
        """Check ⟨v, H·u⟩ = ⟨u, H·v⟩ for random u and v, once for a model with its losses.

        H·u is the tangent of the gradient along u. The identity fails where an operation changes the gradient, which
        then is not the gradient of a function.
        """
        binding = step.binding
        key = binding.structure, step.only, tuple((t.name, code_of(t.loss)) for t in step.terms)
        if not (binding.warns and step.terms and step.directed) or key in _SYMMETRIC:
            return
        products: list[Tensor] = []
        sizes: list[Tensor] = []
        for i in range(2):
            with undisturbed(binding):
                through = tangents.along(dict(tangents.at_random(step.directed, i)), {})[0]
            others = tangents.at_random(step.directed, 1 - i)
            dots = [((x * v).sum(), norm([x]) * norm([v])) for n, v in others if (x := through[n]) is not None]
            products.append(torch.stack([dot for dot, _ in dots]).sum())
            sizes.append(torch.stack([size for _, size in dots]).sum())
        size = max(sizes)
        if not size.is_meta and abs(products[0] - products[1]) > torch.finfo(size.dtype).eps ** 0.5 * size:
            raise Unsuited(
                "the derivative of the gradient is not symmetric, since an operation changes the gradient (such as an "
                "autograd.Function whose backward is not the derivative of its forward)"
            )
        _SYMMETRIC.add(key)


_Found = tuple[PulledUpdate, dict[str, Tensor | None], Sequence[str], Sequence[Tensor | None], State, State]
_SYMMETRIC: set[object] = set()  # models with their losses that passed the check


class _Tangents:
    """The tangents of the gradient of a step at z, by one backward pass on dual numbers."""

    def __init__(
        self, step: Step, z: State, buffers: State, wanted: Sequence[Tensor], modules: Sequence[nn.Module]
    ) -> None:
        self._step, self._z, self._buffers = step, z, buffers
        self._wanted, self._modules = wanted, modules

    def at_random(self, names: Sequence[str], seed: int) -> Generator[tuple[str, Tensor]]:
        """Yield normal numbers in the shapes of these weights, one tensor at a time, reproducibly by the seed."""
        generator = torch.Generator().manual_seed(seed)
        for n in names:
            yield n, torch.randn(self._z[n].shape, generator=generator).to(self._z[n])

    def along(self, u: State, a: State) -> tuple[dict[str, Tensor | None], Sequence[Tensor | None], State]:
        """Return ∇⟨∇ℓ, u⟩ for the weights by name, and for the wanted tensors, and the losses; u is emptied.

        For running statistics b, a·∂b⁺ is added.
        """
        step, z, binding = self._step, self._z, self._step.binding
        _load_forward_mode()
        statistics = bool(binding.moving)
        with (
            binding.inside(z, self._buffers, graph=True, statistics=statistics) as inside,
            forward_ad.dual_level(),
        ):
            with torch.no_grad():
                for n in list(u):  # free each tensor of u once it is copied into the dual number
                    inside.leaves[n].copy_(forward_ad.make_dual(z[n], u.pop(n)))
            binding.note_versions()
            blocks = _Blocks(step, inside, self._wanted)
            with _OnDualNumbers(inside.taking) as blocks.dual, blocks.installed(self._modules):
                with _unsuited("a loss"):
                    weighted, values = step.losses(inside)
                if inside.taking.stops or inside.taking.unknown:
                    raise Unsuited((inside.taking.unknown or ("a loss stops a gradient",))[0])
                with torch.enable_grad():
                    outputs = [sum(weighted[1:], weighted[0])]
                along = [torch.ones_like(outputs[0])]
                for n, b in inside.buffers().items():
                    if n in inside.statistics and n in a and b.requires_grad:
                        outputs.append(b)
                        along.append(forward_ad.make_dual(torch.zeros_like(b), a[n]))
                del weighted
                named = {**inside.leaves, **inside.statistics, **inside.watched}
                tangents = blocks.tangents_of_gradient(outputs, along, [*named.values(), *self._wanted])
                del blocks, outputs, along
        through = dict(zip(named, tangents, strict=False))
        binding.warn_if_read({n: through.pop(n) for n in inside.watched})
        return through, tangents[len(named) :], values


class _Blocks:
    """The blocks of one evaluation of a step on dual numbers, and the sums of their tangents."""

    dual: _OnDualNumbers

    def __init__(self, step: Step, inside: Inside, wanted: Sequence[Tensor]) -> None:
        self.binding, self.inside = step.binding, inside
        self.retain_graph = step.runs_into_other_graphs
        self.tangents = {id(p): t for p in inside.leaves.values() if (t := tangent_of(p)) is not None}
        self.outer = {id(x) for x in (*inside.leaves.values(), *inside.statistics.values(), *wanted)}
        self.sums: dict[int, Tensor] = {}
        self.anchor = torch.zeros(
            (), requires_grad=True
        )  # makes autograd run the backward of a block whose inputs need no gradient
        self.running = False  # a block or a module inside it
        self.going_back = False

    def tangents_of_gradient(
        self, outputs: Sequence[Tensor], along: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the tangents of the gradients for these inputs."""
        self.going_back = True
        with full_precision(), explained(), _unsuited("the gradient of a loss"):
            # with the anchor among the inputs, autograd does not skip a block whose inputs need no gradient
            gradients = grad(outputs, [*inputs, self.anchor], along, retain_graph=self.retain_graph)[:-1]
        tangents = [None if g is None else tangent_of(g) for g in gradients]
        del gradients
        return [add(t, self.sums.pop(id(x), None)) for t, x in zip(tangents, inputs, strict=True)]

    def add(self, x: Tensor, tangent: Tensor | None) -> None:
        if tangent is not None:
            before = self.sums.get(id(x))  # not in place: autograd may return one tensor for two inputs
            self.sums[id(x)] = tangent if before is None else before + tangent

    @contextmanager
    def installed(self, modules: Sequence[nn.Module]) -> Generator[None]:
        """Run each of the modules as a block inside this context."""
        before = [(vars(m), vars(m).get("forward")) for m in modules]
        for m in modules:
            vars(m)["forward"] = self._as_block(m, m.forward)
        try:
            yield
        finally:
            for held, forward in before:
                if forward is None:
                    del held["forward"]
                else:
                    held["forward"] = forward

    @contextmanager
    def replaying(self) -> Generator[None]:
        """Run nested blocks as plain parts of the block that is replayed, inside this context."""
        self.running = self.inside.taking.replaying_block = True
        try:
            yield
        finally:
            self.running = self.inside.taking.replaying_block = False

    def _as_block(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.running or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.running = self.dual.in_block = True
            try:
                return _Call(self, module, forward, args, kwargs).run()
            finally:
                self.running = self.dual.in_block = False

        return run


class _Call:
    """One call of a block: its inputs with their tangents, and everything else that is needed to replay it."""

    def __init__(
        self, blocks: _Blocks, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self._blocks, self._forward = blocks, forward
        binding = blocks.binding
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves: list[Any] = leaves
        for x in self._leaves:
            if not isinstance(x, _PLAIN):
                raise Unsuited(
                    f"a block ({type(module).__name__}) is given a {type(x).__name__}, which it may change; a Hugging "
                    "Face model passes no cache with model.config.use_cache = False"
                )
        self._modules = tuple(module.modules())
        self._modes = [m.training for m in self._modules]
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in binding.device_types}
        self._buffers = binding.buffers_of(self._modules)

    def run(self) -> Any:
        """Run the block on dual numbers; the graph of the result is a single node, this call."""
        blocks, binding, buffers = self._blocks, self._blocks.binding, self._buffers
        leaves: list[Any] = self._leaves
        inputs: list[Tensor] = [x for x in (*leaves, *buffers.values()) if is_tracked(x)]
        versions = [x._version for x in leaves if isinstance(x, Tensor)]
        random = random_states(binding.devices)
        try:
            binding.put_buffers({n: as_dual(primal_of(b).detach().clone(), tangent_of(b)) for n, b in buffers.items()})
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            with blocks.dual.without_graphs(), _unsuited("a block"):
                results, spec = pytree.tree_flatten(self._forward(*args, **kwargs))
            after = {n: b for n, b in binding.buffers_of(self._modules).items() if not is_same(b, buffers[n])}
        finally:
            binding.put_buffers(buffers)
        if versions != [x._version for x in leaves if isinstance(x, Tensor)]:
            raise Unsuited("a block changes its input in place")
        self._random = drawn_from(random, random_states(binding.devices))
        # A result that is one of the arguments bypasses the block. Any other may depend on weights, whether or not
        # they have a tangent; if it does not, it has no graph in the replay.
        self._results = [i for i, y in enumerate(results) if is_real(y) and not any(y is x for x in leaves)]
        self._moved = [n for n, b in after.items() if n in blocks.inside.statistics and is_real(b)]
        outputs: list[Tensor] = [*(results[i] for i in self._results), *(after[n] for n in self._moved)]
        tangents = [tangent_of(y) for y in outputs]
        self._tangents = [tangent_of(x) for x in inputs]
        self._followed = {n for n, b in buffers.items() if is_tracked(b)}
        self._leaves = [_Tracked(x) if is_tracked(x) else x for x in leaves]
        self._buffers = {n: primal_of(b).detach() for n, b in buffers.items()}
        numbers = [primal_of(y).detach() for y in outputs]
        attached = _Block.apply(self, blocks.anchor, numbers, *map(primal_of, inputs))
        new = [as_dual(y, t) for y, t in zip(cast("tuple[Tensor, ...]", attached), tangents, strict=True)]
        for i, y in zip(self._results, new, strict=False):
            results[i] = y
        binding.put_buffers({n: b.detach() for n, b in after.items()})
        binding.put_buffers(dict(zip(self._moved, new[len(self._results) :], strict=True)))
        return pytree.tree_unflatten(results, spec)

    @contextmanager
    def _replay(self, products: LeanProducts) -> Generator[tuple[list[Tensor], list[Tensor]]]:
        """Run the block again with a graph, on plain numbers; return the leaves for its inputs, and its outputs."""
        binding = self._blocks.binding
        now, modes = binding.buffers_of(self._modules), [m.training for m in self._modules]
        random = None if self._random is None else random_states(binding.devices)
        with torch.enable_grad(), _tangents_enabled(False), self._blocks.dual.off():
            leaves = [x.tensor.detach().requires_grad_() if isinstance(x, _Tracked) else x for x in self._leaves]
            buffers = {n: b.detach().requires_grad_(n in self._followed) for n, b in self._buffers.items()}
            inputs = [y for x, y in zip(self._leaves, leaves, strict=True) if isinstance(x, _Tracked)]
            inputs += [b for n, b in buffers.items() if n in self._followed]
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            try:
                set_modes(self._modules, self._modes)
                set_random_states(self._random)
                binding.put_buffers({n: b.clone() for n, b in buffers.items()})
                with products, _autocast(self._autocast), self._blocks.replaying(), _unsuited("a block"):
                    results = pytree.tree_leaves(self._forward(*args, **kwargs))
                after = binding.buffers_of(self._modules)
                outputs = [*(results[i] for i in self._results), *(after[n] for n in self._moved)]
                del results, after
                yield inputs, outputs
            finally:
                binding.put_buffers(now)
                set_modes(self._modules, modes)
                set_random_states(random)

    def back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return dual gradients for the inputs from those for the outputs, and add all other tangents to the sums."""
        blocks, inside = self._blocks, self._blocks.inside
        if not blocks.going_back:
            raise Unsuited("a loss takes a derivative of its own through a block")
        along = [None if g is None else primal_of(g).detach() for g in gradients]
        tangents = [None if g is None else tangent_of(g) for g in gradients]
        since, products = sequence_number(), LeanProducts(inside.weights.values(), inside.taking)
        with self._replay(products) as (inputs, outputs):
            used = _leaves_read(outputs, since)
            moving = [x for x in used if id(x) in blocks.tangents]
            inside.taking.on = True
            with products.taking_gradient():
                first = _vjp(outputs, along, [*inputs, *moving], create_graph=True)
            inside.taking.on = False
            others = [x for x in used if id(x) in blocks.outer]
            second = _vjp(
                [*first, *outputs],
                [*self._tangents, *(blocks.tangents[id(x)] for x in moving), *tangents],
                [*inputs, *others],
            )
            numbers = [None if x is None else x.detach() for x in first[: len(inputs)]]
            del first
        for x, tangent in zip(others, second[len(inputs) :], strict=True):
            blocks.add(x, tangent)
        return [
            as_dual(x, t) if x is not None else None if t is None else as_dual(torch.zeros_like(t), t)
            for x, t in zip(numbers, second, strict=False)
        ]


class _Block(torch.autograd.Function):
    """The outputs of a call that was run already, with a backward that replays it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call, ctx.call = ctx.call, None
        return None, None, None, *call.back(gradients)


class _Tracked:
    """An input of a block that has a derivative, kept without its graph."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = primal_of(x).detach()


# --- dual numbers ---


@functools.cache
def _load_forward_mode() -> None:
    """Import what torch imports at the first dual number, without its warning about torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def tangent_of(x: Tensor) -> Tensor | None:
    """Return the tangent of a dual number, without a graph."""
    tangent = forward_ad.unpack_dual(x).tangent
    return None if tangent is None else tangent.detach()


def primal_of(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x).primal


def as_dual(x: Tensor, tangent: Tensor | None) -> Tensor:
    """Return the dual number (x, tangent), or x itself if the tangent is None."""
    return x if tangent is None else forward_ad.make_dual(x, tangent)


def is_real(x: Any) -> bool:
    """Whether x is a tensor that can have a derivative."""
    return isinstance(x, Tensor) and x.is_floating_point()


def is_tracked(x: Any) -> bool:
    """Whether x is a tensor with a derivative: it depends on a weight or on a wanted tensor."""
    return is_real(x) and (x.requires_grad or tangent_of(x) is not None)


class _OnDualNumbers(TorchFunctionMode):
    """A mode in which the losses of a step run on dual numbers.

    Tensors that a loss computes under torch.no_grad are constants in the direction and in its derivative. Double
    backward treats them so by itself. Forward mode ignores torch.no_grad, so this mode stops tangents there. In a
    block, operations run without a graph, while grad mode stays as the block expects it.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self._on, self._evaluation, self.in_block = True, evaluation, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on and not self.in_block and hooks_on_saved is not None and hooks_on_saved(True) is not None:
            raise Unsuited(
                "a part of a loss outside the blocks runs under activation checkpointing, or other hooks on saved "
                "tensors, which drop tangents; make that part a block"
            )
        if func is torch._C._set_grad_enabled:  # pyright: ignore[reportPrivateUsage]
            if self._on:
                torch._C._set_fwd_grad_enabled(args[0])  # pyright: ignore
        elif func is F.embedding and self._on:
            func = _embedding
        if self._evaluation.without_graphs:
            with torch.no_grad():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def without_graphs(self) -> Generator[None]:
        """Record no graph inside this context."""
        self._evaluation.without_graphs = True
        try:
            yield
        finally:
            self._evaluation.without_graphs = False

    @contextmanager
    def off(self) -> Generator[None]:
        """Propagate no tangents inside this context."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Compute F.embedding with a tangent of 0 in the row `padding_idx`, which a step does not change.

    Dropping the gradient of that row makes the derivative of the gradient unsymmetric. So the row keeps its gradient
    here, and only its tangent is 0, which makes the tangents of all gradients right.
    """
    tangent = tangent_of(weight)
    if padding_idx is not None and tangent is not None:
        tangent = tangent.clone()
        tangent[padding_idx] = 0
        weight = as_dual(primal_of(weight), tangent)
    return F.embedding(input, weight, None, *args, **kwargs)


@contextmanager
def _unsuited(what: str) -> Generator[None]:
    """Turn an error on dual numbers, of code that runs on plain numbers, into an `Unsuited`."""
    try:
        yield
    except (Unsuited, MemoryError):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unsuited(f"{what} does not run on dual numbers, or not a second time ({why[:160]})") from error


# --- graphs of a block ---


def _vjp(
    outputs: Sequence[Tensor | None],
    along: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Return Σ along·∂output for every input, over the outputs that have a graph and an `along`."""
    pairs = [(y, a) for y, a in zip(outputs, along, strict=True) if y is not None and a is not None and y.requires_grad]
    if not pairs or not inputs:
        return [None] * len(inputs)
    with full_precision():
        return grad(
            [y for y, _ in pairs], inputs, [a for _, a in pairs], create_graph=create_graph, retain_graph=create_graph
        )


def _leaves_read(outputs: Sequence[Tensor], since: int) -> list[Tensor]:
    """Return the leaves of a block's graph."""
    found: list[Tensor] = []
    for node in nodes(outputs):
        leaf = leaf_of(node)
        if leaf is not None:
            found.append(leaf)
        elif node._sequence_nr() < since:
            raise Unsuited(
                "a block uses a tensor with a graph that was made outside it and is not one of its arguments"
            )
    return found


@contextmanager
def _autocast(kinds: dict[str, tuple[bool, torch.dtype]]) -> Generator[None]:
    with ExitStack() as stack:
        for kind, (on, dtype) in kinds.items():
            if on:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


# --- which modules are blocks ---


def checked(which: Any) -> Which:
    """Return the choice of `blocks=`, or raise an error that lists what it takes."""
    several: list[Any] = list(which) if isinstance(which, (list, tuple, set, nn.ModuleList)) else [which]
    if which != "auto" and not (several and all(isinstance(x, nn.Module) or _is_class(x) for x in several)):
        raise TypeError(
            "bilevel.Reverse: blocks= takes 'auto', a class of modules, modules of the model, or several of either, "
            f"got {which!r:.80}."
        )
    return "auto" if which == "auto" else several


def _is_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, nn.Module)


def chosen(model: nn.Module, which: Which) -> list[nn.Module]:
    """Return the modules of the model that are blocks. A block inside another one runs as a part of it."""
    modules = list(model.modules())
    if which == "auto":
        return _repeated(modules)
    several = cast("list[Any]", which)
    found = [m for m in modules if any(m is x or (_is_class(x) and isinstance(m, x)) for x in several)]
    missing = [x for x in several if not any(m is x or (_is_class(x) and isinstance(m, x)) for m in found)]
    if missing:
        raise ValueError(
            f"bilevel.Reverse: blocks= names {getattr(missing[0], '__name__', type(missing[0]).__name__)}, but the "
            "model has no such module. Name a class of modules that the model has, or modules of the model."
        )
    return found


def _repeated(modules: list[nn.Module]) -> list[nn.Module]:
    """Return modules of several layers that are in a ModuleList or Sequential with another module of their class.

    Of nested ones, the smallest are returned, since a stage of a network is made of blocks.
    """
    found: dict[int, nn.Module] = {}
    for holder in modules:
        if isinstance(holder, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = list(holder.children())
            kinds = Counter(type(m) for m in children)
            found.update((id(m), m) for m in children if kinds[type(m)] > 1 and _has_layers(m))
    return [m for m in found.values() if not any(id(x) in found for x in m.modules() if x is not m)]


def _has_layers(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(p.requires_grad for p in module.parameters())


_PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
