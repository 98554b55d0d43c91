"""What a loss may not do and what its graph may not hold, looked at while it is evaluated and right after."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..autograd.graph import GRAPH_TO_WEIGHTS, find_leaves, reaches, reads_since
from ..autograd.trees import Pairs, State, map_tensors, tensors_of
from ..model.model import QUANTISED, Evaluation, Model

T = TypeVar("T")
_NOTHING = nullcontext()


# --- while a loss runs ---


def watched(model: Model, evaluation: Evaluation, function: Callable[..., T]) -> Callable[..., T]:
    """Return a function of the model that notes running statistics which the model updates by code of its own."""
    running = evaluation.running
    if running is None:
        return function

    def run(*args: Any) -> T:
        before = running.versions(model.seen.running)
        returned = function(*args)
        if found := running.foreign(before):
            model.seen.unknown = evaluation.taking.unknown = found
        weights = [holder[key] for holder, key, n in model.places if n in model.parameters]
        model.put_buffers(running.unknown(model.seen.running, weights))
        return returned

    return run


def refusing_quantised(model: Model) -> AbstractContextManager[Any]:
    """Refuse quantised modules whose input requires grad: they have no derivative with respect to it."""
    return _refusing_quantised(model) if model.quantised else _NOTHING


@contextmanager
def _refusing_quantised(model: Model) -> Generator[None]:
    names = {id(m): n for n, m in model.module.named_modules()}

    def watch(module: nn.Module, args: Any) -> None:
        home = type(module).__module__
        if home.startswith(QUANTISED) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(args)):
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


def writes_to_weight(name: str, weight: str) -> str:
    return (
        f"bilevel.inner: {name} writes to the weight {weight!r} (nn.Embedding(max_norm=...), or a projection), and the "
        "derivative of that is not known. Write it as a function of the weights that the loss uses: a parametrization, "
        "or a term of the loss."
    )


# --- after a loss ---


def leaves_of_loss(
    model: Model,
    name: str,
    value: Tensor,
    state: Sequence[Tensor],
    cut: Pairs,
    since: int,
    older: list[Any] | None = None,
) -> list[Tensor]:
    """Return the outer variables of the loss, and refuse a loss that does not depend on the weights as it should.

    Nodes of its graph that are older than the step are added to `older`.
    """
    found, connected = find_leaves(value, state, [x for _, x in cut], twice=True, since=since, older=older)
    if any(x in model.seen.states for x in found):
        raise ValueError(GRAPH_TO_WEIGHTS)
    if not model.own:
        refuse_hidden_parameter(name, value, state, found, model)
    if not connected:
        raise disconnected(name)
    return found


def refuse_hidden_parameter(
    name: str, value: Tensor, state: Iterable[Tensor], leaves: Iterable[Tensor], model: Model
) -> None:
    """Where weights are swapped in, refuse a loss that uses the model's own parameters by another reference.

    They are allowed in what was computed from them before the block, where they are an outer variable, w_0.
    """
    own = {id(p): n for n, p in model.parameters.items()}
    state = tuple(state)
    hidden = next((own[id(x)] for x in leaves if id(x) in own and reads_since(value, x, state, model.opened)), None)
    if hidden is not None:
        raise RuntimeError(
            f"bilevel.inner: {name} uses the parameter {hidden!r} by a reference that was made before: a list of "
            "parameters, in the loss or in a module, or a tensor that was computed from the model. It does not see the "
            "weights of this loop. Compute it inside h (or g), from the model that it is given; or use "
            "engine='reverse' without memory= and tasks=, where a list of parameters is right."
        )


def disconnected(name: str) -> ValueError:
    """Return the error for a loss that does not depend on the weights."""
    return ValueError(
        f"bilevel.inner: {name} does not depend on the weights of the inner problem. Compute it from the model that "
        "is its first argument, without .detach(), .item() or torch.no_grad()."
    )


# --- batches, and what losses returned beside their values ---


def check_batch(model: Model, where: str, batch: tuple[Any, ...], z: State, *, replays: bool) -> None:
    """Refuse a batch that was computed from the weights of this loop, or that can't be given a second time."""
    tensors = tensors_of(batch)
    tracked = [x for x in tensors if x.requires_grad]
    if tracked:
        inner = {id(p) for p in model.parameters.values()} | {id(x) for x in z.values()}
        stop = {x.grad_fn for x in z.values()} - {None}
        itself = any(id(x) in inner or x in model.seen.states for x in tracked)
        if itself or reaches([x for x in tracked if not x.is_leaf], inner, stop, model.opened):
            raise ValueError(
                f"bilevel.inner: a tensor in {where} was computed from the weights of this loop, and carries a "
                "graph back to them, which a step would cut. Compute it inside h (or g); or by loop.compute(fn, "
                "*args), which a step takes for a constant and the hypergradient does not; or .detach() it if it is "
                "a constant in both."
            )
    if any(x in model.seen.derived for x in tensors):
        raise ValueError(
            f"bilevel.inner: a tensor in {where} is what a loss of this loop returned beside its value, or what "
            "loop(x) returned without a graph: it depends on the weights, and the hypergradient would take it for a "
            "constant. Compute it by loop.compute(fn, *args), which a step takes for a constant and the "
            "hypergradient does not. What h finds and the next step needs may stay in a buffer of the model, "
            "model.hidden = bilevel.stop_gradient(hidden) inside h. Or .detach() it if it is a constant in both."
        )
    if replays and any(hasattr(x, "__next__") for x in batch):
        raise TypeError(
            "bilevel.inner: a batch holds an iterator, which is used up when the step is run again. Give the step "
            "what it yields (next(iterator)), or use engine='unroll'."
        )


def as_aux(model: Model, aux: Any) -> Any:
    """Return what a loss returned beside its value without graphs; what depends on the weights is remembered."""

    def without_graph(x: Tensor) -> Tensor:
        held = {_address(t) for t in (*model.parameters.values(), *model.buffers.values())} - {None}
        y = x.detach().clone() if _address(x) in held else x.detach()  # the next step changes what the model holds
        if x.requires_grad:
            model.seen.derived.add(y)
        return y

    return aux if aux is None else map_tensors(without_graph, aux)


def _address(x: Tensor) -> int | None:
    return None if x.is_meta or x.layout != torch.strided else x.data_ptr()
