"""The sums over the pieces of a step: the direction, and the running statistics that pass from piece to piece."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd.trees import State, same_bits, tensors_of
from ..model.model import Model
from ..model.tasks import joined, joined_results
from .piece import Found, Piece


class Sums:
    """The direction Σ_i ∇ℓ_i so far, and the statistics after the last piece."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.direction: State = {}
        self.statistics: State = {}
        self.of_call: State = {}  # the gradients of the pieces of an unfinished call
        self.before_hooks: State = {}  # the gradient of the last call that has hooks, before these
        self._rows: list[Found] = []  # what the tasks of an unfinished round have found
        self._aux: dict[str, list[object]] = {}

    def copy(self) -> Sums:
        """Return sums that can be added to, or dropped if a piece fails."""
        other = Sums(self._model)
        other.direction, other.statistics = self.direction, self.statistics
        return other

    def at(self, z: State) -> State:
        """Return the state that the next piece starts from."""
        return {**z, **self.statistics} if self.statistics else z

    def add(self, piece: Piece, found: Found, *, graph: bool) -> Found | None:
        """Add the direction of a piece. Tasks one after the other are joined: None is returned until the last."""
        model = self._model
        if piece.row is not None:
            self._rows.append(found)
            for t in piece.terms:
                self._aux.setdefault(t.name, []).append(model.seen.aux.get(t.name))
            if piece.row + 1 < (model.tasks.count or 1):
                return None
            rows, self._rows = self._rows, []
            with torch.set_grad_enabled(graph):
                direction, left = joined([x.direction for x in rows]), joined([x.left for x in rows])
            found = Found([], {}, direction, left, frozenset[str].intersection(*(x.stopped for x in rows)))
            model.seen.aux.update({n: _aux_of(model, parts) for n, parts in self._aux.items()})
            self._aux = {}
        with torch.set_grad_enabled(graph):
            self.of_call = plus(self.of_call, found.direction) if self.of_call else found.direction
            if piece.last:
                d = self.of_call
                if piece.hooks is not None:
                    self.before_hooks, d = d, piece.hooks(d)
                self.direction, self.of_call = plus(self.direction, d) if self.direction else d, {}
        return found

    def take_statistics(self, left: State, *, graph: bool) -> None:
        """Take the statistics from the buffers that a piece has left, with their graph if it is kept."""
        if left:
            names = self._model.seen.statistics
            self.statistics = {n: left[n] if graph and left[n].requires_grad else left[n].detach() for n in names}

    def pass_on(self, found: Found, z: State, buffers: State, *, several: bool, graph: bool) -> State | None:
        """After a first evaluation, divide the buffers into those of the state and the rest, which is returned.

        None means that the rest is what it was. `several`: the piece is one of the parts of a batch, which may not
        change any buffer, since the plain step changes it once for the batch.
        """
        seen, left = self._model.seen, found.left
        if not left:
            return None
        if several:
            _refuse_changed_buffers(left, {**buffers, **z})
        for n, b in left.items():
            graph_left = b.requires_grad or n in found.stopped
            if graph_left and n not in seen.statistics and n not in seen.changing:
                if n not in found.stopped:
                    raise ValueError(
                        f"bilevel.inner: a loss leaves the buffer {n!r} of the model with a graph, through which the "
                        "next step does not differentiate. Compute it inside h, or store "
                        "bilevel.stop_gradient(...) there: a constant in the gradient of the next step, with its own "
                        "derivative in the hypergradient. (.detach() drops that derivative.)"
                    )
                seen.statistics += (n,)  # from now on the buffer is part of the state
        self.take_statistics(left, graph=graph)
        for n, b in self.statistics.items():
            if n not in seen.moving and not is_same(b, z[n] if n in z else buffers[n]):
                seen.moving.add(n)
        rest = {n: _unless_equal(b.detach(), buffers[n]) for n, b in left.items() if n not in self.statistics}
        changed = {n: b for n, b in rest.items() if b is not buffers[n]}
        seen.changing.update(n for n, b in changed.items() if not _is_counter(b, buffers[n]))
        return rest if changed or rest.keys() != buffers.keys() else None


def plus(x: State, y: State) -> State:
    """Return x + y, where a name that one of them lacks counts as 0."""
    return {**x, **{n: x[n] + v if n in x else v for n, v in y.items()}}


def _aux_of(model: Model, parts: list[object]) -> object:
    """Return what a loss has returned beside its value for all tasks; what depends on the weights stays known."""
    joint = joined_results(parts)
    if any(x in model.seen.derived for x in tensors_of(parts)):
        for x in tensors_of(joint):
            model.seen.derived.add(x)
    return joint


def _refuse_changed_buffers(left: State, before: State) -> None:
    for n, b in left.items():
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
