"""How well methods of attribution predict a training without some rows: ours, and those of dattri.

    make attribution DATA=folder-with-MNIST

Each piece of work is a file in runs/attribution, and is not done again. The page is made of the pieces that are there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel_plugin as bilevel
from bilevel_recipes import runs
from bilevel_recipes.attribution import Attribution
from bilevel_recipes.attribution.trust import random_subsets

from . import attribution_methods as methods
from .attribution_settings import SETTINGS, Problem, Setting

SUBSETS = 100
Piece = tuple[str, Callable[[], dict[str, Any]]]


def pieces(s: Setting, root: Path | None, folder: Path) -> Iterator[Piece]:
    """The pieces of a setting by the names of their files, in the order in which they are done."""
    made: list[Problem] = []

    def p() -> Problem:
        return made[0] if made else made.append(Problem(s, root)) or made[0]  # pyright: ignore

    yield f"{s.name}_about", lambda: about(p())
    for share in s.shares:
        for order in range(s.orders):
            yield f"{s.name}_truth_{share:g}_{order}", lambda share=share, order=order: truth(p(), share, order)
    for order in range(s.orders):
        for leave_out in (*s.shares, 1) if order == 0 else s.shares:
            yield f"{s.name}_ours_{leave_out:g}_{order}", lambda out=leave_out, order=order: ours(p(), out, order)
    yield f"{s.name}_peers", lambda: peers(p())
    if s.model == "GPT":
        yield f"{s.name}_tokens", lambda: tokens(p())
    if s.name == "digits-tanh":
        yield f"{s.name}_brittle", lambda: brittle(p(), folder)
        yield f"{s.name}_wrong", lambda: wrong_labels(p())


def subsets(p: Problem, share: float) -> Tensor:
    """The masks of the random subsets, the same for every order and method."""
    return torch.stack(random_subsets(len(p.x), max(1, round(share * len(p.x))), SUBSETS, seed=1))


def about(p: Problem) -> dict[str, Any]:
    """Accuracy, metasmoothness in three random directions, and the number of weights."""
    whole, _, _ = p.retrained(torch.ones(1, len(p.x)))
    accuracy = p.accuracy({n: x[0] for n, x in whole.items()})
    smooth = [bilevel.metasmoothness(p.train(), torch.ones(len(p.x)).requires_grad_(), seed=s) for s in range(3)]
    return {"accuracy": accuracy, "smoothness": smooth, "weights": sum(x.numel() for x in p.start.values())}


def truth(p: Problem, share: float, order: int) -> dict[str, Any]:
    begin = time.process_time()
    _, losses, _ = p.retrained(subsets(p, share), order)
    return {"losses": losses, "seconds": time.process_time() - begin}


def ours(p: Problem, leave_out: float | int, order: int) -> dict[str, Any]:
    found, seconds = methods.ours(p, leave_out, order)
    return {"effects": found.effects, "losses": found.losses, "weight": found.weight, "seconds": seconds}


def tokens(p: Problem) -> dict[str, Any]:
    """The effect of each letter of each row on the first two queries, and how far their sums are from those of rows."""

    def first(model: Any) -> Tensor:
        return p.queries(model)[:2]

    by_token = Attribution(p.train(), tuple(p.x.shape), first, 0.1).explain()
    by_row = Attribution(p.train(), len(p.x), first, 0.1).explain().effects
    return {"effects": by_token.effects, "error": float((by_token.of_rows - by_row).norm() / by_row.norm())}


def peers(p: Problem) -> dict[str, Any]:
    n = len(p.x)
    full = [_first(p.retrained(torch.ones(1, n), order)[0]) for order in range(methods.MODELS)]
    halves, _, _ = p.retrained(torch.stack(random_subsets(n, n // 2, methods.MODELS, seed=2)))
    half = [{k: v[j] for k, v in halves.items()} for j in range(methods.MODELS)]
    found = {name: run() for name, run in methods.peers(p, full, half).items()}
    return {"methods": {k: [{"scores": x, "seconds": t, "option": o} for x, t, o in v] for k, v in found.items()}}


def _first(states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v[0] for k, v in states.items()}


# --- brittleness, and wrong labels -----------------------------------------------------------------------------


REMOVED = (5, 10, 20, 40, 80, 160, 320)


def brittle(p: Problem, folder: Path) -> dict[str, Any]:
    """How many of the most helpful rows have to go until a right answer becomes wrong, for each method."""
    whole = p.retrained(torch.ones(1, len(p.x)))[2][0]
    state: Any = runs.load(folder / f"{p.s.name}_peers.pt")
    mine: Any = runs.load(folder / f"{p.s.name}_ours_0.1_0.pt")
    scores = {"ours": mine["effects"]}
    scores |= {name: options[-2 if len(options) > 1 else 0]["scores"].T for name, options in state["methods"].items()}
    scores["random rows"] = torch.rand(mine["effects"].shape, generator=torch.Generator().manual_seed(0))
    flips: dict[str, list[int]] = {}
    for name, effects in scores.items():
        order = torch.argsort(-effects, dim=1)
        masks = torch.ones(len(order) * len(REMOVED), len(p.x))
        for k, mask in enumerate(masks):
            mask[order[k // len(REMOVED)][: REMOVED[k % len(REMOVED)]]] = 0
        right = p.retrained(masks)[2].view(len(order), len(REMOVED), -1)
        own = right[torch.arange(len(order)), :, torch.arange(len(order))]  # each query in its own trainings
        flips[name] = [int((~own[whole, k]).sum()) for k in range(len(REMOVED))]
    return {"flips": flips, "right": int(whole.sum())}


def wrong_labels(p: Problem) -> dict[str, Any]:
    """The area under the curve of finding 10 % wrong labels among the rows, with 100 right ones known."""
    n = len(p.x)
    generator = torch.Generator().manual_seed(3)
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n, generator=generator)[: n // 10]] = True
    p = Problem(p.s, queries=100)
    shift = torch.randint(1, 10, (n,), generator=generator)
    p.y = torch.where(wrong, (p.y + shift) % 10, p.y)
    begin = time.process_time()
    found = Attribution(p.train(), n, lambda model: p.queries(model).mean()[None], leave_out=0.1).explain()
    areas = {"ours": (area(-found.effects[0], wrong), time.process_time() - begin)}
    full = [_first(p.retrained(torch.ones(1, n), order)[0]) for order in range(methods.MODELS)]
    halves, _, _ = p.retrained(torch.stack(random_subsets(n, n // 2, methods.MODELS, seed=2)))
    half = [{k: v[j] for k, v in halves.items()} for j in range(methods.MODELS)]
    for name, run in methods.peers(p, full, half).items():
        best = max(((area(-x.mean(1), wrong), t) for x, t, _ in run()), key=lambda found: found[0])
        areas[name] = best
    return {"areas": {k: list(v) for k, v in areas.items()}}


def area(score: Tensor, positive: Tensor) -> float:
    """The probability that a random positive row scores higher than a random other one."""
    from scipy.stats import rankdata

    ranks = torch.tensor(rankdata(score.numpy()))
    a, b = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - a * (a + 1) / 2) / (a * b))


# --- the command -----------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data-root", type=Path, help="folder with MNIST; without it, its settings are left out")
    found.add_argument("--only", default="", help="settings to run, separated by commas")
    found.add_argument("--runs", type=Path, default=Path("runs/attribution"), help="where the pieces are kept")
    found.add_argument("--out", type=Path, default=None, help="write the page and its plot into this folder")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    only = [name for name in options.only.split(",") if name]
    for s in SETTINGS:
        if (only and s.name not in only) or (s.data == "MNIST" and options.data_root is None):
            continue
        for name, work in pieces(s, options.data_root, options.runs):
            path = options.runs / f"{name}.pt"
            if path.is_file():
                continue
            begin = time.process_time()
            found = work()
            runs.save(path, {**found, "cpu": time.process_time() - begin})
            print(f"{name}: {time.process_time() - begin:.1f} CPU s", file=sys.stderr, flush=True)
    if options.out is not None:
        from .attribution_page import write

        write(options.runs, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
