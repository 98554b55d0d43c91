"""Proofs by value: Υ is what the optimizer's own step does, and a function of the direction has its own derivative.

Nothing of the user's is moved: tensors are stand-ins, and random numbers come from a generator of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..autograd.graph import State

_MOST = 2**24  # the largest number of entries for which a proof makes copies in float64


def derivative_error(function: Callable[[State, State], State], d: State, w: State) -> float | None:
    """Return how far the derivative of a function of (d, w) is from central differences of it, relative to its size.

    One random cotangent and one random direction are enough, as in the sentinel. An entry of d that is exactly 0 is
    not moved, since functions such as the sign jump there. None: the function has no value in float64 to compare.
    """
    if sum(x.numel() for x in d.values()) > _MOST or any(x.is_meta for x in d.values()):
        return None
    for dtype, eps, allowance in ((torch.float64, (1e-6, 1e-5, 1e-4), 0.0), (None, (1e-2, 1e-3), 0.05)):
        at = [{n: x.to(dtype or x.dtype) for n, x in s.items()} for s in (d, w)]
        try:
            error = _derivative_error(function, at[0], at[1], eps)
        except RuntimeError:  # a network in it may take float32 alone
            continue
        return max(0.0, error - allowance)
    return None


def _derivative_error(function: Callable[[State, State], State], d: State, w: State, sizes: tuple[float, ...]) -> float:
    generator = torch.Generator().manual_seed(0)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

    with torch.no_grad():
        u = {n: normal(x) for n, x in d.items()}
        along = [normal(x) * x.square().mean().sqrt() * (x != 0) for x in (*d.values(), *w.values())]

    def value(*xs: Tensor) -> Tensor:
        new = function(dict(zip(d, xs, strict=False)), dict(zip(w, xs[len(d) :], strict=True)))
        return torch.stack([(u[n] * x).sum() for n, x in new.items()]).sum()

    start = [*d.values(), *w.values()]
    leaves = [x.detach().requires_grad_() for x in start]
    with torch.enable_grad():
        at = value(*leaves)
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if at.requires_grad:  # the function may use a graph of the user's
            grads = torch.autograd.grad(at, leaves, allow_unused=True, retain_graph=True)
    with torch.no_grad():
        ours = sum(float((g * v).sum()) for g, v in zip(grads, along, strict=True) if g is not None)
        errors: list[float] = []
        for eps in sizes:
            ahead, behind = (value(*(x + s * eps * v for x, v in zip(start, along, strict=True))) for s in (1, -1))
            true = float(ahead - behind) / (2 * eps)
            rounding = 1e2 * torch.finfo(at.dtype).eps * abs(float(at)) / eps
            errors.append(max(0.0, abs(ours - true) - rounding) / max(abs(ours), abs(true), 1e-30))
    return min(errors)
