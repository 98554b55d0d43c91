"""One inner problem on N processes (torch.distributed): each has batches of its own, all hold the same w.

    h(w, λ) = 1/N·Σ_r h_r(w, λ), and so g; rank r evaluates h_r and g_r

Two operations join the graphs of all ranks into one, each the derivative of the other:

- `_Own`: what all ranks hold, as the losses of this rank see it; backwards, the sum over all ranks;
- `_Sum`: the sum over all ranks, which all of them hold then; backwards, what this rank has to do with it.

With weights that enter the losses through `_Own` and losses that leave through `_Sum`, gradients for w come out whole,
and so do those of gradients: the engines need not know. One all-reduce of |w| for a step's direction and one for its
adjoint. Gradients for λ are this rank's part, to be summed when all steps are done.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from .binding import Binding, State

_TAGS = 4096  # so that the sum of tags over the ranks is exact in float32


class ParallelBinding(Binding):
    """`Binding` whose losses are means over the ranks of a group."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup,
        local: Iterable[Tensor],
    ) -> None:
        super().__init__(model, optimizer)
        self.group, self._local = group, {id(x) for x in local}
        self._ranks = dist.get_world_size(group)
        self._calls = 0
        self._device = next(iter(self.parameters.values())).device
        self._strayed = torch.zeros((), device=self._device)

    def start(self) -> State:
        remedy = "Build the model from the same seed on every rank, or broadcast its parameters before the block"
        self.check_same(self.parameters, f"start from different weights. {remedy}")
        return super().start()

    def each(self, x: Tensor) -> Tensor:
        return self.once(x)

    def once(self, x: Tensor) -> Tensor:
        """All ranks hold x outside of their losses, and gradients are summed over the ranks: 1/N of it on each."""
        return x.detach() + (x - x.detach()) / self._ranks if x.requires_grad else x

    def own(self, w: State) -> State:
        return dict(zip(w, _Own.apply(self.group, *w.values()), strict=True))  # pyright: ignore

    def mean(self, name: str, value: Tensor) -> Tensor:
        """Also checks that the ranks evaluate the same loss: a rank that is a step ahead would get others' numbers."""
        self._calls += 1
        tag = (2 * self._calls + (name != "h")) % _TAGS
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        pair = torch.stack([value / self._ranks, value.new_full((), tag)])
        mean, tags = _sum(self.group, [pair])[0].unbind()
        self._strayed = torch.maximum(self._strayed, (tags.detach() - self._ranks * tag).abs().to(self._strayed))
        if self._device.type == "cpu":
            self._check_in_step()
        return mean

    def _check_in_step(self) -> None:
        if float(self._strayed) > 0:
            raise RuntimeError(
                "bilevel.inner: the ranks are out of step: one evaluates another loss, or at another step, than the "
                "others. Take the same number of steps on every rank (a sampler with drop_last=True), with the same "
                "solver."
            )

    def agree(self, ok: bool) -> bool:
        return self.largest(int(not ok))[0] == 0

    def largest(self, *numbers: int) -> tuple[int, ...]:
        both = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, self.group)
        return tuple(both.tolist())

    def check_same(self, tensors: State, what: str = "") -> None:
        self._check_in_step()
        what = what or "have come to different weights. Their optimizers have different options, or state, as it seems"
        sums = torch.stack([x.detach().double().sum() for x in tensors.values()])
        both = torch.stack([sums, -sums])
        dist.all_reduce(both, dist.ReduceOp.MAX, self.group)
        for name, spread in zip(tensors, (both[0] + both[1]).tolist(), strict=True):
            if spread > 0:
                raise RuntimeError(f"bilevel.inner: the ranks {what} ({name!r} differs).")

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        shared = [i for i, x in enumerate(inputs) if id(x) not in self._local]
        shapes = zlib.crc32(repr([(tuple(inputs[i].shape), inputs[i].dtype) for i in shared]).encode())
        most, least = self.largest(shapes, -shapes)
        if most != -least:
            raise ValueError(
                "bilevel.inner: the ranks ask for the gradients of different outer variables (their shapes or types "
                "differ). Name the same ones on every rank; what belongs to one rank alone goes into local=."
            )
        sums = iter(_sum(self.group, [parts[i] for i in shared], [inputs[i] for i in shared]) if shared else ())
        return [part if id(x) in self._local else next(sums) for x, part in zip(inputs, parts, strict=True)]


def _sum(group: Any, xs: Sequence[Tensor | None], like: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
    return _Sum.apply(group, [_Like(x) for x in like or xs], *xs)  # pyright: ignore


class _Like:
    """What a tensor is apart from its numbers: a rank that has no part in a sum still has to take part in it."""

    def __init__(self, x: Any) -> None:
        self.shape, self.size, self.kind = x.shape, x.numel(), (x.dtype, x.device)


class _Sum(Function):
    """Σ over the ranks; None where no rank has a part."""

    @staticmethod
    def forward(ctx: Any, group: Any, like: list[_Like], *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        sums: list[Tensor | None] = [None] * len(xs)
        for kind in dict.fromkeys(x.kind for x in like):
            chosen = [i for i, x in enumerate(like) if x.kind == kind]
            options = {"dtype": kind[0], "device": kind[1]}
            parts = [torch.zeros(like[i].size, **options) if (x := xs[i]) is None else x.flatten() for i in chosen]
            flat = torch.cat([*parts, torch.tensor([xs[i] is not None for i in chosen], **options)])
            dist.all_reduce(flat, group=group)
            *found, counts = flat.split([*(like[i].size for i in chosen), len(chosen)])
            for i, x, count in zip(chosen, found, counts, strict=True):
                # asked only where this rank has no part: reading it makes the host wait for the device
                sums[i] = x.view(like[i].shape) if xs[i] is not None or bool(count) else None
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *a: Tensor | None) -> Any:
        return None, None, *_Own.apply(ctx.group, *a)  # pyright: ignore


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.group, ctx.like = group, [x if x is None else _Like(x) for x in xs]
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chosen = [i for i, x in enumerate(ctx.like) if x is not None]
        sums = iter(_Sum.apply(ctx.group, [ctx.like[i] for i in chosen], *(grads[i] for i in chosen)))  # pyright: ignore
        return None, *(None if x is None else next(sums) for x in ctx.like)
