"""What the command does with two tables: train, attribute, and say how far to trust it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .attribution import Attribution, trained
from .influence import Influence
from .models import Plan, network, scaled, training
from .rows import Both
from .trust import Trust

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Explained:
    """Queries, what the model said to them, and the rows that made it say so.

    said: the class that the model gives each query. sure: its probability. asked: the class whose loss was attributed.
    accuracy: the share of the queries answered rightly, before any were left out; NaN without labels.
    """

    both: Both
    influence: Influence
    trust: Trust
    said: np.ndarray
    sure: np.ndarray
    asked: np.ndarray
    accuracy: float


def explain(
    both: Both, plan: Plan, *, leave_out: float | int, about: str, wrong: bool, subsets: int, most: int,
    folder: Path | None = None, progress: Progress | None = None,
) -> Explained:  # fmt: skip
    """Train a model on the rows, and attribute the losses of the queries to them.

    about: "prediction" for the loss of what the model says, "label" for that of the right class. wrong: only queries
    that are answered wrongly. most: how many queries at most.
    """
    say = progress or (lambda share, words: None)
    if not both.labelled and (wrong or about == "label"):
        raise ValueError(
            "bilevel-attribute: --queries has no labels, so it isn't known which answers are wrong. Leave out --wrong "
            "and --about label, or add the column."
        )
    x, y = scaled(both.x), torch.tensor(both.rows.y)
    model = network(plan, x.shape[1], len(both.rows.classes))
    train = training(plan, model, x[both.train], y[both.train])
    say(0.0, "training")
    ones = torch.ones(len(both.train)).requires_grad_()
    p = trained(train, ones, lambda loop: loop(x[both.queries]).detach().softmax(1))
    right = p.argmax(1) == y[both.queries]
    accuracy = float(right.float().mean()) if both.labelled else float("nan")
    chosen = np.flatnonzero(~right.numpy()) if wrong else np.arange(len(both.queries))
    if not len(chosen):
        raise ValueError(f"bilevel-attribute: all {len(right)} queries are answered rightly. Leave out --wrong.")
    chosen = chosen[:most]
    p, both = p[chosen], both.only(chosen)
    said = p.argmax(1)
    asked = said if about == "prediction" else y[both.queries]
    names = [both.name(int(i)) for i in both.queries]
    work = Attribution(
        train, [both.name(int(i)) for i in both.train], _losses(x[both.queries], asked), leave_out, names
    )
    found = work.explain(folder=folder, progress=lambda share, words: say(0.1 + 0.6 * share, words))
    trust = work.trust(found, subsets=subsets, seed=plan.seed, progress=lambda s, words: say(0.7 + 0.3 * s, words))
    say(1.0, "done")
    return Explained(both, found, trust, said.numpy(), p.max(1).values.numpy(), asked.numpy(), accuracy)


def _losses(x: Tensor, asked: Tensor) -> Callable[[Any], Tensor]:
    return lambda model: cross_entropy(model(x), asked, reduction="none")
