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
FILTERS = 64  # of the patch features: 18 features each, 1,152 in all


@dataclass(frozen=True)
class Data:
    """Several values, separated by commas, make a grid."""

    dataset: Annotated[tuple[str, ...], names(list(data.READERS))] = ("digits",)
    """Public data. mnist-qmnist-labels: MNIST's images with QMNIST's labels."""
    data_root: str = "data"
    """Where the files are: in torchvision's layout, or as .tar.xz or .npz."""
    download: bool = False
    """Let torchvision fetch what is missing into --data-root."""
    features: Literal["auto", "pixels", "patches"] = "auto"
    """What a linear model or an MLP sees. patches: filters learnt from the images, without labels. auto: patches for
    colour, pixels for grey. Networks with convolutions always see pixels."""
    components: Whole = 256
    """Principal components of the inputs that the inner loop of a linear model is run in; 0: all of them. Descent from
    zero is the same in any rotated coordinates, so only what is dropped can matter."""
    rho: Fractions = (0.6,)
    """Fraction of training labels changed to another class."""
    train: Whole = 0
    """Noisy training samples; 0: 5000, or what the data set allows."""
    validation: Wholes = (0,)
    """Clean, checked samples; 0: 5000, or what the data set allows."""


@dataclass(frozen=True)
class Method:
    """The inner loop, and the outer steps on the weights of the samples."""

    model: Annotated[tuple[str, ...], names(list(MODELS))] = ("linear",)
    """Models."""
    solvers: Annotated[tuple[str, ...], names(list(SOLVERS))] = ("gd", "bigsam")
    """Inner solvers. gd: the basic model; bigsam: the improved; bigsam-convergent: with a schedule that converges."""
    steps: Counts = (100,)
    """Inner steps K; several: the paper's Figure 3."""
    every: Counts = (1,)
    """A BiG-SAM step every E-th time, plain descent between; several: the paper's Figure 2."""
    outer_steps: Count = 5
    """Outer steps."""
    lr: Rate = 0.05
    """Inner rate."""
    momentum: Rate = 0.0
    """Momentum of the inner loop."""
    eta: Rate = 0.2
    """Outer rate: Adam's."""
    batch_size: Whole = 0
    """Samples in an inner step; 0: all of them."""
    memory: str = "auto"
    """Memory for a hypergradient, as in 2GiB; less is slower, same result. auto: half of what is free."""


@dataclass(frozen=True)
class Comparison:
    """What stands beside the solvers."""

    baselines: Annotated[tuple[str, ...], names(BASELINES)] = ("validation-only",)
    """validation-only: a classifier of the checked samples alone, a label it disagrees with is called wrong. cleanlab:
    confident learning on cross-validated probabilities of the noisy set (extra: compare). cleanlab-checked: the same
    on the probabilities of validation-only. keep-all: no cleaning. oracle: the true verdict. Or none."""
    fit_steps: Count = 200
    """Adam steps of the classifiers in the comparison."""
    fit_lr: Rate = 3e-3
    """Their rate."""
    seeds: Count = 1
    """How many seeds; a seed sets the split, the wrong labels and the initial weights."""
    first_seed: Whole = 0
    """The first of them. mnist-qmnist-labels takes the seeds after these, since its rows are MNIST's: other draws."""


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
    """Keep weights of convolutions in that layout, for a GPU with --bf16 or --tf32."""
    threads: Whole = 0
    """Torch threads; a run repeats bit for bit with the same number. 0: torch's default."""


@dataclass(frozen=True)
class Settings(Data, Method, Comparison, Run):
    """Everything that the figures depend on; the flags of the command, one to one."""


def fingerprint(s: Settings) -> dict[str, Any]:
    """What a resumed run must share with the one it goes on with. (The memory changes no bit of the result.)"""
    return {k: v for k, v in asdict(s).items() if k not in ("data_root", "download", "memory")}


def check(s: Settings) -> None:
    """Fail on what is wrong before anything is written."""
    bilevel.Reverse(memory=s.memory)  # a size that is none fails here
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
        """How tables and plots call the method."""
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
    """All runs, cell by cell, seed by seed, so that an interrupted study has whole cells."""
    for dataset, model, rho, validation in itertools.product(s.dataset, s.model, s.rho, s.validation):
        first = s.first_seed + s.seeds * (dataset == QMNIST_LABELS)
        for seed in range(first, first + s.seeds):
            for name in s.baselines:
                yield Job(dataset, model, rho, validation, name, 0, 0, seed)
            for steps, solver in itertools.product(s.steps, s.solvers):
                # gd takes no step on g, so that `every` says nothing about it
                for every in s.every if solver != "gd" else (1,):
                    yield Job(dataset, model, rho, validation, solver, every, steps, seed)


def run(s: Settings, folder: Path, quiet: bool = False) -> list[dict[str, Any]]:
    """Run what is not done yet, and return the record of every run."""
    runs.set_up(s.device, s.threads, s.tf32)
    return runs.sweep(list(jobs(s)), folder, lambda job, path, state: one(s, job, path, state, quiet), quiet)


@lru_cache(maxsize=4)
def source(name: str, root: str, download: bool) -> data.Images:
    return data.load(name, Path(root), download)


def features(s: Settings, job: Job) -> str:
    """ "pixels" or "patches", whichever the model of this job sees."""
    if job.model not in ("linear", "mlp"):
        return "pixels"
    colour = source(job.dataset, s.data_root, s.download).x.ndim == 4
    return s.features if s.features != "auto" else "patches" if colour else "pixels"


@lru_cache(maxsize=2)
def patches(name: str, root: str, download: bool) -> data.Images:
    """The data set with patch features in place of images. No label has a part in them, and no test image."""
    images = source(name, root, download)
    learnt = Patches.learn(images.x, count=FILTERS)
    test = None if images.x_test is None else learnt.encode(images.x_test)
    return replace(images, x=learnt.encode(images.x), x_test=test)


@dataclass(frozen=True)
class Problem:
    """A split as tensors, standardised with the training set's mean and deviation."""

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
    """The same problem in the directions in which the training rows vary most."""
    x = p.train[0].flatten(1)
    if not components or components >= x.shape[1]:
        return p
    axes = torch.linalg.eigh(x.T @ x).eigenvectors[:, -components:]
    train, validation = ((x.flatten(1) @ axes, y) for x, y in (p.train, p.validation))
    return replace(p, train=train, validation=validation, shape=(components,))


def one(s: Settings, job: Job, path: Path, state: dict[str, Any] | None, quiet: bool) -> dict[str, Any]:
    """One run: judge every training sample, then measure the verdict."""
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
    """λ and its history, with the F1 after each outer step, by the bilevel loop; saved after each outer step."""
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
    """Which samples the baseline keeps."""
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
    """One row for each cell and method: mean and standard deviation over the seeds of what was measured."""
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
    """After how many outer steps the mean F1 is what gd's is at its end, in the same cell; None if never, or no gd."""
    same = (*CELL, "steps")
    basic = [r for r in records if r["method"] == "gd" and all(r[k] == group[0][k] for k in same)]
    if not basic or not all(r["history"] for r in group):
        return None
    curve = np.mean([[h["f1_clean"] for h in r["history"]] for r in group], axis=0)
    reached = np.flatnonzero(curve >= np.mean([r["f1_clean"] for r in basic]) - 1e-12)
    return int(reached[0]) + 1 if len(reached) else None
