"""Models as a user gives them: which parameters are trained in the block, and which models are refused."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..autograd.trees import State


def refuse_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"bilevel.inner: model must be an nn.Module, got {type(model).__name__}. The order of the arguments is "
            "bilevel.inner(model, h, g)."
        )
    for name, module in model.named_modules():
        _refuse_module(name, module)
    for name, buffer in model.named_buffers():
        if buffer is not None and buffer.grad_fn is not None:
            raise ValueError(
                f"bilevel.inner: the buffer {name!r} has an autograd graph. Compute it inside h, or register it "
                "detached."
            )


def _refuse_module(name: str, module: nn.Module) -> None:
    where = f"the submodule {name!r}" if name else "the model"
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"bilevel.inner: {where} is a TorchScript module (torch.jit), whose derivatives can't be checked. "
            "Pass the nn.Module that it was made from."
        )
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        raise TypeError(
            f"bilevel.inner: {where} is torch.compile'd, and a compiled module has no second derivative. "
            "Pass the module as it was before compiling (compiled._orig_mod)."
        )
    if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
        raise TypeError(
            f"bilevel.inner: {where} is wrapped in {kind}, which sums gradients where second derivatives do not "
            "follow. Pass the module itself (model.module), and group= for several processes."
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise TypeError(
            f"bilevel.inner: {where} has a backward hook, and autograd would apply it to second derivatives as "
            "well. Remove it. What it does to the gradient can be written as an operation in the model, or as "
            "direction=, a function of the direction."
        )
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        raise TypeError(
            f"bilevel.inner: {where} is an nn.Embedding with scale_grad_by_freq=True, whose second derivative is "
            "wrong in PyTorch. Set scale_grad_by_freq=False."
        )


def refuse_shared_memory(model: nn.Module, parameters: State) -> None:
    """Refuse two tensors that share memory. Weights are tied by one Parameter in two places, which is allowed."""
    held = {id(p): n for n, p in parameters.items()}
    spans: list[tuple[int, int, str, bool]] = []
    attributes = [
        (f"{name}.{n}".lstrip("."), t)
        for name, m in model.named_modules()
        if not m._forward_pre_hooks  # old-style norms and pruning replace such tensors before each call
        for n, t in vars(m).items()
        if isinstance(t, Tensor)
    ]
    named = (*model.named_parameters(), *model.named_buffers(), *attributes)
    tensors = {id(t): (n, t) for n, t in named if t is not None}
    for key, (n, t) in tensors.items():
        if t.layout == torch.strided and t.numel() and not t.is_meta and not _lazy(t):
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), n, key in held))
    spans.sort()
    for (_, end, one, a), (begin, _, other, b) in itertools.pairwise(spans):
        if begin < end and (a or b):
            raise ValueError(
                f"bilevel.inner: {one!r} and {other!r} are tied: they are two tensors that share their memory, and a "
                "step would update only one of them. Tie weights by the parameter itself (model.b.weight = "
                "model.a.weight), and give a frozen copy or a buffer its own memory (.clone())."
            )


def _lazy(t: Tensor) -> bool:
    return isinstance(t, torch.nn.parameter.UninitializedTensorMixin)  # pyright: ignore


def inner_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    """Return the parameters that the block trains: those that require grad, and that the optimizers hold if any."""
    named: State = dict(model.named_parameters())
    inner: State = {n: p for n, p in named.items() if p.requires_grad}
    if optimizers:
        mine = _names_held_by(optimizers, named)
        inner = {n: p for n, p in inner.items() if n in mine}
    if not inner:
        kinds = ", ".join(sorted({str(p.dtype) for p in named.values()})) or "no parameters"
        raise ValueError(
            f"bilevel.inner: the model has no trainable parameter, so there is no inner variable (it has {kinds}). Set "
            "requires_grad on the parameters that the inner loop should train; integers can't be trained."
        )
    for n, p in inner.items():
        _refuse_parameter(n, p)
    return inner


def _names_held_by(optimizers: Sequence[torch.optim.Optimizer], named: State) -> set[str]:
    """Return the names of the parameters that the optimizers hold."""
    names = {id(p): n for n, p in named.items()}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    twice = (
        next((p for i, p in enumerate(held) if any(p is q for q in held[:i])), None) if len(optimizers) > 1 else None
    )
    if twice is not None:
        raise ValueError(
            f"bilevel.inner: two of the optimizers hold the parameter {names.get(id(twice), '')!r}. Give each "
            "optimizer its own part of the model; loop.step(..., only=optimizer) updates one part."
        )
    foreign = [tuple(p.shape) for p in held if id(p) not in names]
    if foreign:
        raise ValueError(
            f"bilevel.inner: the optimizer holds {len(foreign)} tensor(s) that are not parameters of the model "
            f"(the first has shape {foreign[0]}). Build it over model.parameters() or a part of them. Outer "
            "variables need another optimizer, which is stepped outside the block."
        )
    return {names[id(p)] for p in held}


def _refuse_parameter(n: str, p: Tensor) -> None:
    if _lazy(p):
        raise ValueError(
            f"bilevel.inner: the parameter {n!r} of a lazy module has no shape yet. Call the model once, on a "
            "batch, before the block."
        )
    if p.is_complex():
        raise TypeError(
            f"bilevel.inner: the parameter {n!r} is complex ({p.dtype}), and steps on complex weights are not "
            "supported. Hold its real and imaginary parts as two parameters (torch.view_as_complex in forward)."
        )
    if p.is_inference():
        raise RuntimeError(
            f"bilevel.inner: the parameter {n!r} was made under torch.inference_mode and can't be differentiated. "
            "Build the model outside of it."
        )
    hooks = getattr(p, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise ValueError(
            f"bilevel.inner: the parameter {n!r} has a post-accumulate hook, which reads .grad, but a block "
            "computes no .grad. Remove it, and write what it does to the gradient as direction=, a function of it."
        )


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "bilevel.inner: torch.inference_mode is on, and nothing can be differentiated in it. Leave it for this "
            "block; torch.no_grad is fine."
        )
