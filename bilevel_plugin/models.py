"""Models as a user gives them: which parameters are trained in the block, and which models are refused."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .graph import State


def has_weight_norm(module: nn.Module) -> bool:
    """Whether it is torch's parametrization, or has torch's older hook."""
    return any(type(x).__name__ in ("_WeightNorm", "WeightNorm") for x in (module, *module._forward_pre_hooks.values()))


def refuse_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bilevel.inner: model must be an nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        where = f"the submodule {name!r}" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"bilevel.inner: {where} is a TorchScript module (torch.jit), whose derivatives can't be looked into. "
                "Pass the nn.Module that it was made from."
            )
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"bilevel.inner: {where} is torch.compile'd, and a compiled module has no second derivative. "
                "Pass the module as it was before compiling (compiled._orig_mod)."
            )
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise TypeError(
                f"bilevel.inner: {where} is wrapped in {kind}, which sums gradients outside of autograd's second "
                "derivative. Pass the module itself (model.module), and group= for several processes."
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise TypeError(
                f"bilevel.inner: {where} has a backward hook, and autograd would apply it to second derivatives as "
                "well. Remove it; what it does to the gradient can be an operation in the model, or direction=, a "
                "function of the direction."
            )
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise TypeError(
                f"bilevel.inner: {where} is an nn.Embedding with scale_grad_by_freq=True, whose second derivative is "
                "wrong in PyTorch. Set scale_grad_by_freq=False."
            )
    for name, buffer in model.named_buffers():
        if buffer is not None and buffer.grad_fn is not None:
            raise ValueError(
                f"bilevel.inner: the buffer {name!r} carries a graph of autograd. Compute it inside h, or register it "
                "detached."
            )


def refuse_shared_memory(model: nn.Module, parameters: State) -> None:
    """Tied weights are one Parameter in two places; two tensors over the same memory train otherwise."""
    held = {id(p): n for n, p in parameters.items()}
    spans: list[tuple[int, int, str, bool]] = []
    attributes = [
        (f"{name}.{n}".lstrip("."), t)
        for name, m in model.named_modules()
        if not m._forward_pre_hooks  # old-style norms and pruning make theirs anew before each call
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
                f"bilevel.inner: {one!r} and {other!r} are tied: two tensors that share their memory, of which a step "
                "would see one. Tie weights by the parameter itself (model.b.weight = model.a.weight), and give a "
                "frozen copy or a buffer memory of its own (.clone())."
            )


def _lazy(t: Tensor) -> bool:
    return isinstance(t, torch.nn.parameter.UninitializedTensorMixin)  # pyright: ignore


def inner_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    named = dict(model.named_parameters())
    inner: State = {n: p for n, p in named.items() if p.requires_grad}
    if optimizers:
        names = {id(p): n for n, p in named.items()}
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        twice = (
            next((p for i, p in enumerate(held) if any(p is q for q in held[:i])), None)
            if len(optimizers) > 1
            else None
        )
        if twice is not None:
            raise ValueError(
                f"bilevel.inner: two of the optimizers hold the parameter {names.get(id(twice), '')!r}. Give each "
                "optimizer a part of the model of its own; loop.step(..., only=optimizer) moves one part."
            )
        strangers = [tuple(p.shape) for p in held if id(p) not in names]
        if strangers:
            raise ValueError(
                f"bilevel.inner: the optimizer holds {len(strangers)} tensor(s) that are no parameters of the model "
                f"(the first has shape {strangers[0]}). Build it over model.parameters() or a part of them; outer "
                "variables have an optimizer of their own."
            )
        mine = {names[id(p)] for p in held}
        inner = {n: p for n, p in inner.items() if n in mine}
    if not inner:
        kinds = ", ".join(sorted({str(p.dtype) for p in named.values()})) or "none at all"
        raise ValueError(
            f"bilevel.inner: the model has no trainable parameter, so there is no inner variable (parameters: {kinds}; "
            "integer ones can't be trained). Set requires_grad on what the inner loop should train."
        )
    for n, p in inner.items():
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
                f"bilevel.inner: the parameter {n!r} has a post-accumulate hook, which reads .grad, and a block has "
                "none there. Remove it, and write what it does to the gradient as direction=, a function of it."
            )
    return inner
