"""Trainings that begin with the same random numbers and differ in the outer variable alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..loop import Inputs, Loop, flatten

Train: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """One training: the outer loss, its gradient if it was asked for, and the trained weights if they are known."""

    value: float
    gradient: list[Tensor] | None
    weights: list[Tensor]


class Trainings:
    """Trainings that begin with the same random numbers and differ in λ alone."""

    def __init__(self, train: Train, lam: Inputs, loss: Callable[[Loop], Tensor] | None) -> None:
        self._train, self._lam, self._loss = train, lam, loss
        self.tensors = list(flatten(lam).values())
        self._start = [x.detach().clone() for x in self.tensors]
        self._random = torch.get_rng_state()

    def at(self, moves: Sequence[Tensor] | None, gradient: bool = False) -> Outcome:
        """Train at λ + moves; afterwards λ and the random state are what they were."""
        try:
            if moves is not None:
                self._set([x + m for x, m in zip(self._start, moves, strict=True)])
            torch.set_rng_state(self._random)
            return self._outcome(self._train(self._lam), gradient)
        finally:
            self._set(self._start)
            torch.set_rng_state(self._random)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for x, value in zip(self.tensors, values, strict=True):
                x.copy_(value)

    def _outcome(self, found: Any, gradient: bool) -> Outcome:
        if isinstance(found, Iterator):
            return self._of_loop(found, gradient)
        value, *more = found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]
        if gradient and not more:
            raise TypeError(
                "bilevel.forecast: the function that trains returned the outer loss without its gradient. Let it "
                "return (loop.value, loop.hypergrad(lam)), or `yield loop` inside of the block."
            )
        grads = like(list(listed(more[0])), self.tensors) if gradient else None
        weights = [x.detach().clone() for x in listed(more[1])] if len(more) > 1 else []
        return Outcome(float(value), grads, weights)

    def _of_loop(self, training: Iterator[Any], gradient: bool) -> Outcome:
        try:
            loop = next(training, None)
            if not isinstance(loop, Loop):
                raise TypeError(
                    f"bilevel.forecast: the function that trains yielded {type(loop).__name__}, and not its loop. "
                    "Write `yield loop` as the last line of the block."
                )
            loss = None if self._loss is None else self._loss(loop)
            value = float(loop.value if loss is None else loss.detach())
            weights = [x.detach().clone() for x in loop.weights.values()]
            grads = list(listed(loop.hypergrad(self._lam, loss=loss))) if gradient else None  # pyright: ignore
            next(training, None)  # leave the block as its own lines do
            return Outcome(value, grads, weights)
        finally:
            getattr(training, "close", lambda: None)()


def listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found.values() if isinstance(found, dict) else found)


def like(found: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    shapes, wanted = [tuple(x.shape) for x in found], [tuple(x.shape) for x in like]
    if shapes != wanted:
        raise ValueError(f"bilevel.forecast: a tensor for each of λ is needed, of shapes {wanted}; got {shapes}.")
    return [x.detach() for x in found]


def rounding(lam: Sequence[Tensor]) -> float:
    return max(torch.finfo(x.dtype).eps for x in lam)
