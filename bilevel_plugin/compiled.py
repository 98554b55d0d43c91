"""A step and its pullback as two pure functions under torch.compile.

No graph lives between the two, and what the pullback does not need of the step (the value of its gradient, for one) is
never computed. A step of a kind that was not seen before runs eagerly, since that is how the outer variables are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config, lookup_backend
from torch._dynamo.exc import TorchDynamoException

from .binding import Binding, Loss, State
from .hypergrad.base import as_leaves
from .step import Phi, Pullback, Traced
from .updates import plain

_CACHE: dict[object, _Functions] = {}  # a compiled function outlives the block that it was made in
_MOST = 8


class _Functions:
    """For one model and its losses: the step, and its pullback."""

    def __init__(self, binding: Binding, losses: Sequence[Loss]) -> None:
        self._seen: list[Tensor] = []

        def direction(w: State, rates: list[Tensor], buffers: State, batches: list[Any], graph: bool) -> Any:
            values: list[Tensor] = []
            buffers = {n: b.clone() for n, b in buffers.items()}
            for loss, batch in zip(losses, batches, strict=True):
                value, buffers = binding.call(loss, w, buffers, batch, {})
                values.append(binding.total(value))
            weighted = [c * value for c, value in zip(rates, values, strict=True)]
            total = sum(weighted[1:], weighted[0])
            grads = torch.autograd.grad(total, list(w.values()), create_graph=graph, allow_unused=True)
            return dict(zip(w, grads, strict=True)), values, buffers

        def step(z: State, rates: list[Tensor], buffers: State, batches: list[Any]) -> Any:
            d, values, buffers = direction(as_leaves(z), rates, buffers, batches, False)
            to = {n: x if d[n] is None else x - d[n].detach() for n, x in z.items()}
            return to, [value.detach() for value in values], {n: b.detach() for n, b in buffers.items()}

        def pull(z: State, a: State, rates: list[Tensor], buffers: State, batches: list[Any], wanted: Any) -> Any:
            w = as_leaves(z)
            d, _, _ = direction(w, rates, buffers, batches, True)
            to = [w[n] if d[n] is None else w[n] - d[n] for n in a]
            return torch.autograd.grad(to, [*w.values(), *wanted], list(a.values()), allow_unused=True)

        self._step, self._pull = (
            torch.compile(f, fullgraph=True, dynamic=False, backend=self._watched) for f in (step, pull)
        )

    def _watched(self, graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        """Inductor's code, which also notes what the graph was given: closed-over tensors are among it."""
        run: Callable[..., Any] = lookup_backend("inductor")(graph, example)

        def watched(*args: Any) -> Any:
            self._seen = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
            return run(*args)

        return watched

    def step(self, z: State, *args: Any) -> tuple[State, list[Tensor], State, list[Tensor]]:
        """z⁺, the losses, the buffers, and the tensors that require grad."""
        with config.patch(trace_autograd_ops=True):
            found = self._step({n: x.detach() for n, x in z.items()}, *args)
        seen, self._seen = self._seen, []  # the cache outlives the block, and must not hold what the block was given
        return *found, seen

    def pull(self, z: State, *args: Any) -> Sequence[Tensor | None]:
        with config.patch(trace_autograd_ops=True):
            return self._pull({n: x.detach() for n, x in z.items()}, *args)


class Compiler:
    """What the steps of one loop share: which kinds of steps were seen, and whether to go on compiling."""

    def __init__(self) -> None:
        self.kinds: set[object] = set()
        self.off = False

    def phi(self, *args: Any) -> Phi:
        return CompiledPhi(self, *args)

    def give_up(self, why: str) -> None:
        self.off = True
        warnings.warn(f"bilevel.Reverse: compile=True is off for this loop, which runs eagerly: {why}.", stacklevel=2)


class CompiledPhi(Phi):
    """Φ_k, compiled if a step like it was run before."""

    def __init__(self, compiler: Compiler, *args: Any) -> None:
        super().__init__(*args)
        self._compiler = compiler
        like = next(iter(self._binding.parameters.values()))
        parts = [(*loss, torch.as_tensor(c, dtype=like.dtype, device=like.device)) for *loss, c in self._used()]
        self._used_names, self._functions, self._batches, self._rates = map(
            list, zip(*parts, strict=True) if parts else [()] * 4
        )
        self._eager = True

    def __call__(self, z: State, *, graph: bool) -> Traced:
        if self.conditions is not None:
            return super().__call__(z, graph=graph)
        kind = tuple(self._used_names), tuple(z)
        self._eager = self._compiler.off or kind not in self._compiler.kinds or not self._used_names
        traced = super().__call__(z, graph=graph)
        if self._eager and not self._compiler.off:
            self._compiler.kinds.add(kind)
            if why := self._why_not():
                self._compiler.give_up(why)
        return traced

    def _why_not(self) -> str | None:
        assert self.conditions is not None
        if self._update is not plain:
            return "the rule of an optimizer= is not compiled; plain steps with lr= are"
        if self.conditions.draws:
            return "the step draws random numbers, and compiled code would draw others"
        return "it is under autocast" if self.conditions.autocast else None

    def _run(self, z: State, graph: bool, first: bool) -> Traced:
        if not self._eager and graph:
            return Pullback(z, {}, self.cut, self.leaves, self)
        if not self._eager:
            try:
                with self._binding.twice_differentiable():
                    to, values, buffers, seen = self.compiled().step(z, self._rates, self._buffers, self._batches)
                if first:
                    self._note(values, buffers, seen, z)
                return Traced(z, to, self.cut, self.leaves)
            except TorchDynamoException as error:
                self.go_eager(error)
        return super()._run(z, graph, first)

    def _note(self, values: list[Tensor], buffers: State, seen: list[Tensor], z: State) -> None:
        """What a first run finds out in `Phi._run`."""
        if any(x.grad_fn is not None for x in seen):
            raise TorchDynamoException("a loss or rate uses a tensor with a graph of its own (pass it in the batch)")
        self.values = dict(zip(self._used_names, values, strict=True))
        self._seen = tuple(self._watch.see(self.k, name, value, z) for name, value in self.values.items())
        stand_ins = {id(x) for _, x in self.cut}
        self._add_leaves(x for x in seen if id(x) not in stand_ins)
        self._remember()
        self.buffers_after = buffers

    def go_eager(self, error: TorchDynamoException) -> None:
        self._eager = True
        if not self._compiler.off:
            self._compiler.give_up(" ".join(str(error).split("\n")[:2]).strip().rstrip("."))

    def compiled(self) -> _Functions:
        key = self._binding.key, *self._functions
        if key not in _CACHE:
            if len(_CACHE) >= _MOST:
                del _CACHE[next(iter(_CACHE))]
            _CACHE[key] = _Functions(self._binding, self._functions)
        return _CACHE[key]

    def pullback(self, z: State) -> Traced:
        return super().pullback(z) if self._eager else self(z, graph=True)

    def pull(self, step: Pullback, a: State, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        assert self.conditions is not None
        if not self._eager:
            try:
                with self.conditions.again(), self._binding.twice_differentiable():
                    args = self._rates, self._buffers, self._batches, list(wanted)
                    return self.compiled().pull(step.at, a, *args)
            except TorchDynamoException as error:
                self.go_eager(error)
        return super().pull(step, a, wanted)
