"""Labelled pictures of your own: a folder with a folder for each class, or a CSV file with the columns file and label.

Pictures are read in chunks and reduced at once, so that a large collection fits in memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..clean.pictures import SUFFIXES, Picture, read_pictures
from ..clean.sources import images_below, images_of_classes, open_source
from ..on_page import folder_beside, is_grey

PAGE = "predictions.html"  # what predict writes; its pictures may be in a folder beside it
LARGEST = 84  # the default of the largest side in pixels, as in MiniImageNet's usual protocol
_SAMPLED = 200  # the number of pictures by which size and colour are chosen
_CHUNK = 128
_SUFFIXES = ", ".join(sorted(SUFFIXES))
_PREFIX = re.compile(r"^(bilevel-\w+|recipes[.\w]*): ")


@dataclass(frozen=True)
class Files:
    """Pictures on disk. names: as the user calls them. labels: the class of each, by name; empty where unknown.

    skipped: name and reason of what can't be used. warnings: a sentence for each thing that is probably not meant.
    digests: a checksum of each picture, once it was read; pictures that look the same have the same.
    """

    home: Path
    names: list[str]
    labels: list[str]
    skipped: list[tuple[str, str]]
    warnings: list[str]
    digests: list[bytes] = field(default_factory=list[bytes])

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
        kind = ValueError if isinstance(error, UnicodeError) else type(error)  # that one wants five arguments
        raise kind(f"bilevel-fewshot: {without_prefix(error)}") from error


def without_prefix(error: Exception) -> str:
    """Return the sentence of an error without the name of the part that raised it."""
    return _PREFIX.sub("", str(error).replace("\n", " "))


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
    return _in_folders(path) if path.is_dir() else _listed(path, root)


def _in_folders(folder: Path) -> Files:
    home = Path(os.path.abspath(folder))
    with own_prefix():
        names, others = images_of_classes(folder)
    names, earlier = _without_earlier_pages(names)
    classes = {name.split("/")[0] for name in names if "/" in name}
    folders = {f.name for f in home.iterdir() if f.is_dir() and not f.name.startswith(".")}
    empty = sorted(folders - classes - {folder_beside(Path(PAGE)).name})
    warnings = [*earlier, *([_left_out(others, folder)] if others else [])]
    warnings += [f"These folders of {folder} have no pictures: {', '.join(map(printable, empty))}."] if empty else []
    loose = [(name, "it is not in the folder of a class") for name in names if "/" not in name]
    names = [name for name in names if "/" in name]
    return Files(home, names, [name.split("/")[0] for name in names], loose, warnings)


def _listed(path: Path, root: Path | None) -> Files:
    with own_prefix():
        source = open_source(path, ["file", "label"], None)
    missing = [name for name in ("file", "label") if name not in source.table.columns]
    if missing:
        raise ValueError(
            f"bilevel-fewshot: {path} has no column {' and no column '.join(missing)}; its columns are "
            f"{', '.join(repr(str(name)) for name in source.table.columns)}. Rename them, or give another file. Cells "
            "are separated by commas or semicolons in a .csv file, and by tabs in a .tsv file."
        )
    files = [str(cell).strip() and str(cell) for cell in source.table["file"]]
    labels = ["" if not isinstance(cell, str) else cell.strip() for cell in source.table["label"]]
    home = Path(os.path.abspath(root or source.folder))
    keep = [i for i, label in enumerate(labels) if label and files[i]]
    skipped = [
        (file or f"row {i + 1}", "it has no label" if file else "it names no file")
        for i, (file, label) in enumerate(zip(files, labels, strict=True))
        if not (file and label)
    ]
    return Files(home, [files[i] for i in keep], [labels[i] for i in keep], skipped, source.warnings)


def unlabelled(path: Path) -> Files:
    """Find the pictures of a folder, at any depth, or take the picture that is given."""
    home = Path(os.path.abspath(path))
    if home.is_file():
        return Files(home.parent, [home.name], [""], [], [])
    if not home.is_dir():
        raise FileNotFoundError(f"bilevel-fewshot: {path} does not exist; give a folder of pictures, or one picture.")
    names, others = images_below(home)
    names, earlier = _without_earlier_pages(names)
    if not names:
        raise ValueError(
            f"bilevel-fewshot: the folder {path} has no pictures; give one with files that end in {_SUFFIXES}."
        )
    warnings = [*earlier, *([_left_out(others, path)] if others else [])]
    return Files(home, names, [""] * len(names), [], warnings)


def _without_earlier_pages(names: list[str]) -> tuple[list[str], list[str]]:
    """Leave out the pictures of pages that predict has written there. Return a sentence as well if there are any."""
    own = folder_beside(Path(PAGE)).name
    kept = [name for name in names if own not in name.split("/")[:-1]]
    if len(kept) == len(names):
        return names, []
    count = len(names) - len(kept)
    return kept, [f"Pictures in folders {own} that were left out: {count}. They belong to earlier predictions."]


def _left_out(others: int, folder: Path) -> str:
    return f"Files of {folder} that were left out: {others}. Pictures are files that end in {_SUFFIXES}."


def read(files: Files, each: Callable[[list[Picture]], NDArray[Any]], quiet: bool = True) -> tuple[NDArray[Any], Files]:
    """Return what `each` makes of the pictures, one row for each that could be read, and the files without the others.

    each: gets pictures of any size, H × W or H × W × 3, a chunk at a time.
    """
    parts: list[NDArray[Any]] = []
    kept: list[int] = []
    digests: list[bytes] = []
    cells = files.cells
    skipped = list(files.skipped)
    for start in tqdm(range(0, len(cells), _CHUNK), "pictures", disable=quiet, unit="chunk", leave=False):
        found, reasons = read_pictures(cells[start : start + _CHUNK], files.home, quiet=True)
        skipped += [(files.names[start + i], why.replace("give root", "give --root")) for i, why in reasons.items()]
        good = [i for i, picture in enumerate(found) if picture is not None]
        kept += [start + i for i in good]
        pictures = [picture for picture in found if picture is not None]
        digests += map(_digest, pictures)
        if pictures:
            parts.append(each(pictures))
    if not kept:
        first = ": ".join(map(printable, skipped[0]))
        what = f"none of the {len(skipped)} pictures in {files.home} can be used. The first: {first}"
        if len(skipped) == 1:
            what = first
        absent = any("does not exist" in why for _, why in skipped)
        hint = " The files of a CSV file are in its own folder, or in that which --root names." if absent else ""
        raise ValueError(f"bilevel-fewshot: {what}. Give pictures that open.{hint}")
    return np.concatenate(parts), replace(chosen(files, kept, skipped), digests=digests)


def _digest(picture: Picture) -> bytes:
    return hashlib.sha256(repr(picture.shape).encode() + picture.tobytes()).digest()


def chosen(files: Files, rows: Sequence[int], skipped: list[tuple[str, str]]) -> Files:
    """Return these files, with the skipped ones."""
    names, labels = ([part[i] for i in rows] for part in (files.names, files.labels))
    digests = [files.digests[i] for i in rows] if files.digests else []
    return Files(files.home, names, labels, skipped, files.warnings, digests)


def without_copies(files: Files) -> tuple[list[int], Files]:
    """Return which pictures to use, and the files without the others: of several that look the same, the first.

    If they are in several classes, none: one of the labels is wrong, and a picture for training must not be in a test.
    """
    groups: dict[bytes, list[int]] = defaultdict(list)
    for i, digest in enumerate(files.digests):
        groups[digest].append(i)
    why: dict[int, str] = {}
    for rows in groups.values():
        for i in rows[1:]:
            why[i] = f"the same picture as {files.names[rows[0]]}"
        if len({files.labels[i] for i in rows}) > 1:
            for i in rows:
                other = next(j for j in rows if files.labels[j] != files.labels[i])
                why[i] = f"the same picture is in the class {files.labels[other]}, as {files.names[other]}"
    rows = [i for i in range(len(files.names)) if i not in why]
    return rows, chosen(files, rows, [*files.skipped, *((files.names[i], text) for i, text in sorted(why.items()))])


def refuse_folder(out: Path) -> None:
    """Refuse a folder for results that can't be made or written to, before anything is computed."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    why = None if there.is_dir() else "is a file;"
    if why is None and not os.access(there, os.W_OK | os.X_OK):
        why = "can't be written to; see to its permissions, or"
    if why is not None:
        raise ValueError(f"bilevel-fewshot: the results can't go to {out}: {there} {why} give another --out.")


def make_folder(out: Path) -> None:
    """Make the folder for the results. Some file systems refuse that although they seem to permit it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"bilevel-fewshot: the folder {out} can't be made ({why}); give another --out.") from error


def own_name(path: Path) -> str:
    """Return the name that results get: that of a folder, or of a file without its suffix. It is never empty."""
    full = Path(os.path.abspath(path))
    return (full.name if full.is_dir() else full.stem) or "pictures"


def some(names: Sequence[str], most: int = 10) -> str:
    """Return names in one line, the first of them if there are many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + rest


def printable(text: str) -> str:
    """Return a name as one line of a terminal: what can't be printed is escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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


def skipped_text(files: Files, most: int = 20) -> str:
    """Return the pictures that were skipped with the reasons, each in a line; nothing if there are none."""
    skipped = files.skipped
    if not skipped:
        return ""
    lines = [f"  {printable(name)}: {printable(why)}" for name, why in skipped[:most]]
    rest = [f"  and {len(skipped) - most} more"] if len(skipped) > most else []
    return "\n".join([f"Skipped pictures of {printable(files.home.name)} ({len(skipped)}):", *lines, *rest])
