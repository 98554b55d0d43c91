"""Solvers: how much of ∇h and of ∇g goes into step k.

Every solver is a pair of weights; the step itself is the same for all of them:

    w⁺ = w − ∇_w [ c_h(k)·h(w, λ) + c_g(k)·g(w, λ) ]

A rate is a float, a scalar tensor (if it requires grad, it is an outer variable like any other), or a
function of k = 1, 2, … that returns one of the two.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .schedules import power

Value = float | Tensor
Rate = Value | Callable[[int], Value]

_PAPER = power(0.25)
_VANISHING = power(1.0)  # 1/k


def evaluate(name: str, rate: Rate, k: int, most: float = math.inf) -> Value:
    """Return the rate at step k. An error begins with the name, such as "bilevel.GD: t".

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.evaluate("t", lambda k: 1 / k, k=4)
        0.25
        >>> bilevel.evaluate("t", -1.0, k=4)
        Traceback (most recent call last):
        ValueError: t must be finite and at least 0, got -1.0 at k = 4.
    """
    value = rate(k) if callable(rate) else rate
    if isinstance(value, Tensor):
        if value.numel() != 1:
            short = name.rpartition(" ")[2]
            raise ValueError(
                f"{name} must be a scalar, got a tensor of shape {tuple(value.shape)}. To have a rate for each step, "
                f"give a function: lambda k: {short}[k - 1]."
            )
        value = value.reshape(()) if value.dim() else value
        if value.device.type != "cpu":  # reading it would make the host wait for the device
            return value
        number = float(value.detach())
    elif isinstance(value, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        number = float(value)
    else:
        raise TypeError(
            f"{name} must be a number, a scalar tensor or a function of k that returns one, got {value!r} "
            f"({type(value).__name__})."
        )
    if not (0 <= number <= most and math.isfinite(number)):
        span = "at least 0" if most == math.inf else f"between 0 and {most:g}"
        raise ValueError(f"{name} must be finite and {span}, got {number} at k = {k}.")
    return value


class StepRule(ABC):
    """The base class of solvers: the weights (c_h, c_g) of the two losses in step k. A 0 leaves a loss out."""

    @abstractmethod
    def weights(self, k: int) -> tuple[Value, Value]: ...

    def lacks(self, need: str) -> str | None:
        """Return why the rule does not have what an engine needs ("fixed point", "symmetry"), or None if it has it."""
        return None


@dataclass(frozen=True)
class GD(StepRule):
    """w⁺ = w − t·∇h: the basic bilevel model (paper, Alg. 5).

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.GD(0.1).weights(k=1)
        (0.1, 0.0)
    """

    t: Rate

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, k: int) -> tuple[Value, Value]:
        return evaluate("bilevel.GD: t", self.t, k), 0.0


@dataclass(frozen=True)
class BiGSAM(StepRule):
    """w⁺ = w − t·α_k·∇h − s·(1 − α_k)·∇g: the improved model (paper, Alg. 1).

    s defaults to t. `every=m` takes such a step at k = m, 2m, … and one with α = 1 between (Fig. 2).

    Examples:
        The weights of ∇h and ∇g in step 16, where the default α_k = k^−0.25 is 1/2:

        >>> import bilevel_plugin as bilevel
        >>> bilevel.BiGSAM(t=1.0).weights(k=16)
        (0.5, 0.5)
        >>> bilevel.BiGSAM(t=1.0, s=0.5, alpha=bilevel.convergent(), every=3).weights(k=3)  # α_3 = 1 − 4^−0.5
        (0.5, 0.25)
        >>> bilevel.BiGSAM(t=1.0, s=0.5, alpha=bilevel.convergent(), every=3).weights(k=2)
        (1.0, 0.0)
    """

    t: Rate
    s: Rate | None = None
    alpha: Rate = _PAPER
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"bilevel.BiGSAM: every must be at least 1, got {self.every}.")
        _check(self)

    def weights(self, k: int) -> tuple[Value, Value]:
        t = evaluate("bilevel.BiGSAM: t", self.t, k)
        if k % self.every:
            return t, 0.0
        alpha = evaluate("bilevel.BiGSAM: alpha", self.alpha, k, most=1)
        s = t if self.s is None else evaluate("bilevel.BiGSAM: s", self.s, k)
        return t * alpha, s * (1 - alpha)

    def lacks(self, need: str) -> str | None:
        if need == "fixed point" and self.every > 1:
            return f"every={self.every} alternates between two maps, and no w is fixed under both"
        return None


@dataclass(frozen=True)
class BDA(StepRule):
    """w⁺ = w − s·α_k·∇g − t·(1 − α_k)·∇h: BiGSAM with the roles of α and 1 − α swapped (Liu et al. 2020).

    The default α_k = 1/k vanishes, as their analysis requires.

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.BDA(t=1.0).weights(k=4)
        (0.75, 0.25)
    """

    t: Rate
    s: Rate | None = None
    alpha: Rate = _VANISHING

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, k: int) -> tuple[Value, Value]:
        t = evaluate("bilevel.BDA: t", self.t, k)
        alpha = evaluate("bilevel.BDA: alpha", self.alpha, k, most=1)
        s = t if self.s is None else evaluate("bilevel.BDA: s", self.s, k)
        return t * (1 - alpha), s * alpha


@dataclass(frozen=True)
class Penalty(StepRule):
    """w⁺ = w − t·∇(h + c·g): Tikhonov regularisation with the outer loss (paper, App. A).

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.Penalty(t=0.5, c=0.5).weights(k=1)
        (0.5, 0.25)
    """

    t: Rate
    c: Rate = 0.1

    def __post_init__(self) -> None:
        _check(self)

    def weights(self, k: int) -> tuple[Value, Value]:
        t = evaluate("bilevel.Penalty: t", self.t, k)
        return t, t * evaluate("bilevel.Penalty: c", self.c, k)


SOLVERS: dict[str, Callable[[Rate], StepRule]] = {"gd": GD, "bigsam": BiGSAM, "bda": BDA, "penalty": Penalty}


def resolve(solver: str | StepRule, lr: Rate | None, has_optimizer: bool) -> tuple[StepRule, Rate | None]:
    """Return the solver that `inner` was given, and the rate of the update; None if solver or optimizer has the rate.

    The rates of a solver that is given by name are 1, and the update has the rate, as in the plain loop.
    """
    if isinstance(solver, StepRule):
        if lr is not None:
            raise ValueError(
                f"bilevel.inner: lr={lr} and a solver object were both given. Set the rates in the object: "
                f"{type(solver).__name__}(t={lr}), or give the solver by name."
            )
        return solver, None
    if solver not in SOLVERS:
        known = ", ".join(map(repr, SOLVERS))
        hint = f" Make an object of it: {solver.__name__}(t=0.1)." if isinstance(solver, type) else ""
        raise ValueError(f"bilevel.inner: unknown solver {solver!r}. Known: {known}, or a StepRule object.{hint}")
    if has_optimizer and lr is None:
        return SOLVERS[solver](1.0), None
    rate = 1e-3 if lr is None else lr  # torch.optim.SGD's default, and the paper's rate
    evaluate("bilevel.inner: lr", rate, 1)
    return SOLVERS[solver](1.0), rate


def _check(rule: StepRule) -> None:
    rule.weights(1)
    rule.weights(getattr(rule, "every", 1))  # the first step in which s and alpha are used
