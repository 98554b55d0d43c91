"""The grid of runs behind the command: data × encoder × ways × shots × method × K × rate × seed, each resumable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from scipy.stats import t as student
from torch import nn
from tqdm import tqdm

from .. import ranks, runs
from ..command import Count, Counts, Rate, Rates, Whole, names, value
from ..device import has_fast_bf16
from ..models import ENCODERS, build_encoder
from . import sources
from .augment import Augment
from .episodes import Episodes, Images
from .evaluate import VIEWS, Views, evaluate
from .maml import RATES, Learner, evaluate_all, meta_train_all
from .train import SOLVERS, meta_train

UNTRAINED = "untrained"
# images of at most so many pixels have one pixel left before a convolution of stride 2, see docs/limits.md
ONE_PIXEL = {"conv4": 8, "resnet18": 16}


@dataclass(frozen=True)
class Data:
    """Several values, separated by commas, make a grid."""

    dataset: Annotated[tuple[str, ...], names(list(sources.SOURCES))] = ("digits",)
    """Data sets with the classes and images."""
    data_root: str = "data"
    """Folder of the files."""
    download: bool = False
    """Let torchvision download Omniglot to --data-root."""
    turns: Count = 4
    """1: images are not rotated. 2, 3, 4: each rotation by 90° makes new classes."""
    test_turns: Whole = 0
    """The same for test classes; 0: as many turns as in training."""
    ways: Counts = (5,)
    """Number of classes in a task."""
    shots: Counts = (1,)
    """Number of support images of each class, from which a task is learnt."""
    queries: Count = 10
    """Number of query images of each class, on which a task is tested."""
    train_queries: Whole = 0
    """Number of query images of each class in meta-training; 0: the same."""
    train_on: Annotated[str, value(str, "train|train+val", ("train", "train+val"))] = "train"
    """Classes for training. train+val: also those for validation, to be used when all settings are chosen."""
    mirror: bool = False
    """Mirror a random half of the training images."""
    shift: Rate = 0.0
    """Move training images by up to this share of their side."""
    turn: Rate = 0.0
    """Rotate training images by up to this many degrees."""
    zoom: Rate = 0.0
    """Enlarge or shrink training images by a factor of up to 1 + X, separately in width and height."""
    light: Rate = 0.0
    """Change contrast by a factor in 1 ± X, and brightness by up to X standard deviations."""


@dataclass(frozen=True)
class Method:
    """Meta-training of an encoder, with a linear head for each task."""

    model: Annotated[tuple[str, ...], names(list(ENCODERS))] = ("conv4",)
    """Encoders to train."""
    solvers: Annotated[tuple[str, ...], names(list(SOLVERS))] = ("bigsam",)
    """Inner solvers. split: steps on g use one half of the queries, and the outer loss the other half."""
    steps: Counts = (5,)
    """Number of inner steps K."""
    every: Counts = (1,)
    """Take a step on g every N-th time."""
    lr: Rates = (0.4,)
    """Inner rate t of steps on h."""
    s: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """Inner rate of steps on g; without this flag, that of steps on h."""
    images: int = 880
    """Approximate number of images in a meta-batch. 880 are 16 tasks of 5-way 1-shot, or 3 of 20-way 5-shot."""
    tasks: Whole = 0
    """Number of tasks in a meta-batch; 0: as many as have about --images images."""
    outer_steps: Count = 300
    """Number of outer steps, each on one meta-batch."""
    eta: Rate = 2e-3
    """Rate of Adam for the encoder."""
    no_decay: bool = False
    """Keep the rate --eta constant; without this flag it falls to 0 along half a cosine."""
    features: str = "sphere"
    """Inputs of the heads. centred: features minus their mean over the support set. sphere: the same, scaled to one
    length. raw: the features themselves."""
    batchnorm: str = "running"
    """Statistics of BatchNorm. running: running statistics at test time. task: those of the task's own images, support
    and query, in training and at test time (transductive)."""
    chunk: Count = 220
    """Number of images in one pass of the encoder, which is BatchNorm's batch in training."""


@dataclass(frozen=True)
class Adaptation:
    """What is adapted to a task. The flags below --adapt apply to --adapt all."""

    adapt: Annotated[str, value(str, "head|all", ("head", "all"))] = "head"
    """head: a linear head on the encoder. all: all weights of encoder and head, from a start that is learnt (MAML).
    BatchNorm then uses the statistics of each batch: the support set, or all queries of a task (transductive)."""
    first_order: bool = False
    """Leave out second derivatives."""
    rates: Annotated[str, value(str, "|".join(RATES), RATES)] = "fixed"
    """Inner rates. fixed: --lr. step: one is learnt for each inner step. tensor: one is learnt for each inner step and
    weight tensor."""
    losses_along: Whole = 0
    """Number of outer steps in which the losses after all inner steps count (MAML++). Their weights are equal at first,
    and shift to the last loss."""


@dataclass(frozen=True)
class Evaluation:
    """Tests on tasks of classes that were never trained on."""

    also: Annotated[tuple[str, ...], names()] = ()
    """Further tasks to test each encoder on: 5x1,20x5 is 5-way 1-shot and 20-way 5-shot."""
    test_on: str = "test"
    """Classes to test on: test, or val for choosing rates."""
    test_steps: Counts = (1, 5, 10, 20, 50)
    """Numbers of adaptation steps to test, besides --steps."""
    test_episodes: Count = 1000
    """Number of test tasks."""
    test_views: Annotated[tuple[str, ...], names(VIEWS)] = ()
    """Views of a test image, or none: its features are the mean over the image and these views. mirror: left and right
    swapped. shift: moved by 1/28 of its side in four directions. Tests during training use the image alone."""
    curve_points: Count = 10
    """Number of tests during training, for the curves."""
    curve_episodes: Count = 200
    """Number of test tasks of each test during training."""
    baselines: Annotated[tuple[str, ...], names([UNTRAINED])] = (UNTRAINED,)
    """Baselines, or none. untrained: heads on a random encoder."""
    seeds: Count = 1
    """Number of seeds, which set the initial weights and the training tasks."""


@dataclass(frozen=True)
class Run:
    """The machine."""

    save_every: Count = 50
    """Number of outer steps between checkpoints, which is the most that a kill can lose."""
    device: str = "cpu"
    """cpu or cuda."""
    precision: Annotated[str, value(str, "float32|bf16|auto", ("float32", "bf16", "auto"))] = "float32"
    """Precision of the encoder. bf16: autocast to bfloat16, while weights and heads stay in float32. auto: bf16 if the
    processor has instructions for it."""
    tf32: bool = False
    """Let float32 products and convolutions on a GPU round to TF32."""
    threads: Whole = 0
    """Number of torch threads; 0: torch's default. A run repeats bit for bit with the same number."""


@dataclass(frozen=True)
class Settings(Data, Method, Adaptation, Evaluation, Run):
    """The settings that the figures depend on. Each is a flag of the command."""


def fingerprint(s: Settings) -> dict[str, Any]:
    """Return what a resumed run must share with the run that it continues."""
    found = {k: v for k, v in asdict(s).items() if k not in ("data_root", "download", "save_every")}
    return {**found, "precision": "bf16" if uses_bf16(s) else "float32"}


def uses_bf16(s: Settings) -> bool:
    """Return whether the encoder runs in bfloat16. "auto" depends on the processor."""
    if s.precision != "auto" or s.adapt == "all":
        return s.precision == "bf16"
    return has_fast_bf16(torch.device(s.device)) and _sees_one_pixel(s) is None


def _sees_one_pixel(s: Settings) -> int | None:
    """The size of images whose last convolution sees one pixel, on a CPU: torch's gradient is wrong there in bf16."""
    if torch.device(s.device).type != "cpu":
        return None
    sizes = [min(_images(s, name, "train").shape[1:]) for name in s.dataset]
    return next((size for size in sizes if any(size <= ONE_PIXEL.get(m, 0) for m in s.model)), None)


@dataclass(frozen=True)
class Job:
    """One run of the grid."""

    dataset: str
    model: str
    ways: int
    shots: int
    method: str
    steps: int
    every: int
    lr: float
    seed: int

    @property
    def label(self) -> str:
        """The name of the method in tables and plots."""
        extra = [f"every {self.every}"] if self.every > 1 else []
        return f"{self.method} ({', '.join([f'K={self.steps}', f't={self.lr:g}', *extra])})"

    @property
    def title(self) -> str:
        return f"{self.dataset} {self.ways}-way {self.shots}-shot {self.label} seed {self.seed}"

    @property
    def file(self) -> str:
        return runs.file_name(self)


CELL = ("dataset", "model", "ways", "shots")


def jobs(s: Settings) -> Iterator[Job]:
    """Yield all runs, ordered by cell and then by seed, so that an interrupted study has complete cells."""
    for cell in itertools.product(s.dataset, s.model, s.ways, s.shots):
        for seed in range(s.seeds):
            for steps, lr, method in itertools.product(s.steps, s.lr, (*s.baselines, *s.solvers)):
                # only a solver with steps on g can take them every E-th time
                for every in s.every if method not in ("gd", UNTRAINED) else (1,):
                    yield Job(*cell, method, steps, every, lr, seed)


def run(s: Settings, folder: Path, quiet: bool = False) -> list[dict[str, Any]]:
    """Do the runs that are not done yet, and return the records of all."""
    runs.set_up(s.device, s.threads, s.tf32)
    return runs.sweep(list(jobs(s)), folder, lambda job, path, state: one(s, job, path, state, quiet), quiet)


@lru_cache(maxsize=4)
def images(name: str, root: str | None, download: bool, turns: int, device: str, part: str) -> Images:
    """Return the classes of a split, normalised with mean and deviation of the training classes."""
    source = sources.load(name, root, download)
    scale = None if part == "train" else images(name, root, download, turns, device, "train").scale
    return Images(source.part(part), turns, device, scale)


def augment(s: Settings) -> Augment | None:
    """Return the random changes of training images, or None."""
    found = Augment(s.mirror, s.shift, s.turn, s.zoom, s.light)
    return None if found == Augment() else found


def check(s: Settings) -> None:
    """Raise for missing data and impossible tasks, before the work begins."""
    for name in ("turns", "queries", "images", "outer_steps", "chunk", "test_episodes", "curve_points", "save_every"):
        if getattr(s, name) < 1:
            raise ValueError(f"recipes.few_shot: --{name.replace('_', '-')} must be at least 1; got {getattr(s, name)}")
    trained = list(itertools.product(s.ways, s.shots))
    _check_adaptation(s)
    if s.test_on in s.train_on.split("+"):
        raise ValueError(
            f"recipes.few_shot: --train-on {s.train_on} trains on the classes of --test-on {s.test_on}; choose other "
            "classes to test on, or --train-on train"
        )
    if uses_bf16(s) and (size := _sees_one_pixel(s)) is not None:
        raise ValueError(
            f"recipes.few_shot: --precision bf16 on the CPU, and images of {size} pixels, of which the last "
            "convolution sees one: torch's gradient of its weights is wrong in bf16; take --precision float32"
        )
    for name in s.dataset:
        tested = [*trained, *map(cells_of, s.also)]
        for part, cells, queries in ((s.train_on, trained, train_queries(s)), (s.test_on, tested, s.queries)):
            for ways, shots in cells:
                _images(s, name, part, test=part == s.test_on).draw(1, ways, shots + queries, torch.Generator())


def _check_adaptation(s: Settings) -> None:
    """Refuse flags that do not apply to the chosen --adapt."""
    only = {"head": ("features", "batchnorm", "chunk", "test_views"), "all": ("first_order", "rates", "losses_along")}
    (other,) = only.keys() - {s.adapt}
    for name in only[other]:
        if getattr(s, name) != getattr(Settings, name):
            raise ValueError(f"recipes.few_shot: --{name.replace('_', '-')} is for --adapt {other}; leave it out")
    if s.adapt == "head":
        return
    if s.precision == "bf16":
        raise ValueError("recipes.few_shot: --adapt all runs in float32; leave out --precision bf16")
    if ranks.size(ranks.group()) > 1:
        raise ValueError("recipes.few_shot: --adapt all runs in one process; start it without torchrun")
    if split := [name for name in s.solvers if SOLVERS[name].split]:
        raise ValueError(f"recipes.few_shot: {split[0]} is for --adapt head, whose queries are features; take another")
    if s.losses_along and min(s.steps) == 1:
        raise ValueError("recipes.few_shot: with --steps 1 there is one loss; leave out --losses-along, or take more")
    for ways, cell in itertools.product(s.ways, s.also):
        if cells_of(cell)[0] != ways:
            raise ValueError(
                f"recipes.few_shot: --also {cell} and --ways {ways}: with --adapt all the head is a part of the start, "
                "and has an output for each way; test with the same ways"
            )


def _images(s: Settings, dataset: str, part: str, test: bool = False) -> Images:
    turns = s.test_turns if test and s.test_turns else s.turns
    return images(dataset, s.data_root, s.download, turns, s.device, part)


def one(s: Settings, job: Job, path: Path, state: dict[str, Any] | None, quiet: bool) -> dict[str, Any]:
    """Do one run: train the encoder, and test it on tasks of new classes."""
    train, test = _images(s, job.dataset, s.train_on), _images(s, job.dataset, s.test_on, test=True)
    encoder = build_encoder(job.model, train.shape, job.seed).to(s.device)
    episodes = Episodes(train, tasks(s, job), job.ways, job.shots, train_queries(s), job.seed, augment(s))
    common = {"features": s.features, "batchnorm": s.batchnorm, "chunk": s.chunk}
    label, start = job.label, encoder
    if s.adapt == "all":
        label = f"{label}, {'all weights' if job.method == UNTRAINED else adaptation(s)}"
        start = Learner(encoder, train.shape, job.ways, job.steps, job.lr, s.rates)

    def test_now(
        module: nn.Module, ways: int, shots: int, leaky: int = 0, views: Sequence[str] = (), **options: Any
    ) -> dict[str, Any]:
        if isinstance(module, Learner):
            found = evaluate_all(module, test, ways, shots, s.queries, **options)
        else:
            # in a mean over n times as many classes each has an n-th of the gradient, so t is scaled with the ways
            lr = job.lr * ways / job.ways
            seen = Views(module, views)
            found = evaluate(seen, test, ways, shots, s.queries, lr=lr, leaky=leaky, **options, **common)
        return {name: asdict(score) for name, score in found.items()}

    others = [cell for cell in s.also if cells_of(cell) != (job.ways, job.shots)]

    def test_all(module: nn.Module, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Test on the tasks that it is trained for, and on the others."""
        also = {cell: test_now(module, *cells_of(cell), **options) for cell in others}
        return test_now(module, job.ways, job.shots, **options), also

    if job.method == UNTRAINED:
        trained = start if isinstance(start, Learner) else settle(start, episodes, s.chunk)
        record: dict[str, Any] = {"seconds": 0.0, "cpu_seconds": 0.0, "history": []}
    else:
        done = 0 if state is None else state["step"]
        bar = tqdm(total=s.outer_steps, initial=done, desc=label, disable=quiet, position=1, leave=False)
        stops = {round(s.outer_steps * i / s.curve_points) for i in range(1, s.curve_points + 1)}

        def keep(now: Any) -> None:
            if now.step in stops:
                quick = {"episodes": s.curve_episodes, "steps": (job.steps,)}
                found, also = test_all(now.encoder, **quick)
                at = {"step": now.step, "seconds": now.seconds}
                here, there = found[str(job.steps)], {cell: scores[str(job.steps)] for cell, scores in also.items()}
                now.history.append({**at, **here, "also": there})
                bar.set_postfix_str(f"accuracy {here['mean']:.1%}")
            if now.step in stops or now.step % s.save_every == 0:
                runs.save(path, now.state())
            bar.update()

        shared: dict[str, Any] = {
            "solver": job.method, "steps": job.steps, "lr": job.lr, "s": s.s, "every": job.every, "seed": job.seed,
            "outer_steps": s.outer_steps, "eta": s.eta, "decay": not s.no_decay, "state": state, "on_step": keep,
        }  # fmt: skip
        if isinstance(start, Learner):
            result = meta_train_all(start, episodes, **shared, first_order=s.first_order, losses_along=s.losses_along)
        else:
            result = meta_train(
                start, episodes, ways=job.ways, **shared, bf16=uses_bf16(s), group=ranks.group(), **common
            )
        bar.close()
        trained, record = result.encoder, {"seconds": result.seconds, "cpu_seconds": result.cpu_seconds}
        record["history"] = result.history
    steps = tuple(sorted({*s.test_steps, job.steps}))
    # seed 1 gives other tasks than those of the curve
    whole: dict[str, Any] = {"episodes": s.test_episodes, "steps": steps, "leaky": job.steps, "seed": 1}
    scores, also = test_all(trained, views=s.test_views, **whole)
    record |= {
        **asdict(job),
        "label": label,
        "scores": scores,
        "also": also,
        "tasks": episodes.tasks,
        "bf16": uses_bf16(s),
    }
    if isinstance(trained, Learner):
        record["rates"] = trained.rates.tolist()
    state = {"record": record, "encoder": trained.state_dict()}
    runs.save(path, state)
    return state


def adaptation(s: Settings) -> str:
    """Return the name of a way to adapt all weights, for tables and plots."""
    parts = ["all weights", *(["first order"] if s.first_order else [])]
    parts += {"fixed": [], "step": ["a rate for each step"], "tensor": ["a rate for each step and tensor"]}[s.rates]
    return ", ".join([*parts, *([f"losses along for {s.losses_along}"] if s.losses_along else [])])


def cells_of(text: str) -> tuple[int, int]:
    """Return ways and shots of "5x1"."""
    ways, _, shots = text.partition("x")
    if not (ways.isdigit() and shots.isdigit()):
        raise ValueError(f"recipes.few_shot: --also takes WAYSxSHOTS, as in 5x1,20x5; got {text!r}")
    return int(ways), int(shots)


def tasks(s: Settings, job: Job) -> int:
    """Return the number of tasks in a meta-batch. Larger tasks are fewer, for the same work."""
    return s.tasks or max(1, round(s.images / (job.ways * (job.shots + train_queries(s)))))


def train_queries(s: Settings) -> int:
    return s.train_queries or s.queries


def settle(encoder: nn.Module, episodes: Episodes, chunk: int, batches: int = 20) -> nn.Module:
    """Return the untrained encoder with BatchNorm statistics of the training classes, which is the fair baseline."""
    encoder.train()
    with torch.no_grad():
        for _ in range(batches):
            (x, _), _ = next(episodes)
            for part in x.flatten(0, 1).split(chunk):
                encoder(part)
    return encoder.eval()


def elsewhere(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each test on other tasks than those of the training, with a label that says so."""
    found: list[dict[str, Any]] = []
    for r in records:
        how = "t of" if r["method"] == UNTRAINED else "trained"
        for cell, scores in r["also"].items():
            ways, shots = cells_of(cell)
            label = f"{r['label']}, {how} {r['ways']}-way {r['shots']}-shot"
            curve = [{**point, **point["also"][cell]} for point in r["history"]]
            found.append({**r, "ways": ways, "shots": shots, "scores": scores, "label": label, "history": curve})
    return found


def over_seeds(means: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean over a few seeds, by Student's t."""
    return float(student.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / math.sqrt(len(means)))


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell and method: the mean over seeds of each score, with an interval.

    The interval is that over the tasks for one seed, and that of `over_seeds` for several.
    """
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in [*records, *elsewhere(records)]:
        rows.setdefault((*(r[k] for k in CELL), r["label"]), []).append(r)
    out: list[dict[str, Any]] = []
    for group in rows.values():
        first = group[0]
        row: dict[str, Any] = {k: first[k] for k in (*CELL, "label", "method", "steps", "every", "lr")}
        row |= {"seeds": len(group), "scores": {}}
        row |= {name: float(np.mean([r[name] for r in group])) for name in ("seconds", "cpu_seconds")}
        for name, score in first["scores"].items():
            means = [r["scores"][name]["mean"] for r in group]
            spread = score["interval"]
            if len(group) > 1:
                spread = over_seeds(means)
            row["scores"][name] = {"mean": float(np.mean(means)), "interval": spread}
        out.append(row)
    return out
