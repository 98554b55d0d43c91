"""Labelled pictures of your own: a folder with a folder for each class, or a CSV file with the columns file and label.

Pictures are read in chunks and reduced at once, so that a large collection fits in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..clean.pictures import Picture, read_pictures
from ..clean.sources import images_below, open_source
from ..on_page import is_grey

LARGEST = 84  # the default of the largest side in pixels, as in MiniImageNet's usual protocol
_SAMPLED = 200  # the number of pictures by which size and colour are chosen
_CHUNK = 128
_PREFIX = re.compile(r"^(bilevel-\w+|recipes[.\w]*): ")


@dataclass(frozen=True)
class Files:
    """Pictures on disk. names: as the user calls them. labels: the class of each, by name; empty where unknown.

    skipped: name and reason of what can't be used. warnings: a sentence for each thing that is probably not meant.
    """

    home: Path
    names: list[str]
    labels: list[str]
    skipped: list[tuple[str, str]]
    warnings: list[str]

    @property
    def cells(self) -> list[Path]:
        """The path of each picture."""
        return [self.home / name for name in self.names]


@dataclass(frozen=True)
class Look:
    """The size in pixels to which pictures are resized, and whether they are in colour."""

    height: int
    width: int
    colour: bool


@contextmanager
def own_prefix() -> Generator[None]:
    """Let the errors of shared readers begin with the name of this command."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise type(error)(f"bilevel-fewshot: {without_prefix(error)}") from error


def without_prefix(error: Exception) -> str:
    """Return the sentence of an error without the name of the part that raised it."""
    return _PREFIX.sub("", str(error))


def labelled(path: Path, root: Path | None = None) -> Files:
    """Find the pictures of a folder with one folder for each class, or of a CSV file with the columns file and label.

    root: where the files of a CSV file are; its own folder by default.
    """
    if not path.is_dir() and path.suffix.lower() not in (".csv", ".tsv"):
        state = "does not exist" if not path.exists() else "is neither a folder nor a .csv file"
        raise ValueError(
            f"bilevel-fewshot: {path} {state}; give a folder with one folder for each class, or a .csv file with the "
            "columns file and label."
        )
    if root is not None and (path.is_dir() or not root.is_dir()):
        why = "goes with a CSV file, and the pictures are in a folder" if path.is_dir() else "is not a folder"
        raise ValueError(f"bilevel-fewshot: --root {root} {why}; leave it out, or correct it.")
    with own_prefix():
        source = open_source(path, ["file", "label"], None)
    missing = [name for name in ("file", "label") if name not in source.table.columns]
    if missing:
        raise ValueError(
            f"bilevel-fewshot: {path} has no column {' and no column '.join(missing)}; its columns are "
            f"{', '.join(map(str, source.table.columns))}. Rename them, or give another file."
        )
    files = [str(cell) for cell in source.table["file"]]
    labels = ["" if not isinstance(cell, str) else cell.strip() for cell in source.table["label"]]
    home = Path(os.path.abspath(root or source.folder))
    why = "it is not in the folder of a class" if path.is_dir() else "it has no label"
    keep = [i for i, label in enumerate(labels) if label]
    skipped = [(files[i], why) for i, label in enumerate(labels) if not label]
    return Files(home, [files[i] for i in keep], [labels[i] for i in keep], skipped, source.warnings)


def unlabelled(path: Path) -> Files:
    """Find the pictures of a folder, at any depth, or take the picture that is given."""
    home = Path(os.path.abspath(path))
    if home.is_file():
        return Files(home.parent, [home.name], [""], [], [])
    if not home.is_dir():
        raise FileNotFoundError(f"bilevel-fewshot: {path} does not exist; give a folder of pictures, or one picture.")
    names, others = images_below(home)
    if not names:
        raise ValueError(f"bilevel-fewshot: the folder {path} has no pictures; give one that has.")
    warnings = [f"{others} files of {path} are not images by their suffix and were left out."] if others else []
    return Files(home, names, [""] * len(names), [], warnings)


def read(files: Files, each: Callable[[list[Picture]], NDArray[Any]], quiet: bool = True) -> tuple[NDArray[Any], Files]:
    """Return what `each` makes of the pictures, one row for each that could be read, and the files without the others.

    each: gets pictures of any size, H × W or H × W × 3, a chunk at a time.
    """
    parts: list[NDArray[Any]] = []
    kept: list[int] = []
    cells = files.cells
    skipped = list(files.skipped)
    for start in tqdm(range(0, len(cells), _CHUNK), "pictures", disable=quiet, unit="chunk", leave=False):
        found, reasons = read_pictures(cells[start : start + _CHUNK], files.home, quiet=True)
        skipped += [(files.names[start + i], why) for i, why in reasons.items()]
        good = [i for i, picture in enumerate(found) if picture is not None]
        kept += [start + i for i in good]
        if good:
            parts.append(each([found[i] for i in good]))  # pyright: ignore[reportArgumentType]
    if not kept:
        first = f" The first: {skipped[0][0]}: {skipped[0][1]}." if skipped else ""
        raise ValueError(
            f"bilevel-fewshot: none of the {len(skipped)} pictures in {files.home} can be used.{first} Give pictures "
            "that open."
        )
    return np.concatenate(parts), chosen(files, kept, skipped)


def chosen(files: Files, rows: Sequence[int], skipped: list[tuple[str, str]]) -> Files:
    """Return these files, with the skipped ones."""
    names, labels = ([part[i] for i in rows] for part in (files.names, files.labels))
    return Files(files.home, names, labels, skipped, files.warnings)


def look(files: Files, size: int = 0, largest: int = LARGEST) -> Look:
    """Choose one size for all pictures: the median of their shorter sides, from 8 to `largest` pixels, as a square.

    They are in colour if one of them is. Up to 200 pictures, evenly spaced, decide on both. size: given by the user.
    """
    cells = files.cells
    some = np.unique(np.linspace(0, len(cells) - 1, min(_SAMPLED, len(cells))).astype(int))
    sides: list[int] = []
    colour = False
    for start in range(0, len(some), _CHUNK):
        found, _ = read_pictures([cells[i] for i in some[start : start + _CHUNK]], files.home, quiet=True)
        pictures = [picture for picture in found if picture is not None]
        sides += [min(picture.shape[:2]) for picture in pictures]
        colour = colour or any(not is_grey(picture) for picture in pictures)
    side = size or int(np.clip(np.median(sides or [largest]), 8, largest))
    return Look(side, side, colour)


def resize(pictures: Sequence[Picture], to: Look) -> NDArray[np.uint8]:
    """Return the pictures as one array, N × H × W or N × H × W × 3; a picture of another shape is stretched."""
    mode, size = "RGB" if to.colour else "L", (to.width, to.height)
    images = (Image.fromarray(picture).convert(mode) for picture in pictures)
    return np.stack([np.asarray(i if i.size == size else i.resize(size, Image.Resampling.BILINEAR)) for i in images])


def skipped_text(skipped: Sequence[tuple[str, str]], most: int = 20) -> str:
    """Return the pictures that were skipped with the reasons, each in a line; nothing if there are none."""
    if not skipped:
        return ""
    lines = [f"  {name}: {why}" for name, why in skipped[:most]]
    rest = [f"  and {len(skipped) - most} more"] if len(skipped) > most else []
    return "\n".join([f"Skipped pictures ({len(skipped)}):", *lines, *rest])
