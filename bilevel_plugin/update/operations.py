"""The operations that the rules of torch.optim are made of, in forms that autograd can differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_on(option: Any) -> bool:
    """Whether an option is in use. A tensor of value 0 counts as in use, since its derivative may be wanted."""
    return isinstance(option, Tensor) or bool(option)


def safe_root(v: Tensor) -> Tensor:
    """√v with slope 0 at 0.

    The slope of √v at 0 is infinite. Where v is 0, so are m and d, and the slope of m/(√v + ε) is that of m alone. So
    the root may be taken as constant there, which is exact and keeps ∞·0 = nan out of the reverse sweep.
    """
    zero = v == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, v).sqrt())


# The next functions use the operations of torch.optim, so that the steps are the same to the last bit. These
# operations take only numbers, so for an option that is a tensor the formula is written out.


def plus(x: Tensor, c: Any, y: Tensor) -> Tensor:
    """x + c·y."""
    return x + c * y if isinstance(c, Tensor) else torch.add(x, y, alpha=c)


def plus_ratio(w: Tensor, c: Any, x: Tensor, y: Tensor) -> Tensor:
    """w + c·x/y."""
    return w + c * x / y if isinstance(c, Tensor) else torch.addcdiv(w, x, y, value=c)


def average(old: Tensor | None, new: Tensor, beta: Any) -> Tensor:
    """β·old + (1 − β)·new."""
    old = torch.zeros_like(new) if old is None else old
    return beta * old + (1 - beta) * new if isinstance(beta, Tensor) else torch.lerp(old, new, 1 - beta)


def average_of_squares(old: Tensor | None, new: Tensor, beta: Any) -> Tensor:
    """β·old + (1 − β)·new²."""
    kept: Tensor = torch.zeros_like(new) if old is None else old * beta
    return kept + (1 - beta) * new * new if isinstance(beta, Tensor) else torch.addcmul(kept, new, new, value=1 - beta)


def with_decay(w: Tensor, d: Tensor, weight_decay: Any, maximize: bool) -> Tensor:
    """d + ω·w; −d in place of d if the objective is maximised."""
    d = -d if maximize else d
    return plus(d, weight_decay, w) if is_on(weight_decay) else d


def as_tensor(x: Any, like: Tensor) -> Tensor:
    """Return a number as torch.optim keeps it: a tensor of torch's default dtype, whatever that of the weights is."""
    if isinstance(x, Tensor):
        return x.to(torch.get_default_dtype())
    return torch.tensor(x, dtype=torch.get_default_dtype(), device=like.device)


def as_read(x: Tensor, learned: Any) -> Any:
    """Return such a tensor as torch.optim reads it: as a number, or as a tensor if it depends on a learned option."""
    if x.device.type == "cpu" and not isinstance(learned, Tensor):
        return x.item()
    return x if x.device.type == "mps" else x.double()
