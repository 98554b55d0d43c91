"""One of two processes that run the same body in a block: python tests/handle_ranks.py RANK FOLDER."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from handle import LR, SAMPLES, Case, adamw, bent, both, clip_norm, momentum, samples
from torch import Tensor, nn

import bilevel_plugin as bilevel

SIZE = 2


def shared(rank: int | None) -> Case:
    """Each rank has half of the samples; a plain loop has the mean of both ranks' losses."""
    x, y, x_val, y_val = samples()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()), nn.Linear(4, 2))
    lam, mu = torch.linspace(-1, 1, SAMPLES).requires_grad_(), torch.tensor(-2.0, requires_grad=True)

    def part(model: nn.Module, i: Tensor) -> Tensor:
        target = bilevel.stop_gradient(model(x[i])).softmax(1) if rank is not None else model(x[i]).detach().softmax(1)
        out = model(x[i])
        loss = F.cross_entropy(out, y[i], reduction="none") + 0.3 * (out - target).square().sum(1)
        return (lam[i].sigmoid() * loss).mean() + mu.exp() * model[0][0].weight.square().sum()

    def h(model: nn.Module, j: int) -> Any:
        """The j-th micro-batch of a rank, and of both."""
        mine = lambda r: part(model, torch.arange(SAMPLES).view(SIZE, 2, 2)[r, j])
        return (mine(0) + mine(1)) / 2 if rank is None else (mine(rank), {"rank": rank})

    def g(model: nn.Module) -> Tensor:
        outer = lambda r: F.cross_entropy(model(x_val[r::SIZE]), y_val[r::SIZE])
        return (outer(0) + outer(1)) / 2 if rank is None else outer(rank)

    def body(loop: Any, model: Any, made: Any) -> None:
        for j in range(2):
            loop.accumulate(j)
        loop.step()
        loop.step(1, only=model[0])
        loop.accumulate(0, only=model[1])
        loop.accumulate(j=1)
        loop.step()
        loop.step(j=0, only=made[1] if isinstance(made, list) else model[1].weight)
        loop.accumulate(1)  # which no step takes

    return Case(model, h, g, {"lam": lam, "mu": mu}, body)


TOGETHER: dict[str, dict[str, Any]] = {
    "lr": {},
    "both": {"optimizer": both},
    "adamw, clip, direction": {"optimizer": adamw, "options": {"direction": bent, "clip": 0.1}},
    "bigsam": {"options": {"solver": "bigsam"}, "optimizer": momentum},
    "factor": {"optimizer": both, "factor": True},
}


OF_GROUPS = {
    "reverse": "reverse",
    "sqrt": bilevel.Reverse("sqrt"),
    "memory": bilevel.Reverse(memory="1MiB"),
    "unroll": "unroll",
}


def together(name: str, rank: int | None) -> Case:
    case, more = shared(rank), dict(TOGETHER[name])
    if more.pop("factor", False):
        case.outer["factor"] = factor = torch.tensor(0.5, requires_grad=True)
        case.options["lr"] = factor
    case.options |= more.get("options", {})
    case.optimizer = more.get("optimizer")
    if "clip" in case.options and rank is None:
        case.by_hand = clip_norm(0.1)["by_hand"]
    return case


def mistakes(rank: int, group: Any) -> dict[str, str]:
    """What the ranks are told if they do not do the same."""

    def block(call: Callable[[Any, nn.Module], object], **options: Any) -> str:
        case = shared(rank)
        options = {"lr": LR, "solver": "gd", "check": False, **options}
        try:
            with bilevel.inner(case.model, case.h, case.g, group=group, local=case.outer["lam"], **options) as loop:
                call(loop, case.model)
                loop.hypergrad(case.outer["mu"])
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was wrong"

    def more_micro_batches(loop: Any, model: nn.Module) -> None:
        for j in range(1 + rank):
            loop.accumulate(j)
        loop.step()
        loop.step(0)

    rate = torch.tensor(1.0, requires_grad=True)
    learned = {"direction": lambda d: {n: rate * x for n, x in d.items()}}
    return {
        "more micro-batches": block(more_micro_batches),
        "one gathers": block(lambda loop, model: (loop.accumulate(0), loop.step()) if rank else loop.step(0)),
        "a learned direction": block(lambda loop, model: loop.step(0), **learned),
    }


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", (Path(folder) / "store").as_uri(), datetime.timedelta(seconds=40), SIZE, rank)
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    for name in TOGETHER:
        for way, engine in OF_GROUPS.items():
            case = together(name, rank)
            found[f"{name}, {way}"] = case.block(engine, group=group, local=case.outer["lam"])
    found["mistakes"] = mistakes(rank, group)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
