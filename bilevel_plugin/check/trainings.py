"""Trainings that begin with the same random numbers and differ in the outer variable alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..loop import Inputs, Loop, flatten
from ..model.losses import evaluating_loss
from .watching import watching

Train: TypeAlias = Callable[..., Any]
R = TypeVar("R")


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

        def outcome(loop: Loop, outer: Any, loss: Tensor | None) -> Outcome:
            return self._of_loop(loop, outer, loss if self._loss is None else self._loss(loop), gradient)

        try:
            if moves is not None:
                self._set([x + m for x, m in zip(self._start, moves, strict=True)])
            torch.set_rng_state(self._random)
            found = at_end(self._train, self._lam, outcome)
            return found if isinstance(found, Outcome) else self._told(found, gradient)
        finally:
            self._set(self._start)
            torch.set_rng_state(self._random)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for x, value in zip(self.tensors, values, strict=True):
                x.copy_(value)

    def _of_loop(self, loop: Loop, outer: Any, loss: Tensor | None, gradient: bool) -> Outcome:
        weights = [x.detach().clone() for x in loop.weights.values()]
        if loss is None and outer is not None:
            loop.add_outer_loss(outer=outer)
        value = float(loop.value if loss is None else loss.detach())
        grads = loop.hypergrad(self.tensors, loss=loss) if gradient else None
        return Outcome(value, grads, weights)

    def _told(self, found: Any, gradient: bool) -> Outcome:
        """Return what a function has returned that took no hypergradient."""
        value, *more = found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]
        if gradient and not more:
            raise TypeError(
                "bilevel.forecast: the function that trains took no hypergradient. Let it call loop.hypergrad(lam), or "
                "`yield loop` as the last line of the block, or return (outer loss, gradient)."
            )
        grads = like(listed(more[0]), self.tensors) if gradient else None
        return Outcome(float(value), grads, [x.detach().clone() for x in listed(more[1])] if len(more) > 1 else [])


class _Done(BaseException):
    """Ends the user's function where its training has ended."""


def at_end(train: Train, lam: Any, use: Callable[[Loop, Any, Tensor | None], R]) -> R | Any:
    """Run a function that trains, and return what `use` makes of its trained loop, whose block is open.

    The training has ended where the function yields its loop, or calls `hypergrad` or `backward`: it does not go on
    from there. `use` gets the loop, and the `outer` and `loss` of that call. A function that does neither is run to its
    end, and what it returns is returned.

    train: called as `train(lam)`, or as `train()` if it takes no argument.
    """
    found: list[R] = []

    def watch(_: Any, loop: Loop) -> None:
        def end(*_: Any, outer: Any = None, loss: Tensor | None = None, **named: Any) -> Any:
            for name in ("hypergrad", "backward"):
                vars(loop).pop(name)
            found.append(use(loop, outer, loss))
            raise _Done

        if not evaluating_loss():  # a block inside of a loss has hypergradients of its own
            vars(loop).update(hypergrad=end, backward=end)

    training: Any = None
    try:
        with watching(watch):
            training = _call(train, lam)
            if not isinstance(training, Iterator):
                return training
            loop = next(training, None)
            if not isinstance(loop, Loop):
                raise TypeError(
                    f"bilevel.forecast: the function that trains yielded {type(loop).__name__}, and not its loop. "
                    "Write `yield loop` as the last line of the block."
                )
            loop.hypergrad(())
    except _Done:
        pass
    finally:
        getattr(training, "close", lambda: None)()
    return found[0]


def _call(train: Train, lam: Any) -> Any:
    try:
        inspect.signature(train).bind()
    except (TypeError, ValueError):  # it takes an argument, or does not say
        return train(lam)
    return train()


def listed(found: Any) -> list[Tensor]:
    """Return a tensor, or the tensors of a list or dict, as a list."""
    return [found] if isinstance(found, Tensor) else list(found.values() if isinstance(found, dict) else found)


def like(found: list[Tensor], lam: Sequence[Tensor]) -> list[Tensor]:
    """Check that there is a tensor for each of λ, and return them without a graph."""
    shapes, wanted = [tuple(x.shape) for x in found], [tuple(x.shape) for x in lam]
    if shapes != wanted:
        raise ValueError(f"bilevel.forecast: a tensor for each of λ is needed, of shapes {wanted}; got {shapes}.")
    return [x.detach() for x in found]


def rounding(lam: Sequence[Tensor]) -> float:
    """Return the largest rounding unit of these tensors."""
    return max(torch.finfo(x.dtype).eps for x in lam)
