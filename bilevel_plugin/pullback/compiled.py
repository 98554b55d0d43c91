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
from ..kernels.stopping import Evaluation
from ..kernels.switches import Patched
from ..model.losses import Loss
from ..model.model import Binding, InnerProblem
from ..step.step import Moved, Step
from . import lean
from .base import Pulled, joined, known_direction

_CACHE: dict[object, _Functions] = {}  # a compiled function outlives the block that it was made in
_MOST = 8


class _Functions:
    """The compiled gradient and the compiled pullback of one model with its losses."""

    def __init__(self, binding: Binding, losses: Sequence[Loss], only: frozenset[str] | None) -> None:
        self._seen: list[Tensor] = []
        names, taking = tuple(binding.parameters), Evaluation()
        moved = [n for n in names if only is None or n in only]

        def evaluate(w: State, rates: list[Tensor], buffers: State, batches: list[Any], graph: bool) -> Any:
            copies = {n: b.clone() for n, b in buffers.items()}
            values: list[Tensor] = []
            with binding.swapped({**w, **copies}, taking) as inside:
                for loss, batch in zip(losses, batches, strict=True):
                    values.append(binding.total(binding.call(loss, inside, batch)))
                after = inside.buffers()
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


def _kind(step: Step) -> object:
    """Return a key that is equal for steps that run the same code."""
    return step.only, *((t.name, t.loss) for t in step.terms)


class Compiler:
    """The state that the compiled steps of one loop share: the kinds of steps so far, and whether compiling is off."""

    def __init__(self) -> None:
        self._kinds: set[object] = set()
        self.disabled = False
        self._warned = False  # whether the user was warned that steps with micro= are not compiled

    def step(self, *args: Any) -> Step:
        return CompiledStep(self, *args)

    def is_known(self, step: Step) -> bool:
        return not self.disabled and step.micro is None and _kind(step) in self._kinds and bool(step.terms)

    def examine(self, step: Step, before: list[bool], draws: bool) -> None:
        """After the first step of a kind, which runs eagerly, decide whether steps of this kind can be compiled."""
        if self.disabled:
            return
        if step.micro is not None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "bilevel.Reverse: compile=True does not apply to steps with micro=, which run eagerly, so that the "
                    "graph of one part is freed before that of the next is made.",
                    stacklevel=2,
                )
            return
        self._kinds.add(_kind(step))
        binding = step.binding
        after = [m.training for m in binding.modules]
        judged = [
            a and b for a, b, m in zip(before, after, binding.modules, strict=True) if isinstance(m, NORMALISATIONS)
        ]
        if not hasattr(config, "trace_autograd_ops"):
            self.disable(f"torch {torch.__version__} can't compile torch.autograd.grad; a later release can")
        elif draws:
            self.disable("the step draws random numbers, and compiled code would draw others")
        elif binding.aux.get("h") is not None or binding.aux.get("g") is not None:
            self.disable("a loss returns more than its value")
        elif binding.stops_gradients:
            self.disable("a loss calls stop_gradient, which compiled code would ignore")
        elif binding.eager_only:
            self.disable(binding.eager_only)
        elif binding.moving and not all(judged):
            self.disable("a loss uses running statistics in eval mode, whose derivative is not compiled")
        elif any(torch.is_autocast_enabled(kind) for kind in binding.device_types):
            self.disable("the step runs under autocast")

    def disable(self, why: str) -> None:
        self.disabled = True
        warnings.warn(f"bilevel.Reverse: compile=True is off for this loop, which runs eagerly: {why}.", stacklevel=2)

    def failed(self, error: Exception) -> None:
        if not self.disabled:
            self.disable(" ".join(str(error).split("\n")[:2]).strip().rstrip("."))


class CompiledStep(Step):
    """The step Φ_k with a compiled gradient, if a step of its kind was run before."""

    __slots__ = ("_compiler", "_seen")

    def __init__(self, compiler: Compiler, *args: Any) -> None:
        super().__init__(*args)
        self._compiler = compiler
        self._seen: Sequence[Tensor] | None = None  # the tensors that require grad which its compiled gradient used

    def arguments(self, buffers: State, z: State) -> tuple[Any, ...]:
        like = next(iter(self.binding.parameters.values()))
        rates = [torch.as_tensor(c, dtype=like.dtype, device=like.device) for c in self.weights]
        held = {n: (z[n] if n in z else buffers[n]).detach() for n in self.binding.buffers}
        # new tensors: the compiler does not notice when a batch is no longer the tensor that a loss closes over
        own = [map_tensors(lambda x: x if x.requires_grad else x.detach(), t.batch) for t in self.terms]
        return rates, held, own

    def problems(self) -> Sequence[InnerProblem]:
        """Return nothing if the step is compiled, since the compiled functions take all inner problems at once."""
        return () if self._compiler.is_known(self) else super().problems()

    def functions(self) -> _Functions:
        losses = [t.loss for t in self.terms]
        key = self.binding.key, self.only, *losses
        if key not in _CACHE:
            if len(_CACHE) >= _MOST:
                del _CACHE[next(iter(_CACHE))]
            _CACHE[key] = _Functions(self.binding, losses, self.only)
        return _CACHE[key]

    def move(
        self,
        z: State,
        buffers: State,
        *,
        graph: bool,
        within: Callable[[Moved], None] | None = None,
        first: bool = False,
    ) -> Moved:
        binding = self.binding
        if not graph and self._compiler.is_known(self):
            try:
                with Patched(False):
                    w = {n: z[n] for n in binding.parameters}
                    d, values, after, seen = self.functions().gradient(w, *self.arguments(buffers, z))
                if any(x.grad_fn is not None for x in seen):
                    raise TorchDynamoException(
                        "a loss or rate uses a tensor with a graph of its own (pass it in the batch)"
                    )
            except TorchDynamoException as error:
                self._compiler.failed(error)
            else:
                self._seen = seen
                named = dict(zip((t.name for t in self.terms), values, strict=True))
                means = binding.means_of_losses(named, self.what)
                to, moved_weights, leaves = self.updated(z, d, False)
                moved = self.finish(z, buffers, to, after, named, means, leaves=seen)
                moved.moved, moved.leaves_of_update = moved_weights, leaves
                if within is not None:
                    within(moved)
                return moved
        before, random = [m.training for m in binding.modules], torch.get_rng_state()
        moved = super().move(z, buffers, graph=graph, within=within, first=first)
        if not self._compiler.is_known(self):
            self._compiler.examine(self, before, not torch.equal(random, torch.get_rng_state()))
        return moved

    def compiled_pull(
        self, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after: State | None
    ) -> Pulled | None:
        """Return a·∂Φ by compiled functions, or None if there are none for this step."""
        binding = self.binding
        if self._seen is None or not self._compiler.is_known(self) or any(n in a for n in binding.statistics):
            return None
        functions, arguments = self.functions(), self.arguments(buffers, z)
        w = {n: z[n] for n in binding.parameters}
        try:
            with Patched(False):
                d = known_direction(self, z, after)
                if d is None:
                    d = binding.mean_of_direction(functions.gradient(w, *arguments)[0])
                update = self.update.pull(z, d, a, wanted)
                u = {n: x * binding.share for n, x in update.cotangent.items()}
                grads, values = functions.pull(w, u, *arguments, wanted=wanted, seen=self._seen or ())
        except TorchDynamoException as error:
            self._compiler.failed(error)
            return None
        named = dict(zip((t.name for t in self.terms), values, strict=True))
        to = update.to if self.update.reads_direction else {}
        return joined(self, update, dict(zip(w, grads, strict=False)), (), grads[len(w) :], to, named)


def pull(
    step: Step, z: State, buffers: State, a: State, wanted: Sequence[Tensor], after: State | None = None
) -> Pulled:
    """Apply the compiled pullback if the step is compiled, and the lean one otherwise."""
    found = step.compiled_pull(z, buffers, a, wanted, after) if isinstance(step, CompiledStep) else None
    return lean.pull(step, z, buffers, a, wanted, after) if found is None else found
