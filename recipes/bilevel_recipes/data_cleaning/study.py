"""The grid of runs behind the command: data × model × ρ × checked samples × method × seed, each resumable."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import bilevel_plugin as bilevel

from .. import data, ranks, runs
from ..models import build
from . import baselines
from .clean import OUTER_STEPS, Pair, clean
from .score import verdict


@dataclass(frozen=True)
class Settings:
    """Everything that the figures depend on; the flags of the command, one to one."""

    dataset: tuple[str, ...] = ("digits",)
    data_root: str | None = None
    download: bool = False
    image_size: int | None = None
    model: tuple[str, ...] = ("linear",)
    rho: tuple[float, ...] = (0.6,)
    train: int | None = None
    validation: tuple[int, ...] = (0,)  # 0: the data set's own size
    judge: tuple[str, ...] = ("evidence",)
    solvers: tuple[str, ...] = ("bigsam",)
    every: tuple[int, ...] = (1,)
    steps: tuple[int, ...] = (100,)
    outer_steps: int | None = None
    lr: float = 0.02
    momentum: float = 0.9
    eta: float = 0.5
    influence: float = 1.0
    batch_size: int | None = None
    memory: str = "auto"
    warm: bool = False
    baselines: tuple[str, ...] = ()
    fit_steps: int = 200
    fit_lr: float = 3e-3
    seeds: int = 1
    device: str = "cpu"
    bf16: bool = False
    tf32: bool = False
    channels_last: bool = False
    workers: int = 0
    threads: int | None = None


def fingerprint(s: Settings) -> dict[str, Any]:
    """What a resumed run must share with the one it goes on with. (The memory changes no bit of the result.)"""
    return {k: v for k, v in asdict(s).items() if k not in ("data_root", "download", "workers", "memory")}


@dataclass(frozen=True)
class Job:
    """One run of the grid."""

    dataset: str
    model: str
    rho: float
    validation: int
    method: str
    judge: str
    every: int
    steps: int
    seed: int

    @property
    def cell(self) -> tuple[str, str, float, int]:
        return self.dataset, self.model, self.rho, self.validation

    @property
    def label(self) -> str:
        """How tables and plots call the method."""
        if not self.judge:
            return self.method
        extra = [f"every {self.every}"] if self.every > 1 else []
        return " ".join([self.method, f"({', '.join([self.judge, f'K={self.steps}', *extra])})"])

    @property
    def title(self) -> str:
        return f"{self.dataset} ρ={self.rho} {self.label} seed {self.seed}"

    @property
    def file(self) -> str:
        return runs.file_name(self)


def jobs(s: Settings) -> Iterator[Job]:
    """All runs, cell by cell, seed by seed, so that an interrupted study has whole cells."""
    cells = (
        (dataset, *cell)
        for dataset in s.dataset  # own data come with their wrong labels and their checked rows
        for cell in itertools.product(s.model, *((s.rho, s.validation) if dataset in data.READERS else ((0.0,), (0,))))
    )
    for dataset, model, rho, validation in cells:
        for seed in range(s.seeds):
            for name in s.baselines:
                yield Job(dataset, model, rho, validation, name, "", 0, 0, seed)
            for judge, steps, solver in itertools.product(s.judge, s.steps, s.solvers):
                # gd takes no step on g, so that `every` says nothing about it
                for every in s.every if solver != "gd" else (1,):
                    yield Job(dataset, model, rho, validation, solver, judge, every, steps, seed)


def run(s: Settings, folder: Path, quiet: bool = False) -> list[dict[str, Any]]:
    """Run what is not done yet, and return the record of every run."""
    runs.set_up(s.device, s.threads, s.tf32)
    return runs.sweep(list(jobs(s)), folder, lambda job, path, state: one(s, job, path, state, quiet), quiet)


@lru_cache(maxsize=4)
def source(name: str, root: str | None, download: bool, image_size: int | None) -> data.Images:
    return data.load(name, Path(root) if root else None, download, image_size)


@dataclass(frozen=True)
class Problem:
    """A split as tensors, standardised with the training set's mean and deviation."""

    train: Pair
    validation: Pair
    test: Pair | None
    split: data.Split
    shape: tuple[int, ...]
    classes: int


def problem(s: Settings, job: Job) -> Problem:
    images = source(job.dataset, s.data_root, s.download, s.image_size)
    cut = data.split(images, job.rho, s.train, job.validation or None, job.seed)
    device = torch.device(s.device)
    scale = _scale(cut.x)

    def pair(x: Any, y: Any) -> Pair:
        return scale(x).to(device), torch.from_numpy(np.asarray(y, np.int64)).to(device)

    train, validation = pair(cut.x, cut.y), pair(cut.x_val, cut.y_val)
    test = None if images.x_test is None else pair(images.x_test, images.y_test)
    return Problem(train, validation, test, cut, tuple(train[0].shape[1:]), len(images.classes))


def _scale(x: Any) -> Any:
    """uint8 N × H × W (× C) → float N × C × H × W, minus the mean image, deviation 1 over the training set.

    Without the mean image the largest curvature of a linear model is 4 times less on MNIST, and its rate 4 times more.
    """

    def tensor(x: Any) -> Tensor:
        t = torch.from_numpy(np.array(x, dtype=np.float32))
        return t if t.ndim == 2 else t[:, None] if t.ndim == 3 else t.permute(0, 3, 1, 2).contiguous()

    t = tensor(x)
    mean, axes = t.mean(0), (0,) if t.ndim == 2 else (0, 2, 3)
    std = (t - mean).square().mean(axes, keepdim=True).sqrt().clamp_min(1e-6)
    return lambda x: (tensor(x) - mean) / std


def one(s: Settings, job: Job, path: Path, state: dict[str, Any] | None, quiet: bool) -> dict[str, Any]:
    """One run: judge every training sample, then measure the verdict."""
    p = problem(s, job)
    model = build(job.model, p.shape, p.classes, job.seed).to(s.device)
    if s.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    options: dict[str, Any] = {"steps": s.fit_steps, "lr": s.fit_lr, "batch_size": s.batch_size, "seed": job.seed}
    truth = p.split.clean
    record: dict[str, Any] = {**asdict(job), "label": job.label, "history": []}
    if job.judge:
        total = OUTER_STEPS[job.judge] if s.outer_steps is None else s.outer_steps
        done = len(state["history"]) if state else 0
        bar = tqdm(total=total, initial=done, desc=job.label, disable=quiet, unit="outer step", position=1, leave=False)

        def keep(now: dict[str, Any]) -> None:
            if truth is not None:
                now["history"][-1].update(verdict(now["lam"] >= 0, truth))
            runs.save(path, now)
            bar.update()

        result = clean(
            model, p.train, p.validation, judge=job.judge, solver=job.method, every=job.every, steps=job.steps,
            outer_steps=s.outer_steps, eta=s.eta, batch_size=s.batch_size, workers=s.workers, bf16=s.bf16,
            engine=bilevel.Reverse(memory=s.memory), lr=s.lr, momentum=s.momentum, influence=s.influence,
            warm=s.warm, seed=job.seed, group=ranks.group(), state=state, on_step=keep,
        )  # fmt: skip
        bar.close()
        kept, lam, suggested = result.kept, result.lam, result.suggested
        record.update(seconds=result.seconds, history=result.history)
    else:
        begin = time.perf_counter()
        kept, suggested = _baseline(job, model, p, options)
        lam = torch.where(kept, 1.0, -1.0)
        record.update(seconds=time.perf_counter() - begin)
    record["kept"] = int(kept.sum())
    if truth is not None:
        record.update(verdict(kept, truth))
    if p.test is not None and kept.any():
        rows = kept.to(p.train[1].device)
        fitted = baselines.fit(model, (p.train[0][rows], p.train[1][rows]), **options)
        record["test_accuracy"] = baselines.accuracy(fitted, p.test)
    state = {"record": record, "lam": lam, "suggested": suggested}
    runs.save(path, state)
    return state


BASELINES = {
    "validation-only": "a classifier trained on the checked samples alone; a label it disagrees with is called wrong",
    "cleanlab": "confident learning on cross-validated probabilities of the noisy set (extra: compare)",
    "cleanlab-checked": "confident learning on the probabilities of the validation-only classifier (extra: compare)",
    "keep-all": "no cleaning",
    "oracle": "the true verdict (only where it is known)",
}


def _baseline(job: Job, model: nn.Module, p: Problem, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    labels = p.train[1].cpu()
    if job.method == "keep-all":
        return torch.ones(len(labels), dtype=torch.bool), labels
    if job.method == "oracle":
        if p.split.clean is None:
            raise ValueError("recipes: the oracle needs the true labels; leave it out of --baselines for this data")
        return torch.from_numpy(p.split.clean), labels
    if job.method == "cleanlab":
        probabilities = baselines.cross_validated(model, p.train, **options)
    else:
        kept, probabilities = baselines.by_validation(model, p.train, p.validation, **options)
        if job.method == "validation-only":
            return kept, probabilities.argmax(1)
    return baselines.by_cleanlab(labels, probabilities), probabilities.argmax(1)


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each cell and method: mean and standard deviation over the seeds of what was measured."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        rows.setdefault((r["dataset"], r["model"], r["rho"], r["validation"], r["label"]), []).append(r)
    out: list[dict[str, Any]] = []
    for (dataset, model, rho, validation, label), group in rows.items():
        row: dict[str, Any] = {"dataset": dataset, "model": model, "rho": rho, "validation": validation}
        row |= {"label": label, "seeds": len(group)}
        for key in ("f1_clean", "f1_corrupted", "test_accuracy", "seconds"):
            values = [r[key] for r in group if r.get(key) is not None]
            if values:
                row[key] = float(np.mean(values))
                row[f"{key}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        row["steps_to_gd"] = _steps_to_gd(group, records)
        out.append(row)
    return out


def _steps_to_gd(group: list[dict[str, Any]], records: list[dict[str, Any]]) -> int | None:
    """After how many outer steps the mean F1 is what gd's is at its end, in the same cell; None if never, or no gd."""
    same = ("dataset", "model", "rho", "validation", "judge", "steps")
    basic = [r for r in records if r["method"] == "gd" and all(r[k] == group[0][k] for k in same)]
    if not basic or not all(r["history"] and "f1_clean" in r for r in [*group, *basic]):
        return None
    curve = np.mean([[h["f1_clean"] for h in r["history"]] for r in group], axis=0)
    reached = np.flatnonzero(curve >= np.mean([r["f1_clean"] for r in basic]) - 1e-12)
    return int(reached[0]) + 1 if len(reached) else None
