"""Running statistics of BatchNorm and InstanceNorm as a part of the state: b⁺ = (1 − m)·b + m·(that of the batch).

torch updates them outside of autograd. Where a step is differentiated, those of the model of the block are updated and
read by differentiable operations. Those of any other module are torch's: a step updates them once, a replay does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..autograd.look import called_by, checkpointing
from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State
from .stopping import Differentiation, constant_in_step, is_stopped

NORMALISATIONS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)  # pyright: ignore[reportPrivateUsage]
_CHECKPOINTED = "a normalisation layer updates its running statistics under activation checkpointing"
_NO_GRAD = "a normalisation layer in training mode updates its running statistics under torch.no_grad"


class RunningStatistics:
    """The running statistics that one evaluation of losses updates and reads.

    `held` returns the buffers that the model holds at the moment. `outside` has the statistics of other modules that
    steps of the loop have updated, by their ids. `first` says that the step is being taken, and not run again.
    """

    def __init__(
        self,
        evaluation: Differentiation,
        held: Callable[[], State],
        outside: dict[int, Tensor],
        *,
        differentiable: bool,
        first: bool = False,
        warns: bool = True,
    ) -> None:
        self._evaluation, self._held, self._outside = evaluation, held, outside
        self._differentiable, self._first, self._warns = differentiable, first, warns
        self._own: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # of the model's statistics, after an update by a normalisation

    def __call__(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        by_batch: bool | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
        **named: bool,
    ) -> Tensor:
        """Compute `func`, which is F.batch_norm or F.instance_norm."""
        by_batch = next(iter(named.values()), func is F.instance_norm) if by_batch is None else by_batch
        rest = weight, bias, by_batch, momentum, eps
        if running_mean is None or running_var is None:
            return func(input, running_mean, running_var, *rest)
        if not self._is_own(running_mean):
            return self._outside_of_the_model(func, input, running_mean, running_var, *rest)
        if self._differentiable and not by_batch:
            return self._normalise(input, running_mean, running_var, weight, bias, eps)
        if self._differentiable:
            # the update comes first, as activation checkpointing ends a recomputation once all saved tensors are there
            over = [i for i in range(input.dim()) if i != 1 and (i or func is F.batch_norm)]
            self._update(running_mean, running_var, input, over, momentum)
            return func(input, None, None, *rest)
        normalised = func(input, running_mean, running_var, *rest)
        if by_batch:
            self._versions.update((id(b), b._version) for b in (running_mean, running_var))
        return normalised

    def _is_own(self, running: Tensor) -> bool:
        if id(running) not in self._own:  # a part of an evaluation, or the loss, may have replaced them
            self._own.update((id(b), b) for b in self._held().values())
        return id(running) in self._own

    def _outside_of_the_model(self, func: Callable[..., Tensor], x: Tensor, mean: Tensor, var: Tensor, *rest: Any):
        by_batch = rest[2]
        if by_batch and self._first:
            self._outside[id(mean)] = mean
            self._evaluation.eager_only = "a normalisation layer outside of the model updates its running statistics"
        if by_batch and not self._first:
            return func(x, None, None, *rest)
        if not by_batch and id(mean) in self._outside and torch.is_grad_enabled():
            self._read_outside(mean)
        return func(x, mean, var, *rest)

    def leaves_alone(self, x: Tensor) -> bool:
        """Whether a normalisation outside of the model is about to count a batch that it has counted before."""
        counter = x.dim() == 0 and not x.is_floating_point() and not self._first
        return counter and called_by("torch.nn.modules.batchnorm") and not self._is_own(x)

    def _read_outside(self, mean: Tensor) -> None:
        what = (
            f"bilevel.inner: a normalisation layer outside of the model ({len(mean)} features) updates its running "
            "statistics in the steps, in training mode, and a loss reads them in eval mode. "
        )
        fix = "Make the layer a part of the model, frozen if it is not to be trained, or keep it in one of the modes."
        if self._first:
            raise RuntimeError(f"{what}A step that reads them can't be run again as it was. {fix}")
        if self._warns:
            del self._outside[id(mean)]  # one warning is enough
            left_out = "The derivative of that update is not known, and the hypergradient leaves it out. "
            warnings.warn(f"{what}{left_out}{fix}", DerivativeWarning, stacklevel=2)

    def _normalise(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Compute (x − mean)/√(var + ε), differentiable with respect to the statistics."""
        # a loss of the same step may have updated them
        mean, var = (constant_in_step(self._evaluation, b) for b in (mean, var))
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = (var + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        out = (x - mean.view(shape)) * scale.view(shape)
        return out if bias is None else out + bias.view(shape)

    def _update(self, mean: Tensor, var: Tensor, x: Tensor, over: list[int], momentum: float) -> None:
        """Update the statistics by those of x over some dimensions; InstanceNorm averages over the samples."""
        evaluation = self._evaluation
        in_backward = torch._C._current_graph_task_id() != -1 and not evaluation.replaying_block  # pyright: ignore
        if checkpointing() or in_backward:  # once in the forward pass, and once in its recomputation
            evaluation.unknown = _CHECKPOINTED, "take the layer out of the checkpointed part"
            x = x.detach()
        if evaluation.without_graphs:  # a block runs on dual numbers, and turns graphs off by torch.no_grad as well
            graph, known = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()  # pyright: ignore
        else:
            graph, known = True, torch.is_grad_enabled()
        if not known:
            evaluation.unknown = _NO_GRAD, "take the call in training mode out of torch.no_grad"
        with torch.set_grad_enabled(graph):  # b⁺ depends on b also where torch.no_grad cuts it off from the batch
            x = x.to(mean.dtype)  # as in torch's kernel, a batch in bf16 is not rounded
            for running, batch in zip((var, mean), torch.var_mean(x, over, correction=1), strict=True):
                batch = batch if batch.dim() == 1 else batch.mean(0)
                running.mul_(1 - momentum).add_(batch, alpha=momentum)
                self._versions[id(running)] = running._version

    def versions(self, names: Iterable[str]) -> list[tuple[str, Tensor, int]]:
        """Return these statistics as the model holds them, with their versions, if a step is taken here."""
        held = self._held() if self._first else {}
        return [(n, held[n], held[n]._version) for n in names if n in held]

    def unknown(self, names: Iterable[str], weights: Sequence[Tensor]) -> State:
        """Return these statistics so that their derivative is refused, if this evaluation has hidden it from autograd.

        It is hidden in what depends on the weights. So the error has its place between the statistics and the weights.
        """
        why, held = self._evaluation.unknown, self._held()
        if why is None or forward_ad._current_level >= 0:  # pyright: ignore  (a step block by block, which asks itself)
            return {}
        refused: Any = _Unknown.apply
        return {n: refused(why, held[n], *weights) for n in names if held[n].requires_grad}

    def foreign(self, before: list[tuple[str, Tensor, int]]) -> tuple[str, str] | None:
        """Return why statistics that other code than a normalisation has changed since have no known derivative."""
        held = self._held() if before else {}
        for n, b, version in before:
            same = held[n] is b and b._version == self._versions.get(id(b), version)
            if not (same or is_stopped(held[n])):
                what = f"the model updates the running statistics {n!r} by code of its own, not by F.batch_norm"
                return what, "leave bilevel.stop_gradient(...) of the new statistics in that buffer"
        return None


class _Unknown(torch.autograd.Function):
    """The identity, whose derivative is not known: if it is asked for, there is an error."""

    @staticmethod
    def forward(why: tuple[str, str], x: Tensor, *weights: Tensor) -> Tensor:  # pyright: ignore
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.why, ctx.inputs = inputs[0], len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if a is None:
            return (None,) * ctx.inputs
        what, fix = ctx.why
        raise RuntimeError(
            f"bilevel.inner: {what}, and a loss uses them in eval mode. The derivative of that update is not known. "
            f"Use engine='reverse' with g in training mode, or {fix}."
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, why: tuple[str, str], x: Tensor, *weights: Tensor) -> Any:  # pyright: ignore
        return _Unknown.apply(why, x, *weights), in_dims[1]
