"""The features of a data set: a dense matrix on which a linear model can be trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..patches import SMALLEST, Patches, reduce
from . import backbones
from .content import read_embeddings
from .rows import Kind, Rows

Matrix = NDArray[np.float32]

_LONGEST = 64  # the pixels of the longer side to which photographs are reduced for pixels and patches
_HEAVY = 2.0  # the skewness above which a column is compressed
_LEVELS = 50  # the largest number of one-hot columns for a categorical column; its other levels share one
_UNITS = 30.0  # the spread of scales from which columns of embeddings are standardised
_WORDS = 20_000  # the size of the vocabulary


@dataclass(frozen=True)
class Features:
    """The features of M rows.

    x: M × D finite numbers of about unit variance. words: a sentence that describes them.
    """

    x: Matrix
    words: str
    seconds: float


@dataclass(frozen=True)
class Wanted:
    """The settings of the functions below."""

    dimensions: int
    seed: int


def features(
    rows: Rows,
    kind: str = "auto",
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    dimensions: int | None = None,
    quiet: bool = True,
) -> Features:
    """Return features of the used rows.

    kind: "auto" chooses by the rows: patches for images, tfidf for text, columns for a table, embeddings as they are.
    "pixels", "patches", "tfidf" and "columns" can be chosen. FILE.npy holds embeddings, one row for each row of the
    input table (or of the used rows). "torchvision:NAME" and "timm:NAME" are the last layer but one of a model, whose
    weights come from the file weights or were downloaded before.
    dimensions: more features than this are reduced to their largest principal components. The default is 512 for text,
    whose components are many and small, and 256 otherwise.
    """
    start = time.perf_counter()
    dimensions = dimensions or (512 if rows.kind == "text" else 256)
    if weights is not None and ":" not in kind:
        raise ValueError(
            f"bilevel-clean: weights were given, but features {kind!r} are no model; choose --features "
            "torchvision:NAME or timm:NAME."
        )
    if kind.endswith(".npy"):
        x, words = _embeddings_file(rows, kind)
    elif ":" in kind:
        _refuse_unless(rows, kind, "images")
        raw, words = backbones.encode(rows.content, kind, weights, quiet)
        x = _standardised(_finite(raw, rows, "the features"))
    else:
        name = _automatic(rows) if kind == "auto" else kind
        if name not in _KINDS:
            raise ValueError(
                f"bilevel-clean: there are no features {kind!r}; choose auto, network, {', '.join(_KINDS)}, a FILE.npy "
                "with embeddings, torchvision:NAME or timm:NAME."
            )
        fitting, make = _KINDS[name]
        _refuse_unless(rows, kind, fitting)
        x, words = make(rows, Wanted(dimensions, seed))
    x, words = _finish(_finite(x, rows, "the features"), words, dimensions, seed)
    return Features(x, words, time.perf_counter() - start)


def views(
    rows: Rows, kind: str = "auto", *, seed: int, weights: str | Path | None, device: str, progress: Any
) -> tuple[list[Matrix], str]:
    """Return the views of the rows that are judged, and what they are in words: features, probabilities, a network.

    kind: see `features`. "network" adds a network that is trained on the rows out of fold. "none" leaves the features
    out where the rows have probabilities.
    """
    from . import network

    found: list[Matrix] = []
    told: list[str] = []
    if kind == "none" and rows.probabilities is None:
        raise ValueError("bilevel-clean: features 'none' need probabilities; give pred_probs=, or other features.")
    if rows.content is not None and kind != "none":
        one = features(rows, "auto" if kind == "network" else kind, seed=seed, weights=weights, quiet=False)
        found, told = [one.x], [one.words]
    if kind == "network" and rows.content is not None:
        large = rows.kind == "images" and min(_common_size(rows.content)) >= SMALLEST
        p = network.out_of_fold(
            _one_size(rows.content) if large else found[0], rows.labels, len(rows.classes), seed=seed, device=device,
            progress=lambda share: progress(0.0, f"network {share:.0%}"),
        )  # fmt: skip
        found.append(network.view(p))
        told.append("A network was trained on the rows, in three parts, each without the rows that it then judged.")
    if rows.probabilities is not None:
        found.append(network.view(rows.probabilities))
        told.append("The probabilities of the classes that were given are judged as well.")
    return found, " ".join(told)


def _automatic(rows: Rows) -> str:
    if rows.kind == "images":
        return "patches" if min(_common_size(rows.content)) >= SMALLEST else "pixels"
    return {"text": "tfidf", "table": "columns", "embeddings": "embeddings"}[rows.kind]


def _refuse_unless(rows: Rows, kind: str, fitting: Kind) -> None:
    if rows.kind != fitting:
        raise ValueError(
            f"bilevel-clean: features {kind!r} are for {fitting}, but the content of {rows.title} is {rows.kind}; "
            "choose --features auto."
        )


def _finish(x: Matrix, words: str, dimensions: int, seed: int) -> tuple[Matrix, str]:
    """Drop constant features, and reduce the others to principal components if there are many."""
    varying = np.ptp(x, axis=0) > 0
    if not varying.any():
        raise ValueError("bilevel-clean: all rows have the same features, so nothing tells them apart; give others.")
    x = x if varying.all() else x[:, varying]
    if x.shape[1] > dimensions:
        words += f" They are reduced to {min(dimensions, len(x))} principal components."
        x = reduce(x, dimensions, seed=seed)
    return np.ascontiguousarray(x, dtype=np.float32), words


def _finite(x: NDArray[Any], rows: Rows, what: str) -> NDArray[Any]:
    """Return x, or refuse all its rows with NaN or infinite values in one error."""
    bad = [rows.names[i] for i in np.flatnonzero(~np.isfinite(x).all(1))]
    if bad:
        raise ValueError(
            f"bilevel-clean: {what} of {len(bad)} used rows are NaN or infinite: {', '.join(bad[:20])}"
            f"{' …' if len(bad) > 20 else ''}. Correct these rows, or remove them."
        )
    return x


def _standardised(x: NDArray[Any]) -> Matrix:
    """Give each column mean 0 and standard deviation 1. A constant column becomes 0."""
    x = x if x.dtype in (np.float32, np.float64) else x.astype(np.float64)  # float16 would overflow
    deviation = x.std(0)
    rounding = 10 * np.finfo(x.dtype).eps * np.abs(x).max(0)
    return ((x - x.mean(0)) / np.where(deviation > rounding, deviation, np.inf)).astype(np.float32)


# --- images ----------------------------------------------------------------------------------------------------


def _patches(rows: Rows, wanted: Wanted) -> tuple[Matrix, str]:
    images = _one_size(rows.content)
    learnt = Patches.learn(images, seed=wanted.seed)
    size, (height, width) = learnt.filters.shape[-1], images.shape[1:3]
    words = (
        f"The features are the responses of {len(learnt.filters)} filters of {size} × {size} pixels, learnt from the "
        f"{_colour(images)} images themselves at {height} × {width} pixels, without labels."
    )
    return learnt.encode(images), words


def _pixels(rows: Rows, wanted: Wanted) -> tuple[Matrix, str]:
    images = _one_size(rows.content)
    words = f"The features are the pixels of the {_colour(images)} images at {images.shape[1]} × {images.shape[2]}."
    # All pixels have one scale. Otherwise a border pixel that is hardly ever set would count too much.
    return _unit_scale(images.reshape(len(images), -1)), words


def _colour(images: NDArray[np.uint8]) -> str:
    return "colour" if images.ndim == 4 else "grey"


def _common_size(content: Any) -> tuple[int, int]:
    """Return the median height and width, reduced until the longer side has at most 64 pixels."""
    height, width = np.median([image.shape[:2] for image in content], axis=0)
    scale = min(1.0, _LONGEST / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _one_size(content: Any) -> NDArray[np.uint8]:
    return backbones.resized(content, *_common_size(content))


# --- text, tables, embeddings ----------------------------------------------------------------------------------


def _tfidf(rows: Rows, wanted: Wanted) -> tuple[Matrix, str]:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = list(rows.content)
    frequent = 2 if len(texts) >= 100 else 1
    options: dict[str, Any] = {"dtype": np.float32}  # its annotation only knows float64
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2), sublinear_tf=True, min_df=frequent, max_features=_WORDS, strip_accents="unicode",
        **options,
    )  # fmt: skip
    try:
        table = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise ValueError(
            f"bilevel-clean: no word occurs in {frequent} of the {len(texts)} texts, so nothing relates them "
            f"({error}); give embeddings of a language model with --features FILE.npy."
        ) from error
    words = f"The features are TF-IDF weights of {table.shape[1]} words and pairs of words"
    count = max(1, min(wanted.dimensions, len(texts) - 1))
    if table.shape[1] <= count:
        return _unit_scale(np.asarray(table.todense())), f"{words}."
    x = TruncatedSVD(count, random_state=wanted.seed).fit_transform(table)
    return _unit_scale(x), f"{words}, reduced to {count} dimensions."


def _columns(rows: Rows, wanted: Wanted) -> tuple[Matrix, str]:
    content: pd.DataFrame = rows.content
    parts = [
        _number(content[c]) if pd.api.types.is_numeric_dtype(content[c].dtype) else _levels(content[c]) for c in content
    ]
    words = f"The features are the {content.shape[1]} columns, numbers standardised and categories one-hot encoded."
    return np.column_stack(parts), words


def _number(column: pd.Series) -> Matrix:
    """Standardise a column. A long tail is compressed first, so that a few rows do not outweigh the others.

    An empty cell gets the median, and a second column says where cells are empty, if some are.
    """
    x = column.to_numpy(np.float64)
    empty = np.isnan(x)
    x = np.where(empty, np.nanmedian(x) if not empty.all() else 0.0, x)
    if np.abs(pd.Series(x).skew()) > _HEAVY:
        distance = np.abs(x - np.median(x))
        # logarithmic in the tail
        x = np.arcsinh((x - np.median(x)) / (np.median(distance) or distance.mean() or 1.0))
    return _standardised(np.column_stack([x, empty]) if 0 < empty.mean() < 1 else x[:, None])


def _levels(column: pd.Series) -> Matrix:
    """Return a 0-1 column for each frequent level and one for all others, centred and, if balanced, of variance 1."""
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(min_frequency=max(2, len(column) // 500), max_categories=_LEVELS, sparse_output=False)
    hot = encoder.fit_transform(column.astype(object).where(column.notna(), "").astype(str).to_numpy()[:, None])
    return (2 * (hot - hot.mean(0))).astype(np.float32)


def _embeddings(rows: Rows, wanted: Wanted) -> tuple[Matrix, str]:
    return _as_they_are(_finite(rows.content, rows, "the embeddings"), "the embeddings")


def _embeddings_file(rows: Rows, path: str) -> tuple[Matrix, str]:
    return _as_they_are(_finite(_aligned(rows, path), rows, f"the embeddings in {path}"), f"the embeddings in {path}")


def _as_they_are(x: NDArray[Any], what: str) -> tuple[Matrix, str]:
    """Keep the scales of embeddings, which are part of what a network has learnt, unless they are of different units.

    Columns of one network have scales of one order. If the middle half of them spreads over more than a factor of
    UNITS, they were probably measured in different units, and are standardised.
    """
    deviation = x.astype(np.float64).std(0)
    low, high = np.quantile(deviation[deviation > 0], (0.25, 0.75)) if (deviation > 0).any() else (1.0, 1.0)
    if high > _UNITS * low:
        told = "standardised, since their scales are so different"
        return _standardised(x), f"The features are {what}, of {x.shape[1]} dimensions, {told}."
    return _unit_scale(x.astype(np.float64)), f"The features are {what}, of {x.shape[1]} dimensions, as they are."


def _aligned(rows: Rows, path: str) -> NDArray[Any]:
    """Return the row of the file for each used row. The file has either those rows, or all rows of the table."""
    if len(rows.used) < len(rows.table):
        with suppress(ValueError):  # a file that is wrong in any other way is refused by the second call as well
            return read_embeddings(path, len(rows.used))
    return read_embeddings(path, len(rows.table))[rows.used]


def _unit_scale(x: NDArray[Any]) -> Matrix:
    """Centre each column, and divide all columns by one number, so that their mean variance is 1."""
    x = x - x.mean(0)
    return (x / max(float(np.sqrt(np.square(x).mean())), 1e-12)).astype(np.float32)


_KINDS: dict[str, tuple[Kind, Callable[[Rows, Wanted], tuple[Matrix, str]]]] = {
    "patches": ("images", _patches),
    "pixels": ("images", _pixels),
    "tfidf": ("text", _tfidf),
    "columns": ("table", _columns),
    "embeddings": ("embeddings", _embeddings),
}
