"""`bilevel-fewshot predict ENCODER SUPPORT QUERY`: recognise new classes from a few pictures of each."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

from .. import runs, tables
from ..clean.pictures import Picture
from ..on_page import Shown, folder_beside
from ..on_page import shown as as_shown
from ..patches import Patches
from .collection import (
    PAGE,
    Files,
    labelled,
    look,
    make_folder,
    own_name,
    printable,
    read,
    refuse_folder,
    resize,
    skipped_text,
    some,
    unlabelled,
    without_copies,
)
from .encoder import load_encoder
from .heads import DEFAULT, Head, leave_one_out, probabilities
from .page import write_page
from .photos import File, Folder, Switch, Whole, load_backbone, require_two

TABLE = "predictions.csv"
_PATCH_SIZE = 64  # the largest side in pixels; patches learn the same from larger pictures, with more work
_LINES = 30  # the largest number of lines of the table on the terminal


@dataclass(frozen=True)
class Command:
    encoder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENCODER")]
    """The folder of a run of bilevel-fewshot PHOTOS; torchvision:NAME or timm:NAME; or patches.
    Patches are features that are learnt from these pictures."""
    support: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SUPPORT")]
    """A folder with one folder for each new class, a few pictures in each.
    Or a .csv file with the columns file and label."""
    query: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="QUERY")]
    """A folder of pictures to recognise, at any depth; or one picture."""
    root: Folder = None
    """Folder of the files that a CSV file names; without this flag, the folder of the CSV file."""
    weights: File = None
    """File with the weights of a torchvision or timm model; without this flag, those in its library's cache."""
    out: Folder = None
    """Folder for the results; without this flag, runs/predict_NAME with the name of QUERY."""
    overwrite: Switch = False
    """Replace the predictions in --out."""
    seed: Whole = 0
    """Random seed of the filters of patches."""
    threads: Whole = 0
    """Number of torch threads; 0: torch's default."""
    quiet: Switch = False
    """Show no progress."""


@dataclass(frozen=True)
class Extractor:
    """How pictures become features.

    each: makes an array of some pictures, which have any size. finish: makes features of all such arrays, support and
    query. words: a sentence that says what the features are.
    """

    each: Callable[[list[Picture]], NDArray[Any]]
    finish: Callable[[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]
    head: Head
    words: str


@dataclass(frozen=True)
class Predictions:
    """The predictions, and how far they can be trusted.

    p: queries × classes. right, tried: of support pictures, each recognised by a head fitted to all others.
    pictures: of support and query, as they are shown.
    """

    classes: list[str]
    support: Files
    query: Files
    p: NDArray[np.float32]
    right: int
    tried: int
    words: str
    pictures: tuple[list[Shown], list[Shown]]

    @property
    def order(self) -> NDArray[np.int64]:
        """Return the classes of each query, the most probable first."""
        return np.argsort(-self.p, axis=1, kind="stable")

    def sentence(self) -> str:
        """Return a sentence on how well the support set tells the classes apart."""
        if not self.tried:
            return "Each class has one picture, so that nothing is known about the accuracy; add a second one to each."
        few = "" if self.tried >= 50 else f" This is an estimate from {self.tried} pictures."
        return (
            f"Leave-one-out accuracy on the support pictures: {100 * self.right / self.tried:.1f} % ({self.right} of "
            f"{self.tried}).{few}"
        )


def run(command: Command, argv: Sequence[str]) -> str:
    """Fit a head to the support set, write its predictions for the queries, and return what is printed at the end."""
    begin, c = time.perf_counter(), command
    runs.set_up("cpu", c.threads)
    folder = c.out or Path("runs") / f"predict_{own_name(c.query)}"
    refuse_folder(folder)
    there = [path.name for path in (folder / TABLE, folder / PAGE, folder_beside(folder / PAGE)) if path.exists()]
    if there and not c.overwrite:
        raise FileExistsError(
            f"bilevel-fewshot: {folder} holds {' and '.join(there)}; pass --overwrite, or another --out."
        )
    found = predict(c)
    make_folder(folder)
    text = tables.csv_text(["file", "class", "probability", "second class", "its probability"], _rows(found))
    words = [word for word in argv if word not in ("--overwrite", "--quiet")]
    try:
        runs.write(folder / TABLE, text.encode("utf-8", "backslashreplace"))
        name = Path(os.path.abspath(c.query)).name
        write_page(folder / PAGE, found, name, shlex.join(["bilevel-fewshot", "predict", *words]))
    except OSError as error:  # the advice of runs.write is for runs
        sentence = str(error).replace("go on with --resume", "give the same command with --overwrite.")
        raise OSError(sentence) from error
    done = f"{TABLE} and {PAGE} written to {folder} in {time.perf_counter() - begin:.0f} s."
    parts = [_table(found), found.words, found.sentence(), *_notes(found), done, f"Next: open {folder / PAGE}"]
    return "\n\n".join(filter(None, parts))


def predict(c: Command) -> Predictions:
    """Read both sets of pictures and return the probabilities of the classes."""
    support, query = labelled(c.support, c.root), unlabelled(c.query)
    require_two(support.labels, c.support)
    extractor = _extractor(c, support)
    shown: tuple[list[Shown], list[Shown]] = ([], [])
    arrays: list[NDArray[Any]] = []
    kept: list[Files] = []
    for files, page in zip((support, query), shown, strict=True):
        array, usable = read(files, lambda pictures, page=page: _both(extractor, pictures, page), c.quiet)
        arrays.append(array)
        kept.append(usable)
    given = support.labels
    rows, support = without_copies(kept[0])
    query = kept[1]
    require_two(support.labels, c.support)
    support.warnings.extend(_lost_classes(given, support))
    query.warnings.extend(_known(query, kept[0]))
    f, f_query = (torch.from_numpy(np.ascontiguousarray(x)) for x in extractor.finish(arrays[0][rows], arrays[1]))
    _require_finite(f, support)
    _require_finite(f_query, query)
    classes = sorted(set(support.labels))
    y = torch.tensor([classes.index(label) for label in support.labels])
    try:
        p = probabilities(f[None], y[None], f_query[None], len(classes), extractor.head)[0]
        right, tried = leave_one_out(compact(f), y, len(classes), extractor.head)
    except FloatingPointError as error:
        raise ValueError(
            f"bilevel-fewshot: a head can't be fitted with the rates of {c.encoder}, which are too large for these "
            "pictures; train the encoder again with a smaller --eta."
        ) from error
    pages = [shown[0][i] for i in rows], shown[1]
    return Predictions(classes, support, query, p.numpy(), right, tried, extractor.words, pages)


def compact(f: Tensor) -> Tensor:
    """Return features with the same products in pairs, of which there are no more than pictures.

    A head depends on nothing else, and leaving one picture after the other out takes a fraction of the time.
    """
    return f if f.shape[1] <= len(f) else torch.linalg.qr(f.double().T).R.T.contiguous().to(f)


def _lost_classes(labels: Sequence[str], support: Files) -> list[str]:
    """Say which classes of the support set have no picture left."""
    lost = sorted(set(labels) - set(support.labels))
    why = "no support picture of that class can be used"
    return [f"No picture is recognised as {some(lost)}: {why}."] if lost else []


def _known(query: Files, support: Files) -> list[str]:
    """Say which queries are support pictures."""
    digests = set(support.digests)
    known = [name for name, digest in zip(query.names, query.digests, strict=True) if digest in digests]
    if not known:
        return []
    return [f"Query pictures that are also in the support set: {len(known)}; the first is {printable(known[0])}. They "
            "show nothing about other pictures."]  # fmt: skip


def _both(extractor: Extractor, pictures: list[Picture], page: list[Shown]) -> NDArray[Any]:
    """Add the pictures to the page, and return their raw features."""
    page += map(as_shown, pictures)
    return extractor.each(pictures)


def _require_finite(f: Tensor, files: Files) -> None:
    bad = [files.names[i] for i in (~f.isfinite().all(1)).nonzero().flatten().tolist()]
    if bad:
        raise ValueError(
            f"bilevel-fewshot: the features of {len(bad)} pictures are NaN or infinite: "
            f"{', '.join(map(printable, bad[:20]))}. The weights of the encoder are probably damaged; train it again, "
            "or fetch them again."
        )


def _extractor(c: Command, support: Files) -> Extractor:
    """Return the encoder with this name: a run, a model with weights from disk, or patches."""
    run = Path(c.encoder)
    if c.weights is not None and ":" not in c.encoder:
        raise ValueError(
            f"bilevel-fewshot: --weights goes with torchvision:NAME or timm:NAME; the encoder is {c.encoder}."
        )
    if c.encoder == "patches" and not (run / "encoder.json").is_file():
        return _patches(c.seed, support)
    if c.encoder.startswith(("torchvision:", "timm:")):
        encoder, file = load_backbone(c.encoder, c.weights, required=True, size=0, head=DEFAULT)
        assert file is not None
        words = f"Encoder: {c.encoder} with the weights of {file.name}."
    elif run.is_dir():
        encoder = load_encoder(run)
        words = f"Encoder: {encoder.spec.architecture}, trained in {run}."
    else:
        raise FileNotFoundError(
            f"bilevel-fewshot: there is no run {c.encoder}; give the folder that bilevel-fewshot PHOTOS wrote, "
            "torchvision:NAME, timm:NAME, or patches."
        )
    return Extractor(encoder.eval().encode, lambda f, f_query: (f, f_query), encoder.spec.head, words)


def _patches(seed: int, support: Files) -> Extractor:
    at = look(support, largest=_PATCH_SIZE)

    def finish(x: NDArray[Any], x_query: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        learnt = Patches.learn(np.concatenate([x, x_query]), seed=seed)
        return learnt.encode(x), learnt.encode(x_query)

    words = f"Features: patches, learnt from these pictures at {at.height} × {at.width} pixels without their labels."
    return Extractor(lambda pictures: resize(pictures, at), finish, DEFAULT, words)


# --- words -----------------------------------------------------------------------------------------------------


def _rows(found: Predictions) -> list[list[Any]]:
    """Return file, class, probability, second class and its probability, in the order of the files."""
    return [
        [name, *(cell for k in order[:2] for cell in (found.classes[k], f"{p[k]:.4f}"))]
        for name, order, p in zip(found.query.names, found.order, found.p, strict=True)
    ]


def _table(found: Predictions) -> str:
    rows = sorted(_rows(found), key=lambda row: row[2])
    lines = [
        [printable(name), printable(first), f"{100 * float(p):.0f} %", printable(second), f"{100 * float(q):.0f} %"]
        for name, first, p, second, q in rows
    ]
    rest = f"\n… and {len(lines) - _LINES} more, in {TABLE}" if len(lines) > _LINES else ""
    header = ["picture", "class", "probability", "second class", "probability"]
    title = f"{len(lines)} picture{'s' * (len(lines) != 1)}, {len(found.classes)} classes"
    title += ", the least certain first" * (len(lines) > 1)
    return tables.screen([(title, header, lines[:_LINES])]) + rest


def _notes(found: Predictions) -> list[str]:
    skipped = [skipped_text(part) for part in (found.support, found.query)]
    return [*found.support.warnings, *found.query.warnings, *skipped]
