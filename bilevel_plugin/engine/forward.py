"""Forward mode: the tangents of z along each outer direction are computed along with the loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..autograd.derive import Gradients, Traced, grad, is_finite
from ..autograd.graph import nodes
from ..autograd.missing import explained
from ..autograd.trees import Pairs, State
from ..step.record import RecordedStep
from ..step.step import LossMonitor, Moved
from .base import End, Engine, Tape, refuse_create_graph


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


class _ForwardTape(Tape):
    reaches_start = False

    def __init__(self, options: Forward) -> None:
        self._options = options
        self._wrt = None if options.wrt is None else {id(x) for x in options.wrt}
        self._followed: dict[int, Tensor] = {}  # the outer tensors with tangents, by id
        self._was_cut: set[int] = set()
        self._ignored: dict[int, Tensor] = {}
        self._tangents: dict[tuple[int, int], State] = {}  # (outer tensor, element of it) -> ż
        self._direct = Gradients()  # the direct gradients of the added losses
        self._through: dict[tuple[int, int], Tensor] = {}  # ∇_z·ż of the added losses

    def step(self, step: RecordedStep, z: State, monitor: LossMonitor) -> Moved:
        return step.take(z, monitor, graph=True, within=lambda traced: self._push_tangents(traced, step.k))

    def _push_tangents(self, traced: Traced, k: int) -> None:
        """Compute the tangents of z⁺ from those of z."""
        sources = self._sources(traced)
        moving = {n: x for n, x in traced.to.items() if x.requires_grad}
        outs = list(moving.values())
        # a·J·(ż, λ̇) is linear in a, and its derivative for a is J·(ż, λ̇). So two vjps make a jvp.
        adjoint = [torch.zeros_like(x, requires_grad=True) for x in outs]
        at = {n: x for n, x in traced.at.items() if x.requires_grad}
        ins = [*at.values(), *(x for _, x in sources)]
        with torch.enable_grad(), explained(), _without_gaps(outs):
            pulled = grad(outs, ins, adjoint, create_graph=True, retain_graph=True)
        for (owner, element), tangent in self._tangents.items():
            along = [tangent.get(n) for n in at]
            along += [_unit_vector(x, element) if id(tensor) == owner else None for tensor, x in sources]
            pairs = [(p, v) for p, v in zip(pulled, along, strict=True) if p is not None and v is not None]
            pairs = [(p, v) for p, v in pairs if p.requires_grad]
            new = _grad(pairs, adjoint)
            new = {n: x.detach() for n, x in zip(moving, new, strict=True) if x is not None}
            if outs[0].device.type == "cpu" and not is_finite(new.values()):
                raise FloatingPointError(
                    f"bilevel.Forward: the tangent of the weights is not finite at step k = {k}. "
                    "A smaller rate may help."
                )
            self._tangents[owner, element] = new

    def _sources(self, traced: Traced) -> Pairs:
        """Return the outer tensors of this step, each with the tensor that replaces it in the graph."""
        closed_over = [(x, x) for x in traced.leaves]
        if self._options.wrt is not None:
            named = {id(x) for x in traced.leaves}
            closed_over += [(x, x) for x in self._options.wrt if id(x) not in named]
        sources: Pairs = []
        for tensor, stand_in in (*closed_over, *traced.cut):
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

    def add_loss(self, loss: End) -> None:
        a = loss.pull(None, self._direct)
        if behind := [x for x in self._options.wrt or () if not x.is_leaf]:  # the call above is for leaves only
            loss.pull(behind, more := Gradients())  # what it finds for cut tensors is known
            for tensor, grad in more.direct.values():
                self._direct.add(self._direct.direct, tensor, grad)
        for key, tangent in self._tangents.items():
            if (along := _dot(a, tangent)) is not None:
                self._through[key] = self._through[key] + along if key in self._through else along

    def pull(self, end: End | None, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        for x in inputs or ():
            if id(x) in self._ignored or not (x.is_leaf or id(x) in self._followed):
                raise ValueError(
                    f"bilevel.Forward: engine='forward' did not follow the input of shape {tuple(x.shape)}. It "
                    "follows leaves, or exactly what Forward(wrt=[...]) names, from the first step on."
                )
        found = Gradients()
        if end is None:
            a, chosen = None, None if inputs is None else {id(x) for x in inputs}
            for tensor, grad in self._direct.direct.values():
                if tensor.is_leaf if chosen is None else id(tensor) in chosen:
                    found.add(found.direct, tensor, grad)
            for tensor, grad in self._direct.cut.values():
                found.add(found.cut, tensor, grad)
        else:
            a = end.pull(inputs, found)
        for owner, tensor in self._followed.items():
            total = torch.zeros_like(tensor).flatten()
            for j in range(tensor.numel()):
                key = owner, j
                along = self._through.get(key) if a is None else _dot(a, self._tangents[key])
                if along is not None:
                    total[j] = along
            into = found.cut if owner in self._was_cut else found.direct
            found.add(into, tensor, total.reshape(tensor.shape))
        return found, {}


def _dot(a: State, tangent: State) -> Tensor | None:
    """Return a·ż, or None if they have no name in common."""
    parts = [(a[n] * x).sum() for n, x in tangent.items() if n in a]
    return torch.stack(parts).sum() if parts else None


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
