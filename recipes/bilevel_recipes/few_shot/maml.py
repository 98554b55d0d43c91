"""Learn a start from which all weights of an encoder and its head adapt to a task (MAML), and the rates of the steps.

    w_0 = λ,   w_k = w_{k−1} − t_k·∇h(w_{k−1}),   outer loss Σ_k c_k·g(w_k)

MAML has c_K = 1 alone; MAML++ begins with equal weights, which go over to that, and learns a rate t_k for each step and
each weight tensor.

BatchNorm has the statistics of the batch at hand, in training and at test time: those of the support set in a step, and
of all queries of a task when these are judged. This is MAML's own choice. It is transductive: what is said of a query
draws on the other queries. Running statistics would be those of no task in particular.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .episodes import Batch, Images, Pair
from .evaluate import Score, score
from .train import SOLVERS, Result, descend, loss, zero_head

RATES = ("fixed", "step", "tensor")


class Learner(nn.Module):
    """An encoder and a linear head, from which all tasks start, and the rates of the inner steps.

    rates: "fixed"; "step", one for each step is learnt; "tensor", one for each step and weight tensor is.
    """

    def __init__(self, encoder: nn.Module, shape: Sequence[int], ways: int, steps: int, lr: float, rates: str) -> None:
        super().__init__()
        if rates not in RATES:
            raise ValueError(f"recipes.few_shot: rates are one of {', '.join(RATES)}; got {rates!r}")
        encoder = copy.deepcopy(encoder).eval()
        with torch.no_grad():
            image = torch.zeros(1, *shape, device=next(encoder.parameters()).device)
            features = encoder(image).flatten(1)
        self.body = nn.Sequential(encoder, nn.Flatten(), zero_head(features.shape[1], ways).to(features)).train()
        for module in self.body.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        columns = len(list(self.body.parameters())) if rates == "tensor" else 1
        at_start = torch.full((steps, columns), lr, device=features.device)
        self.rates = nn.Parameter(at_start, requires_grad=rates != "fixed")

    @contextmanager
    def block(self, rule: Any, engine: Any, first_order: bool = False) -> Generator[bilevel.Loop]:
        """Open the block of one task. Steps after those with rates take the rates of the last one.

        engine: one that runs no step again, which would be with the rates of another. first_order: the direction of
        each step is a constant, so that no second derivative is taken.
        """
        names = [n for n, _ in self.body.named_parameters()]

        def direction(d: dict[str, Tensor]) -> dict[str, Tensor]:
            rates = self.rates[min(loop.steps, len(self.rates) - 1)].expand(len(names))
            return {n: t * (d[n].detach() if first_order else d[n]) for n, t in zip(names, rates, strict=True)}

        one = torch.optim.SGD(self.body.parameters(), lr=1.0)
        options: dict[str, Any] = {"solver": rule, "optimizer": one, "direction": direction, "engine": engine}
        if first_order:
            options["check"] = False  # the derivative is left out on purpose
        with bilevel.inner(self.body, loss, loss, **options) as loop:
            yield loop


def along(step: int, steps: int, until: int) -> list[float]:
    """Return c_1, …, c_K in an outer step: all equal at first, and from outer step `until` on only the last, as 1."""
    rest = max(0.0, 1 - step / until) / steps if until else 0.0
    return [rest] * (steps - 1) + [1 - (steps - 1) * rest]


def pull(learner: Learner, batch: Batch, weights: Sequence[float], rule: Any = "gd", first_order: bool = False) -> None:
    """Adapt to each task of a batch, and add the hypergradient of Σ_k c_k·g(w_k), summed over them, into .grad.

    A block for each task: with tasks=N the graphs of all tasks would be held at once.
    weights: c_1, …, c_K.
    """
    outer_variables = [p for p in learner.parameters() if p.requires_grad]
    for x, y, x_query, y_query in zip(*batch[0], *batch[1], strict=True):
        with learner.block(rule, "unroll", first_order) as loop:
            for c in weights:
                loop.step(x, y, outer=(x_query, y_query))
                if c:
                    loop.add_outer_loss(weight=c)
            loop.backward(outer_variables)


def meta_train_all(
    learner: Learner,
    episodes: Iterable[Batch],
    *,
    solver: str = "gd",
    steps: int = 5,
    lr: float = 0.4,
    s: float | None = None,
    every: int = 1,
    first_order: bool = False,
    losses_along: int = 0,
    outer_steps: int = 1000,
    eta: float = 1e-3,
    decay: bool = True,
    seed: int = 0,
    state: dict[str, Any] | None = None,
    on_step: Any = None,
) -> Result:
    """Train a copy of the learner, as `meta_train` does an encoder: its weights, and its rates if they are learnt.

    s / lr: the rate on g of a solver with steps on g, as a share of that on h. losses_along: the outer steps in which
    losses of all inner steps count, see `along`.
    """
    learner, method = copy.deepcopy(learner), SOLVERS[solver]

    def outer_step(batch: Batch, step: int) -> None:
        rule = method.rule(1.0, 1.0 if s is None else s / lr, every, step)
        pull(learner, batch, along(step, steps, losses_along), rule, first_order)

    return descend(learner, episodes, outer_step, outer_steps, eta, decay, seed, state, on_step)


def evaluate_all(
    learner: Learner,
    images: Images,
    ways: int,
    shots: int,
    queries: int,
    *,
    steps: Sequence[int] = (5,),
    episodes: int = 600,
    seed: int = 0,
) -> dict[str, Score]:
    """Return the accuracy on the queries of random tasks after "k" steps on the support set, for each k in steps.

    The tasks are those of `evaluate` with the same seed.
    """
    items = images.draw(episodes, ways, shots + queries, torch.Generator().manual_seed(seed))
    y, y_query = (torch.arange(ways, device=items.device).repeat(n) for n in (shots, queries))
    right: dict[str, list[Tensor]] = {}
    for task in items:
        x = images[task]
        for k, found in _adapted(learner, (x[:shots].flatten(0, 1), y), x[shots:].flatten(0, 1), steps).items():
            right.setdefault(k, []).append((found == y_query).float().mean())
    return {k: score(torch.stack(parts)) for k, parts in right.items()}


def _adapted(learner: Learner, support: Pair, x_query: Tensor, steps: Sequence[int]) -> dict[str, Tensor]:
    """Return the class of each query after each of these numbers of steps."""
    found: dict[str, Tensor] = {}
    with learner.block("gd", bilevel.Reverse(truncate=1)) as loop:  # no derivative is taken
        for k in range(1, max(steps) + 1):
            loop.step(*support)
            if k in steps:
                with torch.no_grad():
                    found[str(k)] = loop(x_query).argmax(-1)
    return found
