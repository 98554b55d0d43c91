"""Data sets in memory, for recipes: readers that never unpickle, and splits that never share a photograph.

Files are read where torchvision would put them (`ROOT/MNIST/raw/train-images-idx3-ubyte`), gzipped or not, or
straight out of `ROOT/MNIST.tar.xz`; SVHN and CIFAR-10 also from `ROOT/SVHN_subset.npz`, `ROOT/CIFAR10_subset.npz`.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import os
import tarfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True)
class Images:
    """A labelled data set: rows to draw splits from, and a test set that no split touches.

    x: N × H × W or N × H × W × C, uint8; or N × D, float. y: N labels from 0.
    groups: rows of one group (digits cut from one photograph) never land in two splits.
    checked: own data only; the rows whose label a person has verified. truth: the true labels, where known.
    """

    name: str
    x: Array
    y: Array
    classes: list[str]
    x_test: Array | None = None
    y_test: Array | None = None
    groups: Array | None = None
    checked: Array | None = None
    truth: Array | None = None
    sizes: tuple[int, int] = (5000, 5000)  # train and validation, unless asked otherwise: the paper's
    files: list[str] = field(default_factory=list[str])  # own images: how the user calls each row
    note: str = ""


@dataclass(frozen=True)
class Split:
    """Noisy training rows, clean validation rows, and the untouched test set.

    rows: position of each training sample in the source. clean: which given labels are right, where known.
    """

    x: Array
    y: Array
    rows: Array
    x_val: Array
    y_val: Array
    clean: Array | None
    source: Images


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
    over that size keeps the noisy set. Own data come split (`checked`) and with their own wrong labels.
    """
    if images.checked is not None:
        rows, val = np.flatnonzero(~images.checked), np.flatnonzero(images.checked)
        clean = None if images.truth is None else images.truth[rows] == images.y[rows]
        return Split(images.x[rows], images.y[rows], rows, images.x[val], images.y[val], clean, images)
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
    return Split(images.x[rows], noisy, rows, images.x[val], images.y[val], clean, images)


def load(name: str, root: Path | None = None, download: bool = False, image_size: int | None = None) -> Images:
    """Read a data set by name, or the user's own from a path that ends in .npz or .csv."""
    if name in READERS:
        return READERS[name](root, download)
    path = Path(name)
    if path.suffix == ".npz":
        return own_npz(path)
    if path.suffix == ".csv":
        return own_csv(path, root, image_size)
    raise ValueError(f"recipes.data: no data set {name!r}; one of {', '.join(READERS)}, or a path to .npz or .csv")


# --- the user's own data ---------------------------------------------------------------------------------------


def own_npz(path: Path) -> Images:
    """An .npz with x, y and checked (one bool a row); optional: test (bool a row), truth, classes (names)."""
    part = read_npz(path)
    missing = [key for key in ("x", "y", "checked") if key not in part]
    if missing:
        raise ValueError(
            f"recipes.data: {path} has no array {', '.join(missing)}; it needs x (N × H × W, N × H × W × C or N × D), "
            "y (N labels) and checked (N booleans: rows whose label was verified)"
        )
    names = [str(c) for c in part["classes"]] if "classes" in part else None
    return _own(str(path), part["x"], part["y"], part["checked"], part.get("test"), part.get("truth"), names)


def own_csv(path: Path, root: Path | None = None, image_size: int | None = None) -> Images:
    """A CSV with columns file, label, checked (0 or 1) and optionally test, truth; files lie beside it or in root."""
    rows = read_csv(path, ("file", "label", "checked"))
    pictures: list[Array] = []
    for row in rows:
        file = inside(root or path.parent, row["file"], path)
        if not file.is_file():
            raise FileNotFoundError(f"recipes.data: {path} names {row['file']}, which is not in {file.parent}")
        picture = read_picture(file)
        if image_size:
            picture = picture.resize((image_size, image_size))
        pictures.append(np.asarray(picture))
    if len({p.shape for p in pictures}) > 1:
        raise ValueError(f"recipes.data: the images of {path} differ in size or colour; give --image-size, one mode")

    def column(name: str) -> Array | None:
        return np.array([row[name] for row in rows]) if name in rows[0] else None

    label, truth = np.array([row["label"] for row in rows]), column("truth")
    classes, y = np.unique(label, return_inverse=True)
    if truth is not None:
        unknown = set(truth) - set(classes)
        if unknown:
            raise ValueError(f"recipes.data: {path}: truth has labels that column label lacks: {sorted(unknown)}")
        truth = np.searchsorted(classes, truth)
    marks = [None if c is None else _booleans(path, c) for c in (column("checked"), column("test"))]
    images = _own(str(path), np.stack(pictures), y, marks[0], marks[1], truth, [str(c) for c in classes])
    object.__setattr__(images, "files", [row["file"] for row, t in zip(rows, _not(marks[1], rows), strict=True) if t])
    return images


def _booleans(path: Path, column: Array) -> Array:
    if not set(column) <= {"0", "1"}:
        raise ValueError(f"recipes.data: {path}: checked and test are 0 or 1; got {sorted(set(column))[:5]}")
    return column == "1"


def _not(mark: Array | None, rows: list[Any]) -> Array:
    return np.ones(len(rows), dtype=bool) if mark is None else ~mark


def _own(
    name: str, x: Array, y: Array, checked: Any, test: Array | None, truth: Array | None, classes: list[str] | None
) -> Images:
    n = len(x) if x.ndim else 0
    if n == 0 or x.size == 0:
        raise ValueError(f"recipes.data: {name}: x is empty, of shape {x.shape}; it needs a row for each sample")
    for key, value in {"y": y, "checked": checked, "test": test, "truth": truth}.items():
        if value is not None and value.shape != (n,):
            raise ValueError(f"recipes.data: {name}: {key} has shape {value.shape}; x has {n} rows, so ({n},) is due")
    for key, value in {"y": y, "truth": truth}.items():
        if value is not None and not (np.issubdtype(value.dtype, np.integer) and value.min() >= 0):
            raise ValueError(f"recipes.data: {name}: {key} must hold integers from 0; got {value.dtype}")
        if value is not None and int(value.max()) >= max(n, len(classes or ())):
            raise ValueError(
                f"recipes.data: {name}: {key} goes up to {value.max()}, with {n} rows; number the classes 0, 1, 2, …"
            )
    for key, value in {"checked": checked, "test": test}.items():
        if value is not None and not np.isin(value, (0, 1)).all():
            raise ValueError(f"recipes.data: {name}: {key} must hold booleans, or 0 and 1; got {value.dtype}")
    if x.dtype.kind not in "biuf":
        raise ValueError(f"recipes.data: {name}: x must hold numbers; got {x.dtype}")
    if x.ndim not in (2, 3, 4) or (x.ndim == 4 and x.shape[-1] not in (1, 3)):
        raise ValueError(f"recipes.data: {name}: x is N × D, N × H × W or N × H × W × 3; got {x.shape}")
    if x.ndim > 2 and x.dtype != np.uint8:
        raise ValueError(f"recipes.data: {name}: images must be uint8 (0 to 255); got {x.dtype}")
    if not np.isfinite(x).all():
        raise ValueError(f"recipes.data: {name}: x holds NaN or infinite values; drop or fill those rows first")
    checked = checked.astype(bool)
    held = np.zeros(n, dtype=bool) if test is None else test.astype(bool)
    if not (checked & ~held).any() or not (~checked & ~held).any():
        raise ValueError(f"recipes.data: {name}: mark some rows as checked, and leave the rows to clean unmarked")
    top = int(y.max() if truth is None else max(y.max(), truth.max())) + 1
    names = classes or [str(c) for c in range(top)]
    if len(names) < top:
        raise ValueError(f"recipes.data: {name}: labels go up to {top - 1}, but classes has {len(names)} names")
    keep = ~held
    return Images(
        name, x[keep], y[keep].astype(np.int64), names,
        x[held] if held.any() else None, (y if truth is None else truth)[held].astype(np.int64) if held.any() else None,
        checked=checked[keep], truth=None if truth is None else truth[keep].astype(np.int64),
    )  # fmt: skip


# --- public data sets ------------------------------------------------------------------------------------------


def _digits(root: Path | None, download: bool) -> Images:
    from sklearn.datasets import load_digits

    part: Any = load_digits()
    x, y = (part.data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), part.target.astype(np.int64)
    # The last third is by other writers than the first: keep the order, so that the test set has new hands.
    return Images("digits", x[:1297], y[:1297], list("0123456789"), x[1297:], y[1297:], sizes=(800, 400))


_FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def _mnist(folder: str, title: str, classes: list[str]) -> Callable[[Path | None, bool], Images]:
    def read(root: Path | None, download: bool) -> Images:
        home = _fetch(folder, root, download)
        x, y, x_test, y_test = (
            read_idx(member(home, f"{folder}.tar.xz", f"{folder}/raw/{part}-ubyte"), f"{folder} {part}")
            for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        )
        y, y_test = _labels(home / folder, x, y), _labels(home / folder, x_test, y_test)
        return Images(title, x, y, classes, x_test, y_test)

    return read


def _qmnist_labels(home: Path, part: str) -> Array:
    name = f"qmnist-{part}-labels-idx2-int"
    table = read_idx(member(home, "QMNIST-labels-only.tar.xz", f"QMNIST/raw/{name}"), name)
    if table.ndim != 2 or table.shape[1] < 1:
        raise ValueError(f"recipes.data: {name} holds a table of shape {table.shape}; N × 8 is due: fetch it again")
    return table[:, 0].astype(np.int64)


def _qmnist(root: Path | None, download: bool) -> Images:
    home = _fetch("QMNIST", root, download)
    try:
        x, x_test = (
            read_idx(member(home, "QMNIST.tar.xz", f"QMNIST/raw/qmnist-{part}-images-idx3-ubyte"), f"QMNIST {part}")
            for part in ("train", "test")
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. Where only QMNIST's labels are at hand, --dataset mnist-qmnist-labels pairs them with MNIST's "
            "images, and says so"
        ) from None
    y, y_test = (_labels(home, a, _qmnist_labels(home, part)) for a, part in ((x, "train"), (x_test, "test")))
    return Images("QMNIST", x, y, list("0123456789"), x_test, y_test)


def _mnist_qmnist_labels(root: Path | None, download: bool) -> Images:
    mnist = READERS["mnist"](root, download)
    home = _fetch("QMNIST", root, download)
    x_test: Any = mnist.x_test
    y = _labels(home, mnist.x, _qmnist_labels(home, "train"))
    y_test = _labels(home, x_test, _qmnist_labels(home, "test")[: len(x_test)])
    title = "MNIST images with QMNIST labels"
    return Images(title, mnist.x, y, mnist.classes, mnist.x_test, y_test, note="The images are MNIST's, not QMNIST's.")


def _svhn(root: Path | None, download: bool) -> Images:
    home, classes = root or Path("data"), list("0123456789")
    if (home / "SVHN_subset.npz").is_file():
        p = read_npz(home / "SVHN_subset.npz", "x_train", "y_train", "x_test", "y_test", "house_test")
        for part in ("train", "test"):
            p[f"y_{part}"] = _labels(home / "SVHN_subset.npz", p[f"x_{part}"], p[f"y_{part}"])
        note = "SVHN: 7,136 digits of the official test set, split by photograph; tested on 1,083 of the training set."
        return Images("SVHN (subset)", p["x_test"], p["y_test"].astype(np.int64), classes, p["x_train"],
                      p["y_train"].astype(np.int64), p["house_test"], sizes=(3569, 3500), note=note)  # fmt: skip
    with fetching(home):  # torchvision reads the .mat files only if their hashes are right
        parts = [torchvision("datasets").SVHN(str(home), split=s, download=download) for s in ("train", "test")]
    x, x_test = (np.ascontiguousarray(p.data.transpose(0, 2, 3, 1)) for p in parts)
    y, y_test = (np.asarray(p.labels, dtype=np.int64) for p in parts)
    # The 32 × 32 files do not say which photograph a digit is from, but keep their order: split by runs of 64.
    note = "Split by runs of 64 neighbouring digits: digits of one photograph stand together and overlap."
    return Images("SVHN", x, y, classes, x_test, y_test, np.arange(len(y)) // 64, note=note)


def _cifar10(root: Path | None, download: bool) -> Images:
    home = root or Path("data")
    if (home / "CIFAR10_subset.npz").is_file():
        p = read_npz(home / "CIFAR10_subset.npz", "x_train", "y_train", "x_test", "y_test")
        for part in ("train", "test"):
            p[f"y_{part}"] = _labels(home / "CIFAR10_subset.npz", p[f"x_{part}"], p[f"y_{part}"])
        note = "CIFAR-10: training images 0-19,999 and test images 0-1,016 of the official set."
        return Images("CIFAR-10 (subset)", p["x_train"], p["y_train"].astype(np.int64), _CIFAR, p["x_test"],
                      p["y_test"].astype(np.int64), note=note)  # fmt: skip
    # torchvision's own reader unpickles; the official binary version holds the same images without pickle.
    folder, archive = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
    if download and not (home / archive).is_file():
        with fetching(home):
            torchvision("datasets.utils").download_url(
                f"https://www.cs.toronto.edu/~kriz/{archive}", str(home), md5="c32a1d4ab5d03f1284b67883e8d87530"
            )
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    raw = [member(home, archive, f"{folder}/{name}.bin") for name in names]
    if any(len(r) != 3073 * 10000 for r in raw):
        raise ValueError(f"recipes.data: a file of {home / folder} is damaged or cut short; fetch it again")
    table = np.frombuffer(b"".join(raw), np.uint8).reshape(60000, 3073)
    x, y = table[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), table[:, 0].astype(np.int64)
    y = _labels(home / folder, x, y)
    return Images("CIFAR-10", x[:50000], y[:50000], _CIFAR, x[50000:], y[50000:])


READERS: dict[str, Callable[[Path | None, bool], Images]] = {
    "digits": _digits,
    "mnist": _mnist("MNIST", "MNIST", list("0123456789")),
    "fashion-mnist": _mnist("FashionMNIST", "Fashion-MNIST", _FASHION),
    "qmnist": _qmnist,
    "mnist-qmnist-labels": _mnist_qmnist_labels,
    "svhn": _svhn,
    "cifar10": _cifar10,
}


# --- files -----------------------------------------------------------------------------------------------------


def _fetch(folder: str, root: Path | None, download: bool) -> Path:
    """The root to read from, after torchvision has downloaded into it if that was asked for."""
    home = root or Path("data")
    if download and not (home / folder / "raw").is_dir():
        kind = getattr(torchvision("datasets"), folder)
        with fetching(home):
            for part in ({"what": "train"}, {"what": "test"}) if folder == "QMNIST" else ({},):
                kind(str(home), download=True, **part)
    return home


@contextmanager
def fetching(home: Path) -> Generator[None]:
    """torchvision checks the hash of what it fetches; what it says if that or the network fails becomes our error."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(
            f"recipes.data: torchvision could not get the files of {home} ({error}); try --download again, or put the "
            "files there yourself"
        ) from error


def _labels(where: Path, x: Array, y: Array) -> Array:
    """The labels of ten classes, one for each image."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise ValueError(
            f"recipes.data: {where} has images of {x.dtype} {x.shape} and labels of {y.dtype} {y.shape}; one label for "
            "each uint8 image is due: fetch the files again"
        )
    if len(y) == 0 or y.min() < 0 or y.max() > 9:
        raise ValueError(f"recipes.data: {where} has labels outside of 0 to 9, or none; fetch the files again")
    return y.astype(np.int64)


def member(home: Path, archive: str, name: str) -> bytes:
    """The bytes of ROOT/name, of ROOT/name.gz, or of that member of ROOT/archive."""
    plain, zipped, packed = home / name, home / f"{name}.gz", home / archive
    source = next((file for file in (plain, zipped, packed) if file.is_file()), None)
    if source is None:
        raise FileNotFoundError(
            f"recipes.data: none of {plain}, {zipped.name}, {packed} exists; give --data-root, or --download"
        )
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(source.suffix, open)
    try:
        with opened(source, "rb") as handle:
            return _upto(handle) if source is not packed else _member(handle, name)
    except Exception as error:  # the decompressors and tarfile raise a dozen kinds on what is damaged
        raise ValueError(f"recipes.data: {source} is damaged or cut short ({error}); fetch it again") from error


def _upto(handle: Any) -> bytes:
    """All of a stream, if that is not more than a data set has."""
    raw = handle.read(_MOST + 1)
    if len(raw) > _MOST:
        raise ValueError(f"it unpacks to more than {_MOST >> 20} MiB, which no file of this data set has")
    return raw


def _member(handle: Any, name: str) -> bytes:
    """A member of a tar archive, read in memory: nothing is ever unpacked to disk, and no link is followed."""
    with tarfile.open(fileobj=io.BytesIO(_upto(handle)), mode="r:") as tar:
        info = tar.getmember(name)
        if not info.isreg() or info.issparse() or info.size > _MOST:
            raise ValueError(f"{name} is no plain file in it")
        found = tar.extractfile(info)
        assert found is not None
        raw = found.read()
    if len(raw) != info.size:
        raise ValueError(f"{name} has {len(raw)} of {info.size} bytes")
    return raw


def read_idx(raw: bytes, name: str) -> Array:
    """Parse the idx format: 0, 0, type, number of dimensions; big-endian sizes; the entries."""
    kinds = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
    try:
        kind, ndim = kinds[raw[2]], raw[3]
        shape = tuple(map(int, np.frombuffer(raw, ">i4", ndim, 4)))  # Python's numbers: a product of theirs is exact
        fits = len(raw) == 4 + 4 * ndim + kind.itemsize * math.prod(shape)
        if raw[:2] != b"\0\0" or not 1 <= ndim <= 4 or min(shape) < 0 or not fits:
            raise ValueError(f"{len(raw)} bytes do not fit the header {raw[:4].hex()}, shape {shape[:4]}")
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"recipes.data: {name} is not an idx file, or cut short ({error}); fetch it again") from error
    return np.frombuffer(raw, kind, offset=4 + 4 * ndim).reshape(shape)


def read_npz(path: Path, *due: str) -> dict[str, Array]:
    """All arrays of an .npz, without pickle; an error if one that is due is not among them."""
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
        raise ValueError(f"recipes.data: {path} is damaged, or no .npz ({error}); fetch it again") from error
    missing = [key for key in due if key not in found]
    if missing:
        raise ValueError(f"recipes.data: {path} has no array {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    return found


def read_csv(path: Path, due: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV with a header, each with a text in every column."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, strict=True)
            rows: list[dict[Any, Any]] = list(reader)
    except (csv.Error, UnicodeError) as error:
        raise ValueError(f"recipes.data: {path} is no CSV in UTF-8 ({error})") from error
    if not rows or not set(due) <= rows[0].keys():
        raise ValueError(f"recipes.data: {path} needs a header with {', '.join(due)}, and at least one row")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"recipes.data: row {number} of {path} has not as many columns as its header")
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
        with Image.open(file, formats=_FORMATS) as image:
            return image.convert(mode or ("L" if image.mode in ("1", "L") else "RGB"))
    except Exception as error:  # its decoders raise a dozen kinds; an image of absurd size among them
        raise ValueError(
            f"recipes.data: {file} is not a readable image ({error}); {', '.join(_FORMATS)} are read"
        ) from error
