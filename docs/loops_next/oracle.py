"""A stand-in for `bilevel.inner` with companions and computed values: the graph of the whole training, for small loops.

It fixes what the new names mean, in as few words as can be, and judges the loops of this folder until the library has
them. A step takes its gradient for an alias of the weights. So what was computed from them before the step (a
companion, a value of `loop.compute`) is a constant in it, and in the end one backward pass goes through all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

State = dict[str, Tensor]
CUT = False  # whether companions and computed values are constants in the hypergradient too, which is wrong
Rule = Callable[[State, State, int], State]  # (companion after the step before, weights after step k, k) -> companion


def ema(decay: float) -> Rule:
    """s⁺ = decay·s + (1 − decay)·w⁺, for the parameters of the companion, by the names they have in the model."""
    return lambda s, w, k: {n: decay * x + (1 - decay) * w[n] for n, x in s.items()}


def copy(every: int) -> Rule:
    """s⁺ = w⁺ after every so many steps, and s between."""
    return lambda s, w, k: {n: w[n] for n in s} if k % every == 0 else s


class Sam:
    """The loss h with its gradient at w + ρ·∇h/‖∇h‖."""

    def __init__(self, h: Callable[..., Tensor], rho: float) -> None:
        self.h, self.rho = h, rho


class Loop:
    """The weights, the optimizer's states and the companions, as tensors of one graph."""

    def __init__(self, model: nn.Module, h: Any, g: Any, optimizer: torch.optim.Optimizer,
                 companions: Mapping[nn.Module, Rule]) -> None:  # fmt: skip
        self._h, self._g, self._optimizer, self._rules = h, g, optimizer, list(companions.values())
        self._modules = [model, *companions]
        self._holder = _Holder(self._modules)
        self._state = [{n: p.detach().clone().requires_grad_(i == 0) for n, p in m.named_parameters()}
                       for i, m in enumerate(self._modules)]  # fmt: skip
        self._moments: dict[str, list[Tensor]] = {}
        self._k, self._kept = 0, False

    def _run(self, loss: Callable[..., Any], weights: State, args: tuple[Any, ...]) -> Any:
        given = {f"held.{i}.{n}": x for i, s in enumerate([weights, *self._state[1:]]) for n, x in s.items()}
        return torch.func.functional_call(self._holder, given, (lambda: loss(self._modules[0], *args),))

    def _direction(self, args: tuple[Any, ...]) -> State:
        at = {n: x.view_as(x) for n, x in self._state[0].items()}
        rho = self._h.rho if isinstance(self._h, Sam) else 0.0
        loss = self._h.h if isinstance(self._h, Sam) else self._h
        d = torch.autograd.grad(self._run(loss, at, args), list(at.values()), create_graph=True)
        if rho:
            norm = torch.stack([x.norm() for x in d]).norm()
            at = {n: x + rho * dx / (norm + 1e-12) for (n, x), dx in zip(at.items(), d, strict=True)}
            at = _perhaps_cut(at, again=True)
            d = torch.autograd.grad(self._run(loss, at, args), list(at.values()), create_graph=True)
        return dict(zip(at, d, strict=True))

    def step(self, *batch: Any) -> None:
        d, self._k = self._direction(batch), self._k + 1
        options = self._optimizer.param_groups[0]
        self._state[0] = {n: self._moved(n, x, d[n], options) for n, x in self._state[0].items()}
        for i, rule in enumerate(self._rules, 1):
            self._state[i] = _perhaps_cut(rule(self._state[i], self._state[0], self._k))
        with torch.no_grad():
            for m, s in zip(self._modules, self._state, strict=True):
                for n, p in m.named_parameters():
                    p.copy_(s[n])

    def _moved(self, name: str, x: Tensor, d: Tensor, o: dict[str, Any]) -> Tensor:
        d = d + o["weight_decay"] * x
        if isinstance(self._optimizer, torch.optim.Adam):
            (b1, b2), (m, v) = o["betas"], self._moments.get(name, [torch.zeros_like(x)] * 2)
            m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d * d
            self._moments[name] = [m, v]
            root = (v / (1 - b2**self._k)).clamp(min=1e-300).sqrt()  # the slope of a root at 0 is infinite
            return x - o["lr"] / (1 - b1**self._k) * m / (root + o["eps"])
        moment = o["momentum"] * self._moments[name][0] + d if name in self._moments else d
        self._moments[name] = [moment]
        return x - o["lr"] * moment

    def compute(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(model, *args) at the current weights and companions."""
        return _perhaps_cut(self._run(fn, self._state[0], args))

    @property
    def value(self) -> Tensor:
        return self._run(self._g, self._state[0], ())

    def hypergrad(self, inputs: list[Tensor]) -> list[Tensor]:
        value = self.value
        if CUT and not value.requires_grad:
            return [torch.zeros_like(x) for x in inputs]
        return list(torch.autograd.grad(value, inputs, allow_unused=CUT, materialize_grads=CUT))

    def commit_(self) -> None:
        self._kept = True


def _perhaps_cut(values: Any, *, again: bool = False) -> Any:
    """The values, without their graph if `CUT`; with `again`, as leaves."""
    return tree_map(lambda x: x.detach().requires_grad_(again), values) if CUT else values


class _Holder(nn.Module):
    def __init__(self, held: list[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(held)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


@contextmanager
def inner(model: nn.Module, h: Any, g: Any, *, solver: str, optimizer: torch.optim.Optimizer,
          companions: Mapping[nn.Module, Rule] | None = None) -> Iterator[Loop]:  # fmt: skip
    assert solver == "gd"
    before = {p: p.detach().clone() for m in (model, *(companions or {})) for p in m.parameters()}
    loop = Loop(model, h, g, optimizer, companions or {})
    yield loop
    if not loop._kept:
        with torch.no_grad():
            for p, x in before.items():
                p.copy_(x)
