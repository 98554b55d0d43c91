"""Linear heads on features: how they are fitted to a few pictures of each class, and the rates that suit that best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .episodes import Batch
from .train import adapt_and_pull, prepare, zero_head

_NUMBERS = 50_000_000  # in the features of the tasks that are adapted together when pictures are left out in turn
_LEFT_OUT = 500  # the largest number of pictures that are left out in turn


@dataclass(frozen=True)
class Head:
    """The way to fit a linear head: gradient steps from zero on the cross-entropy + ½·decay·‖W‖².

    The cross-entropy is the mean over the classes, so that a class with more pictures does not weigh more.

    rates: of each step, for tasks of so many ways; with other ways they change in proportion, since the mean over n
    times as many classes has n times less gradient for each. features: what the head sees, a name of `train.FEATURES`.
    """

    rates: list[float]
    ways: int
    decay: float = 0.0
    features: str = "sphere"

    def rate(self, ways: int) -> Callable[[int], float]:
        """Return the rate of step k = 1, 2, … in a task of so many ways."""
        return lambda k: self.rates[k - 1] * ways / self.ways


# For features that no head was trained with. The decay bounds the weights where one picture of each class is separable
# whatever it shows; measured on patches of digits and of photographs: docs/few_shot.md.
DEFAULT = Head([0.4] * 50, 5, 0.1)


def probabilities(f: Tensor, y: Tensor, f_query: Tensor, ways: int, head: Head) -> Tensor:
    """Return the probability of each class for the queries of each task: (tasks, n, d), … -> (tasks, m, ways).

    The head is fitted to the support set alone (α = 1), so its answer for a query does not depend on other queries.
    """
    f, f_query = prepare(head.features)(f, f_query)

    counts = F.one_hot(y, ways).sum(1)
    weight = ((counts > 0).sum(1, keepdim=True) * counts.gather(1, y)).to(f).reciprocal()

    def loss(model: nn.Module, f: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (
            weight * F.cross_entropy(model(f), y, reduction="none")
        ).sum() + 0.5 * head.decay * model.weight.square().sum()  # type: ignore[operator]

    rule, engine = bilevel.GD(head.rate(ways)), bilevel.Reverse(truncate=1)
    linear = zero_head(f.shape[-1], ways).to(f)
    with bilevel.inner(linear, loss, loss, solver=rule, tasks=len(f), engine=engine) as loop:
        loop.run(len(head.rates), f, y, weight)
        with torch.no_grad():
            return loop(f_query).softmax(-1)


def leave_one_out(f: Tensor, y: Tensor, ways: int, head: Head) -> tuple[int, int]:
    """Return how many pictures are recognised by a head fitted to all others, and how many were tried.

    A picture that is the only one of its class is not tried. Of more than 500 pictures, 500 evenly spaced ones are.
    """
    several = torch.bincount(y, minlength=ways)[y] > 1
    tried = several.nonzero().flatten()
    if len(tried) > _LEFT_OUT:
        tried = tried[torch.linspace(0, len(tried) - 1, _LEFT_OUT).long()]
    if not len(tried):
        return 0, 0
    others = torch.arange(len(y) - 1) + (torch.arange(len(y) - 1) >= tried[:, None])  # all rows but the one left out
    right = 0
    for rows, out in zip(*(part.split(max(1, _NUMBERS // f.numel())) for part in (others, tried)), strict=True):
        p = probabilities(f[rows], y[rows], f[out][:, None], ways, head)
        right += int((p[:, 0].argmax(-1) == y[out]).sum())
    return right, len(tried)


def learn_rates(batches: Iterator[Batch], ways: int, start: Head, outer_steps: int, eta: float = 0.05) -> Head:
    """Learn the rate of each step by its hypergradient, on tasks whose pictures are features already.

    The outer variables are the logarithms of the rates; Adam's rate for them falls to 0 along half a cosine.
    """
    log = torch.tensor([start.rate(ways)(k + 1) for k in range(len(start.rates))]).log().requires_grad_()
    adam = torch.optim.Adam([log], eta)
    for step in range(outer_steps):
        (x, y), (x_query, y_query) = next(batches)
        f, f_query = prepare(start.features)(x.flatten(2), x_query.flatten(2))
        query = f_query, y_query
        adam.zero_grad()
        adapt_and_pull((f, y), query, query, ways, len(log), bilevel.GD(lambda k: log[k - 1].exp()), "unroll")
        adam.param_groups[0]["lr"] = eta * (0.5 + 0.5 * math.cos(math.pi * step / outer_steps))
        adam.step()
    return Head(log.detach().exp().tolist(), ways, start.decay, start.features)
