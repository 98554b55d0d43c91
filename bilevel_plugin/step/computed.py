"""What the loop computes from the weights between its steps: y = f(w_k), a constant for the steps that use it.

The hypergradient goes through it. While the adjoint is swept back, the gradients of all uses of y add up; when the
sweep comes to the place where y was computed, their sum ȳ is pulled through f at w_k:

    a += ȳ·∂f/∂w,    G += ȳ·∂f/∂λ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autograd.derive import Gradients, Traced, grad, norm, vjp
from ..autograd.graph import Boundary, find_leaves, sequence_number
from ..autograd.trees import Pairs, State, cut_graph, map_tensors, tensors_of
from ..autograd.weak import COMPUTED
from ..guards.evaluation import refuse_hidden_parameter
from ..guards.held import warn_if_read
from ..guards.holding import snapshot
from ..kernels.switches import full_precision
from ..model.losses import active_models
from ..model.model import Evaluation, Model
from .conditions import Conditions
from .record import Record
from .sums import is_same

T = TypeVar("T")
_NOTHING = nullcontext()


_DATA: Any = vars(torch._C.TensorBase)["data"].__get__  # pyright: ignore[reportPrivateUsage] (x.data, as a mode sees it)


class Computed:
    """The value of function(model, *args) at one place of the loop.

    With `replays`, the user is given leaves. Without it, the values keep their graph, behind a `Boundary`.
    """

    def __init__(
        self,
        model: Model,
        k: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        buffers: State,
        *,
        replays: bool,
    ) -> None:
        self.cut: Pairs = []
        self.leaves: Sequence[Tensor] = ()  # the outer variables, and earlier values, that the function uses
        self.values: list[Tensor] = []  # what the user was given of it, as far as it has a derivative
        self._model, self._function, self._buffers, self._replays = model, function, buffers, replays
        self._args = cut_graph(args, self.cut) if replays else args
        self._versions: list[int] = []
        self._twice = False  # whether its derivative is differentiated again
        self.name = f"loop.compute({getattr(function, '__name__', type(function).__name__)})"
        held = snapshot(model, [function])
        conditions = Conditions(model, others=held.plan.draws)
        self.record = Record(k, conditions, self.cut, held, of=f"the value of {self.name}")

    @property
    def numbers(self) -> Sequence[Tensor]:
        return self.values

    def _evaluate(
        self, z: State, use: Callable[[Evaluation, Any], T], watch: AbstractContextManager[Any] = _NOTHING
    ) -> T:
        """Return what `use` makes of the function's result with its graph, while the model holds its weights."""
        model = self._model

        def run(evaluation: Evaluation) -> T:
            active_models().append(model.ids)
            try:
                with torch.enable_grad(), watch:
                    result = model.call(self._function, evaluation, self._args)
            finally:
                active_models().pop()
                torch.clear_autocast_cache()
            with torch.enable_grad():
                return use(evaluation, result)

        follow = bool(model.seen.moving)
        return model.at(z, self._buffers, run, graph=True, follow=follow, twice=self._twice)

    def first(self, z: State, within: Callable[[Evaluation, State], None] | None = None) -> Any:
        """Evaluate the function for the first time, and return what the user is given.

        `within` is called with the tensors that have a derivative, while the model holds the weights.
        """
        model, since, lost = self._model, sequence_number(), _LostGraphs()
        self._twice = within is not None or not self._replays

        def use(evaluation: Evaluation, result: Any) -> Any:
            for n, b in evaluation.left().items():
                before = z[n] if n in z else self._buffers[n]
                if not (is_same(b, before) or torch.equal(b.detach(), before.detach())):
                    raise ValueError(
                        f"bilevel.inner: {self.name} changes the buffer {n!r} of the model (running statistics, a "
                        "counter), and a computed value leaves the state of the loop as it is. Put the layer into "
                        "eval mode while the value is computed, or compute it inside h."
                    )
            outs = self._outs(result)
            if lost.seen and any(x.is_floating_point() and not x.requires_grad for x in tensors_of(result)):
                raise ValueError(
                    f"bilevel.inner: {self.name} returns a tensor without a graph, after it has used the weights or an "
                    "outer variable under torch.no_grad() or with .detach(): the hypergradient would lack this value. "
                    "Leave both out, since steps take a computed value for a constant in any case. What has no "
                    "derivative (a choice, a mask) may be returned as integers or booleans."
                )
            own = model.parameters if model.own else {}
            state = [*evaluation.leaves.values(), *evaluation.statistics.values(), *own.values()]
            known = [x for _, x in self.cut]
            leaves: dict[int, Tensor] = {}
            for y in outs:
                found, _ = find_leaves(y, state, known, since=since if model.own else None)
                if not model.own:
                    refuse_hidden_parameter(self.name, y, state, found, model)
                leaves.update((id(x), x) for x in found)
            self.leaves = list(leaves.values())
            given_of = {i: self._given(x) for i, x in {id(x): x for x in tensors_of(result)}.items()}
            given = map_tensors(lambda x: given_of[id(x)], result)
            if within is not None:
                within(evaluation, dict(zip(map(str, range(len(outs))), outs, strict=True)))
            return given

        given = self._evaluate(z, use, lost)
        self.record.conditions.end_of_call()
        self.record.note((), self.leaves, [(self.name, self._args)])
        self.record.seal(self.leaves, model)
        self._versions = [y._version for y in self.values]
        return given

    def _outs(self, result: Any) -> list[Tensor]:
        """Return the tensors of a result that have a derivative, each once."""
        return list({id(x): x for x in tensors_of(result) if x.requires_grad}.values())

    def _given(self, x: Tensor) -> Tensor:
        """Return what the user is given in place of a tensor of the result."""
        if not x.requires_grad:
            return x.detach().clone()  # it may be what the model holds, which the next step changes
        y = x.detach().clone().requires_grad_() if self._replays else Boundary.apply(x)
        assert isinstance(y, Tensor)
        self.values.append(y)
        if self._replays:
            COMPUTED.add(y)
        return y

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        """Return ȳ·∂f/∂z, and add ȳ·∂f/∂λ, for the gradients ȳ that the sums hold for the values."""
        assert z is not None
        for y, version in zip(self.values, self._versions, strict=True):
            if y._version != version:
                raise RuntimeError(
                    f"bilevel.inner: {self.record.where} was changed in place, and the derivative of that change is "
                    "not known. Make the change inside the function, or write to a clone."
                )
        along = gathered(self.values, into)
        if all(d is None for d in along):
            return {}

        def use(evaluation: Evaluation, result: Any) -> State:
            outs = self._outs(result)
            self._check(outs)
            to = {str(i): y for i, y in enumerate(outs)}
            a = {str(i): d for i, d in enumerate(along) if d is not None}
            if evaluation.watched:
                grads = vjp(to, a, list(evaluation.watched.values()))
                warn_if_read(self._model, dict(zip(evaluation.watched, grads, strict=True)))
            at = {**evaluation.leaves, **evaluation.statistics}
            return Traced(at, to, self.cut, self.leaves).vjp(a, inputs, into)

        with self.record.repeating(), full_precision():
            return self._evaluate(z, use)

    def _check(self, outs: Sequence[Tensor]) -> None:
        """Raise if the values are others than at first."""
        same = len(outs) == len(self.values) and all(
            x.shape == y.shape and x.dtype == y.dtype for x, y in zip(outs, self.values, strict=True)
        )
        if same and outs and not outs[0].is_meta:
            with torch.no_grad():
                off, size = norm(x - y for x, y in zip(outs, self.values, strict=True)), norm(self.values)
            same = float(off) <= self.record.conditions.unit * float(size)
        if not same:
            raise self.record.differs()


def gathered(values: Sequence[Tensor], into: Gradients) -> list[Tensor | None]:
    """Take the gradients for these leaves out of the sums: their own, and those of tensors computed from them."""
    sums = [into.direct.pop(id(y), (y, None))[1] for y in values]
    mine = {id(y) for y in values}
    outs: Pairs = []
    for key, (x, d) in list(into.cut.items()):
        behind = {id(leaf) for leaf in find_leaves(x)[0]}
        if behind & mine:
            outs.append((x, d))
            if behind <= mine:
                del into.cut[key]
    if outs:
        more = grad([x for x, _ in outs], values, [d for _, d in outs], retain_graph=True)
        sums = [d if m is None else m if d is None else d + m for d, m in zip(sums, more, strict=True)]
    return sums


class _LostGraphs(TorchFunctionMode):
    """Notices operations on tensors that require grad whose result has no graph, since they run under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled() or func in (Tensor.detach, _DATA):
            self.seen = self.seen or any(x.requires_grad for x in tensors_of((args, kwargs)))
        return func(*args, **(kwargs or {}))
