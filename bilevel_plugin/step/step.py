"""A step is a sum of gradients, and then an update: d = Σ_i ∇_w ℓ_i(w, b_(i−1)), z⁺ = Υ(z, d).

The pieces ℓ_i are evaluated one after the other: the losses on a batch, on its parts, on one task after the other, on
batches that are accumulated. z holds the weights, the optimizer's tensors, and the running statistics b, which pass
from piece to piece. The derivative is the same sum, read backwards:

    u = a·∂Υ/∂d;    for i = n … 1:  t += ∇_w ⟨∇ℓ_i, u⟩ + b̄·∂b_i/∂w,  b̄ = b̄·∂b_i/∂b_(i−1);    a⁺ = a·∂Υ/∂z + t
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ..autograd.derive import Gradients
from ..autograd.graph import find_leaves, sequence_number
from ..autograd.trees import Pairs, State
from ..autograd.weak import with_computed
from ..kernels.switches import full_precision
from ..model.model import Evaluation, Model
from ..model.tasks import row_of
from ..update.update import Update
from .conditions import set_modes
from .cotangent import Cotangent, CotangentOf, Pull, Pulled
from .hooks import OfCall, leaves_of_hooks
from .monitor import LossMonitor
from .piece import First, Found, Piece
from .record import holds_same_objects
from .sums import Sums, plus


class Pullable(Protocol):
    """An outer loss, whose gradients are taken at a state."""

    def pull(self, inputs: Sequence[Tensor] | None, into: Gradients, z: State | None = None) -> State:
        """Return ∇_z of the loss, and add its direct gradients to the sums."""
        ...


@dataclass
class Open:
    """A step that is being taken: what its pieces have given so far."""

    sums: Sums
    buffers: State  # the buffers that are not part of the state
    mean: State = field(default_factory=dict[str, Tensor])  # the direction, over all ranks; known when it is closed


class Step:
    """Φ_k: z ↦ z⁺ = Υ(z, Σ_i ∇ℓ_i), for all weights w or `only` some."""

    __slots__ = ("action", "calls", "directed", "k", "model", "moved", "only", "open", "pieces", "update")

    def __init__(self, k: int, model: Model, buffers: State, only: frozenset[str] | None = None) -> None:
        self.k, self.model, self.only = k, model, only
        self.pieces: list[Piece] = []
        self.update: Update | None = None  # known when the step is closed
        self.directed: tuple[str, ...] = ()  # the weights that have a direction
        self.moved: tuple[str, ...] = ()  # the weights that the update has changed
        self.calls = 0  # of the user, which have added pieces
        self.action = ""  # what the user does with it now, which must be the same on every rank
        self.open: Open | None = Open(Sums(model), buffers)

    # --- the step is taken ---

    def evaluate(
        self,
        z: State,
        pieces: Sequence[Piece],
        cut: Pairs,
        monitor: LossMonitor,
        *,
        graph: bool = False,
        first: First | None = None,
        within: Callable[[Piece, Evaluation, Found], None] | None = None,
    ) -> State:
        """Evaluate these pieces for the first time at z, add their gradients, and return the means of the losses.

        With `graph` the sums have the graph of the whole. `first` is another way to evaluate a piece. `within` is
        called with the graph of a piece while the model holds its weights.
        """
        model, open = self.model, self.open
        assert open is not None
        sums, buffers, values = open.sums.copy(), open.buffers, dict[str, Tensor]()
        modes, aux = [m.training for m in model.modules], list[dict[str, Any]]()
        several, traced = sum(not piece.row for piece in pieces) > 1, graph or within is not None
        for piece in pieces:
            if piece.row:
                set_modes(model.modules, modes)  # the losses of another task may have changed them
            piece.begin(self.k, cut, buffers)
            at, use = sums.at(z), _Noting(piece, sequence_number(), graph, within)
            found = None if first is None else first(piece, at)
            if found is None:
                found = piece.evaluate(at, use, graph=traced, follow=traced, first=True)
            piece.record.conditions.end_of_call()
            whole = sums.add(piece, found, graph=graph)
            if whole is not None:
                rest = sums.pass_on(whole, at, buffers, several=several, graph=graph)
                buffers = buffers if rest is None else rest
                aux.append(dict(model.seen.aux))
            for n, x in found.values.items():
                values[n] = values[n] + x if n in values else x
            piece.release()
        means = model.ranks.means(values, f"{self.action} {sorted(self.only or ())} {len(pieces)}")
        read = pieces[0].record.values if means is values and len(pieces) == 1 else means.values()
        for (n, mean), number in zip(means.items(), read, strict=True):
            monitor.record_loss(self.k, n, mean, z, number)
        if several:  # a list with an entry for each part
            parts = {n: [part.get(n) for part in aux] for n in values}
            model.seen.aux.update({n: x if any(y is not None for y in x) else None for n, x in parts.items()})
        if pieces and pieces[-1].hooks is not None:
            pieces[-1].use(leaves_of_hooks(pieces[-1], sums.before_hooks))
        self.pieces += pieces
        self.calls += 1
        self.open = Open(sums, buffers)
        return means

    def close(self, z: State, update: Update, *, graph: bool = False) -> State:
        """Apply the update to the sum of the gradients, and return the next state."""
        open, model = self.open, self.model
        assert open is not None
        self.update = update
        with full_precision(), torch.set_grad_enabled(graph):
            d = open.mean = model.ranks.mean(open.sums.direction, model.parameters)
            self.directed = tuple(d)
            to, leaves = _updated(update, z, d, graph, alone=model.ranks.share == 1)
            self.moved = tuple(update.moves(z, d))
        for option in update.options:
            leaves += find_leaves(option)[0]
        self.pieces[-1].use(leaves)
        to.update(open.sums.statistics)
        self._follow(to, graph)
        if model.companions is not None:
            self.pieces[-1].use(model.companions.leaves(self.k, to))
        self.open = None
        return to

    def _follow(self, to: State, graph: bool) -> None:
        """Let the companions follow the weights."""
        if (companions := self.model.companions) is not None:
            with full_precision(), torch.set_grad_enabled(graph):
                to.update(companions.follow(self.k, to))

    def _pull_companions(
        self, z: State, a: State, after: State | None, inputs: Sequence[Tensor] | None, into: Gradients
    ) -> State:
        """Return the adjoint of the state before its companions follow the weights."""
        companions = self.model.companions
        if companions is None or self.update is None or not any(n in a for n in companions.parameters):
            return a
        to = z
        if companions.reads:
            to = after if after and self.model.parameters.keys() <= after.keys() else self.replay(z)
        with full_precision():
            wanted = self._wanted(inputs)
            a, grads = companions.pull(self.k, {**to, **{n: z[n] for n in companions.parameters}}, a, wanted)
        into.collect([], wanted, grads)
        return a

    # --- the step is repeated ---

    def again(self, z: State, *, before: list[State] | None = None, graph: bool = False) -> Sums:
        """Evaluate the pieces again, and return their sums. `before` gets the statistics before each piece."""
        sums = Sums(self.model)
        for piece in self.pieces:
            if before is not None:
                before.append(sums.statistics)
            with piece.record.repeating():
                use = _found if graph else _without_graph
                found = piece.evaluate(sums.at(z), use, graph=graph, follow=graph)
            piece.record.check(found.values)
            whole = sums.add(piece, found, graph=graph)
            if whole is not None:
                sums.take_statistics(whole.left, graph=graph)
        self.release()
        return sums

    def close_again(self, z: State, sums: Sums, *, graph: bool = False) -> State:
        """Apply the update to sums that were found again."""
        assert self.update is not None
        with full_precision(), torch.set_grad_enabled(graph):
            d = self.model.ranks.mean(sums.direction, self.model.parameters)
            to = self.update(z, d)
        to = {**(to if graph else {n: x.detach() for n, x in to.items()}), **sums.statistics}
        self._follow(to, graph)
        return to

    def replay(self, z: State) -> State:
        """Run the step again from z, without a graph, and return the next state."""
        return self.close_again(z, self.again(z))

    def release(self) -> None:
        """Forget batches that can be fetched again."""
        for piece in self.pieces:
            piece.release()

    def share_with(self, before: Step | None) -> None:
        """Share equal objects with the step before, since a loop may have thousands of steps."""
        if before is not None:
            for mine, its in zip(self.pieces, before.pieces, strict=False):
                mine.share_with(its)
            for name in ("update", "only", "directed", "moved"):
                if holds_same_objects(held := getattr(before, name), getattr(self, name)):
                    setattr(self, name, held)

    # --- the derivative ---

    def pull(
        self,
        z: State,
        a: State,
        inputs: Sequence[Tensor] | None,
        into: Gradients,
        how: Pull,
        after: State | None = None,
        losses: Mapping[int, Sequence[Pullable]] = MappingProxyType({}),
    ) -> Pulled:
        """Return a·∂Φ/∂z at z, and add a·∂Φ/∂λ to the sums, for `inputs` or for every leaf if None.

        `how` computes ∇⟨∇ℓ_i, u⟩ of a piece. `after` is the state after the step, if it is known. `losses` are outer
        losses between the pieces, by the number of pieces before them.
        """
        statistics = self.model.seen.statistics
        a = self._pull_companions(z, a, after, inputs, into)
        cotangent = Cotangent(self, z, a, after, self._wanted(inputs))
        before = self._statistics_before(z, cotangent, bool(losses))
        b: State = {n: a[n] for n in statistics if n in a}
        through: State = {}
        through_b: State = {}
        direct: State = {}  # from the losses between the pieces, which are summed over the ranks already
        ends: State = {}  # the statistics after the last piece
        of_call: CotangentOf = cotangent
        for i, piece in reversed(list(enumerate(self.pieces))):
            for loss in losses.get(i + 1, ()):
                found = loss.pull(inputs, into, {**z, **before[i + 1]})
                b = plus(b, {n: x for n, x in found.items() if n in statistics})
                direct = plus(direct, {n: x for n, x in found.items() if n not in statistics})
            if self.update is None and not b:
                continue  # the step is open, and nothing is differentiated through this piece
            record = piece.record
            wanted = with_computed(inputs, record.leaves)
            if piece.last:
                hooked = piece.hooks is not None
                of_call = OfCall(self, i, z, before, cotangent, wanted, into) if hooked else cotangent
            with record.repeating():
                at, its_b = {**z, **before[i]} if before[i] else z, row_of(b, piece.row)
                pulled = how(piece, at, of_call, its_b, [*(x for _, x in record.cut), *wanted])
            record.check(pulled.values)
            into.collect(record.cut, wanted, pulled.wanted)
            for n, x in pulled.adjoint.items():
                to = through_b if n in statistics else through
                if piece.row is not None:
                    to.setdefault(n, torch.zeros_like(z[n]))[piece.row] += x
                else:
                    to[n] = to[n] + x if n in to else x
            if not piece.row:
                b, through_b = {**{n: x for n, x in b.items() if n not in pulled.followed}, **through_b}, {}
            if i == len(self.pieces) - 1 and piece.row is None:
                ends = pulled.left
            del pulled
        self.release()
        found = self._joined(cotangent, through, b, inputs, into)
        found.adjoint = plus(found.adjoint, direct) if direct else found.adjoint
        companions = () if self.model.companions is None else self.model.companions.parameters
        found.to = {n: x for n, x in {**found.to, **ends}.items() if n not in companions}
        return found

    def _wanted(self, inputs: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Return the outer variables that the update is differentiated with respect to."""
        return with_computed(inputs, self.pieces[-1].record.leaves)

    def _statistics_before(self, z: State, cotangent: Cotangent, after: bool) -> list[State]:
        """Return the statistics before each piece that z lacks, and after the last.

        If they, or the direction, are not known, the pieces are evaluated again.
        """
        seen, n = self.model.seen, len(self.pieces)
        calls = sum(not piece.row for piece in self.pieces)
        moving = bool(seen.moving) and (calls > 1 or after)
        if moving or (n > 1 and cotangent.known is None):
            before: list[State] = []
            sums = self.again(z, before=before)
            if cotangent.known is None:
                cotangent.note(sums.direction)
            return [*before, sums.statistics]
        return [{}] * (n + 1)

    def _joined(
        self, cotangent: Cotangent, through: State, b: State, inputs: Sequence[Tensor] | None, into: Gradients
    ) -> Pulled:
        """Return a·∂Υ/∂z + Σ ∇_w ⟨∇ℓ_i, u⟩, summed over the ranks, and the adjoint of the statistics."""
        model, update = self.model, cotangent.update()
        into.collect([], self._wanted(inputs), update.wanted)
        names, like = list(model.parameters), list(model.parameters.values())
        weights = model.ranks.sum([through.pop(n, None) for n in names], like)
        through.update({n: x for n, x in zip(names, weights, strict=True) if x is not None})
        adjoint = {n: x for n, x in update.adjoint.items() if n not in model.seen.statistics}
        update.adjoint = {}
        return Pulled({**plus(adjoint, through), **b}, update.to, cotangent.direction)


class _Noting:
    """What is made of the first evaluation of a piece, while the model holds its weights."""

    def __init__(
        self,
        piece: Piece,
        since: int,
        graph: bool,
        within: Callable[[Piece, Evaluation, Found], None] | None,
    ) -> None:
        self._piece, self._since, self._graph, self._within = piece, since, graph, within

    def __call__(self, evaluation: Evaluation, found: Found) -> Found:
        self._piece.note(evaluation, found, self._since)
        if self._within is not None:
            # a derivative may run a checkpointed part again, which changes buffers in place
            found.left = {n: b if b.requires_grad else b.clone() for n, b in found.left.items()}
            self._within(self._piece, evaluation, found)
        if self._graph:
            return found
        return Found([], found.values, {n: d.detach() for n, d in found.direction.items()}, found.left, found.stopped)


def _found(evaluation: Evaluation, found: Found) -> Found:
    return found


def _without_graph(evaluation: Evaluation, found: Found) -> Found:
    return Found([], found.values, found.direction, found.left)


def _updated(update: Update, z: State, d: State, graph: bool, *, alone: bool) -> tuple[State, list[Tensor]]:
    """Return Υ(z, d), and the outer variables that functions of the user in it have used."""
    if not update.closes_over:
        return update(z, d), []
    with torch.enable_grad():
        to = update(z, d) if graph else {}
        leaves = _leaves(to.values(), z.values())
        if not graph or not alone:
            # z and d have no graph here, so any graph comes from an outer variable
            result = update({n: x.detach() for n, x in z.items()}, {n: x.detach() for n, x in d.items()})
            found = _leaves(result.values(), ())
            if found and not alone:
                raise ValueError(
                    "bilevel.inner: a function of the direction, or a rule of your own, uses an outer variable. "
                    "With group= its gradient would be counted once on every rank. Use the variable in the losses, "
                    "or give it as lr= or as an option of the optimizer."
                )
            to, leaves = to or {n: x.detach() for n, x in result.items()}, leaves or found
    return to, leaves


def _leaves(tensors: Iterable[Tensor], state: Iterable[Tensor]) -> list[Tensor]:
    state = tuple(state)
    return list({id(x): x for y in tensors if y.requires_grad for x in find_leaves(y, state)[0]}.values())
