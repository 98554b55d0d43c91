"""The rules of torch.optim run backwards, up to rounding: the weight before a step, then the state before it.

The weight comes first, from the weight and the state after the step alone, since the direction d can be computed only
where the weight is known. Then (state⁺, w, d) give the state. Every operation is rounded once, so a prediction has the
same bits whatever the layout of the tensors and the number of threads. Nesterov's rules use d in the weight too; there
the mean direction stands in for it, and the prediction is off by some part of a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formulas import adam, nadam, radam, rmsprop, sgd
from .operations import is_on
from .registry import Formula, Tensors


@dataclass(frozen=True)
class Inverse:
    """The inverse of a rule: w from (w⁺, state⁺), and the tensors of the state from (state⁺, w, d)."""

    weight: Callable[..., Tensor]
    state: Callable[..., Tensors]
    lacks: Callable[[Mapping[str, Any]], str] = lambda _: ""  # why it has none with these options, or ""


def numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without graphs, as numbers where they are on the host."""

    def plain(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(plain, x))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if isinstance(x, Tensor):
            return x.item() if x.device.type == "cpu" and x.numel() == 1 else x.detach()
        return x

    return {n: plain(x) for n, x in options.items()}


def _before(mean: Tensor, part: Tensor, beta: Any) -> Tensor:
    """Return x from x⁺ = β·x + part."""
    return (mean - part) / beta if beta else mean


def _moments_before(new: Tensors, d: Tensor, betas: Any) -> dict[str, Tensor]:
    before = {
        "exp_avg": _before(new["exp_avg"], d * (1 - betas[0]), betas[0]),
        "exp_avg_sq": _before(new["exp_avg_sq"], d * d * (1 - betas[1]), betas[1]).clamp(min=0),
    }
    return {**new, **before}  # amsgrad's maximum stays as it is, mostly


def _direction(w: Tensor, d: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return what the moments were given: with its sign, and with a decay that is not decoupled."""
    d = -d if options["maximize"] else d
    decay = options["weight_decay"]
    return d + w * decay if is_on(decay) and not options.get("decoupled_weight_decay") else d


def _undecayed(w: Tensor, options: Mapping[str, Any]) -> Tensor:
    decoupled = options.get("decoupled_weight_decay") and is_on(options["weight_decay"])
    return w / (1 - options["lr"] * options["weight_decay"]) if decoupled else w


def _sgd_weight(w: Tensor, new: Tensors, options: Mapping[str, Any]) -> Tensor:
    return new["momentum_buffer"] * options["lr"] + w


def _sgd_state(new: Tensors, w: Tensor, d: Tensor, options: Mapping[str, Any]) -> Tensors:
    part = _direction(w, d, options) * (1 - options["dampening"])
    return {"momentum_buffer": _before(new["momentum_buffer"], part, options["momentum"])}


def _no_momentum(options: Mapping[str, Any]) -> str:
    return "" if is_on(options["momentum"]) else "without momentum it keeps nothing of the direction"


def _adam_weight(w: Tensor, new: Tensors, options: Mapping[str, Any]) -> Tensor:
    (first, second), count = options["betas"], options["count"]
    v = new["max_exp_avg_sq"] if options["amsgrad"] else new["exp_avg_sq"]
    root = v.sqrt() / (1 - second**count) ** 0.5 + options["eps"]
    return _undecayed(new["exp_avg"] / root * (options["lr"] / (1 - first**count)) + w, options)


def _adam_state(new: Tensors, w: Tensor, d: Tensor, options: Mapping[str, Any]) -> Tensors:
    return _moments_before(new, _direction(w, d, options), options["betas"])


def _nadam_weight(w: Tensor, new: Tensors, options: Mapping[str, Any]) -> Tensor:
    (first, second), count = options["betas"], options["count"]
    mu, following = (first * (1 - 0.5 * 0.96 ** (t * options["momentum_decay"])) for t in (count, count + 1))
    product = _product_of_nadam(first, options["momentum_decay"], count)
    share = (1 - mu) / (1 - product) + following / (1 - product * following)
    root = (new["exp_avg_sq"] / (1 - second**count)).sqrt() + options["eps"]
    return _undecayed(new["exp_avg"] / root * (share * options["lr"]) + w, options)


@functools.lru_cache(2**10)
def _product_of_nadam(first: float, decay: float, count: int) -> float:
    return math.prod(first * (1 - 0.5 * 0.96 ** (t * decay)) for t in range(1, min(count, 1000) + 1))


def _radam_weight(w: Tensor, new: Tensors, options: Mapping[str, Any]) -> Tensor:
    (first, second), count = options["betas"], options["count"]
    unbiased = new["exp_avg"] * (options["lr"] / (1 - first**count))
    most = 2 / (1 - second) - 1
    length = most - 2 * count * second**count / (1 - second**count)
    if length > 5:
        rectified = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) ** 0.5
        root = new["exp_avg_sq"].sqrt() + options["eps"]
        unbiased = unbiased / root * ((1 - second**count) ** 0.5 * rectified)
    return _undecayed(unbiased + w, options)


def _rmsprop_state(new: Tensors, w: Tensor, d: Tensor, options: Mapping[str, Any]) -> Tensors:
    d, alpha = _direction(w, d, options), options["alpha"]
    v = new["square_avg"]
    before = {"square_avg": _before(v, d * d * (1 - alpha), alpha).clamp(min=0)}
    if options["centered"]:
        before["grad_avg"] = _before(new["grad_avg"], d * (1 - alpha), alpha)
        v = v - new["grad_avg"] * new["grad_avg"]
    part = d / (v.sqrt() + options["eps"])
    return {**before, "momentum_buffer": _before(new["momentum_buffer"], part, options["momentum"])}


INVERSES: dict[Formula, Inverse] = {
    sgd: Inverse(_sgd_weight, _sgd_state, _no_momentum),
    adam: Inverse(_adam_weight, _adam_state),
    nadam: Inverse(_nadam_weight, _adam_state),
    radam: Inverse(_radam_weight, _adam_state),
    rmsprop: Inverse(_sgd_weight, _rmsprop_state, _no_momentum),
}


def wide(x: Tensor) -> Tensor:
    """Return the tensor in the type that predictions are computed in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
