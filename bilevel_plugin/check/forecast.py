"""`bilevel.forecast` says how far a hypergradient can be followed.

A hypergradient is exact at λ. It promises that a small change δ changes the outer loss by ⟨∇g, δ⟩. If training reacts
to λ in jumps, "small" is smaller than any change that is of use. So train again, for changes δ of several sizes, and
put g(λ + δ) − g(λ) beside ⟨∇g, δ⟩.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor

from ..loop import Inputs, Loop
from .smoothness import random_direction, smoothness_of
from .trainings import Train, Trainings, like, rounding

Direction: TypeAlias = Callable[[float, Sequence[Tensor]], Sequence[Tensor]]

SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)
_CURES = "What usually cures it: a lower rate, larger batches, a larger ε in Adam, tanh or GELU in place of ReLU."


@dataclass(frozen=True)
class Forecast:
    """What a gradient promised, and what happened. `print(forecast)` shows it as a table with a sentence.

    Attributes:
        value: the outer loss at λ.
        sizes: how far λ was changed, in the unit of `unit`.
        promised: the change of the outer loss by the gradient, for each size.
        realised: the change of the outer loss after another training, for each size.
        noise: changes below this can't be told from rounding, or from the randomness of the training.
        smoothness: the metasmoothness, in [−1, 1]; NaN if the function that trains does not tell its weights.
        tolerance: the relative error that a promise may have.
        unit: how a size reads, such as "dropping {:.3g} of the rows".
    """

    value: float
    sizes: tuple[float, ...]
    promised: tuple[float, ...]
    realised: tuple[float, ...]
    noise: float
    smoothness: float
    tolerance: float
    unit: str

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative error of each promise; 0 where promise and change are both too small to be told from noise."""
        return tuple(self._error(p, r) for p, r in zip(self.promised, self.realised, strict=True))

    @property
    def radius(self) -> float:
        """The size up to which every promise held within the tolerance; 0 if not even the smallest did."""
        kept = 0.0
        for size, error in zip(self.sizes, self.errors, strict=True):
            if error > self.tolerance:
                break
            kept = size
        return kept if any(self._seen(p, r) for p, r in zip(self.promised, self.realised, strict=True)) else 0.0

    def __bool__(self) -> bool:
        return self.radius > 0

    def sentence(self) -> str:
        """Return in words how far the gradient can be followed."""
        if not any(self._seen(p, r) for p, r in zip(self.promised, self.realised, strict=True)):
            return f"Nothing can be said: no change of the outer loss was above the noise, {self.noise:.1e}."
        if not self.radius:
            return (
                f"Not worth following: already {self.unit.format(self.sizes[0])} promised {self.promised[0]:+.2e} and "
                f"changed the outer loss by {self.realised[0]:+.2e}. {_CURES}"
            )
        last = self.radius == self.sizes[-1]
        return f"Reliable up to {self.unit.format(self.radius)}{', the largest size that was tried' * last}."

    def __str__(self) -> str:
        lines = [f"outer loss {self.value:.6g}", f"{'size':>8} {'promised':>11} {'realised':>11} {'error':>7}"]
        for size, p, r, error in zip(self.sizes, self.promised, self.realised, self.errors, strict=True):
            shown = f"{error:7.1%}" if self._seen(p, r) else "  noise"
            lines.append(f"{size:8.3g} {p:+11.3e} {r:+11.3e} {shown}{'' if error <= self.tolerance else '  off'}")
        if not math.isnan(self.smoothness):
            lines.append(f"metasmoothness {self.smoothness:.2f}")
        return "\n".join([*lines, self.sentence()])

    def _seen(self, promised: float, realised: float) -> bool:
        return max(abs(promised), abs(realised)) > 4 * self.noise

    def _error(self, promised: float, realised: float) -> float:
        if not self._seen(promised, realised):
            return 0.0
        if not (math.isfinite(promised) and math.isfinite(realised)):
            return math.inf
        return abs(promised - realised) / abs(promised) if promised else math.inf


def forecast(
    train: Train,
    lam: Inputs,
    *,
    direction: Direction | Tensor | Sequence[Tensor] | None = None,
    sizes: Sequence[float] = SIZES,
    loss: Callable[[Loop], Tensor] | None = None,
    tolerance: float = 0.2,
    unit: str | None = None,
    seed: int = 0,
) -> Forecast:
    """Train again after changes of λ of several sizes, and compare the outer loss with what its gradient promises.

    Args:
        train: a function that trains, as `check_loop` takes it: called as `train(lam)` or `train()`, it opens a block
            and takes a hypergradient, where each call ends. It may also `yield loop` when training is done. Or it
            returns the outer loss, its gradient, and if it can the trained weights. It is called 4 + len(sizes) times,
            with the same random state of torch, and only the first call takes a hypergradient.
        lam: the outer variable. Its tensors are changed in place between the calls, and put back at the end.
        direction: where to go. By default along −gradient, where size 1 is a change as large as λ itself. A tensor (or
            one for each tensor of λ) is multiplied by the size. A function gets the size and the gradient, and returns
            the change.
        sizes: the sizes to try, in ascending order.
        loss: another outer loss instead of g, as a function of the loop.
        tolerance: the relative error that a promise may have.
        unit: how a size reads in the sentence, with one place for the size.
        seed: of the random direction of the metasmoothness.

    Examples:
        The outer loss is (λ − 1)²/2, so a step of size s along −1 is promised s/2 and gives s/2 − s²/8 at λ = 0.5.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> lam = torch.tensor([0.5], requires_grad=True)
        >>> h = lambda m: (m.weight - lam).square().sum()
        >>> g = lambda m: 0.5 * (m.weight - 1).square().sum()
        >>> def train(lam):
        ...     with bilevel.inner(model, h, g, solver="gd", lr=0.5) as loop:
        ...         _ = loop.step()
        ...         yield loop
        >>> found = bilevel.forecast(train, lam, sizes=(0.1, 0.3, 1.0))
        >>> found.radius
        0.3
        >>> print(found.sentence())
        Reliable up to a change of 0.3 times the size of the outer variable.
    """
    sizes = tuple(float(s) for s in sizes)
    if not sizes or sizes[0] <= 0 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"bilevel.forecast: sizes are positive numbers in ascending order, got {sizes}.")
    runs = Trainings(train, lam, loss)
    here = runs.at(None, gradient=True)
    assert here.gradient is not None
    go = _along(direction, here.gradient, runs.tensors)
    again = runs.at(None)
    noise = max(abs(again.value - here.value), 16 * rounding(runs.tensors) * abs(here.value))
    promised: list[float] = []
    realised: list[float] = []
    for size in sizes:
        moves = go(size, here.gradient)
        promised.append(sum(float((d.double() * m.double()).sum()) for d, m in zip(here.gradient, moves, strict=True)))
        realised.append(_value(runs, moves) - here.value)
    smooth = smoothness_of(runs, here, random_direction(runs.tensors, seed), 0.1) if here.weights else math.nan
    return Forecast(
        here.value, sizes, tuple(promised), tuple(realised), noise, smooth, tolerance, unit or _unit_of(direction)
    )


def _value(runs: Trainings, moves: Sequence[Tensor]) -> float:
    try:
        return runs.at(moves).value
    except FloatingPointError:  # the training diverged there
        return math.inf


# --- directions ------------------------------------------------------------------------------------------------


def _along(direction: Any, gradient: Sequence[Tensor], lam: Sequence[Tensor]) -> Direction:
    if callable(direction) and not isinstance(direction, Tensor):
        chosen = cast("Direction", direction)
        return lambda size, found: like(list(chosen(size, found)), lam)
    if direction is None:
        length = math.sqrt(sum(float(d.double().square().sum()) for d in gradient))
        if not 0 < length < math.inf:
            raise ValueError(
                f"bilevel.forecast: the norm of the gradient is {length:g}, so it shows no direction. Give direction=."
            )
        own = math.sqrt(sum(float(x.detach().double().square().sum()) for x in lam))
        scale = (own or math.sqrt(sum(x.numel() for x in lam))) / length
        return lambda size, found: [-size * scale * d for d in found]
    fixed = like([direction] if isinstance(direction, Tensor) else list(direction), lam)
    return lambda size, found: [size * v for v in fixed]


def _unit_of(direction: Any) -> str:
    if direction is None:
        return "a change of {:.3g} times the size of the outer variable"
    return "size {:.3g}" if callable(direction) and not isinstance(direction, Tensor) else "{:.3g} times the direction"
