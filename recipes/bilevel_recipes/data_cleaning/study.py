"""The grid of runs behind the command: data × model × ρ × checked samples × method × seed, each resumable."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import bilevel_plugin as bilevel

from .. import data, ranks, runs
from ..command import Count, Counts, Fractions, Rate, Whole, Wholes, names
from ..models import MODELS, build
from ..patches import Patches
from . import baselines
from .clean import SOLVERS, Pair, clean, make_solver
from .score import verdict

BASELINES = ("validation-only", "cleanlab", "cleanlab-checked", "keep-all", "oracle")
QMNIST_LABELS = "mnist-qmnist-labels"
FILTERS = 64  # the number of filters of patch features; each gives 18 features, 1,152 in all


@dataclass(frozen=True)
class Data:
    """Several values, separated by commas, make a grid."""

    dataset: Annotated[tuple[str, ...], names(list(data.READERS))] = ("digits",)
    """Public data. mnist-qmnist-labels: MNIST's images with QMNIST's labels."""
    data_root: str = "data"
    """Folder of the files, which are in torchvision's layout, or .tar.xz or .npz."""
    download: bool = False
    """Let torchvision download missing files to --data-root."""
    features: Literal["auto", "pixels", "patches"] = "auto"
    """Inputs of a linear model or an MLP. patches: filters that are learnt from the images, without labels. auto:
    patches for colour, pixels for grey. The inputs of convolutional networks are always pixels."""
    components: Whole = 256
    """Number of principal components of the inputs in which the inner loop of a linear model runs; 0: all. Descent
    from zero is the same in all rotated coordinates, so only the dropped components can matter."""
    rho: Fractions = (0.6,)
    """Fraction of training labels that are changed to another class."""
    train: Whole = 0
    """Number of noisy training samples; 0: 5000, or what the data set allows."""
    validation: Wholes = (0,)
    """Number of clean, checked samples; 0: 5000, or what the data set allows."""


@dataclass(frozen=True)
class Method:
    """The inner loop, and the outer steps on the sample weights."""

    model: Annotated[tuple[str, ...], names(list(MODELS))] = ("linear",)
    """Models to train."""
    solvers: Annotated[tuple[str, ...], names(list(SOLVERS))] = ("gd", "bigsam")
    """Inner solvers. gd: the paper's basic model. bigsam: its improved one. bigsam-convergent: the convergent one."""
    steps: Counts = (100,)
    """Number of inner steps K. Several values make the paper's Figure 3."""
    every: Counts = (1,)
    """Take every N-th step by BiG-SAM, and plain steps between. Several values make the paper's Figure 2."""
    outer_steps: Count = 5
    """Number of outer steps."""
    lr: Rate = 0.05
    """Inner rate."""
    momentum: Rate = 0.0
    """Momentum of the inner loop."""
    eta: Rate = 0.2
    """Outer rate, of Adam."""
    batch_size: Whole = 0
    """Number of samples in an inner step; 0: all of them."""
    memory: str = "auto"
    """Memory for a hypergradient, such as 2GiB. Less is slower, with the same result. auto: half of what is free."""


@dataclass(frozen=True)
class Comparison:
    """The methods to compare with."""

    baselines: Annotated[tuple[str, ...], names(BASELINES)] = ("validation-only",)
    """Baselines, or none. validation-only: a classifier of the checked samples alone calls a label wrong if it predicts
    another. cleanlab: confident learning on cross-validated probabilities of the noisy set (needs the extra compare).
    cleanlab-checked: the same on the probabilities of validation-only. keep-all: no cleaning. oracle: the truth."""
    fit_steps: Count = 200
    """Number of Adam steps that train the classifiers of the baselines."""
    fit_lr: Rate = 3e-3
    """Rate of Adam for these classifiers."""
    seeds: Count = 1
    """Number of seeds. A seed sets the split, the wrong labels and the initial weights."""
    first_seed: Whole = 0
    """First seed. mnist-qmnist-labels takes the seeds that follow, since its rows are MNIST's and need other draws."""


@dataclass(frozen=True)
class Run:
    """The machine."""

    device: str = "cpu"
    """cpu or cuda."""
    bf16: bool = False
    """Autocast to bfloat16; weights and their updates stay in float32."""
    tf32: bool = False
    """Let float32 products and convolutions on a GPU round to TF32."""
    channels_last: bool = False
    """Keep weights of convolutions in channels-last layout, for a GPU with --bf16 or --tf32."""
    threads: Whole = 0
    """Number of torch threads; 0: torch's default. A run repeats bit for bit with the same number."""


@dataclass(frozen=True)
class Settings(Data, Method, Comparison, Run):
    """The settings that the figures depend on. Each is a flag of the command."""


def fingerprint(s: Settings) -> dict[str, Any]:
    """Return what a resumed run must share with the run that it continues. (The memory does not change the result.)"""
    return {k: v for k, v in asdict(s).items() if k not in ("data_root", "download", "memory")}


def check(s: Settings) -> None:
    """Raise for wrong settings, before anything is written."""
    bilevel.Reverse(memory=s.memory)  # raises if this is no size
    for name in s.dataset:
        images = source(name, s.data_root, s.download)
        for validation in s.validation:
            data.split(images, 0.0, s.train or None, validation or None, s.first_seed)


@dataclass(frozen=True)
class Job:
    """One run of the grid."""

    dataset: str
    model: str
    rho: float
    validation: int
    method: str
    every: int
    steps: int
    seed: int

    @property
    def label(self) -> str:
        """The name of the method in tables and plots."""
        if not self.steps:
            return self.method
        return f"{self.method} (K={self.steps}{f', every {self.every}' if self.every > 1 else ''})"

    @property
    def title(self) -> str:
        return f"{self.dataset} ρ={self.rho} {self.label} seed {self.seed}"

    @property
    def file(self) -> str:
        return runs.file_name(self)


def jobs(s: Settings) -> Iterator[Job]:
    """Yield all runs, ordered by cell and then by seed, so that an interrupted study has complete cells."""
    for dataset, model, rho, validation in itertools.product(s.dataset, s.model, s.rho, s.validation):
        first = s.first_seed + s.seeds * (dataset == QMNIST_LABELS)
        for seed in range(first, first + s.seeds):
            for name in s.baselines:
                yield Job(dataset, model, rho, validation, name, 0, 0, seed)
            for steps, solver in itertools.product(s.steps, s.solvers):
                # gd takes no steps on g, so `every` does not apply to it
                for every in s.every if solver != "gd" else (1,):
                    yield Job(dataset, model, rho, validation, solver, every, steps, seed)


def run(s: Settings, folder: Path, quiet: bool = False) -> list[dict[str, Any]]:
    """Do the runs that are not done yet, and return the records of all."""
    runs.set_up(s.device, s.threads, s.tf32)
    return runs.sweep(list(jobs(s)), folder, lambda job, path, state: one(s, job, path, state, quiet), quiet)


@lru_cache(maxsize=4)
def source(name: str, root: str, download: bool) -> data.Images:
    return data.load(name, Path(root), download)


def features(s: Settings, job: Job) -> str:
    """Return the inputs of this job's model: "pixels" or "patches"."""
    if job.model not in ("linear", "mlp"):
        return "pixels"
    colour = source(job.dataset, s.data_root, s.download).x.ndim == 4
    return s.features if s.features != "auto" else "patches" if colour else "pixels"


@lru_cache(maxsize=2)
def patches(name: str, root: str, download: bool) -> data.Images:
    """Return the data set with patch features in place of images. They use no labels and no test images."""
    images = source(name, root, download)
    learnt = Patches.learn(images.x, count=FILTERS)
    test = None if images.x_test is None else learnt.encode(images.x_test)
    return replace(images, x=learnt.encode(images.x), x_test=test)


@dataclass(frozen=True)
class Problem:
    """Return a split as tensors, standardised with the mean and deviation of the training set."""

    train: Pair
    validation: Pair
    test: Pair | None
    clean: Tensor
    shape: tuple[int, ...]
    classes: int


def problem(s: Settings, job: Job) -> Problem:
    read = patches if features(s, job) == "patches" else source
    images = read(job.dataset, s.data_root, s.download)
    cut = data.split(images, job.rho, s.train or None, job.validation or None, job.seed)
    device = torch.device(s.device)
    scale = _scale(cut.x)

    def pair(x: Any, y: Any) -> Pair:
        return scale(x).to(device), torch.from_numpy(np.asarray(y, np.int64)).to(device)

    train, validation = pair(cut.x, cut.y), pair(cut.x_val, cut.y_val)
    test = None if images.x_test is None else pair(images.x_test, images.y_test)
    clean = torch.from_numpy(cut.clean)
    return Problem(train, validation, test, clean, tuple(train[0].shape[1:]), len(images.classes))


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


def principal(p: Problem, components: int) -> Problem:
    """Return the same problem, projected to the directions in which the training rows vary most."""
    x = p.train[0].flatten(1)
    if not components or components >= x.shape[1]:
        return p
    axes = torch.linalg.eigh(x.T @ x).eigenvectors[:, -components:]
    train, validation = ((x.flatten(1) @ axes, y) for x, y in (p.train, p.validation))
    return replace(p, train=train, validation=validation, shape=(components,))


def one(s: Settings, job: Job, path: Path, state: dict[str, Any] | None, quiet: bool) -> dict[str, Any]:
    """Do one run: judge all training samples, and measure the verdict."""
    p = problem(s, job)
    model = _model(s, job, p)
    options = {"steps": s.fit_steps, "lr": s.fit_lr, "batch_size": s.batch_size or None, "seed": job.seed}
    record: dict[str, Any] = {**asdict(job), "label": job.label, "features": features(s, job), "history": []}
    if job.steps:
        lam, record["history"] = _learnt(s, job, p, path, state, quiet)
        record["seconds"] = record["history"][-1]["seconds"]
    else:
        begin = time.perf_counter()
        lam = torch.where(_baseline(job, model, p, options), 1.0, -1.0)
        record["seconds"] = time.perf_counter() - begin
    kept = lam >= 0
    record.update(kept=int(kept.sum()), **verdict(kept, p.clean))
    if p.test is not None and kept.any():
        rows = kept.to(p.train[1].device)
        fitted = baselines.fit(model, (p.train[0][rows], p.train[1][rows]), **options)
        record["test_accuracy"] = baselines.accuracy(fitted, p.test)
    state = {"record": record, "lam": lam}
    runs.save(path, state)
    return state


def _model(s: Settings, job: Job, p: Problem) -> nn.Module:
    model = build(job.model, p.shape, p.classes, job.seed).to(s.device)
    if s.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model


def _learnt(
    s: Settings, job: Job, p: Problem, path: Path, state: Any, quiet: bool
) -> tuple[Tensor, list[dict[str, float]]]:
    """Learn λ by the bilevel loop, which is saved after each outer step. Return λ and the F1 after each outer step."""
    p = principal(p, s.components) if job.model == "linear" else p
    done = len(state["history"]) if state else 0
    bar = tqdm(total=s.outer_steps, initial=done, desc=job.label, disable=quiet, position=1, leave=False)

    def keep(now: dict[str, Any]) -> None:
        now["history"][-1].update(verdict(now["lam"] >= 0, p.clean))
        runs.save(path, now)
        bar.update()

    result = clean(
        _model(s, job, p), p.train, p.validation, solver=make_solver(job.method, job.every), lr=s.lr,
        momentum=s.momentum, steps=job.steps, outer_steps=s.outer_steps, eta=s.eta, batch_size=s.batch_size or None,
        engine=bilevel.Reverse(memory=s.memory), bf16=s.bf16, seed=job.seed, group=ranks.group(), state=state,
        on_step=keep,
    )  # fmt: skip
    bar.close()
    return result.lam, result.history


def _baseline(job: Job, model: nn.Module, p: Problem, options: dict[str, Any]) -> Tensor:
    """Return which samples the baseline keeps."""
    labels = p.train[1].cpu()
    if job.method == "keep-all":
        return torch.ones(len(labels), dtype=torch.bool)
    if job.method == "oracle":
        return p.clean
    if job.method == "cleanlab":
        return baselines.by_cleanlab(labels, baselines.cross_validated(model, p.train, **options))
    kept, probabilities = baselines.by_validation(model, p.train, p.validation, **options)
    return kept if job.method == "validation-only" else baselines.by_cleanlab(labels, probabilities)


CELL = ("dataset", "model", "rho", "validation")


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell and method: mean and standard deviation over the seeds of each measured figure."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        rows.setdefault(tuple(r[k] for k in (*CELL, "label")), []).append(r)
    out: list[dict[str, Any]] = []
    for cell, group in rows.items():
        row: dict[str, Any] = {**dict(zip((*CELL, "label"), cell, strict=True)), "seeds": len(group)}
        row |= {k: group[0][k] for k in ("method", "features", "steps", "every")}
        for key in ("f1_clean", "f1_corrupted", "test_accuracy", "seconds"):
            values = [r[key] for r in group if r.get(key) is not None]
            if values:
                row[key] = float(np.mean(values))
                row[f"{key}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        row["steps_to_gd"] = _steps_to_gd(group, records)
        out.append(row)
    return out


def _steps_to_gd(group: list[dict[str, Any]], records: list[dict[str, Any]]) -> int | None:
    """Return after how many outer steps the mean F1 reaches gd's final one in the same cell; None if never or no gd."""
    same = (*CELL, "steps")
    basic = [r for r in records if r["method"] == "gd" and all(r[k] == group[0][k] for k in same)]
    if not basic or not all(r["history"] for r in group):
        return None
    curve = np.mean([[h["f1_clean"] for h in r["history"]] for r in group], axis=0)
    reached = np.flatnonzero(curve >= np.mean([r["f1_clean"] for r in basic]) - 1e-12)
    return int(reached[0]) + 1 if len(reached) else None
