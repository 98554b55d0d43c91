"""The paper's data cleaning: learn a weight for each training sample by the exact gradient of a checked loss.

One outer variable λ_i for each training sample; at the end λ_i < 0 says: mislabelled.

    inner loss   h(w, λ) = mean_i σ(λ_i)·ℓ_i(w)      on the noisy set
    outer loss   g(w)    = mean_j ℓ_j(w)             on the checked set
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import bilevel_plugin as bilevel

from .. import ranks
from ..device import host, number, place
from ..models import autocast

Pair = tuple[Tensor, Tensor]
ENGINE = bilevel.Reverse(memory="auto")  # as fast as the memory allows


@dataclass(frozen=True)
class Result:
    """The result of `clean`. weights: σ(λ_i). kept: λ_i ≥ 0. history: g and the number kept after each outer step."""

    lam: Tensor
    history: list[dict[str, float]]

    @property
    def weights(self) -> Tensor:
        return torch.sigmoid(self.lam)

    @property
    def kept(self) -> Tensor:
        return self.lam >= 0


def clean(
    model: nn.Module, train: Pair, validation: Pair, *, solver: str | Any = "bigsam", lr: float = 0.05,
    momentum: float = 0.0, steps: int = 100, outer_steps: int = 5, eta: float = 0.2, batch_size: int | None = None,
    engine: Any = ENGINE, bf16: bool = False, seed: int = 0, group: Any = None,
    state: dict[str, Any] | None = None, on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Result:  # fmt: skip
    """Learn a weight for each training sample: λ ← Adam(λ, ∂g(w_K(λ))/∂λ) from λ = 0, the paper's outer problem.

    solver: "gd", "bigsam", "bigsam-convergent", or a solver object with rate 1, since the inner loop is an SGD.
    lr, momentum, steps: the SGD and its number of steps K, from the model's own weights in each outer step.
    eta: Adam's rate. batch_size: None takes all samples in each inner step. bf16: autocast to bfloat16.
    group: processes of torch.distributed that call this with the same arguments; each takes a share of every batch.
    state, on_step: on_step gets all it takes to go on after each outer step; give it back as state to do so.
    """
    check(train, validation, steps, outer_steps)
    lam = torch.zeros(len(train[1]), device=train[0].device, requires_grad=True)
    sgd, adam = torch.optim.SGD(model.parameters(), lr, momentum), torch.optim.Adam([lam], eta)
    history = list[dict[str, float]]()
    if state is not None:
        lam.data.copy_(state["lam"])
        adam.load_state_dict(state["adam"])
        history = [dict(row) for row in state["history"]]

    def h(model: nn.Module, count: float, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).sum() / count

    def g(model: Any, count: float | None, *batch: Tensor) -> Tensor:
        if count is None:  # the batch is ∇g over the whole checked set: Σ w·∇g is a loss with that gradient
            return torch.stack([(w * slope).sum() for w, slope in zip(model.parameters(), batch, strict=True)]).sum()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / count

    for step in range(len(history), outer_steps):
        begin = time.perf_counter()
        block = bilevel.inner(model, h, g, solver=make_solver(solver), optimizer=sgd, engine=engine, group=group)
        with drawing(seed, step, lam.device) as draw, autocast(lam.device, bf16), block as loop:
            noisy, checked = batches(train, batch_size, draw), batches(validation, batch_size, draw)
            for _ in range(steps):
                loop.step(*share(next(noisy), group), outer=share(next(checked)[:2], group))
            value, gradient = slopes(loop, model, g, validation, batch_size, group)
            lam.grad = loop.hypergrad(lam, outer=(None, *gradient))
        adam.step()
        spent = time.perf_counter() - begin + (history[-1]["seconds"] if history else 0.0)
        history.append({"step": step + 1, "g": value, "kept": number((lam >= 0).sum()), "seconds": spent})
        if on_step is not None:
            on_step({"lam": host(lam), "adam": adam.state_dict(), "history": history})
    return Result(host(lam), history)


def slopes(loop: Any, model: nn.Module, g: Callable[..., Tensor], data: Pair, size: int | None, group: Any) -> Any:
    """Return g(w_K) over all data, and ∇g(w_K) of this process's share, one tensor for each weight.

    They are summed over chunks, so that the graph of one chunk is in memory at a time, whatever the size of the data.
    """
    state, n = loop.state_dict(), len(data[1])
    weights = [state[name].requires_grad_() for name in loop.weights]
    value, found = data[0].new_zeros(()), [torch.zeros_like(w) for w in weights]
    for chunk in zip(*(part.split(size or n) for part in data), strict=True):
        part = g(lambda x: functional_call(model, state, (x,)), n / ranks.size(group), *ranks.share(chunk, group))
        value = value + part.detach()
        for slope, new in zip(found, torch.autograd.grad(part, weights), strict=True):
            slope += new
    return number(ranks.mean(value, group)), found


def share(batch: tuple[Tensor, ...], group: Any) -> tuple[Any, ...]:
    """Return the divisor of this process's losses, with which the mean over ranks is the batch's, and its rows."""
    return len(batch[0]) / ranks.size(group), *ranks.share(batch, group)


@contextmanager
def drawing(seed: int, step: int, device: torch.device) -> Generator[torch.Generator]:
    """Make all random numbers depend on (seed, step) alone, so that a resumed run draws the same."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(1_000_003 * seed + step)
        yield torch.Generator().manual_seed(1_000_003 * seed + step)


def check(train: Pair, validation: Pair, steps: int, outer_steps: int) -> None:
    """Refuse data and counts from which nothing can be learnt."""
    for name, pair in (("train", train), ("validation", validation)):
        if not all(isinstance(part, Tensor) for part in pair):
            kinds = ", ".join(type(part).__name__ for part in pair)
            raise TypeError(
                f"recipes.clean: {name} must be two tensors, inputs and labels; got {kinds}. Use torch.from_numpy for "
                "NumPy arrays."
            )
        if len(pair[0]) != len(pair[1]) or len(pair[1]) == 0:
            raise ValueError(
                f"recipes.clean: {name} has {len(pair[0])} inputs and {len(pair[1])} labels. It needs at least one "
                "sample, and one label for each."
            )
    for name, count in (("steps", steps), ("outer_steps", outer_steps)):
        if count < 1:
            raise ValueError(f"recipes.clean: {name} must be at least 1; got {count}.")


def make_solver(solver: str | Any, every: int = 1) -> Any:
    """Return the solver object of this name. Its rates are 1, since the inner optimizer has the rate."""
    if not isinstance(solver, str):
        return solver
    if solver not in SOLVERS:
        raise ValueError(f"recipes.clean: no solver {solver!r}; one of {', '.join(SOLVERS)}, or an object")
    return SOLVERS[solver](every)


SOLVERS: dict[str, Callable[[int], Any]] = {
    "gd": lambda every: bilevel.GD(1.0),
    "bigsam": lambda every: bilevel.BiGSAM(1.0, alpha=bilevel.power(0.25), every=every),
    "bigsam-convergent": lambda every: bilevel.BiGSAM(1.0, alpha=bilevel.convergent(), every=every),
}


def batches(pair: Pair, size: int | None, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches (x, y, row numbers) without end: always the full batch, or shuffled mini-batches by epochs."""
    n, device = len(pair[1]), pair[0].device
    everything = place(torch.arange(n), device)
    while size is None or size >= n:
        yield *pair, everything
    while True:
        for rows in torch.randperm(n, generator=generator).split(size)[: n // size]:  # whole batches only
            i = place(rows, device)
            yield pair[0][i], pair[1][i], i
