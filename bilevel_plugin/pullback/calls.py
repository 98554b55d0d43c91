"""The blocks of one evaluation on dual numbers, and their calls: run forward without a graph, and again backwards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.derive import grad
from ..autograd.graph import leaf_of, nodes, sequence_number
from ..autograd.missing import explained
from ..kernels.switches import full_precision
from ..model.model import Evaluation
from ..step.conditions import drawn_from, random_states, set_modes, set_random_states
from ..step.piece import Piece
from ..step.sums import is_same
from ..update.update import add
from .dual import (
    OnDualNumbers,
    Unsuited,
    as_dual,
    is_real,
    is_tracked,
    primal_of,
    tangent_of,
    tangents_enabled,
    unsuited,
)
from .lean import LeanProducts


class Blocks:
    """The blocks of one evaluation of a step on dual numbers, and the sums of their tangents."""

    dual: OnDualNumbers

    def __init__(self, piece: Piece, inside: Evaluation, wanted: Sequence[Tensor]) -> None:
        self.model, self.inside = piece.model, inside
        self.retain_graph = piece.runs_into_other_graphs
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
        with full_precision(), explained(), unsuited("the gradient of a loss"):
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
        self, blocks: Blocks, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self._blocks, self._forward = blocks, forward
        model = blocks.model
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
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in model.device_types}
        self._buffers = model.present_buffers(self._modules)

    def run(self) -> Any:
        """Run the block on dual numbers; the graph of the result is a single node, this call."""
        blocks, model, buffers = self._blocks, self._blocks.model, self._buffers
        leaves: list[Any] = self._leaves
        inputs: list[Tensor] = [x for x in (*leaves, *buffers.values()) if is_tracked(x)]
        versions = [x._version for x in leaves if isinstance(x, Tensor)]
        random = random_states(model.devices)
        try:
            model.put_buffers({n: as_dual(primal_of(b).detach().clone(), tangent_of(b)) for n, b in buffers.items()})
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            with blocks.dual.without_graphs(), unsuited("a block"):
                results, spec = pytree.tree_flatten(self._forward(*args, **kwargs))
            after = {n: b for n, b in model.present_buffers(self._modules).items() if not is_same(b, buffers[n])}
        finally:
            model.put_buffers(buffers)
        if versions != [x._version for x in leaves if isinstance(x, Tensor)]:
            raise Unsuited("a block changes its input in place")
        self._random = drawn_from(random, random_states(model.devices))
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
        model.put_buffers({n: b.detach() for n, b in after.items()})
        model.put_buffers(dict(zip(self._moved, new[len(self._results) :], strict=True)))
        return pytree.tree_unflatten(results, spec)

    @contextmanager
    def _replay(self, products: LeanProducts) -> Generator[tuple[list[Tensor], list[Tensor]]]:
        """Run the block again with a graph, on plain numbers; return the leaves for its inputs, and its outputs."""
        model = self._blocks.model
        now, modes = model.present_buffers(self._modules), [m.training for m in self._modules]
        random = None if self._random is None else random_states(model.devices)
        with torch.enable_grad(), tangents_enabled(False), self._blocks.dual.off():
            leaves = [x.tensor.detach().requires_grad_() if isinstance(x, _Tracked) else x for x in self._leaves]
            buffers = {n: b.detach().requires_grad_(n in self._followed) for n, b in self._buffers.items()}
            inputs = [y for x, y in zip(self._leaves, leaves, strict=True) if isinstance(x, _Tracked)]
            inputs += [b for n, b in buffers.items() if n in self._followed]
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            try:
                set_modes(self._modules, self._modes)
                set_random_states(self._random)
                model.put_buffers({n: b.clone() for n, b in buffers.items()})
                with products, _autocast(self._autocast), self._blocks.replaying(), unsuited("a block"):
                    results = pytree.tree_leaves(self._forward(*args, **kwargs))
                after = model.present_buffers(self._modules)
                outputs = [*(results[i] for i in self._results), *(after[n] for n in self._moved)]
                del results, after
                yield inputs, outputs
            finally:
                model.put_buffers(now)
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


_PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
