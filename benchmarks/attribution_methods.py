"""The methods of the study of attribution. Each gives scores, rows × queries, or predictions of its own.

The rivals are those of dattri, with the options of its own benchmark (experiments/benchmark_result.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bilevel_recipes.attribution import Attribution, Influence

from .attribution_settings import Problem, State

PEERS = Path(os.environ.get("ATTRIBUTION_PEERS") or Path(__file__).parent.parent / ".venv" / "attribution-peers")
DAMPING = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
MODELS = 10  # for TracIn and TRAK


def ours(p: Problem, leave_out: float | int, order: int = 0) -> tuple[Influence, float]:
    """The influence by one training at the point of linearisation, and the CPU seconds that it took."""
    begin = time.process_time()
    found = Attribution(p.train(order), len(p.x), p.queries, leave_out).explain()
    return found, time.process_time() - begin


def dattri() -> Any:
    """The module, from the folder that the Makefile installs it into; None where it is not there."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))  # last: it brings packages called docs and test
    try:
        import dattri.algorithm as found  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return found


Scores = list[tuple[Tensor, float, str]]  # the scores of each option, their CPU seconds, and what the option was


def peers(p: Problem, full: list[State], half: list[State]) -> dict[str, Callable[[], Scores]]:
    """The methods of dattri by name. full, half: trainings on all rows, and on random halves of them."""
    found = dattri()
    if found is None:
        return {}
    p.model.eval()
    damped: dict[str, Any] = {
        "influence, CG": lambda task, r: found.IFAttributorCG(**task, regularization=r, max_iter=10),
        "influence, Arnoldi": lambda task, r: found.IFAttributorArnoldi(**task, regularization=r, max_iter=50),
    }
    if sum(x.numel() for x in p.start.values()) <= 1000:
        damped["influence, explicit"] = lambda task, r: found.IFAttributorExplicit(**task, regularization=r)
    methods: dict[str, Callable[[], Scores]] = {
        name: partial(_with_each_damping, p, full[:1], make) for name, make in damped.items()
    }
    averaged = {"TracIn": (full, False), "gradient dot": (full[:1], False), "gradient cosine": (full[:1], True)}
    for name, (models, cosine) in averaged.items():
        methods[name] = partial(_timed, partial(_tracin, p, found, models, cosine))
    methods[f"TRAK, {MODELS} models"] = partial(_timed, partial(_trak, p, found, half))
    return methods


def _task(p: Problem, states: list[State], what: str) -> dict[str, Any]:
    from dattri.task import AttributionTask  # pyright: ignore[reportMissingImports]

    def batch(params: Any, data: Any) -> Tensor:
        return p.losses(lambda x: functional_call(p.model, params, (x,)), *data).mean()

    def row(params: Any, data: Any) -> Tensor:
        return batch(params, [d.unsqueeze(0) for d in data])

    def margin(params: Any, data: Any) -> Tensor:
        log = -row(params, data)
        return log - torch.log(1 - torch.exp(log))

    loss = {"batch": batch, "row": row, "margin": margin}[what]
    return {"task": AttributionTask(model=p.model, loss_func=loss, checkpoints=states), "device": "cpu"}


def _loaders(p: Problem) -> tuple[Any, Any]:
    from torch.utils.data import DataLoader, TensorDataset

    return tuple(DataLoader(TensorDataset(x, y), batch_size=500) for x, y in ((p.x, p.y), (p.xq, p.yq)))  # pyright: ignore


def _with_each_damping(p: Problem, full: list[State], make: Callable[[Any, float], Any]) -> Scores:
    from torch.utils.data import DataLoader, TensorDataset

    def scores(damping: float) -> Tensor:
        attributor = make(_task(p, full, "batch"), damping)
        attributor.cache(DataLoader(TensorDataset(p.x, p.y), batch_size=len(p.x)))
        with torch.no_grad():
            return attributor.attribute(*_loaders(p))

    return [x for r in DAMPING for x in _timed(partial(scores, r), f"damping {r:g}")]


def _tracin(p: Problem, found: Any, models: list[State], cosine: bool) -> Tensor:
    rates = torch.full((len(models),), 1e-3)
    attributor = found.TracInAttributor(**_task(p, models, "row"), weight_list=rates, normalized_grad=cosine)
    with torch.no_grad():
        return attributor.attribute(*_loaders(p))


def _trak(p: Problem, found: Any, half: list[State]) -> Tensor:
    def right(params: Any, data: Any) -> Tensor:
        loss = p.losses(lambda x: functional_call(p.model, params, (x,)), *(d.unsqueeze(0) for d in data))
        return torch.exp(-loss.mean())

    attributor = found.TRAKAttributor(
        **_task(p, half, "margin"), correct_probability_func=right, projector_kwargs={"proj_dim": 512, "device": "cpu"},
        regularization=1e-4,
    )  # fmt: skip
    train, test = _loaders(p)
    attributor.cache(train)
    with torch.no_grad():
        return attributor.attribute(test)


def _timed(scores: Callable[[], Tensor], option: str = "") -> Scores:
    begin = time.process_time()
    found = scores().detach()
    return [(found, time.process_time() - begin, option)]
