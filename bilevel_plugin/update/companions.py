"""Companions: modules whose parameters follow the weights by a rule, s⁺ = C(s, w⁺), after each update.

A target network, the average of the weights, a key encoder. In the gradient of a step a companion is a constant; in the
hypergradient it is a part of the state, as running statistics are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.derive import grad
from ..autograd.graph import find_leaves
from ..autograd.trees import State
from .solvers import Value

Rule = Callable[[State, State], State]
"""(s, w⁺): the parameters of the companion, and the weights by their names in the model -> s⁺"""


@dataclass(frozen=True)
class ema:
    """s⁺ = decay·s + (1 − decay)·w⁺, the exponential moving average of the weights of the same names.

    Examples:
        The average starts at 0, and the step goes to 1.

        >>> import copy, torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> mean = copy.deepcopy(model)
        >>> h = lambda m: 0.5 * (m.weight - 1).square().sum()
        >>> with bilevel.inner(model, h, solver="gd", lr=1.0, companions={mean: bilevel.ema(0.75)}) as loop:
        ...     _ = loop.step()
        ...     print(mean.weight.item())
        0.25
    """

    decay: Value

    def __post_init__(self) -> None:
        if not isinstance(self.decay, Tensor) and not 0 <= self.decay <= 1:
            raise ValueError(f"bilevel.ema: decay must be from 0 to 1, got {self.decay!r}.")

    def __call__(self, s: State, w: State) -> State:
        return {n: self.decay * x + (1 - self.decay) * w[n] for n, x in s.items()}


@dataclass(frozen=True)
class copy:
    """s⁺ = w⁺ after every so many steps of the block, and s⁺ = s after the others."""

    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:  # pyright: ignore
            raise ValueError(f"bilevel.copy: every must be a number of steps, at least 1, got {self.every!r}.")

    def __call__(self, s: State, w: State) -> State:
        return {n: w[n] for n in s}


class Companions:
    """The companions of a model, whose parameters have names of their own in the state."""

    def __init__(self, given: Mapping[nn.Module, Rule], model: nn.Module) -> None:
        self.modules, self._rules = list(given), list(given.values())
        self._names = [{n: f"companions[{i}].{n}" for n, _ in m.named_parameters()} for i, m in enumerate(self.modules)]
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self.parameters: State = {
            names[n]: p for m, names in zip(self.modules, self._names, strict=True) for n, p in m.named_parameters()
        }
        self.buffers: State = {
            f"companions[{i}].{n}": b for i, m in enumerate(self.modules) for n, b in m.named_buffers()
        }
        self._check(model)

    def _check(self, model: nn.Module) -> None:
        own = {id(p): n for n, p in model.named_parameters()}
        shared = next((n for n, p in self.parameters.items() if id(p) in own), None)
        if shared is not None:
            raise ValueError(
                f"bilevel.inner: {shared!r} is the model's own parameter {own[id(self.parameters[shared])]!r}. A "
                "companion has tensors of its own: copy.deepcopy(model)."
            )
        weights = dict(model.named_parameters())
        for m, rule in zip(self.modules, self._rules, strict=True):
            if not callable(rule):
                raise TypeError(
                    f"bilevel.inner: companions= takes a rule for each module, bilevel.ema(0.99), bilevel.copy(every="
                    f"100) or a function (state, weights) -> state, got {type(rule).__name__}."
                )
            if isinstance(rule, copy) and any(True for _ in m.buffers()):
                raise ValueError(
                    f"bilevel.inner: bilevel.copy follows parameters, and the companion ({type(m).__name__}) has "
                    f"buffers too ({next(n for n, _ in m.named_buffers())!r}), which load_state_dict would copy. Take "
                    "layers without buffers, or follow the weights by bilevel.ema."
                )
            for n, p in m.named_parameters() if isinstance(rule, (ema, copy)) else ():
                if n not in weights or weights[n].shape != p.shape:
                    raise ValueError(
                        f"bilevel.inner: the companion's parameter {n!r} of shape {tuple(p.shape)} has no counterpart "
                        "of that name and shape in the model. Give a rule of your own, a function (state, weights) -> "
                        "state."
                    )

    def follow(self, k: int, to: State) -> State:
        """Return the companions after step k, from the state with the weights after it and the companions before."""
        found: State = {}
        weights = {**self._frozen, **to}
        for rule, names in zip(self._rules, self._names, strict=True):
            if isinstance(rule, copy) and k % rule.every:
                continue
            s = {n: to[name] for n, name in names.items()}
            new = rule(dict(s), weights)
            if new.keys() != s.keys() or any(new[n].shape != x.shape for n, x in s.items()):
                raise ValueError(
                    "bilevel.inner: a rule of companions= has to return the state with the same names and shapes; it "
                    f"returned {sorted(new)} for {sorted(s)}."
                )
            found.update({names[n]: x.view_as(x) if x is weights.get(n) else x for n, x in new.items()})
        return found

    def leaves(self, k: int, to: State) -> list[Tensor]:
        """Return the outer variables that the rules use."""
        with torch.enable_grad():
            new = self.follow(k, {n: x.detach() for n, x in to.items()})
        return list({id(x): x for y in new.values() if y.requires_grad for x in find_leaves(y)[0]}.values())

    @property
    def reads(self) -> bool:
        """Whether the derivative of a rule may depend on the values of the weights and the companions."""
        return not all(isinstance(r, copy) or (isinstance(r, ema) and _is_fixed(r.decay)) for r in self._rules)

    def pull(self, k: int, to: State, a: State, wanted: Sequence[Tensor]) -> tuple[State, Sequence[Tensor | None]]:
        """Pull the adjoint of the state after step k back to before the rules; `to` are their arguments."""
        at = {n: x.detach().requires_grad_() for n, x in to.items() if x.is_floating_point()}
        with torch.enable_grad():
            new = self.follow(k, {**to, **at})
        keys = [n for n in new if n in a and new[n].requires_grad]
        rest = {n: x for n, x in a.items() if n not in new}
        if not keys:
            return rest, [None] * len(wanted)
        grads = grad([new[n] for n in keys], [*at.values(), *wanted], [a[n] for n in keys], retain_graph=True)
        for n, d in zip(at, grads, strict=False):
            if d is not None:
                rest[n] = rest[n] + d if n in rest else d.detach()
        return rest, grads[len(at) :]


def _is_fixed(x: Any) -> bool:
    return not (isinstance(x, Tensor) and x.requires_grad)
