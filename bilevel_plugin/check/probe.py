"""What is compared with differences: the gradient of g, and the second derivatives of a step's losses.

With u a cotangent of the gradient of the losses ℓ, and v a direction in the weights or in one outer variable,

    ⟨u, ∇_w ℓ(x + ε·v)⟩, differentiated by ε,   must be   ⟨∇⟨∇_w ℓ(x), u⟩, v⟩,      x = (w, λ),

and the differences of g itself must be ⟨∇g, v⟩. Both sides are derivatives along lines, w + s·u + t·v, so that they are
numbers: no gradient of the size of the weights is kept but u, in the type of the weights. The weights' part and the
parts of the outer variables are compared apart; together, a wrong ∂²ℓ/∂w∂λ would drown in ∂²ℓ/∂w².
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.graph import leaves_read_since, sequence_number
from ..autograd.missing import explained
from ..autograd.trees import State, as_leaves, map_tensors
from ..kernels.stopping import Differentiation, evaluating
from ..kernels.switches import full_precision
from ..model.model import Evaluation as Tensors
from ..model.model import Model
from ..model.session import NESTED
from ..step.conditions import Conditions
from ..step.piece import Term, value_of
from .compared import Compared, Outer, Parts
from .differences import NotChecked
from .double import LOW, InFloat64, Onward, as_float64, dot, random_like

T = TypeVar("T")


class Losses(NamedTuple):
    """The losses of a step, and the weights of the model that the step is for."""

    terms: Sequence[Term]
    only: Collection[str] | None = None


@dataclass
class Evaluation:
    """The losses in float64 at one point."""

    taking: Differentiation
    mode: InFloat64
    values: list[Tensor]  # each times its weight in the step

    @property
    def total(self) -> Tensor:
        return sum(self.values[1:], self.values[0])

    def outer(self, since: int, known: Collection[int]) -> list[Outer]:
        """Return the outer variables that the losses depend on, with the leaves of the graph that stand for them.

        A variable that only a custom function reads, which is no operation of torch, can't be moved.
        """
        stand_for = {id(stand_in): (x, stand_in.detach()) for x, stand_in in self.mode.found.values()}
        found: dict[int, Outer] = {}
        for leaf in leaves_read_since(self.values, since):
            if id(leaf) in stand_for and id(leaf) not in known:
                x, value = stand_for[id(leaf)]
                found.setdefault(id(x), Outer(x, value, [])).leaves.append(leaf)
        return list(found.values())


class Probe:
    """The losses of one loop as functions of weights and outer variables, and the comparisons of their derivatives."""

    def __init__(self, model: Model, conditions: Conditions, z: State, buffers: State) -> None:
        self._model, self._conditions = model, conditions
        self._weights = {n: z[n].detach() for n in model.parameters}
        self._buffers = as_float64({n: z[n] if n in z else buffers[n] for n in model.buffers})
        self._moving: dict[str, Tensor] = {}  # of a weight with a gradient, the entries that have one
        self.rows: tuple[int, int] | None = None  # (n, few): what has n entries, one for each sample, is cut to few
        self.cotangent: State = {}  # u, of the weights that it is not 0 for

    # --- evaluating ---

    def _at(
        self, losses: Losses, weights: State, use: Callable[[Evaluation], T], outer: Mapping[int, Tensor] = {}
    ) -> T:
        """Return use(the losses in float64), with these weights in the model, and these outer variables moved."""
        model = self._model
        copies = {n: b.clone() for n, b in self._buffers.items()}
        # the new weights replace the parameters in the model and elsewhere: in a closure, or in a list in a module
        instead = {id(p): weights[n] for n, p in model.parameters.items()} if model.own else {}
        moved = {**instead, **outer, **{id(w): w for w in weights.values()}}
        mode, taking = InFloat64(moved, self.rows), Differentiation()
        tensors = Tensors(weights, weights, {}, {}, taking, model.present_buffers)
        NESTED.clear()

        def run() -> T:
            with mode, model.kernels(tensors, follow=True), evaluating(taking), torch.enable_grad():
                values: list[Tensor] = []
                for t in losses.terms:
                    value = value_of(model, t.name, t.loss, tensors, map_tensors(_up, t.given()))
                    weight = t.weight.detach().double() if isinstance(t.weight, Tensor) else t.weight
                    values.append(weight * t.share * value)
                return use(Evaluation(taking, mode, values))

        with self._conditions.replaying(autocast=False):
            return model.swapped({**copies, **weights}, run)

    def _on_line(self, x: State, t: State, along: Callable[[str, Tensor], Tensor]) -> State:
        """Return the same weights, with a graph to one number t for each that has one: its gradient is along(n, a)."""
        return {
            n: Onward.apply(w, t[n], lambda a, n=n: along(n, a)) if n in t else w  # pyright: ignore
            for n, w in x.items()
        }

    def _numbers(self) -> State:
        return {n: _zero() for n in self._weights}

    def _known(self, t: State) -> set[int]:
        return {id(x) for x in (*t.values(), *self._model.parameters.values())}

    def _start(self) -> State:
        return {n: w.double() for n, w in self._weights.items()}

    def _moved(self, by: float, names: Collection[str]) -> State:
        """Return the weights in float64 as leaves, these moved along their directions."""
        moved = as_float64(self._weights)
        for n in names if by else ():
            along = random_like(moved[n])
            moved[n].add_(along.mul_(self._moving[n]) if n in self._moving else along, alpha=by)
        return as_leaves(moved)

    # --- the two comparisons ---

    def first_derivative(self, term: Term, trained: Collection[str] = ()) -> list[Compared]:
        """Compare ∇g with differences of g, and take ∇g for the cotangent u."""
        losses = Losses([term._replace(weight=1.0)])
        u: State = {}

        def note(n: str, a: Tensor) -> Tensor:
            u[n] = _dense(a).detach().to(self._weights[n].dtype)
            self._moving[n] = u[n] != 0
            return dot(_dense(a), random_like(self._weights[n]))

        self._moving.clear()
        t, since = self._numbers(), sequence_number()

        def differentiated(at: Evaluation) -> tuple[Tensor, Parts]:
            parts = Parts(t, at.outer(since, self._known(t)))
            with full_precision():
                parts.differentiate(at.total)
            return at.total.detach(), parts

        here, parts = self._at(losses, self._on_line(self._start(), t, note), differentiated)
        self.cotangent = {n: x for n, x in u.items() if bool(x.any())}

        def value(by: float, names: Collection[str], outer: Mapping[int, Tensor]) -> tuple[Tensor, set[int]]:
            return self._at(losses, self._moved(by, names), lambda at: (at.total.detach(), at.mode.read), outer)

        return parts.compared(value, here, trained)

    def gradients(self, losses: Losses) -> dict[str, Tensor]:
        """Return the value, and its gradients with respect to the weights and the outer variables, by what they are."""
        d: dict[str, Tensor] = {}

        def note(n: str, a: Tensor) -> Tensor:
            d[f"the gradient with respect to the weight {n!r}"] = _dense(a).detach()
            return a.new_zeros(())

        t, since = self._numbers(), sequence_number()

        def differentiated(at: Evaluation) -> dict[str, Tensor]:
            parts = Parts(t, at.outer(since, self._known(t)))
            with full_precision():
                parts.differentiate(at.total)
            return {"its value": at.total.detach(), **d, **parts.in_outer_variables()}

        return self._at(losses, self._on_line(self._start(), t, note), differentiated)

    def gradient_of(self, losses: Losses) -> State:
        """Return the gradient that the step takes of its losses, in the type of the weights."""
        d: State = {}

        def note(n: str, a: Tensor) -> Tensor:
            if losses.only is None or n in losses.only:
                d[n] = _dense(a).detach().to(self._weights[n].dtype)
            return a.new_zeros(())

        t = self._numbers()
        self._at(losses, self._on_line(self._start(), t, note), lambda at: _gradient(at, list(t.values())))
        return d

    def second_derivative(self, losses: Losses, trained: Collection[str] = ()) -> list[Compared]:
        """Compare ∇⟨∇ℓ, u⟩ with differences of ⟨∇ℓ, u⟩, also along weights that other steps have trained."""
        u = {n: x for n, x in self.cotangent.items() if losses.only is None or n in losses.only}
        u = u or self.gradient_of(losses)
        self._moving.clear()

        def seen(n: str, a: Tensor) -> Tensor:
            entries = _dense(a).detach() != 0
            self._moving[n] = self._moving[n] | entries if n in self._moving else entries
            return _dense(a)

        def along_u(n: str, a: Tensor) -> Tensor:
            return dot(seen(n, a), u[n]) if n in u else seen(n, a).new_zeros(())

        def along_v(n: str, a: Tensor) -> Tensor:
            return dot(seen(n, a), random_like(self._weights[n]))

        t, since, s = self._numbers(), sequence_number(), _zero()
        x = self._on_line(self._start(), t, along_v)

        def differentiated(at: Evaluation) -> tuple[Tensor, Parts]:
            parts = Parts(t, at.outer(since, self._known(t)))
            d = _in_direction(at, s, create_graph=True)
            with full_precision(), explained():
                parts.differentiate(d)
            return d.detach(), parts

        here, parts = self._at(losses, self._on_line(x, dict.fromkeys(x, s), along_u), differentiated)
        del x

        def direction(by: float, names: Collection[str], outer: Mapping[int, Tensor]) -> tuple[Tensor, set[int]]:
            s = _zero()
            x = self._on_line(self._moved(by, names), dict.fromkeys(u, s), lambda n, a: dot(_dense(a), u[n]))
            return self._at(losses, x, lambda at: (_in_direction(at, s).detach(), at.mode.read), outer)

        return parts.compared(direction, here, {*trained, *self._moving})


def _gradient(at: Evaluation, inputs: Sequence[Tensor], *, create_graph: bool = False) -> Sequence[Tensor | None]:
    """Return the gradient that a step takes of the losses: what `stop_gradient` returned is a constant."""
    total = at.total
    if not total.requires_grad:
        return [None] * len(inputs)
    at.taking.on = True
    try:
        with full_precision(), explained():
            return grad([total], inputs, [None], create_graph=create_graph, retain_graph=create_graph)
    finally:
        at.taking.on = False


def _in_direction(at: Evaluation, s: Tensor, *, create_graph: bool = False) -> Tensor:
    (d,) = _gradient(at, [s], create_graph=create_graph)
    return torch.zeros_like(s).detach() if d is None else d


def _up(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().to(torch.float64 if x.dtype in LOW else x.dtype)


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def _dense(a: Tensor) -> Tensor:
    return a.to_dense() if a.is_sparse else a


@contextmanager
def guarded() -> Generator[None]:
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
