"""The gradient of each query's loss with respect to the weights of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def gradients_of(loop: Any, weights: Tensor, queries: Callable[[Any], Tensor], which: range) -> Iterator[Tensor]:
    """Yield d loss_q / d weights for each query q of `which`, one hypergradient a query.

    The losses are computed anew for each, since a hypergradient uses up their graph.
    """
    for q in which:
        yield loop.hypergrad(weights, loss=queries(loop)[q], allow_unused=True)
