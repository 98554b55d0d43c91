"""A step is a gradient followed by an update: d = ∇_w [c_h·h + c_g·g], z⁺ = Υ(z, d). The one place where it is written.

z holds the weights, the optimizer's tensors, and the running statistics of normalisation layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.graph import find_leaves
from ..autograd.missing import explained
from ..autograd.trees import State, same_bits
from ..kernels.stopping import is_stopped
from ..kernels.switches import full_precision
from ..model.losses import Loss
from ..model.model import Binding, InnerProblem, Inside
from ..update.solvers import Value
from ..update.update import PulledUpdate, Update
from .conditions import set_modes
from .parts import Micro, split


class Term(NamedTuple):
    """A loss of a step, with the batch that it is evaluated on."""

    name: str
    loss: Loss
    batch: tuple[Any, ...]


@dataclass
class Evaluated:
    """The losses of a step at z, and its direction."""

    weighted: list[Tensor]  # c·loss, with a graph
    values: State  # the values of the losses, by name
    direction: State  # the direction from the losses of this process; a weight that no loss uses has none
    buffers: State  # the buffers after the losses were evaluated
    without_value: frozenset[str] = frozenset()  # weights whose direction has a graph, but no values
    leaves: Sequence[Tensor] | None = None  # the outer variables that the losses use, if `weighted` has not all of them
    at: State | None = None  # the weights that `weighted` was computed from, if these are not those of z


@dataclass
class Moved:
    """The result of a step: the next state, and the losses and buffers that were computed with it."""

    at: State  # the leaves for which `to` can be differentiated, if it has a graph
    to: State  # z⁺
    values: State  # the values of the losses of this process
    means: State  # the means of the losses over all processes
    buffers: State  # the buffers that are not part of z
    weighted: list[Tensor]
    leaves: Sequence[Tensor] | None = None  # the outer variables that the losses use, if they are known already
    moved: Iterable[str] = ()  # the weights that were updated
    leaves_of_update: Sequence[Tensor] = ()  # the outer variables that functions of the user in the update use


class Step:
    """Φ_k: z ↦ z⁺ = Υ_k(z, ∇_w Σ c·loss), for all weights w or `only` some."""

    __slots__ = (
        "binding", "directed", "k", "micro", "only", "runs_into_other_graphs", "terms", "update", "weights",
    )  # fmt: skip

    def __init__(
        self,
        k: int,
        binding: Binding,
        terms: Sequence[Term],
        weights: Sequence[Value],
        update: Update,
        only: frozenset[str] | None = None,
    ) -> None:
        self.k, self.binding, self.update, self.only = k, binding, update, only
        used = [i for i, c in enumerate(weights) if isinstance(c, Tensor) or c != 0]
        self.terms = tuple(terms[i] for i in used)
        self.weights = tuple(weights[i] for i in used)
        self.micro: Micro | None = None  # how the batches are split into parts
        self.directed: tuple[str, ...] = ()  # the weights that have a direction; known after the step
        self.runs_into_other_graphs = True  # whether a loss uses a tensor with a graph; known after the step

    @property
    def what(self) -> str:
        """A description of the step that must be the same on every rank."""
        parts = "" if self.micro is None else f" in {self.micro}"
        return f"{'accumulate' if self.update.accumulates else 'step'} {sorted(self.only or ())}{parts}"

    def losses(self, inside: Inside) -> tuple[list[Tensor], State]:
        """Return each loss times its weight, with a graph, and the values of the losses."""
        weighted: list[Tensor] = []
        values: State = {}
        with torch.enable_grad():
            for (name, loss, batch), c in zip(self.terms, self.weights, strict=True):
                value = self.binding.loss(name, loss, inside, batch)
                weighted.append(value if isinstance(c, float) and c == 1 else c * value)
                values[name] = value.detach()
        return weighted, values

    def evaluate(self, inside: Inside, *, create_graph: bool) -> Evaluated:
        """Compute the losses and their direction in one backward pass, or in one for each part or inner problem."""
        if self.micro is not None:
            return self._evaluate_parts(inside, create_graph)
        if not create_graph and (problems := self.problems()):
            return self._evaluate_problems(inside, problems)
        weighted, values = self.losses(inside)
        return Evaluated(weighted, values, gradient(weighted, inside, create_graph, self.only), inside.buffers())

    def parts(self) -> list[Part]:
        """With micro=, return steps z ↦ ∇ℓ_i on a part of each batch; their sum is the gradient of this step."""
        assert self.micro is not None
        reductions, dimension = dict(self.micro.reductions), self.binding.batch_dimension
        pieces = [split(t.name, t.batch, self.micro.parts, dimension) for t in self.terms]
        parts: list[Part] = []
        for i in range(self.micro.parts):  # also if no batch has so many samples, since all ranks need the same number
            mine = [(t, c, p[i]) for t, c, p in zip(self.terms, self.weights, pieces, strict=True) if i < len(p)]
            factors = {t.name: piece.share if reductions[t.name] == "mean" else 1.0 for t, _, piece in mine}
            terms = [Term(t.name, t.loss, piece.batch) for t, _, piece in mine]
            with torch.enable_grad():
                weights = [c if factors[t.name] == 1 else c * factors[t.name] for t, c, _ in mine]
            step = Step(self.k, self.binding, terms, weights, Gradient(), self.only)
            step.directed, step.runs_into_other_graphs = self.directed, self.runs_into_other_graphs
            parts.append(Part(step, factors))
        return parts

    def _evaluate_parts(self, inside: Inside, create_graph: bool) -> Evaluated:
        """Compute the sums over the parts. Without `create_graph`, only the first part keeps its graph."""
        state = (*inside.weights.values(), *inside.leaves.values(), *inside.statistics.values())
        kept: list[Tensor] = []
        leaves: dict[int, Tensor] = {}
        values: State = {}
        direction: State = {}
        aux: dict[str, list[Any]] = {t.name: [] for t in self.terms}
        for i, part in enumerate(self.parts()):
            weighted, found = part.step.losses(inside)
            part.add_values(found, values)
            for n in found:
                aux[n].append(self.binding.aux.get(n))
            d = gradient(weighted, inside, create_graph, self.only)
            with torch.set_grad_enabled(create_graph):
                direction.update({n: direction[n] + x if n in direction else x for n, x in d.items()})
                if i == 0:
                    kept = weighted
                elif create_graph:
                    by_name = dict(zip(found, weighted, strict=True))
                    kept = [
                        x + by_name[t.name] if t.name in by_name else x for x, t in zip(kept, self.terms, strict=True)
                    ]
            if not create_graph:
                for x in weighted:
                    leaves.update((id(y), y) for y in find_leaves(x, state, inside.watched.values())[0])
            del weighted, d
        self.binding.aux.update({n: x if any(y is not None for y in x) else None for n, x in aux.items()})
        known = None if create_graph else list(leaves.values())
        return Evaluated(kept, values, direction, inside.buffers(), leaves=known)

    def problems(self) -> Sequence[InnerProblem]:
        """Return the inner problems if the derivatives of this step are computed for one after the other."""
        return () if self.micro is not None else self.binding.separate()

    def of(self, problem: InnerProblem) -> Step:
        """Return the step z ↦ ∇ℓ of one inner problem."""
        terms = [Term(t.name, t.loss, problem.rows(t.batch)) for t in self.terms]
        step = Step(self.k, problem.binding, terms, self.weights, Gradient(), self.only)
        step.directed, step.runs_into_other_graphs = self.directed, self.runs_into_other_graphs
        return step

    def _evaluate_problems(self, inside: Inside, problems: Sequence[InnerProblem]) -> Evaluated:
        """Compute the directions of the inner problems one after the other. Only the first keeps its graph."""
        binding, before = self.binding, inside.buffers()
        for t in self.terms:
            binding.check_batch(t.name, t.batch)
        values: State = {}
        found: list[Evaluated] = []
        leaves: dict[int, Tensor] = {}
        aux: dict[str, list[Any]] = {t.name: [] for t in self.terms}
        modes = [m.training for m in binding.modules]
        for problem in problems:
            set_modes(binding.modules, modes)  # a loss may have changed them
            w = problem.leaves(inside.weights)
            mine = replace(inside, weights=w, leaves=w, swapped=w)
            binding.put_buffers({n: x.clone() for n, x in problem.rows(before).items()})
            one = self.of(problem).evaluate(mine, create_graph=False)
            one.at = w
            for n, x in one.values.items():
                values[n] = values[n] + x if n in values else x
                aux[n].append(binding.aux.get(n))
            for x in one.weighted:
                leaves.update((id(y), y) for y in find_leaves(x, (*w.values(), *mine.watched.values()))[0])
            if found:
                one.weighted = []
            found.append(one)
        after = binding.joined_buffers([one.buffers for one in found])
        binding.put_buffers(after)
        binding.aux.update({n: binding.joined_aux(parts) for n, parts in aux.items()})
        direction = binding.joined([one.direction for one in found])
        return Evaluated(found[0].weighted, values, direction, after, leaves=list(leaves.values()), at=found[0].at)

    def move(
        self,
        z: State,
        buffers: State,
        *,
        graph: bool,
        within: Callable[[Moved], None] | None = None,
        first: bool = False,
    ) -> Moved:
        """Take the step from z. `within` is called while the weights, and the graph if any, are still in the model."""
        binding = self.binding
        with binding.inside(z, buffers, graph=graph, statistics=graph, first=first) as inside:
            found = self.evaluate(inside, create_graph=graph)
            if self.micro is not None:
                _refuse_changed_buffers(found.buffers, {**buffers, **z})
            means = binding.means_of_losses(found.values, self.what)
            at = {**z, **inside.leaves, **inside.statistics} if graph else z
            to, moved_weights, leaves = self.updated(at, found.direction, graph)
            at = at if found.at is None else {**at, **found.at}
            moved = self.finish(z, buffers, to, found.buffers, found.values, means, found.weighted, found.leaves, at)
            moved.moved, moved.leaves_of_update = moved_weights, leaves
            if within is not None:
                within(moved)
        return moved

    def updated(self, at: State, direction: State, graph: bool) -> tuple[State, Iterable[str], Sequence[Tensor]]:
        """Return z⁺, the names of the updated weights, and the outer variables that functions of the user have used."""
        update, binding = self.update, self.binding
        with full_precision(), torch.set_grad_enabled(graph):
            d = binding.mean_of_direction(direction)
            self.directed = tuple(d)
            if not update.closes_over:
                return update(at, d), update.moves(at, d), ()
        with full_precision(), torch.enable_grad():
            to = update(at, d) if graph else {}
            leaves = {id(x): x for y in to.values() if y.requires_grad for x in find_leaves(y, at.values())[0]}
            if not graph or binding.share != 1:
                # z and d have no graph here, so any graph comes from an outer variable
                alone = update({n: x.detach() for n, x in at.items()}, {n: x.detach() for n, x in d.items()})
                found = {id(x): x for y in alone.values() if y.requires_grad for x in find_leaves(y)[0]}
                if found and binding.share != 1:
                    raise ValueError(
                        "bilevel.inner: a function of the direction, or a rule of your own, uses an outer variable. "
                        "With group= its gradient would be counted once on every rank. Use the variable in the losses, "
                        "or give it as lr= or as an option of the optimizer."
                    )
                to, leaves = to or {n: x.detach() for n, x in alone.items()}, leaves or found
            return to, update.moves(at, d), list(leaves.values())

    def finish(
        self,
        z: State,
        buffers: State,
        to: State,
        after: State,
        values: State,
        means: State,
        weighted: Sequence[Tensor] = (),
        leaves: Sequence[Tensor] | None = None,
        at: State | None = None,
    ) -> Moved:
        """Divide the buffers after a step into those that are part of the state and the others."""
        binding = self.binding
        for n, b in after.items():
            if b.requires_grad and n not in binding.statistics and n not in binding.changing:
                if not is_stopped(b):
                    raise ValueError(
                        f"bilevel.inner: a loss leaves the buffer {n!r} of the model with a graph, through which the "
                        "next step does not differentiate. Compute it inside h, or store "
                        "bilevel.stop_gradient(...) there: a constant in the gradient of the next step, with its own "
                        "derivative in the hypergradient. (.detach() drops that derivative.)"
                    )
                binding.statistics += (n,)  # from now on the buffer is part of the state
        for n in binding.statistics:
            to[n] = after[n] if after[n].requires_grad else after[n].detach()
            if n not in binding.moving and not is_same(to[n], z[n] if n in z else buffers[n]):
                binding.moving.add(n)
        rest = {n: _unless_equal(b.detach(), buffers[n]) for n, b in after.items() if n not in to}
        binding.changing.update(n for n, b in rest.items() if b is not buffers[n] and not _is_counter(b, buffers[n]))
        if all(x is buffers[n] for n, x in rest.items()):
            rest = buffers
        return Moved(z if at is None else at, to, values, means, rest, list(weighted), leaves)


@dataclass(frozen=True)
class Part:
    """A step on a part of each batch, and the factor of each of its losses in the loss of the whole step."""

    step: Step
    factors: dict[str, float]

    def add_values(self, values: State, sums: State) -> None:
        """Add the values of this part's losses to those of the whole step."""
        for n, x in values.items():
            x = x * self.factors[n]
            sums[n] = sums[n] + x if n in sums else x


@dataclass(frozen=True)
class Gradient(Update):
    """The update of a part, z⁺ = d, whose result is the gradient alone."""

    @property
    def reads_direction(self) -> bool:
        return False

    def __call__(self, z: State, d: State) -> State:
        return dict(d)

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        return PulledUpdate({}, {}, {n: a[n] for n in d if n in a}, [None] * len(wanted))


def gradient(weighted: list[Tensor], inside: Inside, create_graph: bool, only: Collection[str] | None = None) -> State:
    """Return ∇_w of the sum as dense tensors, for every weight that it depends on; `stop_gradient` is in effect."""
    if not weighted:
        return {}
    weights = inside.weights if only is None else {n: x for n, x in inside.weights.items() if n in only}
    inside.taking.on = True
    try:
        with torch.enable_grad():
            total = sum(weighted[1:], weighted[0])
        with full_precision(), explained():
            if not total.requires_grad:
                return {}
            grads = grad([total], list(weights.values()), [None], create_graph=create_graph, retain_graph=create_graph)
    finally:
        inside.taking.on = False
    return {n: d.to_dense() if d.is_sparse else d for n, d in zip(weights, grads, strict=True) if d is not None}


def _refuse_changed_buffers(after: State, before: State) -> None:
    for n, b in after.items():
        if not b.is_meta and not (is_same(b, before[n]) or torch.equal(b.detach(), before[n].detach())):
            raise ValueError(
                f"bilevel.inner: with micro= a loss changes the buffer {n!r} of the model (running statistics, a "
                "counter) once for each part, while the plain step changes it once for the batch. Put the layer into "
                "eval mode, or leave out micro=."
            )


def is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two buffers hold the same bits; always False on a device, where comparing would make the host wait."""
    return x.device.type == "cpu" and same_bits(x, y)


def _is_counter(new: Tensor, old: Tensor) -> bool:
    """Whether a buffer is a counter, which has no derivative: integers, or all entries grew by the same integer."""
    if not new.is_floating_point() or new.is_meta:
        return True
    by = new - old
    return by.numel() > 0 and bool((by == by.flatten()[0]).all()) and float(by.flatten()[0]).is_integer()


def _unless_equal(new: Tensor, old: Tensor) -> Tensor:
    """Return the old buffer if the new one is equal, so that it is stored once. (BatchNorm does not raise versions.)"""
    return old if is_same(new, old) else new


class LossMonitor:
    """Finds losses that are not finite, and their steps: at once on the CPU, in `raise_if_not_finite` on a device."""

    def __init__(self) -> None:
        self._later: list[tuple[int, str, Tensor]] = []

    def record_loss(self, k: int, name: str, value: Tensor, w: State) -> float | Tensor:
        """Record the value, and return it: as a number on the CPU, as a tensor on a device."""
        if value.device.type == "cpu":
            if not math.isfinite(number := value.item()):
                raise self._error(k, name, value, w)
            return number
        if value.device.type != "meta":
            self._later.append((k, name, value))
        return value

    def raise_if_not_finite(self) -> None:
        """Raise if a recorded loss was not finite."""
        later, self._later = self._later, []
        if later and not bool(torch.isfinite(torch.stack([value.float() for _, _, value in later])).all()):
            raise self._error(*next(entry for entry in later if not bool(torch.isfinite(entry[2]))), {})

    @staticmethod
    def _error(k: int, name: str, value: Tensor, w: State) -> FloatingPointError:
        broken = [n for n, x in w.items() if not bool(torch.isfinite(x).all())]
        why = (
            f"The weight {broken[0]!r} is not finite after the step before. A smaller rate may help."
            if broken
            else "A smaller rate may help."
        )
        return FloatingPointError(f"bilevel.inner: {name} is {float(value)} at step k = {k}. {why}")


def disconnected(name: str) -> ValueError:
    """Return the error for a loss that does not depend on the weights."""
    return ValueError(
        f"bilevel.inner: {name} does not depend on the weights of the inner problem. Compute it from the model that "
        "is its first argument, without .detach(), .item() or torch.no_grad()."
    )
