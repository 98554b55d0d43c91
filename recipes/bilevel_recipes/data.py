"""Public data sets in memory, splits that never share a photograph, and readers of files that others have made.

torchvision reads its own layout (`ROOT/MNIST/raw/train-images-idx3-ubyte`), also when that is packed as
`ROOT/MNIST.tar.xz`; SVHN and CIFAR-10 are also read from `ROOT/SVHN_subset.npz`, `ROOT/CIFAR10_subset.npz`.
"""

from __future__ import annotations

import csv
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .vision import torchvision

Array = NDArray[Any]

# No file of the public data sets has more once it is unpacked; a few kilobytes can claim to be terabytes.
_MOST = 2**28
# Of an .npz: more than this, and far more than the file itself has, is no data set.
_MOST_UNPACKED, _MOST_RATIO = 2**30, 100
# The formats of images that are read: no other of Pillow's decoders, one of which runs a program (EPS, Ghostscript).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True)
class Images:
    """A labelled data set: rows to draw splits from, and a test set that no split touches.

    x: N × H × W or N × H × W × C, uint8; or N × D, float. y: N labels from 0.
    groups: rows of one group (digits cut from one photograph) never land in two splits.
    sizes: rows for training and for validation unless asked otherwise; the paper's.
    """

    name: str
    x: Array
    y: Array
    classes: list[str]
    x_test: Array | None = None
    y_test: Array | None = None
    groups: Array | None = None
    sizes: tuple[int, int] = (5000, 5000)
    note: str = ""


@dataclass(frozen=True)
class Split:
    """Noisy training rows and clean validation rows.

    rows: position of each training sample in the source. clean: which of the given labels are right.
    """

    x: Array
    y: Array
    rows: Array
    x_val: Array
    y_val: Array
    clean: Array


def corrupt(y: Array, rho: float, classes: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Change exactly round(ρ·N) labels, each to a different class drawn uniformly: (labels, which are clean)."""
    if not 0 <= rho < 1:
        raise ValueError(f"recipes.data: rho is the fraction of wrong labels, in [0, 1); got {rho}")
    bad = rng.permutation(len(y))[: round(rho * len(y))]
    noisy, clean = y.copy(), np.ones(len(y), dtype=bool)
    noisy[bad] = (y[bad] + rng.integers(1, classes, len(bad))) % classes
    clean[bad] = False
    return noisy, clean


def split(images: Images, rho: float, train: int | None, validation: int | None, seed: int) -> Split:
    """Draw train and validation, and corrupt the training labels.

    The training rows and their wrong labels depend on the seed, not on the size of the validation set: a study
    over that size keeps the noisy set.
    """
    n, m = train or images.sizes[0], validation or images.sizes[1]
    rng = np.random.default_rng(seed)
    if images.groups is None:
        order = rng.permutation(len(images.y))
        rows, val = order[:n], order[n : n + m]
    else:
        groups = rng.permutation(np.unique(images.groups))
        size = dict(zip(*np.unique(images.groups, return_counts=True), strict=True))
        total = np.cumsum([size[g] for g in groups])
        cut = int(np.searchsorted(total, n))  # whole groups, as many as stay at or above n
        first = np.isin(images.groups, groups[: cut + 1])
        rows, val = rng.permutation(np.flatnonzero(first))[:n], rng.permutation(np.flatnonzero(~first))[:m]
    if len(rows) < n or len(val) < m:
        raise ValueError(
            f"recipes.data: {images.name} has {len(images.y)} rows, too few for --train {n} and --validation {m}; "
            f"its own sizes are {images.sizes[0]} and {images.sizes[1]}"
        )
    noisy, clean = corrupt(images.y[rows], rho, len(images.classes), rng)
    return Split(images.x[rows], noisy, rows, images.x[val], images.y[val], clean)


def load(name: str, root: Path | None = None, download: bool = False) -> Images:
    """Read a public data set by name from root (./data)."""
    if name not in READERS:
        raise ValueError(f"recipes.data: there is no data set {name!r}; known: {', '.join(READERS)}")
    return READERS[name](root or Path("data"), download)


# --- public data sets ------------------------------------------------------------------------------------------


def _digits(home: Path, download: bool) -> Images:
    from sklearn.datasets import load_digits

    part: Any = load_digits()
    x, y = (part.data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), part.target.astype(np.int64)
    # The last third is by other writers than the first: keep the order, so that the test set has new hands.
    return Images("digits", x[:1297], y[:1297], list("0123456789"), x[1297:], y[1297:], sizes=(800, 400))


_FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def _mnist(folder: str, title: str, classes: list[str]) -> Callable[[Path, bool], Images]:
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")

    def read(home: Path, download: bool) -> Images:
        with _unpacked(home, f"{folder}.tar.xz", [f"{folder}/raw/{part}-ubyte" for part in parts]) as place:
            x, y, x_test, y_test = _by_torchvision(folder, place, download, {"train": True}, {"train": False})
        return Images(title, x, y, classes, x_test, y_test)

    return read


def _qmnist(home: Path, download: bool) -> Images:
    try:
        x, y, x_test, y_test = _by_torchvision("QMNIST", home, download, {"what": "train"}, {"what": "test"})
    except OSError as error:
        raise OSError(
            f"{error} Where only QMNIST's labels are at hand, --dataset mnist-qmnist-labels pairs them with MNIST's "
            "images, and says so."
        ) from None
    return Images("QMNIST", x, y, list("0123456789"), x_test, y_test)


def _mnist_qmnist_labels(home: Path, download: bool) -> Images:
    mnist, archive = READERS["mnist"](home, download), home / "QMNIST-labels-only.tar.xz"
    names = [f"QMNIST/raw/qmnist-{part}-labels-idx2-int" for part in ("train", "test")]
    with _unpacked(home, archive.name, names) as place, fetching(archive if archive.is_file() else home):
        read = torchvision("datasets.mnist").read_sn3_pascalvincent_tensor
        y, y_test = (read(str(place / name))[:, 0].numpy() for name in names)
    x_test: Any = mnist.x_test
    return Images(
        "MNIST images with QMNIST labels", mnist.x, _labels(home, mnist.x, y), mnist.classes, x_test,
        _labels(home, x_test, y_test[: len(x_test)]),
        note="The row of QMNIST has MNIST's images with QMNIST's labels, which are equal to MNIST's: it is MNIST with "
        "other seeds.",
    )  # fmt: skip


def _subset(file: Path, *more: str) -> dict[str, Array]:
    """The arrays of a subset: images and labels for training and test, and what else is named."""
    found = read_npz(file, "x_train", "y_train", "x_test", "y_test", *more)
    return found | {f"y_{part}": _labels(file, found[f"x_{part}"], found[f"y_{part}"]) for part in ("train", "test")}


def _svhn(home: Path, download: bool) -> Images:
    classes = list("0123456789")
    if (home / "SVHN_subset.npz").is_file():
        p = _subset(home / "SVHN_subset.npz", "house_test")
        note = "SVHN: 7,136 digits of the official test set, split by photograph; tested on 1,083 of the training set."
        return Images("SVHN (subset)", p["x_test"], p["y_test"], classes, p["x_train"], p["y_train"], p["house_test"],
                      sizes=(3569, 3500), note=note)  # fmt: skip
    x, y, x_test, y_test = _by_torchvision("SVHN", home, download, {"split": "train"}, {"split": "test"})
    # The 32 × 32 files do not say which photograph a digit is from, but keep their order: split by runs of 64.
    note = "SVHN: split by runs of 64 neighbouring digits; digits of one photograph stand together and overlap."
    return Images("SVHN", x, y, classes, x_test, y_test, np.arange(len(y)) // 64, note=note)


def _cifar10(home: Path, download: bool) -> Images:
    if (home / "CIFAR10_subset.npz").is_file():
        p = _subset(home / "CIFAR10_subset.npz")
        note = "CIFAR-10: training images 0-19,999 and test images 0-1,016 of the official set."
        return Images("CIFAR-10 (subset)", p["x_train"], p["y_train"], _CIFAR, p["x_test"], p["y_test"], note=note)
    # torchvision unpickles these files, but only after it has found their hashes right
    x, y, x_test, y_test = _by_torchvision("CIFAR10", home, download, {"train": True}, {"train": False})
    return Images("CIFAR-10", x, y, _CIFAR, x_test, y_test)


READERS: dict[str, Callable[[Path, bool], Images]] = {
    "digits": _digits,
    "mnist": _mnist("MNIST", "MNIST", list("0123456789")),
    "fashion-mnist": _mnist("FashionMNIST", "Fashion-MNIST", _FASHION),
    "qmnist": _qmnist,
    "mnist-qmnist-labels": _mnist_qmnist_labels,
    "svhn": _svhn,
    "cifar10": _cifar10,
}


# --- files -----------------------------------------------------------------------------------------------------


def _by_torchvision(kind: str, home: Path, download: bool, *parts: dict[str, Any]) -> list[Array]:
    """Images and labels of each part of a data set, one after the other, as torchvision reads them."""
    arrays: list[Array] = []
    for part in parts:
        with fetching(home):
            found = getattr(torchvision("datasets"), kind)(str(home), download=download, **part)
            x, y = np.asarray(found.data), np.asarray(found.labels if kind == "SVHN" else found.targets)
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if kind == "SVHN" else x
        arrays += [x, _labels(home, x, y[:, 0] if kind == "QMNIST" else y)]
    return arrays


@contextmanager
def fetching(home: Path) -> Generator[None]:
    """Make one of our errors of what torchvision says if files are missing or damaged, or if there is no network."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"recipes.data: torchvision could not get the files of {home} ({_line(error)}). Give --data-root, the "
            "folder that holds them, or --download."
        ) from error
    except Exception as error:  # its readers raise a dozen kinds on what is damaged
        raise ValueError(f"recipes.data: a file of {home} is damaged ({_line(error)}); fetch it again.") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def _unpacked(home: Path, archive: str, names: Sequence[str]) -> Generator[Path]:
    """home itself; or, if it has these files in an archive alone, a temporary folder that they are unpacked to."""
    packed = home / archive
    if not packed.is_file() or all((home / name).is_file() for name in names):
        yield home
        return
    with TemporaryDirectory() as folder:
        for name, raw in _members(packed, names).items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(raw)
        try:
            yield Path(folder)
        except (ValueError, OSError) as error:  # the user knows the archive, not the temporary folder
            raise type(error)(str(error).replace(folder, str(packed))) from error


def _labels(where: Path, x: Array, y: Array) -> Array:
    """The labels of ten classes, one for each image."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise ValueError(
            f"recipes.data: {where} has images of {x.dtype} {x.shape} and labels of {y.dtype} {y.shape}, but needs "
            "one label for each uint8 image; fetch the files again"
        )
    if len(y) == 0 or y.min() < 0 or y.max() > 9:
        raise ValueError(f"recipes.data: {where} has labels outside of 0 to 9, or none; fetch the files again")
    return y.astype(np.int64)


def _members(packed: Path, names: Sequence[str]) -> dict[str, bytes]:
    """These members of a .tar.xz, read in memory: no other is looked at, and no link is followed."""
    try:
        with lzma.open(packed) as handle:
            raw = handle.read(_MOST + 1)
        if len(raw) > _MOST:
            raise ValueError(f"it unpacks to more than {_MOST >> 20} MiB, which no such data set has")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            return {name: _member(tar, name) for name in names}
    except Exception as error:  # lzma and tarfile raise a dozen kinds on what is damaged
        raise ValueError(f"recipes.data: {packed} is damaged or cut short ({error}); fetch it again.") from error


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    info = tar.getmember(name)
    found = tar.extractfile(info) if info.isreg() and not info.issparse() and info.size <= _MOST else None
    if found is None:
        raise ValueError(f"{name} is no plain file in it")
    raw = found.read()
    if len(raw) != info.size:
        raise ValueError(f"{name} has {len(raw)} of {info.size} bytes")
    return raw


def read_npz(path: Path, *required: str) -> dict[str, Array]:
    """Return all arrays of an .npz, without pickle; raise an error if a required one is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"recipes.data: {path} does not exist")
    try:
        with zipfile.ZipFile(path) as packed:
            unpacked = sum(info.file_size for info in packed.infolist())
        if unpacked > max(_MOST_UNPACKED, _MOST_RATIO * path.stat().st_size):
            raise ValueError(f"it would unpack to {unpacked >> 20} MiB, over {_MOST_RATIO} times its size")
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as part:
            found = {str(key): np.asarray(part[key]) for key in part.files}
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on what is damaged; MemoryError among them
        if "allow_pickle" in str(error):
            why = "holds pickled objects, which are never loaded; save plain arrays"
            raise ValueError(f"recipes.data: {path} {why}") from error
        raise ValueError(f"recipes.data: {path} is damaged, or not an .npz ({error}); fetch it again") from error
    missing = [key for key in required if key not in found]
    if missing:
        raise ValueError(f"recipes.data: {path} has no array {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    return found


def read_csv(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a CSV with a header; every row has a text in every column."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, strict=True)
            rows: list[dict[Any, Any]] = list(reader)
    except (csv.Error, UnicodeError) as error:
        raise ValueError(f"recipes.data: {path} is not a CSV in UTF-8 ({error})") from error
    if not rows or not set(columns) <= rows[0].keys():
        raise ValueError(f"recipes.data: {path} needs a header with {', '.join(columns)}, and at least one row")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"recipes.data: row {number} of {path} has a different number of columns than its header")
    return rows


def inside(folder: Path, name: str, table: Path) -> Path:
    """The file of that name in the folder. A table made by others must not have files read from anywhere else."""
    file = Path(os.path.normpath(folder / name))
    if "\0" in name or not file.is_relative_to(os.path.normpath(folder)):
        raise ValueError(
            f"recipes.data: {table} names {name!r}, which is not in {folder}; give --data-root, a folder that holds "
            "all files, and names relative to it"
        )
    return file


def read_picture(file: Path, mode: str | None = None) -> Any:
    """An image in that mode; without one, in L or RGB."""
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as image:
            return image.convert(mode or ("L" if image.mode in ("1", "L") else "RGB"))
    except Exception as error:  # its decoders raise a dozen kinds; an image of absurd size among them
        raise ValueError(
            f"recipes.data: {file} is not a readable image ({error}); {', '.join(FORMATS)} are read"
        ) from error
