"""The sentinel: are the derivatives that a hypergradient rests on those of the losses?

For a cotangent u of a step's gradient, and a direction v in the weights and outer variables,

    ⟨u, ∇ℓ(x + ε·v) − ∇ℓ(x − ε·v)⟩ / 2ε   must be   ⟨∇⟨∇ℓ(x), u⟩, v⟩,      x = (w, λ)

and likewise for g itself. A `.detach()` that drops a path, a custom backward that can't be differentiated again, a
straight-through estimator: whatever makes the two differ, two gradients and one pullback tell. It is done in float64
(in float32 the differences see kinks, and rounding, that the derivative does not): the weights are held by the model
in float64 for the time of it, and every other floating-point argument of an operation is cast up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .binding import Binding, Inside, Loss
from .graph import State, find_leaves, map_tensors, tensors_of
from .replay import Conditions
from .step import Step, Term, gradient

_EPSILONS = (1e-5, 1e-6, 1e-7)
_TOLERANCE = 1e-3
_LOW = (torch.float16, torch.bfloat16, torch.float32)
_CHECKED: set[object] = set()  # models, by their structure, with the losses that they were checked with


class DerivativeWarning(UserWarning):
    """A derivative that a hypergradient rests on is not that of the loss, or could not be checked."""


@dataclass
class _Point:
    """Everything that a loss can be moved along, in float64: weights, outer variables, tensors of the batch."""

    weights: State
    outer: dict[int, Tensor]  # by the id of the user's tensor: the float64 leaf that stands for it

    def moved(self, v: Sequence[Tensor], by: float) -> _Point:
        values = [x.detach() + by * d for x, d in zip(self.tensors(), v, strict=True)]
        n = len(self.weights)
        leaves = [x.requires_grad_() for x in values]
        return _Point(
            dict(zip(self.weights, leaves[:n], strict=True)), dict(zip(self.outer, leaves[n:], strict=True))
        )

    def tensors(self) -> list[Tensor]:
        return [*self.weights.values(), *self.outer.values()]


class Sentinel:
    """Looks at the derivatives of one loop, when its first hypergradient is taken."""

    def __init__(
        self, binding: Binding, losses: tuple[Loss, Loss | None], check: Literal["first", "always", False]
    ) -> None:
        self._binding, self._losses, self._check = binding, losses, check
        self._warned_buffers = False

    def _is_due(self, step: Step) -> bool:
        if self._check is False or next(iter(self._binding.parameters.values())).is_meta:
            return False
        if self._check == "always":
            return True
        structure = tuple((type(m), m.training) for m in self._binding.modules)
        shapes = tuple((n, p.shape, p.dtype) for n, p in self._binding.parameters.items())
        codes = tuple(getattr(loss, "__code__", loss) for loss in self._losses)
        key = structure, shapes, codes, tuple(t.name for t in step.terms)
        try:
            new = key not in _CHECKED
            _CHECKED.add(key)
        except TypeError:  # a loss that can't be hashed
            return True
        return new

    def examine(
        self,
        step: Step,
        conditions: Conditions | None,
        leaves: Sequence[Tensor],
        z: State,
        buffers: State,
        outer_batch: tuple[Any, ...] | None,
        wanted: Sequence[Tensor] | None,
    ) -> None:
        """Compare the derivatives of the last step's losses and of g, at the current weights, with differences."""
        if not self._is_due(step):
            return
        conditions = conditions or Conditions(self._binding)
        probe = _Probe(self._binding, conditions, z, buffers)
        unchecked: list[str] = []
        u = None
        terms: list[tuple[str, Callable[[], str | None]]] = []
        g = self._losses[1]
        try:
            if g is not None and outer_batch is not None:
                found = probe.first_derivative(Term("g", g, outer_batch))
                u = found.gradient
                if found.error > _TOLERANCE:
                    self._warn("the gradient of g", "g", found.error)
            if step.terms:
                error = probe.second_derivative(step, u)
                if error > _TOLERANCE:
                    names = " and ".join(t.name for t in step.terms)
                    self._warn(f"the second derivative of {names}", names, error, step.k)
        except _NotChecked as why:
            unchecked.append(str(why))
        del terms, leaves, wanted
        if unchecked:
            warnings.warn(
                f"bilevel.inner: the derivatives of this loop could not be checked: {unchecked[0]}. Check them by "
                "bilevel.gradcheck, on a small problem; check=False leaves the check out.",
                DerivativeWarning,
                stacklevel=5,
            )

    def _warn(self, what: str, names: str, error: float, k: int | None = None) -> None:
        at = "" if k is None else f", on the batch of step k = {k}"
        warnings.warn(
            f"bilevel.inner: {what} is not the derivative of the loss{at}: it is off by {error:.1%} from central "
            "differences in float64, and so the hypergradient may be wrong. Likely causes: a .detach() or "
            "torch.no_grad() that drops a dependence on the weights, an autograd.Function whose backward can't be "
            "differentiated, a straight-through estimator, spectral_norm in training mode. bilevel.gradcheck names the "
            "module; check=False says that you know.",
            DerivativeWarning,
            stacklevel=6,
        )


class _NotChecked(Exception):
    pass


@dataclass
class _Found:
    gradient: State
    error: float


class _Probe:
    """Losses of one loop in float64, as functions of weights and outer variables."""

    def __init__(self, binding: Binding, conditions: Conditions, z: State, buffers: State) -> None:
        self._binding, self._conditions = binding, conditions
        self._weights = {n: z[n].detach().double() for n in binding.parameters}
        held = {n: z[n] if n in z else buffers[n] for n in binding.buffers}
        self._buffers = {n: b.detach().double() if b.is_floating_point() else b.detach() for n, b in held.items()}

    @contextmanager
    def _inside(self, point: _Point) -> Generator[Inside]:
        binding = self._binding
        copies = {n: b.clone() for n, b in self._buffers.items()}
        with self._conditions.replaying(autocast=False):
            if binding.own_parameters:
                with _lent(binding.parameters, point.weights), binding.swapped(copies) as inside:
                    inside.weights = binding.parameters
                    with _InFloat64(point.outer), binding.twice_differentiable(inside.taking):
                        yield inside
            else:
                copies.update(point.weights)
                with binding.swapped(copies) as inside, _InFloat64(point.outer), binding.twice_differentiable(inside.taking):
                    inside.weights = point.weights
                    yield inside

    def _start(self, terms: Sequence[Term]) -> _Point:
        """The weights as they are, and what requires grad besides: found in the graphs of the losses."""
        point = _Point({n: x.clone().requires_grad_() for n, x in self._weights.items()}, {})
        outer: dict[int, Tensor] = {}
        for x in tensors_of([t.batch for t in terms]):
            if x.requires_grad:
                outer[id(x)] = x
        with self._inside(point) as inside:
            for t in terms:
                value = self._loss(t, inside, {})
                state = (*inside.weights.values(), *self._binding.parameters.values())
                for x in find_leaves(value, state)[0]:
                    if x.dtype in _LOW or x.dtype == torch.float64:
                        outer[id(x)] = x
        self._keep = list(outer.values())  # so that no id is used again
        point.outer = {key: x.detach().double().requires_grad_() for key, x in outer.items()}
        return point

    def _loss(self, t: Term, inside: Inside, outer: dict[int, Tensor]) -> Tensor:
        batch = map_tensors(lambda x: outer.get(id(x), x.double() if x.dtype in _LOW else x), t.batch)
        with torch.enable_grad():
            return self._binding.loss(t.name, t.loss, inside, batch)

    def _total(self, terms: Sequence[Term], weights: Sequence[Any], point: _Point, inside: Inside) -> list[Tensor]:
        values = [self._loss(t, inside, point.outer) for t in terms]
        numbers = [c.detach().double() if isinstance(c, Tensor) else c for c in weights]
        with torch.enable_grad():
            return [c * value for c, value in zip(numbers, values, strict=True)]

    def first_derivative(self, term: Term) -> _Found:
        """∇g at the current weights, and how far it is off from differences along itself."""
        with _guarded():
            point = self._start([term])
            with self._inside(point) as inside:
                value = self._total([term], [1.0], point, inside)[0]
                inputs = [*inside.weights.values(), *point.outer.values()]
                grads = torch.autograd.grad(value, inputs, allow_unused=True)
            v = _filled(grads, point.tensors())

            def at(by: float) -> Tensor:
                moved = point.moved(along, by)
                with torch.no_grad(), self._inside(moved) as inside:
                    return self._total([term], [1.0], moved, inside)[0].detach()

            error = 0.0
            for along in _directions(point, v, None):
                error = max(error, _compare(_dot(v, along), at, _scale(point, along)))
        return _Found(dict(zip(point.weights, v, strict=False)), error)

    def second_derivative(self, step: Step, u: State | None) -> float:
        """How far ∇⟨∇ℓ, u⟩ is off from differences of ∇ℓ."""
        with _guarded():
            point = self._start(step.terms)
            with self._inside(point) as inside:
                weighted = self._total(step.terms, step.weights, point, inside)
                d = gradient(weighted, inside, True)
                u = {n: x for n, x in (u or {}).items() if n in d}
                if not any(bool(x.any()) for x in u.values()):
                    u = {n: x.detach() for n, x in d.items()}
                keys = [n for n in u if d[n].requires_grad]
                inputs = [*inside.weights.values(), *point.outer.values()]
                grads: Sequence[Tensor | None] = [None] * len(inputs)
                if keys:
                    outputs, along_u = [d[n] for n in keys], [u[n] for n in keys]
                    grads = torch.autograd.grad(outputs, inputs, along_u, allow_unused=True)
                touched = {n for n, x in d.items() if bool(x.detach().any())}
            v = _filled(grads, point.tensors())

            def at(by: float) -> Tensor:
                moved = point.moved(along, by)
                with self._inside(moved) as inside:
                    weighted = self._total(step.terms, step.weights, moved, inside)
                    d = gradient(weighted, inside, False)
                return torch.stack([(d[n].detach() * u[n]).sum() for n in u if n in d]).sum()

            error = 0.0
            for along in _directions(point, v, touched):
                error = max(error, _compare(_dot(v, along), at, _scale(point, along)))
        return error


@contextmanager
def _guarded() -> Generator[None]:
    """What does not run in float64 is said to be unchecked; errors of ours are errors."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if str(error).startswith("bilevel.") and "float64" not in str(error):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _NotChecked(f"in float64 the losses raise {type(error).__name__}: {first}") from None


@contextmanager
def _lent(parameters: State, values: State) -> Generator[None]:
    """The model's own parameters with other data, float64, for a time; the memory that they had comes back."""
    before = [p.data for p in parameters.values()]
    try:
        for n, p in parameters.items():
            p.data = values[n].detach()
        yield
    finally:
        for p, data in zip(parameters.values(), before, strict=True):
            p.data = data


class _InFloat64(TorchFunctionMode):
    """Every floating-point argument cast up; outer variables replaced by what stands for them."""

    def __init__(self, outer: dict[int, Tensor]) -> None:
        super().__init__()
        self._outer = outer

    def _up(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) in self._outer:
                return self._outer[id(x)]
            return x.double() if x.dtype in _LOW else x
        return torch.float64 if isinstance(x, torch.dtype) and x in _LOW else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "requires_grad_", "backward", "_make_subclass"):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16") and args:
            return self._up(args[0]).double()
        if name in ("copy_", "__setitem__", "fill_") and args and isinstance(args[0], Tensor):
            return func(args[0], *pytree.tree_map(self._up, args[1:]), **kwargs)  # in place: the first is written to
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            return func(args[0], *pytree.tree_map(self._up, args[1:]), **pytree.tree_map(self._up, kwargs))
        args, kwargs = pytree.tree_map(self._up, (args, kwargs))
        return func(*args, **kwargs)


def _filled(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, like, strict=True)]


def _directions(point: _Point, v: list[Tensor], touched: set[str] | None) -> Generator[list[Tensor]]:
    """The derivative itself, for the weights and for each kind of outer variable; and a random one in the weights.

    Weights that no step moves are left alone: a frozen part may well be behind a torch.no_grad().
    """
    n = len(point.weights)
    zeros = [torch.zeros_like(x) for x in v]
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) * _rms(x) for x in point.tensors()]
    if touched is not None:
        for i, name in enumerate(point.weights):
            if name not in touched:
                random[i] = zeros[i]
    if any(bool(x.any()) for x in v[:n]):
        yield [*v[:n], *zeros[n:]]
    yield [*random[:n], *zeros[n:]]
    if len(v) > n:
        yield [*zeros[:n], *(_unit(x) * _rms(p) if bool(x.any()) else r for x, p, r in zip(v[n:], point.tensors()[n:], random[n:], strict=True))]


def _rms(x: Tensor) -> float:
    size = float(x.detach().square().mean().sqrt()) if x.numel() else 0.0
    return size or 1.0


def _unit(x: Tensor) -> Tensor:
    return x / x.norm() * x.numel() ** 0.5


def _dot(x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))


def _scale(point: _Point, v: Sequence[Tensor]) -> float:
    """‖x‖/‖v‖, so that ε is relative."""
    moved = [(x, d) for x, d in zip(point.tensors(), v, strict=True) if bool(d.any())]
    size = sum(float(x.detach().square().sum()) for x, _ in moved) ** 0.5
    length = sum(float(d.square().sum()) for _, d in moved) ** 0.5
    return (size or 1.0) / length if length else 1.0


def _compare(got: float, at: Callable[[float], Tensor], scale: float) -> float:
    """The relative error of a derivative against central differences: the least over three ε.

    Where two ε disagree, the differences are rough (rounding, a kink), and as much is taken off.
    """
    best, before = 1.0, None
    for eps in _EPSILONS:
        step = eps * scale
        ahead, behind = float(at(step)), float(at(-step))
        expected = (ahead - behind) / (2 * step)
        size = max(abs(expected), abs(got))
        rounding = 2**-50 * max(abs(ahead), abs(behind)) / step
        if size == 0 or size <= rounding:
            return 0.0
        error = abs(expected - got) / size
        rough = rounding / size if before is None else max(rounding, abs(expected - before)) / size
        best, before = min(best, max(0.0, error - rough)), expected
        if best <= _TOLERANCE / 10:
            return best
    return best
