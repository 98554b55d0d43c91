"""Data sets of classes to draw few-shot tasks from: classes for training, validation and test, with none in common.

Omniglot and MiniImageNet are read in the forms that people have; no file is unpickled but through `read_pickle`,
which admits arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..data import Array, fetching, inside, read_csv, read_npz, read_picture
from ..unpickle import read_pickle
from ..vision import torchvision


@dataclass(frozen=True)
class Part:
    """The images of some classes. x: N × H × W or N × H × W × 3, uint8. y: the class of each, from 0."""

    x: Array
    y: Array


@dataclass(frozen=True)
class Source:
    """Three parts with different classes ("train", "val", "test"); digits has no val."""

    name: str
    parts: dict[str, Part]
    note: str = ""

    def part(self, name: str) -> Part:
        """Return the classes of a split, or of several: "train+val"."""
        if "+" in name:
            return _joined([self.part(one) for one in name.split("+")])
        if name not in self.parts:
            raise ValueError(f"recipes.few_shot: {self.name} has no split {name!r}; it has {', '.join(self.parts)}")
        return self.parts[name]


def _joined(parts: Sequence[Part]) -> Part:
    """Return all classes of several parts, numbered from one part to the next."""
    counts = [int(part.y.max()) + 1 for part in parts]
    y = [part.y + sum(counts[:i]) for i, part in enumerate(parts)]
    return Part(np.concatenate([part.x for part in parts]), np.concatenate(y))


@lru_cache(maxsize=2)
def load(name: str, root: str | None = None, download: bool = False) -> Source:
    """Read a data set by name."""
    if name not in SOURCES:
        raise ValueError(f"recipes.few_shot: no data set {name!r}; one of {', '.join(SOURCES)}")
    return SOURCES[name](Path(root) if root else Path("data"), download)


def _digits(home: Path, download: bool) -> Source:
    from sklearn.datasets import load_digits

    part: Any = load_digits()
    x, y = (part.data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), part.target.astype(np.int64)
    # Test classes that no turn takes into one another: 6 and 9 are in different splits, 0, 1 and 8 are for training.
    return Source("digits", {"train": _choose(x, y, (0, 1, 2, 5, 6, 8)), "test": _choose(x, y, (3, 4, 7, 9))})


def _choose(x: Array, y: Array, classes: Iterable[int]) -> Part:
    """Return the images of these classes, which get the numbers 0, 1, …"""
    rank = np.full(int(y.max()) + 1, -1, np.int64)
    chosen = np.asarray(list(classes))
    rank[chosen] = np.arange(len(chosen))
    keep = rank[y] >= 0
    return Part(x[keep], rank[y][keep])


# --- Omniglot --------------------------------------------------------------------------------------------------

# Vinyals' split, as Snell et al. publish it: of the 1,623 characters, background before evaluation, each sorted by
# alphabet, the last 423 are for test, and these five alphabets for validation.
_TEST, _VAL = range(1200, 1623), ((75, 116), (180, 226), (333, 355), (496, 518), (739, 780))


def _omniglot(home: Path, download: bool) -> Source:
    """Read 1,623 characters, 20 drawings of each, at 28 × 28: ROOT/Omniglot.npz, or torchvision's ROOT/omniglot-py."""
    if (home / "Omniglot.npz").is_file():
        keys = [f"{part}_{what}" for part in ("background", "evaluation") for what in ("bits", "character")]
        part = read_npz(home / "Omniglot.npz", *keys)
        for bits, character in (keys[:2], keys[2:]):
            if part[bits].dtype != np.uint8 or part[bits].shape != (part[character].size, 105, 14):
                raise ValueError(
                    f"recipes.few_shot: {home / 'Omniglot.npz'}: {bits} is {part[bits].dtype} {part[bits].shape}; N × "
                    f"105 × 14 uint8 is due, for the N of {character}"
                )
        bits = np.concatenate([part["background_bits"], part["evaluation_bits"]])
        ink = np.unpackbits(bits, axis=-1, count=105)
        y = np.concatenate([part["background_character"], part["evaluation_character"].astype(np.int64) + 964])
    else:
        ink, y = _omniglot_folders(home, download)
    if y.dtype.kind not in "iu" or np.unique(y).tolist() != list(range(1623)):
        raise ValueError(f"recipes.few_shot: {home}: Omniglot's characters are not 0 to 1622; fetch it again")
    val = {c for begin, end in _VAL for c in range(begin, end)}
    split = {"train": [c for c in range(1200) if c not in val], "val": sorted(val), "test": list(_TEST)}
    x = shrink(ink, 28)
    return Source("Omniglot", {name: _choose(x, y, classes) for name, classes in split.items()})


def _omniglot_folders(home: Path, download: bool) -> tuple[Array, Array]:
    folder = home / "omniglot-py"
    if download and not folder.is_dir():
        with fetching(home):
            for background in (True, False):
                torchvision("datasets").Omniglot(str(home), background=background, download=True)
    found = [sorted((folder / part).glob("*/character*")) for part in ("images_background", "images_evaluation")]
    characters = [c for part in found for c in part if c.is_dir()]
    if len(characters) != 1623:
        raise FileNotFoundError(
            f"recipes.few_shot: no Omniglot.npz in {home}, and {len(characters)} of Omniglot's 1623 characters in "
            f"{folder}; give --data-root, or --download"
        )
    drawings = [(file, c) for c, character in enumerate(characters) for file in sorted(character.glob("*.png"))]
    ink = np.empty((len(drawings), 105, 105), np.uint8)
    for i, (file, _) in enumerate(drawings):
        picture = read_picture(file, "L")
        if picture.size != (105, 105):
            raise ValueError(f"recipes.few_shot: {file} is {picture.size}; Omniglot's drawings are 105 × 105")
        ink[i] = np.asarray(picture) < 128
    return ink, np.array([c for _, c in drawings])


def shrink(ink: Array, size: int) -> Array:
    """Shrink 0/1 images. Each new pixel is the share of its area that is ink, 0 to 255.

    All images are shrunk at once, by two products with a matrix of overlaps.
    """
    old = ink.shape[-1]
    edge = np.linspace(0, old, size + 1)
    low, high = np.maximum(edge[:-1, None], np.arange(old)), np.minimum(edge[1:, None], np.arange(1, old + 1))
    overlap = np.clip(high - low, 0, None).astype(np.float32) * (size / old)
    small = [np.rint(255 * (overlap @ part.astype(np.float32) @ overlap.T)) for part in np.array_split(ink, 16)]
    return np.concatenate(small).astype(np.uint8)


# --- MiniImageNet ----------------------------------------------------------------------------------------------

_SIZE = 64


def _tiny_imagenet(home: Path, download: bool) -> Source:
    """Read 100 classes of Tiny-ImageNet, 40 images each, split like MiniImageNet. They never have that name."""
    path, splits = home / "MiniImageNet_STANDIN_TinyImageNet64.npz", ("train", "val", "test")
    part = read_npz(path, *(f"{what}_{s}" for what in "xy" for s in splits))
    for s in splits:
        x, y = part[f"x_{s}"], part[f"y_{s}"]
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise ValueError(f"recipes.few_shot: {path}: {s} has images of {x.dtype} {x.shape}, labels of {y.dtype} "
                             f"{y.shape}; a label for each uint8 image is due")  # fmt: skip
    parts = {s: Part(part[f"x_{s}"], part[f"y_{s}"].astype(np.int64)) for s in splits}
    note = (
        "Tiny-ImageNet photographs in 64 / 16 / 20 classes of 40: not comparable with published MiniImageNet figures."
    )
    return Source("Tiny-ImageNet 64/16/20", parts, note)


def _mini_imagenet(home: Path, download: bool) -> Source:
    """Read cached pickles of both usual kinds, or the CSV splits of Ravi & Larochelle beside a folder of images."""
    if download:
        raise ValueError("recipes.few_shot: MiniImageNet has no official download; put the files into --data-root")
    parts: dict[str, Part] = {}
    for split in ("train", "val", "test"):
        names = [f"mini-imagenet-cache-{split}.pkl", f"miniImageNet_category_split_{split}.pickle"]
        if split == "train":
            names.append("miniImageNet_category_split_train_phase_train.pickle")
        pickles = [home / name for name in names if (home / name).is_file()]
        table = home / f"{split}.csv"
        if pickles:
            parts[split] = _cached(pickles[0])
        elif table.is_file():
            parts[split] = _listed(table)
        else:
            raise FileNotFoundError(
                f"recipes.few_shot: {home} has none of {', '.join(names)}, {table.name}; give --data-root, a folder "
                "with MiniImageNet's cached pickles, or with train.csv, val.csv, test.csv and images/"
            )
    return Source("MiniImageNet", parts)


def _cached(path: Path) -> Part:
    """Read a pickle {image_data, class_dict: name -> rows} (Ren et al.), or {data, labels} (Lee et al.)."""
    found = read_pickle(path)
    try:
        x, y = _arrays(found)
    except (TypeError, IndexError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"recipes.few_shot: {path} holds no images with their classes ({error})") from error
    if x is None:
        keys = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"recipes.few_shot: {path} holds {keys}; image_data and class_dict, or data and labels, are due"
        )
    if x.ndim != 4 or x.shape[-1] != 3 or 0 in x.shape or x.dtype != np.uint8 or len(x) != len(y) or (y < 0).any():
        raise ValueError(
            f"recipes.few_shot: {path}: images are {x.dtype} {x.shape}, with {len(y)} labels; N × H × W × 3 uint8 and "
            "a label for each are due"
        )
    from PIL import Image

    return Part(np.stack([_resize(Image.fromarray(image)) for image in x]), y)


def _arrays(found: Any) -> tuple[Any, Any]:
    """Return the images and classes of either kind of pickle, or None if it is neither."""
    if isinstance(found, dict) and {"image_data", "class_dict"} <= found.keys():
        x, y = np.asarray(found["image_data"]), np.full(len(found["image_data"]), -1, np.int64)
        for c, name in enumerate(sorted(found["class_dict"])):
            y[np.asarray(found["class_dict"][name])] = c
        return x, y
    if isinstance(found, dict) and {"data", "labels"} <= found.keys():
        return np.asarray(found["data"]), np.unique(np.asarray(found["labels"]), return_inverse=True)[1]
    return None, None


def _listed(table: Path) -> Part:
    """Read a CSV of filename and label. The images are in images/, in a folder of their label, or beside the CSV."""
    rows = read_csv(table, ("filename", "label"))
    pictures: list[Array] = []
    for row in rows:
        names = [str(Path(folder, row["filename"])) for folder in ("images", row["label"], ".")]
        places = [inside(table.parent, name, table) for name in names]
        file = next((p for p in places if p.is_file()), None)
        if file is None:
            raise FileNotFoundError(f"recipes.few_shot: {table} names {row['filename']}; none of {places[0]}, "
                                    f"{places[1]}, {places[2]} exists")  # fmt: skip
        pictures.append(_resize(read_picture(file, "RGB")))
    return Part(np.stack(pictures), np.unique([row["label"] for row in rows], return_inverse=True)[1])


def _resize(picture: Any) -> Array:
    from PIL import Image

    return np.asarray(
        picture if picture.size == (_SIZE, _SIZE) else picture.resize((_SIZE, _SIZE), Image.Resampling.LANCZOS)
    )


SOURCES: dict[str, Callable[[Path, bool], Source]] = {
    "digits": _digits,
    "omniglot": _omniglot,
    "mini-imagenet": _mini_imagenet,
    "tiny-imagenet": _tiny_imagenet,
}
