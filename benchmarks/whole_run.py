"""P9, a whole training run: K different batches, none of which comes twice, and the hypergradient through all of it.

    data    a few images, from which every step makes a batch of its own: crop, flip and noise by torch's generator
    model   two convolutions and a linear layer, SGD with momentum
    λ       a weight for each image: h = mean_i σ(λ_i)·ℓ_i, g the mean loss on images that are left as they are

Each K and runner has a process of its own. Memory is what the process grows by while it runs, pages of files not
counted (the system can take those back at any time); a process that holds more than the limit is ended.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .measure import Result, Setting, clock, grown, own_memory, progress
from .problems import Weighted, mean_loss
from .runners import BY_NAME, quietly

Run = Callable[[int], Tensor]  # K -> the hypergradient
HORIZONS = {"full": (100, 1000, 10_000), "quick": (30, 100, 300), "tiny": (3, 6)}
TIMED = 1000  # plain steps that a run is compared with, half of them before it and half after
LR, MOMENTUM = 0.05, 0.9


@dataclass
class Task:
    """The images, the model and λ."""

    model: nn.Module
    lam: Tensor
    images: Tensor
    labels: Tensor
    batch: int
    outer: tuple[Tensor, Tensor]
    plan: str = ""  # of the last run, where there was one

    @property
    def h(self) -> Weighted:
        return Weighted(self.lam)

    @property
    def title(self) -> str:
        shape = "×".join(str(n) for n in self.images.shape[1:])
        return f"{len(self.images)} images of {shape}, batches of {self.batch} crops, two convolutions, momentum"

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """A batch by torch's generator: which images, where each is cut out, whether it is mirrored, and noise."""
        progress["step"] += 1
        n, side = self.batch, self.images.shape[-1]
        crop = side - 4
        i = torch.randint(len(self.labels), (n,))
        down, right = torch.randint(5, (2, n))
        rows = (down[:, None] + torch.arange(crop))[:, None, :, None]
        columns = right[:, None] + torch.arange(crop)
        columns = torch.where(torch.rand(n, 1) < 0.5, columns, columns.flip(1))[:, None, None, :]
        x = self.images[i[:, None, None, None], torch.arange(3)[:, None, None], rows, columns]
        return x + 0.05 * torch.randn_like(x), self.labels[i], i

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)


def make(size: str, dtype: torch.dtype = torch.float32) -> Task:
    """The same numbers from every call."""
    number, batch, side, filters = (8, 2, 12, 2) if size == "tiny" else (512, 32, 20, 8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, filters, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(filters, 2 * filters, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(2 * filters * ((side - 4) // 4) ** 2, 10)).to(dtype)
        images, labels = torch.rand(number, 3, side, side).to(dtype), torch.randint(10, (number,))
        outer = torch.rand(batch, 3, side - 4, side - 4).to(dtype), torch.randint(10, (batch,))
        return Task(model, torch.randn(number).to(dtype).requires_grad_(), images, labels, batch, outer)


def plain(task: Task, steps: int) -> None:
    """The run that nothing is asked of."""
    start = {n: x.clone() for n, x in task.model.state_dict().items()}
    optimizer, weights = task.optimizer(), list(task.model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        task.h(task.model, *task.draw()).backward(inputs=weights)
        optimizer.step()
    optimizer.zero_grad()
    task.model.load_state_dict(start)


# --- who takes part ---------------------------------------------------------------------------------------------


def ours(task: Task, *, fetch: bool = True, store: bool = False, **options: Any) -> Run:
    """`fetch`: a batch is drawn again in the replay, in place of being kept. `store`: states live in a folder."""

    def run(steps: int) -> Tensor:
        with ExitStack() as stack:
            place: dict[str, Any] = {}
            if store:
                place["store"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_p9_"))
            engine = bilevel.Reverse(**options, **place)
            loop = stack.enter_context(
                bilevel.inner(task.model, task.h, mean_loss, solver="gd", optimizer=task.optimizer(), engine=engine)
            )
            for _ in range(steps):
                if fetch:
                    loop.step(fetch=task.draw, outer=task.outer)
                else:
                    loop.step(*task.draw(), outer=task.outer)
            task.plan = str(loop.plan or "")
            return loop.hypergrad(task.lam)

    return run


def higher(task: Task) -> Run:
    library: Any = quietly("higher")

    def run(steps: int) -> Tensor:
        with library.innerloop_ctx(task.model, task.optimizer(), copy_initial_weights=False) as (fast, optimizer):
            for _ in range(steps):
                optimizer.step(task.h(fast, *task.draw()))
            return torch.autograd.grad(mean_loss(fast, *task.outer), task.lam)[0]

    return run


def torchopt(task: Task) -> Run:
    library: Any = quietly("torchopt")

    def run(steps: int) -> Tensor:
        optimizer = library.MetaSGD(task.model, lr=LR, momentum=MOMENTUM, moment_requires_grad=True)
        start = library.extract_state_dict(task.model, by="reference")
        for _ in range(steps):
            optimizer.step(task.h(task.model, *task.draw()))
        (grad,) = torch.autograd.grad(mean_loss(task.model, *task.outer), task.lam)
        library.recover_state_dict(task.model, start)
        return grad

    return run


@dataclass(frozen=True)
class Case:
    """One line of the figure. A peer is installed if the runner of that name is."""

    name: str
    group: str
    build: Callable[[Task], Run]
    most: int = 10_000  # the largest K that it is asked for

    def missing(self) -> str:
        return BY_NAME[self.name].missing() if self.name in BY_NAME else ""


CASES = [
    Case("ours: checkpoint=sqrt", "ours", functools.partial(ours, fetch=False, checkpoint="sqrt"), most=1000),
    Case("ours: fetch=, checkpoint=sqrt", "ours", functools.partial(ours, checkpoint="sqrt")),
    Case("ours: fetch=, store=", "ours", functools.partial(ours, store=True)),
    Case("higher", "peer", higher),
    Case("TorchOpt", "peer", torchopt),
]


# --- measuring --------------------------------------------------------------------------------------------------


def case(setting: Setting, name: str, steps: int) -> Result:
    """Memory and time of one run of so many steps, beside plain steps that are taken right before and after it."""
    task = make(setting.size)
    run = next(c for c in CASES if c.name == name).build(task)
    torch.manual_seed(1)
    run(2)  # sets up what is set up once, and looks at the derivatives
    half = max(1, min(steps, TIMED) // 2)
    plain(task, 2)
    before = clock(lambda: plain(task, half))
    begin = time.perf_counter()
    progress["step"] = 0
    with Peak() as peak:
        resident = grown(lambda: run(steps))
    seconds = time.perf_counter() - begin
    after = clock(lambda: plain(task, half))
    state = 2 * sum(x.numel() * x.element_size() for x in task.model.parameters())  # the weights and their momentum
    return {
        "own": peak.bytes, "resident": resident, "seconds": seconds, "plain": (before + after) / (2 * half) * steps,
        "state": state, "plan": task.plan, "title": task.title,
    }  # fmt: skip


def plain_run(setting: Setting, steps: int) -> Result:
    """The same of the plain run itself."""
    task = make(setting.size)
    plain(task, 2)
    begin = time.perf_counter()
    with Peak() as peak:
        resident = grown(lambda: plain(task, steps))
    seconds = time.perf_counter() - begin
    return {"own": peak.bytes, "resident": resident, "seconds": seconds, "plain": seconds, "title": task.title}


class Peak:
    """How many bytes more than at its start the process has had of its own, looked at twenty times a second."""

    def __enter__(self) -> Peak:
        self._start = self._most = own_memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, own_memory())

    def __exit__(self, *error: object) -> None:
        self._most = max(self._most, own_memory())
        self._over.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._most - self._start
