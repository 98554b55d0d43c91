"""Learn an encoder under which a linear head tells new classes apart from a few images of each.

The outer variable λ is the encoder, shared by all tasks; the inner variable w_i is the head of task i, from zero.

    inner loss   h(w_i, λ) = cross-entropy of head w_i on the support set of task i, encoded by λ
    outer loss   g(w_i, λ) = the same on its query set

A new task has no query labels: at test time a head is adapted with steps on h alone.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bilevel_plugin as bilevel

from .. import ranks
from ..models import autocast
from .episodes import Batch, Pair, next_batch

Rule = Any  # a solver of bilevel_plugin
CONVERGENT, PAPER = bilevel.convergent(), bilevel.power(0.25)  # of α
LENGTH = 5.0  # the length of features on the sphere, for which t = 0.4 suits 5 ways, and 4.8 suits 60


@dataclass(frozen=True)
class Method:
    """How heads are adapted in meta-training.

    rule: (t, s, every, step) -> solver; step: outer steps done before.
    split: steps on g see one half of the queries of each class, and the outer loss is taken on the other half.
    """

    rule: Callable[[float, float, int, int], Rule]
    split: bool = False


def annealed(step: int, schedule: Callable[[int], float] = CONVERGENT, until: int = 75) -> Callable[[int], float]:
    """Return α_k = 1 − (1 − schedule(k))·(1 − step/until): the schedule first, plain descent from step `until` on.

    Steps on g help an encoder that has learnt little, and harm one that has learnt much. So `until` is a number of
    steps, not a share of them.
    """
    weight = max(0.0, 1 - step / until)
    return lambda k: 1 - weight * (1 - schedule(k))


def _bigsam(alpha: Callable[[int], Callable[[int], float]], split: bool = False) -> Method:
    return Method(lambda t, s, every, step: bilevel.BiGSAM(t, s, alpha(step), every), split)


SOLVERS: dict[str, Method] = {
    "gd": Method(lambda t, s, every, step: bilevel.GD(t)),
    "bigsam": _bigsam(annealed),
    "bigsam-paper": _bigsam(lambda step: PAPER),
    "bigsam-paper-annealed": _bigsam(lambda step: annealed(step, PAPER)),
    "bigsam-convergent": _bigsam(lambda step: CONVERGENT),
    "bigsam-split": _bigsam(annealed, split=True),
}


@dataclass(frozen=True)
class Moment:
    """The progress of meta-training after an outer step. state() returns all that is needed to continue."""

    step: int
    seconds: float
    encoder: nn.Module
    history: list[dict[str, Any]]
    state: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """The trained encoder, and the history that `on_step` wrote.

    seconds: of training, by the clock; evaluation does not count. cpu_seconds: those of all threads of this process.
    """

    encoder: nn.Module
    history: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float


def meta_train(
    encoder: nn.Module,
    episodes: Iterable[Batch],
    *,
    ways: int,
    solver: str | Rule = "bigsam",
    steps: int = 5,
    lr: float = 0.4,
    s: float | None = None,
    every: int = 1,
    outer_steps: int = 1000,
    eta: float = 2e-3,
    decay: bool = True,
    features: str = "sphere",
    batchnorm: str = "running",
    chunk: int = 220,
    engine: Any = "unroll",
    bf16: bool = False,
    seed: int = 0,
    group: Any = None,
    state: dict[str, Any] | None = None,
    on_step: Callable[[Moment], None] | None = None,
) -> Result:
    """Train a copy of the encoder: one Adam step for each batch of tasks.

    episodes: batches ((support, labels), (query, labels)), each tensor with the tasks as first dimension: `Episodes`,
        or any other iterator. If it has state_dict and load_state_dict, its place in the sequence is part of `state`.
    ways: classes in a task. solver: a name of SOLVERS, or a solver object that has its rates.
    steps: inner steps K. lr: their rate t on h. s: their rate on g (t). every: a step on g every E-th time.
    eta: Adam's rate; decay: let it fall to 0 over the training, along half a cosine.
    features: what heads see of them, a name of FEATURES. batchnorm, chunk: see `encode`.
    engine: heads are small, so that their K graphs cost less than a second run of the steps.
    bf16: autocast of the encoder. seed: of what the encoder draws (dropout).
    group: processes of torch.distributed that call this with the same arguments; each takes a share of the tasks, and
        the encoder is under DistributedDataParallel. BatchNorm sees the chunks of its own process.
    state, on_step: on_step gets a Moment after each outer step; give its state() back as state to go on from there.
    """
    method = SOLVERS.get(solver) if isinstance(solver, str) else None
    if isinstance(solver, str) and method is None:
        raise ValueError(f"recipes.few_shot: no solver {solver!r}; one of {', '.join(SOLVERS)}, or an object")
    seen_by_heads = prepare(features)
    encoder = copy.deepcopy(encoder).train()
    # buffers are averaged once a step instead: a broadcast before each chunk would change what the last one has saved
    parallel = partial(DistributedDataParallel, process_group=group, broadcast_buffers=False)
    wrapped = encoder if group is None else parallel(encoder)

    def outer_step(batch: Batch, step: int) -> None:
        if len(batch[0][0]) < ranks.size(group):
            raise ValueError(
                f"recipes.few_shot: {len(batch[0][0])} tasks in a meta-batch are too few for {ranks.size(group)} "
                "processes; give --tasks, or start fewer"
            )
        (x, y), (x_query, y_query) = (ranks.share(part, group) for part in batch)
        with autocast(x.device, bf16):
            f, f_query = encode_task(wrapped, x, x_query, batchnorm, chunk)
        f, f_query = seen_by_heads(f, f_query)
        rule = solver if method is None else method.rule(lr, lr if s is None else s, every, step)
        seen, judged = halves(f_query, y_query) if method and method.split else ((f_query, y_query),) * 2
        adapt_and_pull((f, y), seen, judged, ways, steps, rule, engine)
        if group is not None:
            _as_one(encoder, group)

    return descend(encoder, episodes, outer_step, outer_steps, eta, decay, seed, state, on_step)


def descend(
    module: nn.Module,
    episodes: Iterable[Batch],
    outer_step: Callable[[Batch, int], None],
    outer_steps: int,
    eta: float,
    decay: bool,
    seed: int,
    state: dict[str, Any] | None,
    on_step: Callable[[Moment], None] | None,
) -> Result:
    """Take one Adam step for each batch of tasks. outer_step(batch, step) adds the gradient to the module's .grad."""
    adam = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], eta)
    history, done, spent, cpu = list[dict[str, Any]](), 0, 0.0, 0.0
    if state is not None:
        module.load_state_dict(state["encoder"])
        adam.load_state_dict(state["adam"])
        history, done = [dict(row) for row in state["history"]], state["step"]
        spent, cpu = state["seconds"], state["cpu_seconds"]
        if "episodes" in state:
            episodes.load_state_dict(state["episodes"])  # type: ignore[attr-defined]

    source = iter(episodes)
    for step in range(done, outer_steps):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        with torch.random.fork_rng(_cuda(module)):
            torch.manual_seed(1_000_003 * seed + step)  # so that a resumed run draws the same
            adam.zero_grad()
            outer_step(next_batch(source, step, outer_steps), step)
            for options in adam.param_groups:
                options["lr"] = eta * (0.5 + 0.5 * math.cos(math.pi * step / outer_steps) if decay else 1.0)
            adam.step()
        spent += time.perf_counter() - begin
        cpu += time.process_time() - cpu_begin
        if on_step is not None:

            def now(step: int = step, spent: float = spent, cpu: float = cpu) -> dict[str, Any]:
                place = {"episodes": episodes.state_dict()} if hasattr(episodes, "state_dict") else {}  # type: ignore
                parts = {"encoder": module.state_dict(), "adam": adam.state_dict(), **place}
                times = {"seconds": spent, "cpu_seconds": cpu}
                return {"step": step + 1, "history": history, **times, **parts}

            on_step(Moment(step + 1, spent, module, history, now))
    return Result(module.eval(), history, spent, cpu)


def _as_one(encoder: nn.Module, group: Any) -> None:
    """Turn DDP's mean gradient into that of the summed losses, and give all ranks the same BatchNorm statistics."""
    with torch.no_grad():
        for p in encoder.parameters():
            if p.grad is not None:
                p.grad.mul_(ranks.size(group))
        for buffer in encoder.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer.div_(ranks.size(group))


def adapt_and_pull(support: Pair, seen: Pair, judged: Pair, ways: int, steps: int, rule: Rule, engine: Any) -> None:
    """Adapt the heads of all tasks, and add the hypergradient to the .grad of what the features were computed from."""
    f, y = support
    with f.device:  # made there: a copy to a GPU would wait until the features are done
        head = zero_head(f.shape[-1], ways).to(f)
    with bilevel.inner(head, loss, loss, solver=rule, tasks=len(f), engine=engine) as loop:
        loop.run(steps, f, y, outer=seen)
        loop.backward(outer=judged)  # through all heads, then once through the encoder


def loss(head: nn.Module, f: Tensor, y: Tensor) -> Tensor:
    """The loss h on the features of a support set, and g on those of a query set."""
    return F.cross_entropy(head(f), y)


def zero_head(features: int, ways: int) -> nn.Module:
    """Return a linear layer of zeros. Its first step on h is along the class means of the support set."""
    head = nn.Linear(features, ways)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def halves(f: Tensor, y: Tensor) -> tuple[Pair, Pair]:
    """Return two halves of the queries, each with about half of each class, in any order of the queries."""
    order = y.argsort(dim=1, stable=True)
    parts = [order[:, begin::2] for begin in (0, 1)]
    first, second = ((f.gather(1, i[..., None].expand(-1, -1, f.shape[-1])), y.gather(1, i)) for i in parts)
    return first, second


def centre(f: Tensor, f_query: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract from features their mean over the support set of the task.

    Behind a ReLU all features share a large mean. The curvature of h along it is far above that between the classes,
    and it alone would say how large t can be.
    """
    mean = f.mean(1, keepdim=True)
    return f - mean, f_query - mean


def sphere(f: Tensor, f_query: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract from features their mean, and scale each to the same length.

    A head's first step from zero goes along the class means, so that its scores are then cosines: no image, and no
    class, weighs more than another, and one rate t suits encoders of any width at any stage of training.
    """
    f, f_query = (LENGTH * F.normalize(part, dim=-1) for part in centre(f, f_query))
    return f, f_query


FEATURES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "sphere": sphere,
    "centred": centre,
    "raw": lambda f, f_query: (f, f_query),
}


def prepare(features: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if features not in FEATURES:
        raise ValueError(f"recipes.few_shot: features are one of {', '.join(FEATURES)}; got {features!r}")
    return FEATURES[features]


def encode_task(
    encoder: nn.Module, x: Tensor, x_query: Tensor, batchnorm: str = "running", chunk: int = 220
) -> tuple[Tensor, Tensor]:
    """Return features (tasks, n, d) of the support and query images of all tasks, with their graph."""
    both = torch.cat([x, x_query], 1)
    f = encode(encoder, both.flatten(0, 1).split(chunk_size(batchnorm, chunk, both.shape[1])))
    f = f.reshape(*both.shape[:2], -1)
    return f[:, : x.shape[1]], f[:, x.shape[1] :]


def encode(encoder: nn.Module, chunks: Iterable[Tensor]) -> Tensor:
    """Return the features of many images, computed in chunks.

    On a CPU the buffers of a large batch cost more in page faults than in arithmetic, so that chunks are faster. They
    are also what BatchNorm sees. batchnorm="running": statistics of a chunk in training, the running ones at test time,
    where what is said of an image does not depend on the others. "task": those of the task's own images, support and
    query together, in training and at test time; what is said of a query then draws on all (transductive, as in MAML).
    """
    f = torch.cat([encoder(x).flatten(1) for x in chunks])
    return f.float() if f.dtype == torch.bfloat16 else f  # heads are adapted in full precision


def chunk_size(batchnorm: str, chunk: int, task: int) -> int:
    """Return the number of images in one pass of the encoder. task: the number of images in a task."""
    if batchnorm not in ("running", "task"):
        raise ValueError(f"recipes.few_shot: batchnorm is 'running' or 'task'; got {batchnorm!r}")
    return task if batchnorm == "task" else chunk


def _cuda(module: nn.Module) -> list[torch.device]:
    return sorted({p.device for p in module.parameters() if p.is_cuda}, key=str)
