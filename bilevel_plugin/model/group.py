"""One inner problem on N processes (torch.distributed): each has batches of its own, and all hold the same w.

    h(w, λ) = 1/N·Σ_r h_r(w, λ), and g likewise; rank r evaluates h_r and g_r

The direction of a step is the mean of the ranks' gradients, which takes one all-reduce of the size of w. In the reverse
sweep, each rank pulls 1/N of the cotangent through its own gradient, and the resulting adjoints of the weights are
summed over the ranks, which takes another all-reduce. Gradients for λ are partial sums of this rank. They are summed
over the ranks when all steps are done.

Where graphs are kept, two autograd functions do the same:

- `_Local` passes on a tensor that all ranks hold; its backward sums the gradients over the ranks;
- `_Sum` sums over the ranks; its backward applies `_Local` to the gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..autograd.trees import State
from .ranks import Alone

_TAGS = 4096  # a bound on the tags, so that their sum over the ranks is exact


class Group(Alone):
    """N processes whose losses are averaged. `local` are the outer variables that belong to this rank alone."""

    def __init__(self, group: dist.ProcessGroup, local: Iterable[Tensor], like: Tensor, *, own: bool) -> None:
        self._group: Any = group
        self._local = {id(x) for x in local}
        self._ranks = dist.get_world_size(group)
        self._own = own  # whether the losses use the model's own parameters, so that no graph sums over the ranks
        self.share = 1 / self._ranks
        self.shards = True
        self._calls = 0
        self._device = like.device
        self._out_of_step = torch.zeros((), device=self._device)

    def close(self) -> None:
        self._group = None  # gloo aborts the process if a group is referenced after its end

    def check_start(self, parameters: State) -> None:
        remedy = "Build the model from the same seed on every rank, or broadcast its parameters before the block"
        self.means({}, "start")
        self._check_same(parameters, f"start from different weights. {remedy}")

    def check_same(self, z: State, statistics: Sequence[str]) -> None:
        self._check_same(
            {n: x for n, x in z.items() if n not in statistics},
            "have reached different weights. Probably their rates, or their optimizers' options or state, differ",
        )

    def _check_same(self, tensors: State, what: str) -> None:
        self._check_in_step()
        sums = torch.stack([_fingerprint(x.detach()) for x in tensors.values()])
        both = torch.stack([sums, -sums])
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        for name, spread in zip(tensors, (both[0] + both[1]).tolist(), strict=True):
            if spread > 0:
                raise RuntimeError(f"bilevel.inner: the ranks {what} ({name!r} differs).")

    def once(self, x: Tensor) -> Tensor:
        """Scale the gradient of x by 1/N, since each rank uses x outside its losses, and gradients are summed."""
        return x.detach() + (x - x.detach()) / self._ranks if x.requires_grad else x

    def entering(self, w: State) -> State:
        return dict(zip(w, _Local.apply(self._group, *w.values()), strict=True))  # pyright: ignore

    def mean(self, d: State, parameters: State) -> State:
        # a weight that this rank's loss does not use may be used on another, so every weight takes part
        parts = [None if d.get(n) is None else d[n] / self._ranks for n in parameters]
        sums = _sum(self._group, parts, list(parameters.values()))
        return {n: x for n, x in zip(parameters, sums, strict=True) if x is not None}

    def sum(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return _sum(self._group, grads, like) if self._own else grads

    def means(self, values: State, what: str = "") -> State:
        """Return the means over the ranks, after checking that all ranks do the same action.

        Every action is one message of the same size, so that ranks that do different things still understand each
        other.
        """
        self._calls += 1
        tag = zlib.crc32(f"{self._calls}: {','.join(values)} {what}".encode()) % _TAGS
        precise = torch.float32 if self._device.type == "mps" else torch.float64
        message = torch.zeros(4, dtype=precise, device=self._device)
        for i, value in enumerate(values.values()):
            message[i] = value.detach() / self._ranks
        message[2], message[3] = tag, tag * tag
        dist.all_reduce(message, group=self._group)
        off = (message[2] - self._ranks * tag).abs() + (message[3] - self._ranks * tag * tag).abs()
        self._out_of_step = torch.maximum(self._out_of_step, off.to(self._out_of_step))
        if self._device.type == "cpu":
            self._check_in_step()
        return {n: message[i].to(value.dtype) for i, (n, value) in enumerate(values.items())}

    def _check_in_step(self) -> None:
        if float(self._out_of_step) > 0:
            raise RuntimeError(
                "bilevel.inner: the ranks are out of step: one of them evaluates a different loss, or is at a "
                "different step, than the others. Take the same number of steps on every rank (a sampler with "
                "drop_last=True), with the same solver and engine."
            )

    def largest(self, *numbers: int) -> tuple[int, ...]:
        both = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        return tuple(both.tolist())

    def part_of(self, size: int) -> range:
        part = -(-size // self._ranks)  # the part of the last rank is padded
        begin = dist.get_rank(self._group) * part
        return range(begin, begin + part)

    def join_parts(self, part: Tensor) -> Tensor:
        whole = part.new_empty(len(part) * self._ranks)
        dist.all_gather(list(whole.split(len(part))), part.contiguous(), group=self._group)
        return whole

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        shared = [i for i, x in enumerate(inputs) if id(x) not in self._local]
        shapes = zlib.crc32(repr([(tuple(inputs[i].shape), inputs[i].dtype) for i in shared]).encode())
        most, least = self.largest(shapes, -shapes)
        if most != -least:
            raise ValueError(
                "bilevel.inner: the ranks want the gradients of different outer variables (their shapes or types "
                "differ). Name the same outer variables on every rank. An outer variable that belongs to one rank "
                "alone goes into local=."
            )
        sums = iter(_sum(self._group, [parts[i] for i in shared], [inputs[i] for i in shared]) if shared else ())
        return [part if id(x) in self._local else next(sums) for x, part in zip(inputs, parts, strict=True)]


def _fingerprint(x: Tensor) -> Tensor:
    """A checksum that depends on the order of the entries."""
    flat = x.flatten().double()
    return flat @ torch.cos(torch.arange(1.0, len(flat) + 1, dtype=torch.float64, device=x.device))


def _sum(group: Any, xs: Sequence[Tensor | None], like: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
    return _Sum.apply(group, [_TensorSpec(x) for x in like or xs], *xs)  # pyright: ignore


class _TensorSpec:
    """Shape, dtype and device of a tensor, with which a rank without a summand takes part in an all-reduce."""

    def __init__(self, x: Any) -> None:
        self.shape, self.size, self.kind = x.shape, x.numel(), (x.dtype, x.device)


class _Sum(Function):
    """The sum over the ranks; None where no rank has a summand."""

    @staticmethod
    def forward(ctx: Any, group: Any, like: list[_TensorSpec], *xs: Tensor | None) -> tuple[Tensor | None, ...]:
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
                # the count is read only where this rank has no summand, since reading makes the host wait
                sums[i] = x.view(like[i].shape) if xs[i] is not None or bool(count) else None
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *a: Tensor | None) -> Any:
        return None, None, *_Local.apply(ctx.group, *a)  # pyright: ignore


class _Local(Function):
    """The identity, whose backward sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.group, ctx.like = group, [x if x is None else _TensorSpec(x) for x in xs]
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chosen = [i for i, x in enumerate(ctx.like) if x is not None]
        sums = iter(_Sum.apply(ctx.group, [ctx.like[i] for i in chosen], *(grads[i] for i in chosen)))  # pyright: ignore
        return None, *(None if x is None else next(sums) for x in ctx.like)
