"""`bilevel-fewshot PHOTOS`: train an encoder on your own classes, and test it on classes that it has never seen."""

from __future__ import annotations

import copy
import hashlib
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from .. import runs, tables
from ..clean import backbones
from ..command import Count, Rate, Whole, value
from .augment import Augment
from .collection import (
    Files,
    chosen,
    labelled,
    look,
    make_folder,
    own_name,
    own_prefix,
    printable,
    read,
    refuse_folder,
    resize,
    skipped_text,
    some,
    without_copies,
)
from .encoder import ABOUT, WEIGHTS, Encoder, Spec, build_body, check_size, save_encoder
from .episodes import Episodes, Images
from .evaluate import Score, evaluate
from .heads import Head, learn_rates
from .sources import Part
from .study import settle
from .train import SOLVERS, meta_train

PARTS = ("train", "val", "test")
POINTS = 10  # how often in training the encoder is saved, after a test on the validation classes
RATE = 0.4  # the rate of a head in a task of 5 ways
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Data:
    """Pictures, and tasks made of them: to tell some classes apart after a few pictures of each.
    0 stands for a value that is chosen by the data, and reported."""

    root: Folder = None
    """Folder of the files that a CSV file names; without this flag, the folder of the CSV file."""
    image_size: Whole = 0
    """Side in pixels to which pictures are resized.
    0: the median of their shorter sides, but at most 84; with --frozen, the size that the model was made for."""
    augment: Annotated[str, value(str, "auto|none|flip|rotate", ("auto", "none", "flip", "rotate"))] = "auto"
    """Changes of training pictures.
    flip: mirror a random half of them.
    rotate: turns by 90° make further classes.
    none: no changes.
    auto: none with --frozen; rotate for grey pictures or fewer than 10 training classes; otherwise flip."""
    ways: Annotated[int, value(int, "N", least=2)] = 5
    """Number of classes in a test task; fewer if there are fewer test classes."""
    shots: Count = 1
    """Number of pictures of each class to learn from in a task."""
    test_tasks: Count = 600
    """Number of test tasks."""
    seed: Whole = 0
    """Random seed of the split of the classes, of the initial weights and of the tasks."""


@dataclass(frozen=True)
class Training:
    """The encoder, which makes features of pictures, and how it is trained.
    A head is a linear classifier of features; each task has its own."""

    encoder: Annotated[str, tyro.conf.arg(metavar="NAME")] = "conv4"
    """Network: conv4, conv4-pool, resnet18, torchvision:NAME or timm:NAME."""
    weights: File = None
    """File with the weights of a torchvision or timm model; without this flag, those in its library's cache, if any."""
    frozen: Switch = False
    """Keep the weights of the model. Only the rates of the heads are learnt, which takes seconds."""
    solver: Annotated[str, value(str, "|".join(SOLVERS), list(SOLVERS))] = "bigsam"
    """Solver that fits heads in training. gd takes steps only on the pictures to learn from.
    The others also take steps on the pictures to recognise."""
    steps: Count = 5
    """Number of steps in which a head is fitted."""
    outer_steps: Whole = 0
    """Number of outer steps, each on one batch of tasks. 0: 300, or 100 with --frozen."""
    images: Whole = 0
    """Approximate number of pictures in a batch of tasks. 0: 400, or 100 for torchvision and timm models."""
    eta: Rate = 0.0
    """Learning rate of Adam, which trains the encoder.
    0: 2e-3; 1e-4 for a model with trained weights; 0.05 for the rates of heads with --frozen."""


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Folder = None
    """Folder of the run; without this flag, runs/NAME with the name of the data."""
    resume: Switch = False
    """Continue the run in --out that was stopped, with the same result."""
    threads: Whole = 0
    """Number of torch threads; 0: torch's default."""
    quiet: Switch = False
    """Show no progress."""


@dataclass(frozen=True)
class Command:
    photos: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PHOTOS")]
    """A folder with one folder for each class, or a .csv file with the columns file and label."""
    data: Data
    training: Training
    output: Output


@dataclass(frozen=True)
class Material:
    """All that training needs.

    classes: the number of pictures of each class, by part. images: those of each part that has any; features if frozen.
    weights: the file of the weights that the encoder starts from; None for random ones.
    """

    files: Files
    classes: dict[str, dict[str, int]]
    images: dict[str, Images]
    encoder: Encoder
    frozen: bool
    augment: str
    weights: Path | None

    @property
    def mapping(self) -> nn.Module:
        """The module that turns `images` into features."""
        return nn.Flatten() if self.frozen else self.encoder.body

    @property
    def digest(self) -> str:
        """Return a checksum of the pictures and their classes."""
        found = hashlib.sha256(repr((self.files.names, self.files.labels)).encode())
        for images in self.images.values():
            found.update(images.digest())
        return found.hexdigest()


def run(command: Command, argv: Sequence[str]) -> str:
    """Train, test and write the encoder. Return what is printed at the end."""
    begin, c = time.perf_counter(), command
    runs.set_up("cpu", c.output.threads)
    folder = c.output.out or Path("runs") / own_name(c.photos)
    refuse_folder(folder)
    _refuse_run(folder, c.output.resume)
    if any((folder / name).exists() for name in (WEIGHTS, ABOUT)) and not (folder / "settings.json").is_file():
        raise FileExistsError(f"bilevel-fewshot: {folder} holds an encoder, but not its run; give another --out.")
    m = gather(c)
    pictures = f"{len(m.files.names)} of {len(set(m.files.labels))} classes, checksum {m.digest[:16]}"
    settings = {**asdict(c.data), **asdict(c.training), "pictures": pictures}
    make_folder(folder)
    runs.open_folder(folder, {k: v for k, v in settings.items() if k not in ("root", "weights")}, c.output.resume)
    before = _measure(_untrained(m, c), "test", c, m.encoder.spec.head)
    head, trained = _learn_rates(m, c) if m.frozen else _train(m, c, folder)
    after = _measure(m, "test", c, head)
    ways = _ways(m, "test", c)
    accuracy = {"ways": ways, "shots": c.data.shots, "before": _plain(before), "after": _plain(after)}
    words = [word for word in argv if word not in ("--resume", "--quiet")]
    about = {"classes": m.classes, "skipped": m.files.skipped, "augment": m.augment,
             "accuracy": accuracy if after else None, **trained,
             "command": shlex.join(["bilevel-fewshot", *words]), "versions": runs.versions()}  # fmt: skip
    save_encoder(folder, m.encoder.body, replace(m.encoder.spec, head=head, about=about))
    table = _table(before, after, ways, c) if after else _NOT_MEASURED
    helped = not after or m.frozen or after["head"].mean > before["head"].mean
    parts = [_description(m, c), skipped_text(m.files), *m.files.warnings, table, "" if helped else _NOT_HELPED,
             f"{WEIGHTS} and {ABOUT} written to {folder} in {time.perf_counter() - begin:.0f} s.",
             f"Next: bilevel-fewshot predict {shlex.quote(str(folder))} SUPPORT QUERY"]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def _refuse_run(folder: Path, resume: bool) -> None:
    """Refuse a run that is there already before the pictures are read, which may take minutes."""
    if (folder / "settings.json").is_file() and not resume:
        raise FileExistsError(
            f"bilevel-fewshot: {folder} holds a run; pass --resume to go on with it, or another --out."
        )


_NOT_HELPED = (
    "Training has not raised the accuracy on these test classes, as happens with few classes. Try bilevel-fewshot "
    "predict patches, or a model with trained weights and --frozen."
)
_NOT_MEASURED = (
    "The accuracy on new classes was not measured: with fewer than 4 classes, all of them are for training. Leave-one-"
    "out accuracy of bilevel-fewshot predict says how well the encoder serves new classes."
)

# --- pictures, classes, encoder --------------------------------------------------------------------------------


def gather(c: Command) -> Material:
    """Read the pictures, split their classes, and build the encoder. Raise for anything that is wrong."""
    frozen = c.training.frozen
    _refuse(c)
    files = labelled(c.photos, c.data.root)
    require_two(files.labels, c.photos)  # before anything is read
    given = set(files.labels)
    encoder, scaled, file = _encoder(files, c)
    each = encoder.eval().encode if frozen else lambda pictures: resize(pictures, encoder.look)
    x, files = read(files, each, c.output.quiet)
    rows, files = without_copies(files)
    x, files = _without_small_classes(x[rows], files, c.data.shots, given)
    names = split_classes(files.labels, c.data.seed)
    augment = _augment(c, encoder.look.colour, len(names["train"]))
    parts = {part: _part(x, files.labels, names[part]) for part in PARTS if names[part]}
    given = (torch.tensor(encoder.spec.mean), torch.tensor(encoder.spec.deviation)) if scaled and not frozen else None
    images = _images(parts, 4 if augment == "rotate" else 1, given)
    if not scaled:
        mean, deviation = (part.tolist() for part in images["train"].scale)
        encoder = Encoder(encoder.body, replace(encoder.spec, mean=mean, deviation=deviation))
    counts = Counter(files.labels)
    classes = {part: {name: counts[name] for name in names[part]} for part in PARTS}
    return Material(files, classes, images, encoder, frozen, augment, file)


def _refuse(c: Command) -> None:
    """Refuse flags that do not go together."""
    t = c.training
    for flag, given in (("--frozen", t.frozen), ("--weights", t.weights is not None)):
        if given and ":" not in t.encoder:
            raise ValueError(
                f"bilevel-fewshot: {flag} goes with --encoder torchvision:NAME or timm:NAME; it is {t.encoder}."
            )
    if t.frozen and c.data.augment not in ("auto", "none"):
        raise ValueError(
            f"bilevel-fewshot: --augment {c.data.augment} does not go with --frozen, whose features are computed once; "
            "leave one of them out."
        )
    if c.data.image_size and not 8 <= c.data.image_size <= 256:
        raise ValueError(f"bilevel-fewshot: --image-size is from 8 to 256 pixels; got {c.data.image_size}.")


def split_classes(labels: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Split classes by name, sorted, then shuffled with the seed: the first are for test, then validation, training.

    Of n classes, a fifth (at least 2) is for test, and a sixth for validation if n is at least 12. With fewer than 4
    classes, all are for training.
    """
    names = sorted(set(labels))
    n = len(names)
    test = 0 if n < 4 else max(2, round(n / 5))
    val = 0 if n < 12 else round(n / 6)
    order = [names[i] for i in np.random.default_rng(seed).permutation(n)]
    cut = {"test": order[:test], "val": order[test : test + val], "train": order[test + val :]}
    return {part: sorted(cut[part]) for part in PARTS}


def require_two(labels: Sequence[str], path: Path) -> None:
    names = sorted(set(labels))
    if len(names) < 2:
        found = f"one class, {printable(names[0])}" if names else "no class"
        where = "In a folder of pictures, each class is a folder of its own."
        if not path.is_dir():
            where = "The column label names the class of each file."
        raise ValueError(f"bilevel-fewshot: {path} has {found}; at least two are needed. {where}")


def _without_small_classes(x: NDArray[Any], files: Files, shots: int, given: set[str]) -> tuple[NDArray[Any], Files]:
    """Leave out classes that have no picture besides the shots, since a task needs a query picture.

    given: the classes before pictures were skipped.
    """
    counts = Counter(files.labels)
    rows = [i for i, label in enumerate(files.labels) if counts[label] > shots]
    small = [f"{name} ({counts[name]})" for name in sorted(given) if counts[name] <= shots]
    why = f"its class has no more than {shots} picture{'s' * (shots > 1)} that can be used"
    skipped = [(name, why) for name, label in zip(files.names, files.labels, strict=True) if counts[label] <= shots]
    kept = chosen(files, rows, [*files.skipped, *skipped])
    if len(set(kept.labels)) < 2:
        first = (
            f" The first picture that was skipped: {': '.join(map(printable, files.skipped[0]))}."
            if files.skipped
            else ""
        )
        raise ValueError(
            f"bilevel-fewshot: two classes need at least {shots + 1} pictures that can be used; too small are "
            f"{some(small)}. Add pictures{', or lower --shots' * (shots > 1)}.{first}"
        )
    left_out = f"Classes that were left out, with their numbers of pictures that can be used: {some(small)}."
    return x[rows], replace(kept, warnings=[*kept.warnings, *([left_out] if small else [])])


def _part(x: NDArray[Any], labels: Sequence[str], names: list[str]) -> Part:
    """Return the pictures of these classes, numbered in this order. Features get the shape of images."""
    rank = {name: i for i, name in enumerate(names)}
    rows = [i for i, label in enumerate(labels) if label in rank]
    part = x[rows]
    return Part(part[:, None] if part.ndim == 2 else part, np.array([rank[labels[i]] for i in rows]))


def _images(parts: dict[str, Part], turns: int, scale: tuple[Any, Any] | None) -> dict[str, Images]:
    train = Images(parts["train"], turns, scale=scale)
    # the encoder is tested on the user's classes, not on turns of them
    rest = {part: Images(parts[part], 1, scale=train.scale) for part in parts if part != "train"}
    return {"train": train, **rest}


def _augment(c: Command, colour: bool, classes: int) -> str:
    if c.data.augment != "auto":
        return c.data.augment
    if c.training.frozen:
        return "none"
    return "rotate" if not colour or classes < 10 else "flip"


def _encoder(files: Files, c: Command) -> tuple[Encoder, bool, Path | None]:
    """Return the encoder before training, whether its mean and deviation are set, and the file of its weights."""
    t, name, seed = c.training, c.training.encoder, c.data.seed
    head = Head([RATE] * t.steps, 5)
    if ":" not in name:
        at = look(files, c.data.image_size)
        channels = 3 if at.colour else 1
        body = build_body(name, (channels, at.height, at.width), seed)
        spec = Spec(name, at.height, at.width, channels, [0.0] * channels, [1.0] * channels, head)
        return Encoder(body, spec), False, None
    encoder, file = load_backbone(name, t.weights, required=t.frozen, size=c.data.image_size, head=head, seed=seed)
    if not t.frozen and not c.data.image_size:  # at the full size, training would take hours
        at = look(files)
        encoder = Encoder(encoder.body, replace(encoder.spec, height=at.height, width=at.width))
    if not t.frozen:
        check_size(encoder.body, name, (3, encoder.spec.height, encoder.spec.width), train=True)
    return encoder, True, file


def load_backbone(
    name: str, weights: Path | None, *, required: bool, size: int, head: Head, seed: int = 0
) -> tuple[Encoder, Path | None]:
    """Return a torchvision or timm model as encoder, and the file of its weights: `weights`, or its library's cache.

    Without such a file the weights are random, unless they are required. size: the side of its images; 0: its own.
    """
    with own_prefix(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = backbones.build(name)
        file = weights or (found.cached if found.cached.is_file() else None)
        if required or file is not None:
            found, file = backbones.load(name, weights)
    height, width = (size, size) if size else (found.height, found.width)
    mean, deviation = ([255 * value for value in part] for part in (found.mean, found.deviation))
    check_size(found.model, name, (3, height, width))
    return Encoder(found.model, Spec(name, height, width, 3, mean, deviation, head)), file


# --- training and testing -------------------------------------------------------------------------------------


def _ways(m: Material, part: str, c: Command) -> int:
    """Return the number of classes in a task: up to 20 in training, where many ways teach most, and else --ways."""
    if part not in m.images:
        return 0
    return min(20 if part == "train" and not m.frozen else c.data.ways, m.images[part].classes)


def _queries(m: Material, part: str, c: Command) -> int:
    return min(5 if part == "train" else 10, m.images[part].fewest - c.data.shots)


def _episodes(m: Material, c: Command) -> Episodes:
    ways, queries = _ways(m, "train", c), _queries(m, "train", c)
    images = c.training.images or (100 if ":" in c.training.encoder and not m.frozen else 400)
    tasks = max(1, round(images / (ways * (c.data.shots + queries))))
    augment = Augment(mirror=True) if m.augment == "flip" else None
    return Episodes(m.images["train"], tasks, ways, c.data.shots, queries, c.data.seed, augment)


def _measure(m: Material, part: str, c: Command, head: Head, tasks: int | None = None) -> dict[str, Score]:
    """Return the accuracy of heads ("head") and of the nearest mean on tasks of the part, if it has any classes."""
    ways = _ways(m, part, c)
    if not ways:
        return {}
    steps = len(head.rates)
    found = evaluate(
        m.mapping, m.images[part], ways, c.data.shots, _queries(m, part, c), lr=head.rate(ways), steps=(steps,),
        episodes=tasks or c.data.test_tasks, seed=c.data.seed,
    )  # fmt: skip
    return {"head": found[str(steps)], "nearest mean": found["nearest mean"]}


def _untrained(m: Material, c: Command) -> Material:
    """Return the encoder before training. With random weights, it gets BatchNorm statistics of the training classes."""
    if m.weights is not None:
        return m
    body = settle(copy.deepcopy(m.encoder.body), _episodes(m, c), chunk=220)
    return replace(m, encoder=Encoder(body, m.encoder.spec))


def _learn_rates(m: Material, c: Command) -> tuple[Head, dict[str, Any]]:
    episodes, outer_steps = _episodes(m, c), c.training.outer_steps or 100
    head = learn_rates(episodes, episodes.ways, m.encoder.spec.head, outer_steps, c.training.eta or 0.05)
    return head, {"outer_steps": outer_steps}


def _train(m: Material, c: Command, folder: Path) -> tuple[Head, dict[str, Any]]:
    """Train the body of the encoder in place, and keep its weights at the best validation accuracy.

    Without validation classes, keep those after the last step.
    """
    t, episodes = c.training, _episodes(m, c)
    outer_steps, path = t.outer_steps or 300, folder / "runs" / "training.pt"
    stops = {round(outer_steps * i / POINTS) for i in range(1, POINTS + 1)}
    state = runs.load(path)
    best: dict[str, Any] = {"mean": -1.0} if state is None else state["best"]
    done = 0 if state is None else state["step"]
    bar = tqdm(total=outer_steps, initial=done, desc="training", disable=c.output.quiet, leave=False)

    def keep(now: Any) -> None:
        nonlocal best
        bar.update()
        if now.step not in stops:
            return
        judged = replace(m, encoder=Encoder(now.encoder, m.encoder.spec))
        val = _measure(judged, "val", c, m.encoder.spec.head, tasks=200)
        mean = val["head"].mean if val else float(now.step)  # without validation classes, the last step is the best
        now.history.append({"step": now.step, "validation": val["head"].mean if val else None})
        if mean > best["mean"]:
            weights = {name: value.clone() for name, value in now.encoder.state_dict().items()}
            best = {"mean": mean, "step": now.step, "encoder": weights}
        runs.save(path, {**now.state(), "best": best})

    result = meta_train(
        m.encoder.body, episodes, ways=episodes.ways, solver=t.solver, steps=t.steps, lr=RATE * episodes.ways / 5,
        outer_steps=outer_steps, eta=t.eta or (2e-3 if m.weights is None else 1e-4), seed=c.data.seed, state=state,
        on_step=keep,
    )  # fmt: skip
    bar.close()
    m.encoder.body.load_state_dict(best["encoder"])
    m.encoder.eval()
    about = {"outer_steps": outer_steps, "taken_after_step": best["step"], "validation": result.history}
    return m.encoder.spec.head, {**about, "training_seconds": round(result.seconds, 1)}


# --- words -----------------------------------------------------------------------------------------------------


def _plain(scores: dict[str, Score]) -> dict[str, Any]:
    return tables.plain({name: asdict(score) for name, score in scores.items()})


def _description(m: Material, c: Command) -> str:
    counts = ", ".join(f"{len(m.classes[part])} for {word}" for part, word in zip(PARTS, _WORDS, strict=True))
    rotated = f" Their turns by 90° make {4 * len(m.classes['train'])} training classes." * (m.augment == "rotate")
    spec = m.encoder.spec
    colour = "colour" if spec.channels == 3 else "grey"
    start = f"Its weights are those of {m.weights.name}." if m.weights else "It starts from random weights."
    frozen = " It stays as it is; the rates of the heads were learnt." if m.frozen else ""
    return (
        f"{len(m.files.names)} pictures. Classes: {counts}.{rotated} Encoder {spec.architecture}, images of "
        f"{spec.height} × {spec.width} pixels in {colour}, augmentation {m.augment}. {start}{frozen}"
    )


_WORDS = ("training", "validation", "test")


def _table(before: dict[str, Score], after: dict[str, Score], ways: int, c: Command) -> str:
    title = (
        f"Accuracy in % on {c.data.test_tasks} tasks of {ways} test classes, which were never trained on, "
        f"{c.data.shots}-shot, with its 95 % interval. By chance: {100 / ways:.1f}."
    )
    header = ["", "head", "nearest mean"]
    lines = [
        [
            name,
            *(f"{100 * scores[key].mean:.1f} ± {100 * scores[key].interval:.1f}" for key in ("head", "nearest mean")),
        ]
        for name, scores in (("before training", before), ("after training", after))
    ]
    return tables.screen([(title, header, lines)])
