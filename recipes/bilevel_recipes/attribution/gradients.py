"""The gradient of each query's loss with respect to the weights of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def gradients_of(
    loop: Any, weights: Tensor, queries: Callable[[Any], Tensor], which: range, at_once: int = 20
) -> Iterator[Tensor]:
    """Yield d loss_q / d weights for each query q of `which`, from one sweep for every `at_once` of them."""
    losses = queries(loop)
    for begin in range(0, len(which), at_once):
        some = which[begin : begin + at_once]
        yield from loop.hypergrad(weights, loss=losses[some.start : some.stop], allow_unused=True)
