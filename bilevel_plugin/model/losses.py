"""Losses as a user writes them: how they are called, what they return, and when two of them are the same code."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Loss = Callable[..., Tensor]
_EVALUATING = threading.local()


def evaluating_loss() -> bool:
    """Whether a loss is being evaluated in this thread."""
    return bool(active_models())


def active_models() -> list[frozenset[int]]:
    """Return the ids of the modules of each model whose loss is being evaluated in this thread, the innermost last."""
    if not hasattr(_EVALUATING, "models"):
        _EVALUATING.models = []
    return _EVALUATING.models


def value_and_aux(name: str, returned: Any, *, vector: bool = False) -> tuple[Tensor, Any]:
    """Return the loss, and the second value that was returned with it (None if there is none)."""
    if type(returned) is tuple and len(returned) == 2:
        return scalar(name, returned[0], vector=vector), returned[1]
    return scalar(name, returned, vector=vector), None


def scalar(name: str, value: object, *, vector: bool = False) -> Tensor:
    """Return the value of a loss, or raise an error that names the mistake. `vector`: it may be a vector of losses."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"bilevel.inner: {name} must return a scalar tensor, got {type(value).__name__}. Return the loss itself, "
            "not loss.item(). Other results may be returned as a second value: return loss, logits."
        )
    if value.shape != () and not (vector and value.dim() == 1 and len(value)):
        raise ValueError(
            f"bilevel.inner: {name} must return a scalar, got a tensor of shape {tuple(value.shape)}. Reduce it, "
            "with .mean() or .sum()."
            + (" A vector of outer losses is for hypergrad alone, without tasks=." if name != "h" else "")
        )
    if not value.is_floating_point():
        raise TypeError(f"bilevel.inner: {name} must return a real floating-point loss, got {value.dtype}.")
    return value


def code_of(loss: Any) -> object:
    """Return a key that is equal for a loss that is defined anew in every block: its code and closed-over flags.

    The tensors and numbers that the loss closes over may differ.
    """
    if isinstance(loss, WithKeywords):
        return code_of(loss.loss)
    if isinstance(loss, functools.partial):
        return code_of(loss.func), *map(_switch, (*loss.args, *loss.keywords.values()))
    code = getattr(loss, "__code__", None)
    if code is None:
        return type(loss), *map(_switch, getattr(loss, "__dict__", {}).values())
    held = (*(loss.__defaults__ or ()), *(cell.cell_contents for cell in loss.__closure__ or () if _is_filled(cell)))
    return code, getattr(loss, "__self__", None) and id(loss.__self__), *map(_switch, held)


def _switch(x: object) -> object:
    return x if isinstance(x, (bool, str)) else getattr(x, "__code__", None)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@dataclass(frozen=True)
class WithKeywords:
    """A loss whose last arguments are passed by name."""

    loss: Loss
    keywords: tuple[str, ...]

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n = len(args) - len(self.keywords)
        return args[:n], dict(zip(self.keywords, args[n:], strict=True))

    def __call__(self, *args: Any) -> Tensor:
        positional, named = self._split(args)
        return self.loss(*positional, **named)

    def bind(self, *args: Any) -> None:
        """Raise a TypeError if the loss does not take these arguments."""
        positional, named = self._split(args)
        _signature(self.loss).bind(*positional, **named)


def check_arguments(name: str, loss: Loss, model: nn.Module, batch: tuple[Any, ...], error: TypeError) -> None:
    """Raise an error that names the mistake, if the loss does not take the arguments that the batch gives."""
    try:
        if isinstance(loss, WithKeywords):
            loss.bind(model, *batch)
        else:
            _signature(loss).bind(model, *batch)
    except TypeError as mismatch:
        where = "outer=(...)" if name == "g" else "loop.step(...)"
        named = f" ({', '.join(loss.keywords)} by name)" if isinstance(loss, WithKeywords) else ""
        fix = f"The arguments after the model come from {where}."
        if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            fix = f"The batch is a {type(batch[0]).__name__}: unpack it, loop.step(*batch)."
        elif isinstance(loss, nn.Module):
            fix = f"Its first argument is the model: give a function such as lambda model, x, y: {name}(model(x), y)."
        raise TypeError(
            f"bilevel.inner: {name}(model, *batch) was called with a batch of {len(batch)}{named}: {mismatch}. {fix}"
        ) from error
    except ValueError:  # a built-in without a signature
        pass


def _signature(loss: Any) -> inspect.Signature:
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
