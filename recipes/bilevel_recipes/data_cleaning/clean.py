"""Find the mislabelled samples of a training set with the help of a few checked ones.

One outer variable λ_i for each training sample; at the end λ_i < 0 says: mislabelled.

    inner loss   h(w, λ) = mean_i σ(λ_i)·ℓ_i(w)      on the noisy set
    outer loss   g(w)    = mean_j ℓ_j(w)             on the checked set
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import bilevel_plugin as bilevel

from .. import ranks
from ..device import host, number, place
from ..models import autocast

Pair = tuple[Tensor, Tensor]
ENGINE = bilevel.Reverse(memory="auto")  # as fast as the memory allows
CAP = 8.0  # |λ| at most: beyond it σ is 0 or 1 in all but name, and a sample could never come back


@dataclass(frozen=True)
class Result:
    """What `clean` found. weights: σ(λ_i). kept: λ_i ≥ 0. suggested: the given label if kept, else the best other."""

    lam: Tensor
    suggested: Tensor
    history: list[dict[str, float]]
    seconds: float

    @property
    def weights(self) -> Tensor:
        return torch.sigmoid(self.lam)

    @property
    def kept(self) -> Tensor:
        return self.lam >= 0


def clean(
    model: nn.Module,
    train: Pair,
    validation: Pair,
    *,
    judge: str = "evidence",
    solver: str | Any = "bigsam",
    lr: float = 0.02,
    momentum: float = 0.9,
    steps: int = 100,
    outer_steps: int | None = None,
    eta: float = 0.5,
    influence: float = 1.0,
    every: int = 1,
    engine: Any = ENGINE,
    batch_size: int | None = None,
    workers: int = 0,
    bf16: bool = False,
    warm: bool = False,
    seed: int = 0,
    group: Any = None,
    state: dict[str, Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Learn a weight for each training sample.

    judge: what moves λ in an outer step.
        "validation": λ ← Adam(λ, ∂g(w_K)/∂λ), the paper's outer problem; from λ = 0.
        "evidence": λ_i ← (1 − η)·λ_i + η·(a_i + influence·b_i), from λ = −4, which trusts the checked samples first.
        a_i: log-odds that label i is right, by a model trained on the other half of the noisy set.
        b_i = −N·∂g(w_K)/∂σ_i: what training on i does for g. influence=0 leaves it out: over twice as fast.
    solver: "gd", "bigsam", "bigsam-convergent", or a solver object with rate 1, since the inner loop is an SGD.
    steps: inner steps K, from the model's own weights in each outer step (warm=True: from the last ones).
    eta: η, or Adam's rate. batch_size: None takes all samples in each inner step. bf16: autocast.
    group: processes of torch.distributed that call this with the same arguments; each takes a share of every batch.
    state, on_step: on_step gets all it takes to go on after each outer step; give it back as state to do so.
    """
    if judge not in OUTER_STEPS:
        raise ValueError(f"recipes.clean: no judge {judge!r}; one of {', '.join(OUTER_STEPS)}")
    if warm and judge == "evidence":
        raise ValueError("recipes.clean: a warm start has seen the half to be judged; use judge='validation' with it")
    (x, y), n, model = train, len(train[1]), copy.deepcopy(model)
    rule, inner_sgd = make_solver(solver, every), torch.optim.SGD(model.parameters(), lr, momentum)
    lam = torch.full((n,), 0.0 if judge == "validation" else -4.0, device=x.device, requires_grad=True)
    adam = torch.optim.Adam([lam], lr=eta)
    scores, history = torch.empty(0), list[dict[str, float]]()
    if state is not None:
        lam.data.copy_(state["lam"])
        adam.load_state_dict(state["adam"])
        model.load_state_dict(state["model"])
        scores, history = state["scores"].to(x.device), [dict(row) for row in state["history"]]

    def h(model: nn.Module, count: float, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).sum() / count

    def g(model: nn.Module, count: float, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum") / count

    def mine(*batch: Tensor) -> tuple[Any, ...]:
        """This process's share of a batch, and what its losses are divided by, so that their mean is the batch's."""
        return len(batch[0]) / ranks.size(group), *ranks.share(batch, group)

    def solve(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Train K steps on these rows: ∂g(w_K)/∂λ, the logits of all samples at w_K, and g(w_K)."""
        noisy = batches(train, rows, batch_size, draw, workers)
        checked = batches(validation, torch.arange(len(validation[1])), batch_size, draw, workers)
        block = bilevel.inner(model, h, g, solver=rule, optimizer=inner_sgd, engine=engine, group=group)
        with autocast(x.device, bf16), block as loop:
            for _ in range(steps):
                loop.step(*mine(*next(noisy)), outer=mine(*next(checked)[:2]))
            grad = loop.hypergrad(lam) if judge == "validation" or influence else torch.zeros_like(lam)
            value, logits = loop.value, predict(loop, model, x)
            if warm:
                loop.commit_()
        return grad, logits, value

    def by_validation() -> Tensor:
        nonlocal scores
        lam.grad, scores, value = solve(torch.arange(n))
        adam.step()
        return value

    def by_evidence() -> Tensor:
        nonlocal scores
        weight, gain, value = torch.sigmoid(lam.detach()), torch.zeros_like(lam), lam.new_zeros(())
        halves = torch.randperm(n, generator=draw).chunk(2)
        for seen, held in (halves, halves[::-1]):
            grad, logits, last = solve(seen)
            scores = logits if len(scores) == 0 else scores
            held = place(held, x.device)
            scores[held] = logits[held]
            gain -= influence * n * grad / (weight * (1 - weight))  # ∂σ/∂λ divided out; 0 for what was held out
            value = value + last / 2
        new = log_odds(scores, y) + gain
        lam.data.lerp_(new.clamp(-CAP, CAP), eta if history else 1.0)  # the start has no say in the mean
        return value

    spent = history[-1]["seconds"] if history else 0.0
    for step in range(len(history), outer_steps or OUTER_STEPS[judge]):
        # All that is random in this outer step hangs on (seed, step), so that a resumed run draws the same.
        draw, begin = torch.Generator().manual_seed(1_000_003 * seed + step), time.perf_counter()
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            torch.manual_seed(1_000_003 * seed + step)
            value = number(by_validation() if judge == "validation" else by_evidence())  # waits for a device
        spent += time.perf_counter() - begin
        history.append({"step": step + 1, "g": value, "kept": number((lam >= 0).sum()), "seconds": spent})
        if on_step is not None:
            now = {"lam": host(lam), "scores": host(scores), "history": history}
            on_step({**now, "adam": adam.state_dict(), "model": model.state_dict()})
    return Result(host(lam), suggest(scores, y, lam), history, spent)


OUTER_STEPS = {"evidence": 6, "validation": 10}


def log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """log [π·p_y / ((1 − π)·(1 − p_y)/(C − 1))]: the given label is right, or it was drawn from the other classes.

    p = softmax(logits·τ). π, the share of right labels, and τ, which mends over- and underconfidence, are those
    of the highest likelihood of the given labels: π by its fixed point π = mean σ(log-odds), τ from a grid.
    """
    likelihoods, odds = list[Tensor](), list[Tensor]()
    for tau in torch.logspace(-2, 5, 15, base=2).tolist():
        p = (tau * logits.float()).log_softmax(1).gather(1, y[:, None])[:, 0].clamp(-30, -1e-6)
        wrong = torch.log1p(-p.exp()) - math.log(logits.shape[1] - 1)
        share = p.new_full((), 0.5)
        for _ in range(50):
            share = torch.sigmoid(p - wrong + torch.logit(share)).mean().clamp(0.01, 0.99)
        likelihoods.append(torch.logaddexp(share.log() + p, (1 - share).log() + wrong).mean())
        odds.append(p - wrong + torch.logit(share))
    return torch.stack(odds).index_select(0, torch.stack(likelihoods).argmax(0, keepdim=True))[0]


def suggest(scores: Tensor, y: Tensor, lam: Tensor) -> Tensor:
    """The given label of a kept sample; of any other the class with the highest score among the rest."""
    other = scores.scatter(1, y[:, None], -torch.inf).argmax(1)
    return host(torch.where(lam.detach() >= 0, y, other))


def make_solver(solver: str | Any, every: int = 1) -> Any:
    """The solver object behind a name of this recipe; its rates are 1, since the inner optimizer has the rate."""
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


def predict(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """Logits in chunks, in evaluation mode."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([call(part).float() for part in x.split(1000)])
    model.train(training)
    return logits


class Indexed(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """(x, y, i) of a whole batch of rows at once."""

    def __init__(self, pair: Pair, rows: Tensor) -> None:
        self.pair, self.rows = pair, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        i = place(self.rows[index], self.pair[0].device)
        return self.pair[0][i], self.pair[1][i], i


def batches(
    pair: Pair, rows: Tensor, size: int | None, generator: torch.Generator, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches (x, y, i) without end: the same full batch, or shuffled mini-batches, epoch after epoch."""
    data = Indexed(pair, rows)
    if size is None or size >= len(rows):
        i = place(rows, pair[0].device)
        whole = pair if len(rows) == len(pair[1]) else (pair[0][i], pair[1][i])
        while True:
            yield (*whole, i)
    if workers and pair[0].is_cuda:
        raise ValueError(
            f"recipes: the data are on {pair[0].device}, where no other process can cut batches; workers=0"
        )
    sampler = BatchSampler(RandomSampler(data, generator=generator), size, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader
