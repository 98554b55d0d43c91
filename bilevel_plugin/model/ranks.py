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
from torch import Tensor, nn
from torch.autograd import Function

from ..autograd.trees import State
from .model import Binding

_SHARD = "shard of layout "
_TAGS = 4096  # a bound on the tags, so that their sum over the ranks is exact


class ParallelBinding(Binding):
    """`Binding` whose losses are means over the ranks of a group."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
        local: Iterable[Tensor],
        *,
        own_parameters: bool,
    ) -> None:
        super().__init__(model, optimizers, own_parameters=own_parameters)
        self._group: Any = group
        self._local = {id(x) for x in local}
        self._ranks = dist.get_world_size(group)
        self.share = 1 / self._ranks
        self.shards = True
        self._layouts: list[tuple[tuple[str, torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]] = []
        self._calls = 0
        self._device = next(iter(self.parameters.values())).device
        self._out_of_step = torch.zeros((), device=self._device)

    def close(self) -> None:
        super().close()
        self._group = None  # gloo aborts the process if a group is referenced after its end

    def initial_weights(self) -> State:
        remedy = "Build the model from the same seed on every rank, or broadcast its parameters before the block"
        self.announce("start")
        self.check_same_on_all_ranks(self.parameters, f"start from different weights. {remedy}")
        return super().initial_weights()

    def repeat_for_tasks(self, x: Tensor) -> Tensor:
        return self.count_once_across_ranks(x)

    def count_once_across_ranks(self, x: Tensor) -> Tensor:
        """Scale the gradient of x by 1/N, since each rank uses x outside its losses, and gradients are summed."""
        return x.detach() + (x - x.detach()) / self._ranks if x.requires_grad else x

    def weights_for_losses(self, w: State) -> State:
        return dict(zip(w, _Local.apply(self._group, *w.values()), strict=True))  # pyright: ignore

    def mean_of_direction(self, d: State) -> State:
        # a weight that this rank's loss does not use may be used on another, so every weight takes part
        parts = [None if d.get(n) is None else d[n] / self._ranks for n in self.parameters]
        sums = _sum(self._group, parts, list(self.parameters.values()))
        return {n: x for n, x in zip(self.parameters, sums, strict=True) if x is not None}

    def sum_over_ranks(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return _sum(self._group, grads, like) if self.own_parameters else grads

    def means_of_losses(self, values: State, what: str = "") -> State:
        """Return the means over the ranks, and check that all ranks evaluate the same losses at the same step."""
        means = self._mean_in_step(f"{','.join(values)} {what}", list(values.values()))
        return dict(zip(values, means, strict=False))

    def announce(self, action: str) -> None:
        self._mean_in_step(action)

    def _mean_in_step(self, action: str, values: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the means of values over the ranks, after checking that all ranks do the same action.

        Every action is one message of the same size, so that ranks that do different things still understand each
        other.
        """
        self._calls += 1
        tag = zlib.crc32(f"{self._calls}: {action}".encode()) % _TAGS
        precise = torch.float32 if self._device.type == "mps" else torch.float64
        message = torch.zeros(4, dtype=precise, device=self._device)
        for i, value in enumerate(values):
            message[i] = value.detach() / self._ranks
        message[2], message[3] = tag, tag * tag
        dist.all_reduce(message, group=self._group)
        off = (message[2] - self._ranks * tag).abs() + (message[3] - self._ranks * tag * tag).abs()
        self._out_of_step = torch.maximum(self._out_of_step, off.to(self._out_of_step))
        if self._device.type == "cpu":
            self._check_in_step()
        return [message[i].to(value.dtype) for i, value in enumerate(values)]

    def _check_in_step(self) -> None:
        if float(self._out_of_step) > 0:
            raise RuntimeError(
                "bilevel.inner: the ranks are out of step: one of them evaluates a different loss, or is at a "
                "different step, than the others. Take the same number of steps on every rank (a sampler with "
                "drop_last=True), with the same solver and engine."
            )

    def all_agree(self, ok: bool) -> bool:
        return self.largest_on_any_rank(int(not ok))[0] == 0

    def largest_on_any_rank(self, *numbers: int) -> tuple[int, ...]:
        both = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        return tuple(both.tolist())

    def shard(self, z: State) -> State:
        """Return this rank's 1/N of the tensors that all ranks hold, flat and padded.

        Running statistics differ between the ranks, so they are returned whole.
        """
        common = {n: x for n, x in z.items() if n not in self.statistics}
        layout = tuple((n, x.shape, x.stride(), x.dtype, x.device) for n, x in common.items())
        if layout not in self._layouts:
            self._layouts.append(layout)
        number, kept = self._layouts.index(layout), {n: x for n, x in z.items() if n not in common}
        rank = dist.get_rank(self._group)
        for kind in dict.fromkeys((x.dtype, x.device) for x in common.values()):
            mine = [_flat(x.detach()) for x in common.values() if (x.dtype, x.device) == kind]
            part = -(-sum(map(len, mine)) // self._ranks)  # the part of the last rank may be shorter
            begin, pieces = rank * part, list[Tensor]()
            for x in mine:
                pieces.append(x[max(0, begin) : max(0, begin + part)])
                begin -= len(x)
            whole = torch.cat(pieces)
            kept[f"{_SHARD}{number} {kind[0]} {kind[1]}"] = torch.cat([whole, whole.new_zeros(part - len(whole))])
        return kept

    def unshard(self, kept: State) -> State:
        z = {n: x for n, x in kept.items() if not n.startswith(_SHARD)}
        for name, part in kept.items():
            if name.startswith(_SHARD):
                whole = part.new_empty(len(part) * self._ranks)
                dist.all_gather(list(whole.split(len(part))), part.contiguous(), group=self._group)
                begin, kind = 0, (part.dtype, part.device)
                for n, shape, strides, dtype, device in self._layouts[int(name[len(_SHARD) :].split()[0])]:
                    if (dtype, device) == kind:
                        size = shape.numel()
                        z[n] = _unflat(whole[begin : begin + size], shape, strides)
                        begin += size
        return z

    def check_same_on_all_ranks(self, tensors: State, what: str = "") -> None:
        self._check_in_step()
        what = (
            what
            or "have reached different weights. Probably their rates, or their optimizers' options or state, differ"
        )
        names = [n for n in tensors if n not in self.statistics]  # statistics differ between ranks
        sums = torch.stack([_fingerprint(tensors[n].detach()) for n in names])
        both = torch.stack([sums, -sums])
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        for name, spread in zip(names, (both[0] + both[1]).tolist(), strict=True):
            if spread > 0:
                raise RuntimeError(f"bilevel.inner: the ranks {what} ({name!r} differs).")

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        shared = [i for i, x in enumerate(inputs) if id(x) not in self._local]
        shapes = zlib.crc32(repr([(tuple(inputs[i].shape), inputs[i].dtype) for i in shared]).encode())
        most, least = self.largest_on_any_rank(shapes, -shapes)
        if most != -least:
            raise ValueError(
                "bilevel.inner: the ranks want the gradients of different outer variables (their shapes or types "
                "differ). Name the same outer variables on every rank. An outer variable that belongs to one rank "
                "alone goes into local=."
            )
        sums = iter(_sum(self._group, [parts[i] for i in shared], [inputs[i] for i in shared]) if shared else ())
        return [part if id(x) in self._local else next(sums) for x, part in zip(inputs, parts, strict=True)]


def _flat(x: Tensor) -> Tensor:
    """Return the entries of x in a row: in the order of its memory, if it has no gaps."""
    return x.as_strided((x.numel(),), (1,)) if _is_dense(x.shape, x.stride()) else x.flatten()


def _unflat(flat: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    return flat.as_strided(shape, strides) if _is_dense(shape, strides) else flat.view(shape)


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return span == shape.numel() and 0 not in strides


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
