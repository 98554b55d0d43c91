"""The update w, d ↦ w⁺ of a `torch.optim` object, written so that autograd can differentiate it.

d is the solver's direction; it stands where `.grad` does in torch.optim. The state z of the inner problem
holds the weights under their names and an optimizer's tensors under "name@tensor". As in torch.optim, a
weight that the step's loss does not touch is left alone. The optimizer is read at every step (so a
learning-rate scheduler works), never stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .binding import State, map_tensors, tensors_of

Step = Callable[[State, State], State]  # (z, d) -> z⁺


def plain(z: State, d: State) -> State:
    return {n: x - d[n] if n in d else x for n, x in z.items()}


class Plain:
    """w⁺ = w − d."""

    def __init__(self) -> None:
        self.start: State = {}

    def at_step(self) -> tuple[Step, list[Tensor]]:
        return plain, []

    def lacks(self, need: str) -> str | None:
        return None


class FromOptimizer:
    """The rule of an SGD, Adam or AdamW object, with its groups, options and present state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], once: Callable[[Tensor], Tensor]
    ) -> None:
        kind = _kind(optimizer)
        self._optimizer, self._rule, self._once = optimizer, _RULES[kind], once
        self._names = [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]
        self._kind = kind
        self.start: State = {}
        self._count: dict[str, int] = {}  # updates that a weight has had (Adam's bias correction)
        for p, name in names.items():
            held: dict[str, Any] = optimizer.state.get(p, {})
            self._count[name] = int(held.get("step", 0))
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if isinstance(held.get(key), Tensor):
                    self.start[f"{name}@{key}"] = held[key].detach().clone()

    def at_step(self) -> tuple[Step, list[Tensor]]:
        """The rule with the options as they are now, however often it is called; and the options that require grad."""
        groups = list(zip(self._names, map(self._options, self._optimizer.param_groups), strict=True))
        count, first = dict(self._count), True

        def step(z: State, d: State) -> State:
            nonlocal first
            new = dict(z)
            for names, options in groups:
                for n in names:
                    if n in d:
                        self._rule(new, n, -d[n] if options["maximize"] else d[n], count[n] + 1, options)
            if first:
                self._count.update({n: count[n] + 1 for n in d})
                first = False
            return new

        return step, [x for _, options in groups for x in tensors_of(options) if x.requires_grad]

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key != "params"}
        options["decoupled"] = group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
        # schedulers write to a rate that is a tensor in place
        return map_tensors(lambda x: self._once(x) if x.requires_grad else x.clone(), options)

    def lacks(self, need: str) -> str | None:
        groups = self._optimizer.param_groups
        if need == "fixed point" and self._kind == "Adam":
            return "Adam divides by a root that is 0 where the gradient is, and has no derivative there"
        if need == "symmetry" and any(g["momentum"] for g in groups):
            return "with momentum the Jacobian of a step is not symmetric; hypergrad='neumann' takes it"
        if need == "symmetry" and any(g["lr"] is not groups[0]["lr"] and g["lr"] != groups[0]["lr"] for g in groups):
            return "with a rate for each group the Jacobian is not symmetric; hypergrad='neumann' takes it"
        return None


def _sgd(z: State, n: str, d: Tensor, count: int, o: Mapping[str, Any]) -> None:
    """b⁺ = μ·b + (1 − τ)·d (b⁺ = d at first); w⁺ = w − lr·b⁺, or w − lr·(d + μ·b⁺) for Nesterov."""
    if o["weight_decay"]:
        d = d + o["weight_decay"] * z[n]
    if o["momentum"]:
        key = f"{n}@momentum_buffer"
        z[key] = o["momentum"] * z[key] + (1 - o["dampening"]) * d if key in z else d
        d = d + o["momentum"] * z[key] if o["nesterov"] else z[key]
    z[n] = z[n] - o["lr"] * d


def _adam(z: State, n: str, d: Tensor, count: int, o: Mapping[str, Any]) -> None:
    """m⁺ = β₁·m + (1 − β₁)·d, v⁺ = β₂·v + (1 − β₂)·d²; w⁺ = w − lr·m̂ / (√v̂ + ε), m̂ and v̂ unbiased."""
    beta1, beta2 = o["betas"]
    if o["weight_decay"]:
        if o["decoupled"]:
            z[n] = z[n] - o["lr"] * o["weight_decay"] * z[n]
        else:
            d = d + o["weight_decay"] * z[n]
    m, v, top = (f"{n}@{key}" for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    z[m] = beta1 * z[m] + (1 - beta1) * d if m in z else (1 - beta1) * d
    z[v] = beta2 * z[v] + (1 - beta2) * d * d if v in z else (1 - beta2) * d * d
    second = z[v]
    if o["amsgrad"]:
        second = z[top] = torch.maximum(z[top], z[v]) if top in z else z[v]
    # √ has slope ∞ at 0. Where v is 0, so are m and d, and the quotient's slope is that of m alone: the
    # root may be taken as constant there, which is exact and keeps ∞·0 = nan out of the reverse sweep.
    zero = second == 0
    root = torch.where(zero, 0.0, torch.where(zero, 1.0, second).sqrt())
    step = o["lr"] / (1 - beta1**count)
    z[n] = z[n] - step * z[m] / (root / (1 - beta2**count) ** 0.5 + o["eps"])


_RULES: dict[str, Callable[[State, str, Tensor, int, Mapping[str, Any]], None]] = {"SGD": _sgd, "Adam": _adam}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    if type(optimizer) is torch.optim.SGD:
        return "SGD"
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return "Adam"
    wrapped = getattr(optimizer, "optimizer", None)  # accelerate's and Lightning's have it so
    remedy = "Use one of the three, or leave it out and set lr."
    raise TypeError(
        f"bilevel.inner: optimizer= takes torch.optim.SGD, Adam or AdamW, got {type(optimizer).__name__}, whose rule "
        f"this library does not know. {'Give the one that it wraps: optimizer.optimizer.' if wrapped else remedy}"
    )
