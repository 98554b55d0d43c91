"""The gradient of a step and its pullback as two pure functions under torch.compile; the update stays as it is.

No graph lives between the two functions, and the pullback computes only those parts of the gradient that it needs (not
its value, for example). The first step of each kind runs eagerly, since its graph shows which outer variables it uses.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config, lookup_backend
from torch._dynamo.exc import TorchDynamoException

from ..autograd.trees import State, as_leaves, map_tensors
from ..kernels.statistics import NORMALISATIONS
from ..kernels.stopping import Differentiation
from ..kernels.switches import Patched
from ..model.losses import Loss
from ..model.model import Evaluation, Model
from ..model.tasks import row_of
from ..step.cotangent import CotangentOf, PulledPiece
from ..step.piece import Found, Piece
from . import lean

_CACHE: dict[object, _Functions] = {}  # a compiled function outlives the block that it was made in
_MOST = 8


class _Functions:
    """The compiled gradient and the compiled pullback of one model with its losses."""

    def __init__(self, model: Model, losses: Sequence[Loss], only: frozenset[str] | None, mapped: bool) -> None:
        self._seen: list[Tensor] = []
        names, taking = tuple(model.parameters), Differentiation()
        moved = [n for n in names if only is None or n in only]

        def evaluate(w: State, rates: list[Tensor], buffers: State, batches: list[Any], graph: bool) -> Any:
            copies = {**{n: b.clone() for n, b in buffers.items()}, **w}
            left = (lambda: {n: copies[n] for n in buffers}) if mapped else model.present_buffers
            evaluation = Evaluation(w, w, {}, {}, taking, left, copies if mapped else None)
            values: list[Tensor] = []

            def run() -> State:
                for loss, batch in zip(losses, batches, strict=True):
                    values.append(model.tasks.total(model.call(loss, evaluation, batch)))
                return left()

            after = run() if mapped else model.swapped(copies, run)
            weighted = [c * value for c, value in zip(rates, values, strict=True)]
            total = sum(weighted[1:], weighted[0])
            with torch.autocast("cpu", enabled=False):
                grads = torch.autograd.grad(total, [w[n] for n in moved], create_graph=graph, allow_unused=True)
            return dict(zip(moved, grads, strict=True)), [v.detach() for v in values], after

        def gradient(z: State, rates: list[Tensor], buffers: State, batches: list[Any]) -> Any:
            d, values, after = evaluate(as_leaves(z), rates, buffers, batches, False)
            d = {n: None if x is None else x.detach() for n, x in d.items()}
            return d, values, {n: b.detach() for n, b in after.items()}

        def pull(z: State, u: State, rates: list[Tensor], buffers: State, batches: list[Any], wanted: Any) -> Any:
            w = as_leaves(z)
            d, values, _ = evaluate(w, rates, buffers, batches, True)
            outputs = [d[n] for n in u if d[n] is not None and d[n].requires_grad]
            along = [u[n] for n in u if d[n] is not None and d[n].requires_grad]
            inputs = [*(w[n] for n in names), *wanted]
            with torch.autocast("cpu", enabled=False):
                return torch.autograd.grad(outputs, inputs, along, allow_unused=True), values

        self._gradient, self._eager_pull = self._compiled(gradient), pull
        self._pulls: dict[tuple[int, ...], Callable[..., Any]] = {}  # by which of the tensors seen are wanted

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        own = _with_code_of_its_own(function)
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._watched)

    def _watched(self, graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        """Compile a graph by Inductor, and record the tensors that it is called with, closed-over ones included."""
        run: Callable[..., Any] = lookup_backend("inductor")(graph, example)

        def watched(*args: Any) -> Any:
            self._seen = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
            return run(*args)

        return watched

    def gradient(self, z: State, *args: Any) -> tuple[State, list[Tensor], State, list[Tensor]]:
        """Return the direction, the losses, the buffers, and the tensors that require grad."""
        with config.patch(trace_autograd_ops=True):
            d, values, buffers = self._gradient({n: x.detach() for n, x in z.items()}, *args)
        d = {n: x for n, x in d.items() if x is not None}
        seen, self._seen = self._seen, []  # the cache outlives the block, and must not hold what the block was given
        return d, values, buffers, seen

    def pull(
        self,
        z: State,
        u: State,
        rates: Any,
        buffers: Any,
        batches: Any,
        wanted: Sequence[Tensor],
        seen: Sequence[Tensor],
    ) -> tuple[Sequence[Tensor | None], list[Tensor]]:
        """Return ∇_(w, λ) ⟨∇ℓ, u⟩ for the wanted tensors that the gradient has used; None for any other.

        A function is compiled for each choice of them. torch's compiler does not guard against an argument being the
        same tensor as a closed-over one, so a function that was compiled for one outer variable could return the
        gradient of another.
        """
        places = {id(x): i for i, x in enumerate(seen)}
        read = [x for x in wanted if id(x) in places]
        key = tuple(places[id(x)] for x in read)
        if key not in self._pulls:
            self._pulls[key] = self._compiled(self._eager_pull)
        with config.patch(trace_autograd_ops=True):
            grads, values = self._pulls[key]({n: x.detach() for n, x in z.items()}, u, rates, buffers, batches, read)
        self._seen = []
        found = dict(zip(map(id, read), grads[len(z) :], strict=True))
        return [*grads[: len(z)], *(found.get(id(x)) for x in wanted)], values


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a new code object, since the compiler allows eight recompilations of each."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _kind(piece: Piece) -> object:
    """Return a key that is equal for pieces that run the same code."""
    return piece.only, piece.row is None, *((t.name, t.loss) for t in piece.terms)


class Compiler:
    """The compiled pieces of one loop: the kinds of pieces so far, and whether compiling is off."""

    def __init__(self) -> None:
        self._kinds: set[object] = set()
        self.disabled = False
        self._warned = False  # whether the user was warned that steps with micro= are not compiled

    def _is_known(self, piece: Piece) -> bool:
        return not (self.disabled or piece.part) and bool(piece.terms) and _kind(piece) in self._kinds

    def first(self, piece: Piece, z: State) -> Found | None:
        """Evaluate a piece for the first time by compiled code, or eagerly if it is the first of its kind."""
        if self._is_known(piece):
            try:
                with Patched(False):
                    d, values, left, seen = _functions(piece).gradient(*_arguments(piece, z))
                if any(x.grad_fn is not None for x in seen):
                    raise TorchDynamoException(
                        "a loss or rate uses a tensor with a graph of its own (pass it in the batch)"
                    )
            except TorchDynamoException as error:
                self._failed(error)
            else:
                named = dict(zip((t.name for t in piece.terms), values, strict=True))
                piece.note_compiled(named, seen)
                return Found([], named, d, left)
        return None

    def examine(self, pieces: Sequence[Piece], before: list[bool]) -> None:
        """After the first evaluation of pieces, decide whether others of their kind can be compiled."""
        for piece in pieces:
            if not self.disabled and not self._is_known(piece) and piece.terms:
                self._examine(piece, before)

    def _examine(self, piece: Piece, before: list[bool]) -> None:
        model = piece.model
        if piece.part:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "bilevel.Reverse: compile=True does not apply to steps with micro=, which run eagerly, so that the "
                    "graph of one part is freed before that of the next is made.",
                    stacklevel=2,
                )
            return
        self._kinds.add(_kind(piece))
        after = [m.training for m in model.modules]
        judged = [
            a and b for a, b, m in zip(before, after, model.modules, strict=True) if isinstance(m, NORMALISATIONS)
        ]
        seen = model.seen
        if not hasattr(config, "trace_autograd_ops"):
            self._disable(f"torch {torch.__version__} can't compile torch.autograd.grad; a later release can")
        elif piece.record.conditions.draws:
            self._disable("the step draws random numbers, and compiled code would draw others")
        elif seen.aux.get("h") is not None or seen.aux.get("g") is not None:
            self._disable("a loss returns more than its value")
        elif seen.stops:
            self._disable("a loss calls stop_gradient, which compiled code would ignore")
        elif seen.eager_only:
            self._disable(seen.eager_only)
        elif seen.moving and not all(judged):
            self._disable("a loss uses running statistics in eval mode, whose derivative is not compiled")
        elif any(torch.is_autocast_enabled(kind) for kind in model.device_types):
            self._disable("the step runs under autocast")

    def _disable(self, why: str) -> None:
        self.disabled = True
        warnings.warn(f"bilevel.Reverse: compile=True is off for this loop, which runs eagerly: {why}.", stacklevel=2)

    def _failed(self, error: Exception) -> None:
        if not self.disabled:
            self._disable(" ".join(str(error).split("\n")[:2]).strip().rstrip("."))

    def pull(self, piece: Piece, z: State, cotangent: CotangentOf, b: State, wanted: Sequence[Tensor]) -> PulledPiece:
        """Apply the compiled pullback if the piece was evaluated by compiled code, and the lean one otherwise."""
        if piece.seen is None or b or not self._is_known(piece):
            return lean.pull(piece, z, cotangent, b, wanted)
        functions, (w, *arguments) = _functions(piece), _arguments(piece, z)
        try:
            with Patched(False):
                if cotangent.known is None:
                    d = functions.gradient(w, *arguments)[0]
                    u = cotangent(piece, d)
                else:
                    u = cotangent(piece)
                grads, values = functions.pull(w, u, *arguments, wanted=wanted, seen=piece.seen)
        except TorchDynamoException as error:
            self._failed(error)
            return lean.pull(piece, z, cotangent, b, wanted)
        named = dict(zip((t.name for t in piece.terms), values, strict=True))
        adjoint = {n: x for n, x in zip(w, grads, strict=False) if x is not None}
        return PulledPiece(adjoint, grads[len(w) :], named, ())


def _arguments(piece: Piece, z: State) -> tuple[Any, ...]:
    """Return what the compiled functions of a piece are called with."""
    model = piece.model
    like = next(iter(model.parameters.values()))
    rates = [torch.as_tensor(t.weight, dtype=like.dtype, device=like.device) for t in piece.terms]
    held = {n: (z[n] if n in z else piece.buffers[n]).detach() for n in model.buffers}
    # new tensors: the compiler does not notice when a batch is no longer the tensor that a loss closes over
    own = [map_tensors(lambda x: x if x.requires_grad else x.detach(), t.given()) for t in piece.terms]
    w = {n: z[n] for n in model.parameters}
    return row_of(w, piece.row), rates, row_of(held, piece.row), own


def _functions(piece: Piece) -> _Functions:
    model, losses = piece.model, [t.loss for t in piece.terms]
    mapped = model.tasks.count is not None and piece.row is None
    places = tuple((id(holder), name, n) for holder, name, n in model.places)
    key = places, model.tasks.count, piece.row is None, piece.only, *losses
    if key not in _CACHE:
        if len(_CACHE) >= _MOST:
            del _CACHE[next(iter(_CACHE))]
        _CACHE[key] = _Functions(model, losses, piece.only, mapped)
    return _CACHE[key]
