"""The data sets of `benchmarks.cleaning`: real data, published labels, and wrong labels put in with a seed.

    one = load_set("mnist-pairwise-300", seed=0, roots=[Path("data")])
    one.x, one.given, one.checked, one.classes   # what a method may see
    one.truth                                    # what it is judged by

The published label of a row counts as the true one, although a few of those are wrong as well. The rows, the rows that
are checked and the wrong labels depend on the entry of the set in `SETS` and on the seed, and on nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bilevel_recipes import data, patches
from bilevel_recipes.clean import features as feature_module
from bilevel_recipes.clean.features import features
from bilevel_recipes.clean.rows import Kind, Rows

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]
Noise = Literal["uniform", "pairwise", "class-dependent", "human"]
CACHE = Path(tempfile.gettempdir()) / "cleaning-cache"
MOST_WRONG = 0.75  # of one class: with more than that, no method could tell the class from its errors


# --- where the rows come from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Rows with their published labels. groups: rows of one group (one photograph) are all checked, or none is."""

    kind: Kind
    content: Any
    y: Labels
    classes: list[str]
    groups: Labels | None = None
    human: dict[str, Labels] | None = None  # by the name of the draw: labels that people gave, of the first rows


@dataclass(frozen=True)
class Origin:
    """How a source is read, by which files it is recognised (any of them), and where those are published."""

    read: Callable[[Path], Source]
    files: tuple[str, ...]
    published: str


def _images(name: str) -> Callable[[Path], Source]:
    def read(root: Path) -> Source:
        found = data.load(name, root)
        return Source("images", found.x, found.y, found.classes, found.groups)

    return read


PEOPLE = "CIFAR10N_labels_first10000.npz"


def _by_people(root: Path) -> Source:
    """The first images of CIFAR-10, and what people called them: CIFAR-10N (Wei et al. 2022)."""
    found = data.load("cifar10", root)
    with np.load(root / PEOPLE) as file:
        human = {name: file[name].astype(np.int64) for name in file.files}
    count = len(human["clean"])
    if not np.array_equal(human["clean"], found.y[:count]):
        raise ValueError(f"{PEOPLE} is not about these images")
    return Source("images", found.x[:count], human["clean"], found.classes, human=human)


def _digits(root: Path) -> Source:
    from sklearn.datasets import load_digits

    part: Any = load_digits()
    return Source(
        "images", (part.images * (255 / 16)).astype(np.uint8), part.target.astype(np.int64), list("0123456789")
    )


def _letter(root: Path) -> Source:
    table = pd.read_csv(root / "letter-recognition.data", header=None)
    return _labelled("table", table.drop(columns=0).add_prefix("column_"), table[0])


ADULT = ["age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
         "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"]  # fmt: skip


def _adult(root: Path) -> Source:
    table = pd.read_csv(root / "adult.data", header=None, names=ADULT, skipinitialspace=True, keep_default_na=False)
    return _labelled("table", table.drop(columns="income"), table["income"])


def _sms(root: Path) -> Source:
    lines = (root / "SMSSpamCollection").read_text("utf-8").splitlines()
    labels, texts = zip(*(line.split("\t", 1) for line in lines), strict=True)
    return _labelled("text", list(texts), pd.Series(labels))


def _ag_news(root: Path) -> Source:
    table = pd.read_csv(
        root / "ag_news_csv/test.csv", header=None, names=["class", "title", "text"], keep_default_na=False
    )
    names = pd.Series(["World", "Sports", "Business", "Sci/Tech"], index=[1, 2, 3, 4])
    return _labelled("text", list(table["title"] + ". " + table["text"]), table["class"].map(names))


def _banking(root: Path) -> Source:
    table = pd.read_csv(root / "banking_data/train.csv", keep_default_na=False)
    return _labelled("text", list(table["text"]), table["category"])


def _labelled(kind: Kind, content: Any, labels: pd.Series) -> Source:
    numbers, names = pd.factorize(labels, sort=True)
    return Source(kind, content, numbers.astype(np.int64), [str(name) for name in names])


SOURCES: dict[str, Origin] = {
    "digits": Origin(_digits, (), "part of scikit-learn"),
    "MNIST": Origin(_images("mnist"), ("MNIST.tar.xz", "MNIST"), "torchvision.datasets.MNIST, its training part"),
    "Fashion-MNIST": Origin(
        _images("fashion-mnist"),
        ("FashionMNIST.tar.xz", "FashionMNIST"),
        "torchvision.datasets.FashionMNIST, its training part",
    ),
    "CIFAR-10": Origin(
        _images("cifar10"),
        ("CIFAR10_subset.npz", "cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
        "<https://www.cs.toronto.edu/~kriz/cifar.html>; here its training images 0 to 19,999",
    ),
    "CIFAR-10N": Origin(
        _by_people, (PEOPLE,), "<https://github.com/UCSC-REAL/cifar-10-100n>, here of the training images 0 to 9,999"
    ),
    "SVHN": Origin(
        _images("svhn"),
        ("SVHN_subset.npz", "train_32x32.mat"),
        "<http://ufldl.stanford.edu/housenumbers/>; here 7,136 digits of its test part, with the photograph of each",
    ),
    "letter": Origin(
        _letter, ("letter-recognition.data",), "<https://archive.ics.uci.edu/dataset/59/letter+recognition>"
    ),
    "adult": Origin(_adult, ("adult.data",), "<https://archive.ics.uci.edu/dataset/2/adult>"),
    "SMS spam": Origin(
        _sms, ("SMSSpamCollection",), "<https://archive.ics.uci.edu/dataset/228/sms+spam+collection>"
    ),
    "AG News": Origin(
        _ag_news, ("ag_news_csv/test.csv",), "<https://github.com/mhjabreel/CharCnn_Keras>, data/ag_news_csv/test.csv"
    ),
    "banking77": Origin(
        _banking,
        ("banking_data/train.csv",),
        "<https://github.com/PolyAI-LDN/task-specific-datasets>, banking_data/train.csv",
    ),
}  # fmt: skip


def read(name: str, roots: Sequence[Path]) -> Source:
    """Read a source from the first of the roots that has one of its files."""
    origin = SOURCES[name]
    if not origin.files:
        return origin.read(Path())
    home = next((root for root in roots if any((root / file).exists() for file in origin.files)), None)
    if home is None:
        raise FileNotFoundError(f"{' or '.join(origin.files)} is missing")
    return origin.read(home)


# --- draws ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What is drawn from a source.

    rows: how many in all. checked: how many of them have a label that was verified. rate: the share of wrong labels
    among the others. frequency: of each class relative to the others, where it is not the source's own.
    at_least: this many rows of each class are checked. people: which labels people gave.
    """

    source: str
    rows: int
    checked: int
    noise: Noise
    rate: float
    frequency: tuple[float, ...] | None = None
    at_least: int = 0
    remark: str = ""
    people: str = ""

    @property
    def title(self) -> str:
        """One line that says what the set is."""
        noise = f"{100 * self.rate:g} % {self.noise}" if self.rate else "no wrong label"
        noise = f"labels by people ({self.people})" if self.people else noise
        return (
            f"{self.source}{', ' * bool(self.remark)}{self.remark}: {self.rows:,} rows, {self.checked} checked; {noise}"
        )


RARE = (1.0,) * 9 + (0.01,)
LONG_TAIL = tuple(0.01 ** (c / 9) for c in range(10))

SETS: dict[str, Draw] = {
    "digits": Draw("digits", 1797, 100, "uniform", 0.10),
    "mnist-clean": Draw("MNIST", 3000, 300, "uniform", 0.0),
    "mnist-uniform-50": Draw("MNIST", 3000, 50, "uniform", 0.10),
    "mnist-uniform-40%": Draw("MNIST", 3000, 300, "uniform", 0.40),
    "mnist-pairwise-30": Draw("MNIST", 3000, 30, "pairwise", 0.25),
    "mnist-pairwise-300": Draw("MNIST", 3000, 300, "pairwise", 0.25),
    "mnist-class-30": Draw("MNIST", 3000, 30, "class-dependent", 0.125),
    "mnist-class-300": Draw("MNIST", 3000, 300, "class-dependent", 0.125),
    "mnist-rare": Draw("MNIST", 10000, 300, "uniform", 0.05, RARE, 3, "the digit 9 a hundred times rarer"),
    "mnist-60000": Draw("MNIST", 60000, 500, "uniform", 0.10),
    "fashion-2%": Draw("Fashion-MNIST", 5000, 100, "uniform", 0.02),
    "fashion-pairwise": Draw("Fashion-MNIST", 5000, 500, "pairwise", 0.15),
    "fashion-tail": Draw(
        "Fashion-MNIST", 5000, 200, "class-dependent", 0.10, LONG_TAIL, 2, "frequencies falling from 1 to 1/100"
    ),
    "cifar10": Draw("CIFAR-10", 5000, 500, "uniform", 0.10, remark="photographs"),
    "cifar10-class": Draw("CIFAR-10", 5000, 500, "class-dependent", 0.15, remark="photographs"),
    **{
        f"human-{people}-{checked}": Draw("CIFAR-10N", 2000, checked, "human", 0.0, people=people)
        for people in ("aggre", "random1", "worse")
        for checked in (0, 20, 50, 200)
    },
    "svhn": Draw("SVHN", 5000, 500, "uniform", 0.20, remark="checked by whole photographs"),
    "letter": Draw("letter", 20000, 300, "pairwise", 0.15, remark="a table of 16 numbers"),
    "adult": Draw("adult", 10000, 200, "class-dependent", 0.10, remark="a table with categories"),
    "sms": Draw("SMS spam", 5574, 100, "uniform", 0.05, remark="text"),
    "agnews": Draw("AG News", 7600, 200, "pairwise", 0.10, remark="text"),
    "banking77": Draw("banking77", 10003, 500, "uniform", 0.10, remark="text, 77 classes"),
}


@dataclass(frozen=True)
class Noisy:
    """A drawn set: content as in `Rows`, and for each row its given label, its true one, and whether it is checked."""

    kind: Kind
    content: Any
    given: Labels
    truth: Labels
    checked: Mask
    names: list[str]
    positions: Labels  # in the source

    def as_rows(self, title: str) -> Rows:
        """The set as a reader of the recipe would give it."""
        count = len(self.given)
        table = pd.DataFrame({"label": np.asarray(self.names)[self.given], "checked": self.checked})
        return Rows(
            title, self.kind, table, np.arange(count), self.given, self.checked, self.names, self.content,
            [str(row) for row in range(count)], pd.DataFrame(columns=["row", "name", "reason"]),
        )  # fmt: skip


def draw(source: Source, plan: Draw, seed: int) -> Noisy:
    """Choose the rows and which of them are checked, then change labels of the others."""
    rng = np.random.default_rng(seed)
    order = _order(source, plan, rng)
    group = np.arange(len(source.y)) if source.groups is None else source.groups
    checked = order[: plan.checked]
    others = order[~np.isin(group[order], group[checked])][: plan.rows - plan.checked]
    if len(checked) + len(others) < plan.rows:
        raise ValueError(f"{plan.source} has {len(source.y)} rows, too few for {plan.rows} with {plan.checked} checked")
    rows = rng.permutation(np.concatenate([checked, others]))
    truth, mask = source.y[rows], np.isin(rows, checked)
    given = truth.copy()
    if source.human is not None and plan.people:
        given[~mask] = source.human[plan.people][rows][~mask]
    else:
        given[~mask] = wrong_labels(truth[~mask], plan.noise, plan.rate, len(source.classes), rng)
    return Noisy(source.kind, take(source.content, rows), given, truth, mask, source.classes, rows)


def _order(source: Source, plan: Draw, rng: np.random.Generator) -> Labels:
    """The rows to draw from, shuffled; rows of one group side by side; first those that have to be checked."""
    order = rng.permutation(len(source.y))
    if plan.frequency is not None:
        share = np.cumsum([0, *plan.frequency]) / sum(plan.frequency)
        most = np.diff(np.rint(share * plan.rows)).astype(int)  # sums to plan.rows
        order = rng.permutation(order[_nth_of_class(source.y[order]) < most[source.y[order]]])
    if source.groups is not None:
        _, number = np.unique(source.groups, return_inverse=True)
        place = rng.permutation(number.max() + 1)[number]
        order = order[np.argsort(place[order], kind="stable")]
    first = _nth_of_class(source.y[order]) < plan.at_least
    return np.concatenate([order[first], order[~first]])


def _nth_of_class(y: Labels) -> Labels:
    """How many rows of the same class stand before each row."""
    return pd.Series(y).groupby(y).cumcount().to_numpy()


def take(content: Any, rows: Labels) -> Any:
    """Some rows of the content of a source, which is a frame, an array or a list."""
    if isinstance(content, pd.DataFrame):
        return content.iloc[rows].reset_index(drop=True)
    return content[rows] if isinstance(content, np.ndarray) else [content[row] for row in rows]


def wrong_labels(y: Labels, noise: Noise, rate: float, classes: int, rng: np.random.Generator) -> Labels:
    """Labels of which exactly round(rate · N) are wrong.

    uniform: any row, any other class. pairwise: any row, class c becomes c + 1. class-dependent: rows of the classes
    0, 2, 4, …, any other class; from the first to the last of these the rate triples, and the number of wrong labels
    of each is rounded.
    """
    quotas = _quotas(y, noise, rate, classes)
    bad = np.concatenate([rng.permutation(np.flatnonzero(np.isin(y, some)))[:count] for some, count in quotas])
    step = np.ones(len(bad), np.int64) if noise == "pairwise" else rng.integers(1, classes, len(bad))
    given = y.copy()
    given[bad] = (y[bad] + step) % classes
    return given


def _quotas(y: Labels, noise: Noise, rate: float, classes: int) -> list[tuple[list[int], int]]:
    """Groups of classes, and how many labels of each group become wrong."""
    if noise != "class-dependent":
        return [(list(range(classes)), round(rate * len(y)))]
    noisy = list(range(0, classes, 2))
    count = np.bincount(y, minlength=classes)[noisy]
    relative = np.linspace(1, 3, len(noisy))
    rates = relative * rate * len(y) / (relative @ count)
    if rates.max() > MOST_WRONG:
        raise ValueError(f"{100 * rates.max():.0f} % of one class would be wrong, more than {100 * MOST_WRONG:.0f} %")
    return [([c], round(r * n)) for c, r, n in zip(noisy, rates, count, strict=True)]


# --- ready for a method ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What a method may see (x, given, checked, classes), and what it is judged by (truth).

    x: M × D features, float32. fingerprint: so that a result can tell what it was computed with.
    seconds: of CPU time that the features took.
    """

    x: NDArray[np.float32]
    given: Labels
    truth: Labels
    checked: Mask
    classes: int
    names: list[str]
    fingerprint: str
    seconds: float = 0.0
    content: Callable[[], Any] | None = None  # reads what the features were made of


def load_set(name: str, seed: int, roots: Sequence[Path] = (), cache: Path = CACHE) -> Loaded:
    """Draw a set and compute its features, or read them from the cache if the code that makes them is the same.

    Labels and features are cached apart: sets that draw the same rows of a source share their features.
    """
    if name not in SETS:
        raise ValueError(f"there is no set {name!r}; the sets are {', '.join(SETS)}")
    plan = SETS[name]
    drawn = cache / f"{name}-{seed}-{_mark(repr(plan), DRAWING)}.npz"
    if not drawn.is_file():
        noisy = draw(read(plan.source, roots), plan, seed)
        _save(drawn, names=np.array(noisy.names), **{key: getattr(noisy, key) for key in LABELS})
    labels = _load(drawn)
    made = cache / f"features-{_mark(plan.source, labels['positions'].tobytes(), MAKING)}.npz"
    if not made.is_file():
        rows = draw(read(plan.source, roots), plan, seed).as_rows(name)
        start = time.process_time()
        x = np.ascontiguousarray(features(rows, seed=0).x, dtype=np.float32)
        _save(made, x=x, seconds=np.array(time.process_time() - start))
    found = _load(made)
    given, truth, checked, _ = (labels[key] for key in LABELS)
    mark = fingerprint(found["x"], given)
    names = [str(n) for n in labels["names"]]

    def content() -> Any:
        return draw(read(plan.source, roots), plan, seed).content

    return Loaded(found["x"], given, truth, checked, len(names), names, mark, float(found["seconds"]), content)


def fingerprint(x: NDArray[np.float32], given: Labels) -> str:
    """A mark of the labels and of the features, the same for features that differ by rounding errors alone."""
    scales = [f"{scale:.3g}" for scale in x[:, :32].std(0)]  # other threads or another machine round differently
    return _mark(repr(x.shape), ",".join(scales), given.tobytes())


LABELS = ("given", "truth", "checked", "positions")


def _mark(*parts: str | bytes) -> str:
    """A fingerprint."""
    data = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _save(file: Path, **arrays: NDArray[Any]) -> None:
    """Write an .npz of which another process sees the whole, or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez(part, allow_pickle=False, **arrays)
    part.replace(file)


def _load(file: Path) -> dict[str, NDArray[Any]]:
    with np.load(file) as found:
        return dict(found)


# Of the code as it was imported: the files may change while a long run goes on.
DRAWING = "".join(inspect.getsource(function) for function in (draw, _order, wrong_labels, _quotas))
MAKING = "".join(inspect.getsource(module) for module in (feature_module, patches))
