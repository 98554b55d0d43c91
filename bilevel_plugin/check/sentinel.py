"""The sentinel, which checks that the derivatives a hypergradient depends on are those of the losses.

For a cotangent u of a step's gradient, and a direction v in the weights and outer variables,

    ⟨u, ∇ℓ(x + ε·v) − ∇ℓ(x − ε·v)⟩ / 2ε   must be   ⟨∇⟨∇ℓ(x), u⟩, v⟩,      x = (w, λ)

and likewise for g itself. Two gradients and one pullback reveal any cause that makes the two sides differ: `.detach()`
that drops a path, a custom backward that can't be differentiated, a straight-through estimator. The check runs in
float64, because in float32 the differences are dominated by kinks and rounding. During the check float64 weights take
the places of the model's own, and every other floating-point argument of an operation is cast to float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..autograd.derive import grad
from ..autograd.graph import leaves_read_since, sequence_number
from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State, map_tensors, tensors_of
from ..engine.plan import free
from ..kernels.statistics import NORMALISATIONS
from ..kernels.stopping import evaluating
from ..model.losses import Loss, code_of
from ..model.model import Binding, Inside
from ..model.session import NESTED
from ..step.parts import samples_of, split
from ..step.record import Conditions
from ..step.step import Step, Term, gradient
from ..update.solvers import Value

_EPSILONS = (1e-7, 1e-9, 1e-5)
TOLERANCE = 1e-4
_REPRODUCED = 1e-11  # how much a value may change from one evaluation to the next, relative to it or its derivative
_DIFFERENT = "the losses return a different value at each evaluation (random numbers?)"
_LOW = (torch.float16, torch.bfloat16, torch.float32)
_CHECKED: set[object] = set()  # structures of models, with the losses, that were checked


@dataclass
class _Point:
    """A point in float64 at which a loss is evaluated: weights by name, outer variables by id of the user's tensor."""

    weights: State
    outer: dict[int, Tensor]

    def moved(self, direction: Sequence[Tensor], by: float) -> _Point:
        values = [x.detach() + by * d for x, d in zip(self.tensors(), direction, strict=True)]
        n = len(self.weights)
        return _Point(dict(zip(self.weights, values[:n], strict=True)), dict(zip(self.outer, values[n:], strict=True)))

    def tensors(self) -> list[Tensor]:
        return [*self.weights.values(), *self.outer.values()]


class Sentinel:
    """Checks the derivatives of one loop when its first hypergradient is taken."""

    def __init__(
        self, binding: Binding, g: Loss | None, check: Literal["first", "always", False], *, sparing: bool = False
    ) -> None:
        self._binding, self._g, self._check = binding, g, check
        self._sparing = sparing  # the loop is one that just fits into the memory

    def is_due(self, step: Step) -> bool:
        """Whether steps of this kind must still be checked. A call that returns True marks them as checked."""
        if self._check is False or next(iter(self._binding.parameters.values())).is_meta:
            return False
        if self._check == "always":
            return True
        codes = (code_of(self._g), *((t.name, code_of(t.loss)) for t in step.terms))
        key = self._binding.structure, codes, step.only
        new = key not in _CHECKED
        _CHECKED.add(key)
        return new

    def examine(
        self,
        step: Step,
        conditions: Conditions | None,
        z: State,
        buffers: State,
        outer_batch: tuple[Any, ...] | None,
        trained: Collection[str],
    ) -> None:
        """Compare the derivatives of the last step's losses, and of g, with differences at the current weights."""
        conditions = conditions or Conditions(self._binding)
        u, g, binding, given = None, self._g, self._binding, step.terms
        if problems := binding.separate():  # one inner problem has the same derivatives to test
            (one, *_), binding = problems, problems[0].binding
            z, buffers, outer_batch = one.rows(z), one.rows(buffers), one.rows(outer_batch)
            given = step.of(one).terms
        try:
            with _guarded():
                if self._sparing:
                    self._check_memory()
                terms = self._few_samples(given)
                probe = Probe(binding, conditions, z, buffers)
            if g is not None and outer_batch is not None:
                with _guarded():
                    (term,) = self._few_samples([Term("g", g, outer_batch)])
                u, error = probe.first_derivative(term)
                if error > TOLERANCE:
                    self._warn("the gradient of g", error)
            if step.terms:
                checked_step = Step(step.k, binding, terms, step.weights, step.update, step.only)
                error = probe.second_derivative(checked_step, u, trained)
                if error > TOLERANCE:
                    names = " and ".join(t.name for t in step.terms)
                    self._warn(f"the second derivative of {names}", error, step.k)
        except NotChecked as why:
            warnings.warn(
                f"bilevel.inner: the derivatives of this loop could not be checked: {why}. Check them by "
                "bilevel.gradcheck on a small problem. check=False leaves out the check and this warning.",
                DerivativeWarning,
                stacklevel=5,
            )

    def _few_samples(self, terms: Sequence[Term]) -> list[Term]:
        """Where memory is short, restrict the losses to one or two samples, which run the same code."""
        if not self._sparing:
            return list(terms)
        few = 2 if any(isinstance(m, NORMALISATIONS) for m in self._binding.modules) else 1
        found: list[Term] = []
        for name, loss, batch in terms:
            try:
                n = samples_of(name, batch, self._binding.batch_dimension)
                if n is not None and n > few:
                    batch = split(name, batch, n // few, self._binding.batch_dimension)[0].batch
            except (TypeError, ValueError):
                raise NotChecked(f"memory is short, and the batch of {name} can't be split into samples") from None
            found.append(Term(name, loss, batch))
        return found

    def _check_memory(self) -> None:
        """Raise if float64 weights, gradients and directions would not fit."""
        weights = self._binding.parameters.values()
        need, device = 16 * sum(p.numel() * 8 for p in weights), next(iter(weights)).device
        if device.type in ("cpu", "cuda") and need > (available := free(device)):
            raise NotChecked(f"the check takes about {need / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free")

    def _warn(self, what: str, error: float, k: int | None = None) -> None:
        at = "" if k is None else f", on the batch of step k = {k}"
        warnings.warn(
            f"bilevel.inner: {what} is not the derivative of the loss{at}: it differs by {error:.2%} from central "
            "differences in float64, so the hypergradient may be wrong. Likely causes: a .detach() or "
            "torch.no_grad() that drops a dependence on the weights (bilevel.stop_gradient(x) in its place takes the "
            "same steps, and keeps the dependence), an autograd.Function whose backward can't be differentiated, a "
            "straight-through estimator, or spectral_norm in training mode. bilevel.gradcheck names the module. "
            "check=False silences this warning.",
            DerivativeWarning,
            stacklevel=6,
        )


class NotChecked(Exception):
    """The reason why a derivative could not be compared with differences."""


class Probe:
    """The losses of one loop in float64, as functions of weights and outer variables."""

    def __init__(self, binding: Binding, conditions: Conditions, z: State, buffers: State) -> None:
        self._binding, self._conditions = binding, conditions
        self._weights = {n: z[n].detach().double() for n in binding.parameters}
        held = {n: z[n] if n in z else buffers[n] for n in binding.buffers}
        self._buffers = {n: b.detach().double() if b.is_floating_point() else b.detach() for n, b in held.items()}

    @contextmanager
    def _inside(self, point: _Point) -> Generator[Inside]:
        binding = self._binding
        copies = {n: b.clone() for n, b in self._buffers.items()}
        weights = {n: x.detach().requires_grad_() for n, x in point.weights.items()}
        # the new weights replace the parameters in the model and elsewhere: in a closure, or in a list in a module
        instead = {id(p): weights[n] for n, p in binding.parameters.items()} if binding.own_parameters else {}
        with (
            self._conditions.replaying(autocast=False),
            binding.swapped({**copies, **weights}) as inside,
            _InFloat64({**instead, **point.outer}),
            binding.kernels(inside, follow=True),
            evaluating(inside.taking),
        ):
            inside.weights = weights
            yield inside

    def _losses(self, terms: Sequence[Term], weights: Sequence[Value], point: _Point, inside: Inside) -> list[Tensor]:
        def up(x: Tensor) -> Tensor:
            return point.outer[id(x)] if id(x) in point.outer else x.double() if x.dtype in _LOW else x

        with torch.enable_grad():
            values = [self._binding.loss(t.name, t.loss, inside, map_tensors(up, t.batch)) for t in terms]
            numbers = [c.detach().double() if isinstance(c, Tensor) else c for c in weights]
            return [c * value for c, value in zip(numbers, values, strict=True)]

    def _start(self, terms: Sequence[Term]) -> _Point:
        """Return the current weights, and the tensors of the batches that require grad, as a point."""
        NESTED.clear()
        self._since = sequence_number()
        # a sparse tensor can't be moved along a dense gradient, and stays where it is
        given = [x for x in tensors_of([t.batch for t in terms]) if x.requires_grad and x.layout == torch.strided]
        self._given = given  # keeps ids from being reused
        return _Point(self._weights, {id(x): x.detach().double().requires_grad_() for x in given})

    def _add_leaves(self, point: _Point, values: Sequence[Tensor], inside: Inside) -> list[Tensor]:
        """Return the inputs of the derivative: the weights, the tensors of the batch, and every leaf that can be moved.

        A leaf behind a tensor that was computed earlier can't be moved, because the loss would not change.
        """
        known = {id(x) for x in (*inside.weights.values(), *self._binding.parameters.values(), *point.outer.values())}
        leaves = [x for x in leaves_read_since(values, self._since) if id(x) not in known | NESTED]
        leaves = [x for x in leaves if x.dtype in (*_LOW, torch.float64) and x.layout == torch.strided]
        inputs = [*inside.weights.values(), *point.outer.values(), *leaves]
        point.outer = {**point.outer, **{id(x): x.detach().double() for x in leaves}}
        return inputs

    def first_derivative(self, term: Term) -> tuple[State, float]:
        """Return ∇g at the current weights, and its error against differences."""
        with _guarded():
            point = self._start([term])
            with self._inside(point) as inside:
                (value,) = values = self._losses([term], [1.0], point, inside)
                inputs = self._add_leaves(point, values, inside)
                grads = grad([value], inputs, [None])
            v = _filled(grads, point.tensors())
            n = len(point.weights)

            def at(by: float) -> tuple[float, float]:
                moved = point.moved(along, by)
                with torch.no_grad(), self._inside(moved) as inside:
                    value = float(self._losses([term], [1.0], moved, inside)[0].detach())
                return value, value

            along = _direction(point, v, v[:n])
            here = float(value.detach())
            error = _compare(_dot(v, along), at, here, here)
        return dict(zip(point.weights, v, strict=False)), error

    def second_derivative(self, step: Step, u: State | None, trained: Collection[str] = ()) -> float:
        """Return the error of ∇⟨∇ℓ, u⟩ against differences of ∇ℓ, also along weights that other steps have trained."""
        with _guarded():
            point = self._start(step.terms)
            with self._inside(point) as inside:
                values = self._losses(step.terms, step.weights, point, inside)
                inputs = self._add_leaves(point, values, inside)
                total = sum(float(x.detach()) for x in values)
                d = gradient(values, inside, True, step.only)
                u = {n: x for n, x in (u or {}).items() if n in d}
                if not any(bool(x.any()) for x in u.values()):
                    u = {n: x.detach() for n, x in d.items()}
                keys = [n for n in u if d[n].requires_grad]
                grads: Sequence[Tensor | None] = [None] * len(inputs)
                if keys:
                    outputs, along_u = [d[n] for n in keys], [u[n] for n in keys]
                    grads = grad(outputs, inputs, along_u)
                here = float(sum((d[n].detach() * u[n]).sum() for n in u))
                others = {n: x if n in trained else torch.zeros_like(x) for n, x in point.weights.items()}
                moves = [d[n].detach() if n in d else others[n] for n in point.weights]
            v = _filled(grads, point.tensors())

            def at(by: float) -> tuple[float, float]:
                moved = point.moved(along, by)
                with self._inside(moved) as inside:
                    values = self._losses(step.terms, step.weights, moved, inside)
                    d = gradient(values, inside, False, step.only)
                    value = sum(float(x.detach()) for x in values)
                return float(sum((d[n].detach() * u[n]).sum() for n in u if n in d)), value

            along = _direction(point, v, moves)
            return _compare(_dot(v, along), at, here, total)


@contextmanager
def _guarded() -> Generator[None]:
    """Turn an error of losses that do not run in float64 into `NotChecked`, except errors of this library."""
    try:
        yield
    except (NotChecked, MemoryError):
        raise
    except Exception as error:
        if str(error).startswith("bilevel.") and "float64" not in str(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotChecked(f"in float64 the losses raise {type(error).__name__}: {first}") from None


class _InFloat64(TorchFunctionMode):
    """A mode that casts every floating-point argument to float64, and replaces outer variables by those of a point."""

    def __init__(self, outer: dict[int, Tensor]) -> None:
        super().__init__()
        self._outer = outer

    def _up(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) in self._outer:
                return self._outer[id(x)]
            return x.double() if x.dtype in _LOW else x
        if isinstance(x, (tuple, list, dict)):
            return pytree.tree_map(self._up, x)
        return torch.float64 if isinstance(x, torch.dtype) and x in _LOW else x

    def _all_up(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._up, args)), {n: self._up(x) for n, x in kwargs.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "requires_grad_", "backward", "_make_subclass"):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16") and args:
            return self._up(args[0]).double()
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and args:
            return func(args[0], *map(self._up, args[1:]), **kwargs)  # in place: the first is written to
        args, kwargs = self._all_up(args, kwargs)
        return func(*args, **kwargs)


def _filled(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, like, strict=True)]


def _direction(point: _Point, v: list[Tensor], moves: list[Tensor]) -> list[Tensor]:
    """Return the direction of the differences.

    In the weights it is the derivative plus the change by a step, times fixed numbers of both signs. In λ it is the
    derivative. Each part is as long as the tensors that it moves. A weight that no step changes is not moved, since a
    frozen part may well be behind torch.no_grad().
    """
    n = len(point.weights)

    def random(x: Tensor) -> Tensor:
        """Return fixed numbers of both signs that are unrelated to the model, without using a random generator."""
        return torch.arange(1.0, x.numel() + 1, dtype=x.dtype, device=x.device).cos_().view(x.shape)

    size = _norm(list(point.weights.values())) or 1.0
    along = _scaled(v[:n], size)
    shaken = _scaled([x * random(x) for x in moves], size / 2)
    outer = [
        part for x, p in zip(v[n:], point.tensors()[n:], strict=True)
        for part in _scaled([x if bool(x.any()) else random(x)], _norm([p]) or 1.0)
    ]  # fmt: skip
    return [*(a + b for a, b in zip(along, shaken, strict=True)), *outer]


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(float(x.detach().square().sum()) for x in tensors) ** 0.5


def _scaled(tensors: Sequence[Tensor], size: float) -> list[Tensor]:
    length = _norm(tensors)
    return [x * (size / length) if length else x for x in tensors]


def _dot(x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum().detach()) for a, b in zip(x, y, strict=True))


def _compare(got: float, at: Callable[[float], tuple[float, float]], here: float, loss: float) -> float:
    """Return the relative error of a derivative against differences of a function that has the value `here`.

    One-sided differences, which cost one evaluation, are enough where they agree. Otherwise central differences are
    taken, and the least error over three ε counts. Where two ε disagree, the differences are inexact (rounding, a
    kink), and their disagreement is subtracted from the error. The disagreement of random numbers would hide any error,
    so a function that is not the same at each evaluation is refused first.
    """

    def error(expected: float, rough: float) -> float:
        size = max(abs(expected), abs(got))
        return max(0.0, abs(expected - got) - rough) / size if size > rough else 0.0

    eps = _EPSILONS[0]
    ahead = at(eps)[0]
    best = error((ahead - here) / eps, _rounding(ahead, here, eps))
    if best <= TOLERANCE / 10:
        return best
    again, value = at(0.0)
    if not abs(again - here) <= _REPRODUCED * max(abs(here), abs(got)):  # noise / 1e-9 would be as large as `got`
        raise NotChecked(_DIFFERENT)
    before = None
    for eps in _EPSILONS:
        ahead, behind = at(eps)[0], at(-eps)[0]
        expected = (ahead - behind) / (2 * eps)
        rounding = _rounding(ahead, behind, eps)
        best = min(best, error(expected, max(rounding, 0.0 if before is None else abs(expected - before))))
        before = expected
        if best <= TOLERANCE / 10:
            return best
    if not abs(value - loss) <= 1e-6 * abs(loss):
        raise NotChecked(_DIFFERENT)
    return best


def _rounding(ahead: float, behind: float, eps: float) -> float:
    return 2**-50 * max(abs(ahead), abs(behind)) / eps
