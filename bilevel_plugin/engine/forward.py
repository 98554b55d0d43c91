"""Forward mode: the tangents of z along each outer direction are computed along with the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from ..autograd.derive import Gradients, grad, is_finite
from ..autograd.graph import find_leaves, nodes
from ..autograd.missing import explained
from ..autograd.trees import Pairs, State, as_leaves
from ..model.model import Evaluation
from ..step.computed import Computed, gathered
from ..step.monitor import LossMonitor
from ..step.piece import Found, Piece
from ..step.step import Step
from ..step.sums import plus
from ..update.update import Update
from .base import Engine, OuterLoss, Tape, refuse_create_graph


@dataclass(frozen=True, eq=False)
class Forward(Engine):
    """ż_j⁺ = ∂Φ/∂z·ż_j + ∂Φ/∂λ_j; then dg/dλ_j = ∇_z g·ż_j + ∂g/∂λ_j.

    Memory does not depend on K. Time and memory grow with the number of outer directions, so it is for a few rates or
    regularisers. `wrt` names the tensors to differentiate with respect to; by default these are all that the losses
    use. More than `limit` directions are an error.

    Examples:
        Three steps of the learnable rate t end at w = (1 − t)³, whose derivative is −3·(1 − t)².

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> rate = torch.tensor(0.5, requires_grad=True)
        >>> h, g = lambda m: 0.5 * m.weight.square().sum(), lambda m: m.weight.sum()
        >>> with bilevel.inner(model, h, g, solver="gd", lr=rate, engine=bilevel.Forward()) as loop:
        ...     _ = loop.run(3)
        ...     print(loop.hypergrad(rate))
        tensor(-0.7500)
    """

    wrt: Sequence[Tensor] | None = None
    limit: int = 256

    @property
    def traces_steps(self) -> bool:
        return True

    @property
    def refuses_group(self) -> str:
        return "engine='forward' would have to sum a tangent for each outer direction over the group, in every step"

    def tape(self) -> Tape:
        return _ForwardTape(self)


Key = tuple[int, int]  # (outer tensor, element of it)


class _ForwardTape(Tape):
    reaches_start = False

    def __init__(self, options: Forward) -> None:
        self._options = options
        self._wrt = None if options.wrt is None else {id(x) for x in options.wrt}
        self._followed: dict[int, Tensor] = {}  # the outer tensors with tangents, by id
        self._was_cut: set[int] = set()
        self._ignored: dict[int, Tensor] = {}
        self._tangents: dict[Key, State] = {}  # ż, for each outer direction
        self._of_direction: dict[Key, State] = {}  # ḋ of the open step, summed over its pieces so far
        self._of_statistics: dict[Key, State] = {}  # ḃ after the last piece of the open step
        self._direct = Gradients()  # the direct gradients of the added losses
        self._through: dict[Key, Tensor] = {}  # ∇_z·ż of the added losses
        self._values: Any = WeakTensorKeyDictionary()  # the tangents of computed values, and of their parts
        self._value = torch.zeros(())  # the value of one of the added losses

    def begin(self, step: Step, z: State, *, whole: bool) -> None:
        self._of_direction, self._of_statistics = {}, {}

    def evaluate(self, step: Step, z: State, pieces: Sequence[Piece], cut: Pairs, monitor: LossMonitor) -> State:
        before = copy.deepcopy((self._of_direction, self._of_statistics)) if step.pieces else ({}, {})
        self._of_direction = {}
        try:
            means = step.evaluate(z, pieces, cut, monitor, within=self._push_piece)
            if pieces[-1].hooks is not None:
                self._push_hooks(step, pieces[-1])
        except BaseException:
            self._of_direction, self._of_statistics = before  # the pieces of this call are dropped
            raise
        for key, total in before[0].items():
            self._of_direction[key] = plus(total, self._of_direction.get(key, {}))
        return means

    def _push_hooks(self, step: Step, piece: Piece) -> None:
        """Push the tangents of the gradient of a call through the hooks on parameters."""
        assert step.open is not None
        assert piece.hooks is not None
        d = as_leaves(step.open.sums.before_hooks)
        with torch.enable_grad():
            to = piece.hooks(d)
        of_call = self._of_direction

        def tangents(key: Key) -> list[Tensor | None]:
            return [of_call.get(key, {}).get(n) for n in d]

        self._of_direction = self._pushed(to, list(d.values()), tangents, self._sources(piece.record.leaves, []))

    def _push_piece(self, piece: Piece, evaluation: Evaluation, found: Found) -> None:
        """Add the tangents of the gradient of a piece to ḋ, and replace those of the statistics."""
        row, count = piece.row, piece.model.tasks.count or 1
        statistics = found.stopped.union(piece.model.seen.statistics)
        left = {n: x for n, x in found.left.items() if n in statistics}
        at = {**evaluation.leaves, **evaluation.statistics}

        def tangents(key: Key) -> list[Tensor | None]:
            now = self._now(key)
            return [None if n not in now else now[n] if row is None else now[n][row] for n in at]

        sources = self._sources(piece.record.leaves, piece.record.cut)
        for key, new in self._pushed({**found.direction, **left}, list(at.values()), tangents, sources).items():
            direction, b = self._of_direction.setdefault(key, {}), self._of_statistics.setdefault(key, {})
            for n, x in new.items():
                if row is not None:  # the rows of the other tasks stay
                    now = self._now(key).get(n) if n in left else direction.get(n)
                    whole = torch.zeros_like(x).expand(count, *x.shape).clone() if now is None else now.clone()
                    whole[row] = x if n in left else whole[row] + x
                    x = whole
                elif n in direction and n not in left:
                    x = direction[n] + x
                (b if n in left else direction)[n] = x

    def close(self, step: Step, z: State, update: Update) -> State:
        assert step.open is not None
        at, d = as_leaves(z), as_leaves(step.open.sums.direction)
        step.open.sums.direction = d
        b = step.open.sums.statistics = as_leaves(step.open.sums.statistics)
        to = step.close(at, update, graph=True)  # once: functions of the user in it may count their calls

        now = self._now

        def tangents(key: Key) -> list[Tensor | None]:
            into = self._tangents[key], self._of_direction.get(key, {})
            return [*(into[0].get(n) for n in at), *(into[1].get(n) for n in d), *(now(key).get(n) for n in b)]

        sources = self._sources(step.pieces[-1].record.leaves, [])
        pushed = self._pushed(to, [*at.values(), *d.values(), *b.values()], tangents, sources)
        for key, new in pushed.items():
            if next(iter(z.values())).device.type == "cpu" and not is_finite(new.values()):
                raise FloatingPointError(
                    f"bilevel.Forward: the tangent of the weights is not finite at step k = {step.k}. "
                    "A smaller rate may help."
                )
            self._tangents[key] = {**self._of_statistics.get(key, {}), **new}
        self._of_direction, self._of_statistics = {}, {}
        return {n: x.detach() for n, x in to.items()}

    def compute(self, value: Computed, z: State) -> tuple[Any, State]:
        pushed: dict[Key, State] = {}

        def push(evaluation: Evaluation, outs: State) -> None:
            at, sources = {**evaluation.leaves, **evaluation.statistics}, self._sources(value.leaves, value.cut)
            pushed.update(
                self._pushed(outs, list(at.values()), lambda key: [self._now(key).get(n) for n in at], sources)
            )

        given = value.first(z, push)
        for i, y in enumerate(value.values):
            self._values[y] = {key: to[str(i)] for key, to in pushed.items() if str(i) in to}
        return given, z

    def _of_value(self, x: Tensor) -> bool:
        """Whether a tensor was computed from computed values; if so, its tangents are known from now on."""
        if x in self._values:
            return True
        leaves, _ = find_leaves(x)
        values = [y for y in leaves if y in self._values]
        if values and len(values) < len(leaves):
            raise ValueError(
                f"bilevel.Forward: a tensor of a batch (shape {tuple(x.shape)}) was computed from a value of "
                "loop.compute and from an outer variable. Compute it inside h, or use engine='reverse'."
            )
        if values:
            pushed = self._pushed({"": x}, values, lambda key: [self._values[y].get(key) for y in values], [])
            self._values[x] = {key: to[""] for key, to in pushed.items() if "" in to}
        return bool(values)

    def _through_values(self, into: Gradients) -> dict[Key, Tensor]:
        """Return Σ ȳ·ẏ over the computed values, and take their gradients ȳ out of the sums."""
        found = [x for x, _ in (*into.cut.values(), *into.direct.values())]
        values = list({id(y): y for x in found for y in find_leaves(x)[0] if y in self._values}.values())
        sums: dict[Key, Tensor] = {}
        for y, d in zip(values, gathered(values, into) if values else [], strict=True):
            for key, along in self._values[y].items() if d is not None else ():
                sums[key] = sums.get(key, 0) + (d * along).sum()
        return sums

    def _now(self, key: Key) -> State:
        """Return the tangents of the state, with those of statistics that an open step has changed."""
        return {**self._tangents[key], **self._of_statistics.get(key, {})}

    def _pushed(
        self, to: State, ins: list[Tensor], tangents: Callable[[Key], list[Tensor | None]], sources: Pairs
    ) -> dict[Key, State]:
        """Return the tangents of `to`, for each outer direction, from those of `ins` and of the sources."""
        to = {n: x for n, x in to.items() if x.requires_grad}
        tracked = [i for i, x in enumerate(ins) if x.requires_grad]
        outs = list(to.values())
        if not outs:
            return {key: {} for key in self._tangents}
        # a·J·(ż, λ̇) is linear in a, and its derivative for a is J·(ż, λ̇). So two vjps make a jvp.
        adjoint = [torch.zeros_like(x, requires_grad=True) for x in outs]
        inputs = [*(ins[i] for i in tracked), *(x for _, x in sources)]
        with torch.enable_grad(), explained(), _without_gaps(outs):
            pulled = grad(outs, inputs, adjoint, create_graph=True, retain_graph=True)
        found: dict[Key, State] = {}
        for key in self._tangents:
            owner, element = key
            given = tangents(key)
            along = [given[i] for i in tracked]
            for tensor, x in sources:
                unit = _unit_vector(x, element) if id(tensor) == owner else None
                along.append(self._values[tensor].get(key) if tensor in self._values else unit)
            pairs = [(p, v) for p, v in zip(pulled, along, strict=True) if p is not None and v is not None]
            new = _grad([(p, v) for p, v in pairs if p.requires_grad], adjoint)
            found[key] = {n: x.detach() for n, x in zip(to, new, strict=True) if x is not None}
        return found

    def _sources(self, leaves: Sequence[Tensor], cut: Pairs) -> Pairs:
        """Return the outer tensors of a piece or an update, each with the tensor that replaces it in the graph."""
        closed_over = [(x, x) for x in leaves]
        if self._options.wrt is not None:
            named = {id(x) for x in leaves}
            closed_over += [(x, x) for x in self._options.wrt if id(x) not in named]
        sources: Pairs = []
        for tensor, stand_in in (*closed_over, *cut):
            if self._of_value(tensor):
                sources.append((tensor, stand_in))
                continue
            if self._wrt is not None and id(tensor) not in self._wrt:
                self._ignored[id(tensor)] = tensor
                continue
            sources.append((tensor, stand_in))
            if stand_in is not tensor:
                self._was_cut.add(id(tensor))
            if id(tensor) not in self._followed:
                if len(self._tangents) + tensor.numel() > self._options.limit:
                    raise ValueError(
                        f"bilevel.Forward: engine='forward' would follow {len(self._tangents) + tensor.numel()} outer "
                        f"directions, at the cost of one pass a step each (limit {self._options.limit}). Use "
                        "engine='reverse', name the few that matter in Forward(wrt=[...]), or raise its limit."
                    )
                self._followed[id(tensor)] = tensor
                self._tangents.update({(id(tensor), j): {} for j in range(tensor.numel())})  # ż = 0 until now
        return sources

    def add_loss(self, loss: OuterLoss) -> None:
        a = loss.pull(None, self._direct)
        self._value = loss.value
        if behind := [x for x in self._options.wrt or () if not x.is_leaf]:  # the call above is for leaves only
            loss.pull(behind, more := Gradients())  # what it finds for cut tensors is known
            for tensor, grad in more.direct.values():
                self._direct.add(self._direct.direct, tensor, grad)
        values = self._through_values(self._direct)
        for key in self._tangents:
            if (along := _sum(_dot(a, self._now(key)), values.get(key))) is not None:
                self._through[key] = self._through[key] + along if key in self._through else along

    def pull(
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        for x in inputs or ():
            if id(x) in self._ignored or not (x.is_leaf or id(x) in self._followed):
                raise ValueError(
                    f"bilevel.Forward: engine='forward' did not follow the input of shape {tuple(x.shape)}. It "
                    "follows leaves, or exactly what Forward(wrt=[...]) names, from the first step on."
                )
        found, values = Gradients(), dict[Key, Tensor]()
        if end is None:
            a, chosen = None, None if inputs is None else {id(x) for x in inputs}
            self.along(self._value)  # which may refuse a vector
            for tensor, grad in self._direct.direct.values():
                if tensor.is_leaf if chosen is None else id(tensor) in chosen:
                    found.add(found.direct, tensor, self.chosen(self._value, grad))
            for tensor, grad in self._direct.cut.values():
                found.add(found.cut, tensor, self.chosen(self._value, grad))
        else:
            a = end.pull(inputs, found)
            values = self._through_values(found)
        for owner, tensor in self._followed.items():
            keys = [(owner, j) for j in range(tensor.numel())]
            if a is None:
                along = [None if (x := self._through.get(key)) is None else self.chosen(self._value, x) for key in keys]
            else:
                along = [_sum(_dot(a, self._now(key)), values.get(key)) for key in keys]
            rows = self.along(self._value if end is None else end.value).shape[:-1]
            total = tensor.new_zeros((*rows, tensor.numel()))
            for j, x in enumerate(along):
                if x is not None:
                    total[..., j] = x
            into = found.cut if owner in self._was_cut else found.direct
            found.add(into, tensor, total.reshape((*rows, *tensor.shape)))
        return found, {}


def _dot(a: State, tangent: State) -> Tensor | None:
    """Return a·ż, for each row of a if it has rows, or None if they have no name in common."""
    parts = [(a[n] * x).flatten(a[n].dim() - x.dim()).sum(-1) for n, x in tangent.items() if n in a and x.dim()]
    parts += [a[n] * x for n, x in tangent.items() if n in a and not x.dim()]
    return torch.stack(parts).sum(0) if parts else None


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _without_gaps(outs: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Save tensors without gaps for another derivative if there is a cross entropy of (N, C, T), which fails on others.

    torch's kernel for that derivative, `nll_loss2d_backward`, wants them. Its tensors have four dimensions.
    """
    if not any(type(node).__name__.startswith("NllLoss2D") for node in nodes(outs)):
        return nullcontext()
    return saved_tensors_hooks(lambda x: x.contiguous() if x.dim() == 4 else x, lambda x: x)


def _unit_vector(x: Tensor, element: int) -> Tensor:
    unit = torch.zeros_like(x).flatten()
    unit[element] = 1
    return unit.reshape(x.shape)


def _grad(pairs: Pairs, inputs: list[Tensor]) -> Sequence[Tensor | None]:
    if not pairs:
        return [None] * len(inputs)
    outputs, along = zip(*pairs, strict=True)
    with explained():
        return grad(outputs, inputs, along, retain_graph=True)
