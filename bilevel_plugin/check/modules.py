"""Which modules have second derivatives that are wrong: each is tried alone, on what the loss calls it with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..autograd.graph import find_leaves
from ..autograd.trees import State, map_tensors, tensors_of
from ..kernels.replace import replaced
from ..model.model import Model
from .differences import Difference, Scale, compare


def failing_modules(model: Model, value: Callable[[], Tensor], seed: int) -> list[str]:
    """Return the deepest modules whose second derivatives fail, on the arguments that the loss calls them with."""
    failing: list[tuple[str, str]] = []
    for name, call in _calls(model.module, value).items():
        why = _why_it_fails(call, model, seed)
        if why:
            failing.append((name, f"{name or 'itself'!r} ({type(call.module).__name__}): {why}"))
    return [
        text
        for name, text in failing
        if not any(n != name and n.startswith(f"{name}." if name else "") for n, _ in failing)
    ]


@dataclass
class _Call:
    """The first call of a module: a copy of it in float64, and its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


def _calls(model: nn.Module, value: Callable[[], Tensor]) -> dict[str, _Call]:
    calls: dict[str, _Call] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:
            calls[name] = _Call(copy.deepcopy(module).double(), *map_tensors(_detached_double, (args, kwargs)))

    hooks = [
        module.register_forward_pre_hook(lambda *call, name=name: note(name, *call), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with torch.enable_grad(), suppress(RuntimeError):  # gradcheck's finding has this error already
            value()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _why_it_fails(call: _Call, model: Model, seed: int) -> str:
    """Compare ∇²f·v by double backward with differences of ∇f, where f is a fixed sum of the module's results."""
    module = call.module
    at = {n: p.detach().clone() for n, p in module.named_parameters() if p.is_floating_point()}
    floating = [x for x in tensors_of((call.args, call.kwargs)) if x.is_floating_point()]
    at |= {f"@{i}": x for i, x in enumerate(floating)}
    if not at:
        return ""

    def f(w: State) -> Tensor:
        torch.manual_seed(seed)
        inputs = iter([x for n, x in w.items() if n.startswith("@")])
        args, kwargs = map_tensors(lambda x: next(inputs) if x.is_floating_point() else x, (call.args, call.kwargs))
        state = {n: x for n, x in w.items() if not n.startswith("@")}
        state |= {n: b.detach().clone() for n, b in module.named_buffers()}
        with replaced():
            out = functional_call(module, state, args, kwargs)
        outs = [x for x in tensors_of(out) if x.is_floating_point()]
        return torch.stack([(randn_like(x, seed) * (x + x * x / 2)).sum() for x in outs]).sum()

    try:
        found = _compare_hessian(f, at, seed)
    except RuntimeError as error:
        return f"no second derivative: {str(error).strip().splitlines()[0].removeprefix('bilevel.inner: ')}"
    return "wrong values" if found.verdict == "WRONG" else ""


def _compare_hessian(f: Callable[[State], Tensor], w: State, seed: int) -> Difference:
    v = {n: randn_like(x, seed) for n, x in w.items()}

    def gradient(step: float, create_graph: bool = False) -> tuple[State, Sequence[Tensor | None]]:
        with torch.enable_grad():
            at = {n: (x + step * v[n]).requires_grad_() for n, x in w.items()}
            return at, torch.autograd.grad(f(at), list(at.values()), create_graph=create_graph, allow_unused=True)

    def flat(parts: Sequence[Tensor | None]) -> Tensor:
        filled = [torch.zeros_like(x) if p is None else p for p, x in zip(parts, w.values(), strict=True)]
        return torch.cat([p.detach().flatten().double() for p in filled])

    at, first = gradient(0.0, create_graph=True)
    find_leaves(f(at), at.values(), twice=True)
    dot = [(p * v[n]).sum() for n, p in zip(at, first, strict=True) if p is not None and p.requires_grad]
    second: Sequence[Tensor | None] = [None] * len(at)  # f may seem linear; the differences show if it is not
    if dot:
        second = torch.autograd.grad(torch.stack(dot).sum(), list(at.values()), allow_unused=True)
    return compare(flat(second), lambda step: flat(gradient(step)[1]), Scale.of([]))


def randn_like(x: Tensor, seed: int) -> Tensor:
    """Return random numbers of the shape and type of x, that are the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def _detached_double(x: Tensor) -> Tensor:
    return x.detach().double() if x.is_floating_point() else x.detach()
