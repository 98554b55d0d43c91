"""The choice of the part of a table to judge labels by, and the rows where that part can't be used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from .cells import annotators, as_numbers
from .pictures import SUFFIXES, read_pictures
from .rows import Kind
from .sources import Source, find_column

# Columns about the label that this program or a benchmark has written. They are never features.
ABOUT_LABELS = frozenset(["checked", "truth", "is_label_issue", "label_score", "given_label", "suggested_label"])
_IMAGE_NAMES = re.compile("(image|img|file|picture)?_?(file|path|name|image|img|picture)s?")
_TEXT_NAMES = re.compile("(text|sentence|review|body|content|comment|message|tweet|document|description|question)s?")
_ID_NAMES = frozenset(["id", "index", "row", "unnamed: 0", "uuid", "guid", "key"])
_WORDS = 4  # a string column with fewer words in a cell, on average, holds categories


@dataclass(frozen=True)
class Choice:
    """The columns to judge by, and a sentence that says so. Without columns, these are the x of the source."""

    kind: Kind
    columns: list[Any]
    note: str


def choose(source: Source, label: Any, taken: set[Any], image: Any, text: Any, columns: Any) -> Choice:
    """Return the columns that were named, or if none were, those that the table itself suggests."""
    named = {key: value for key, value in (("image", image), ("text", text), ("columns", columns)) if value is not None}
    if len(named) > 1:
        raise ValueError(f"bilevel-clean: {' and '.join(named)} were given; the features are one of them.")
    if source.x is not None:
        if named:
            raise ValueError(f"bilevel-clean: {next(iter(named))} names columns of a table; {source.title} has x.")
        return _choose_x(source.x)
    table = source.table
    if image is not None:
        return _one("images", find_column(table, image, "image"))
    if text is not None:
        return _one("text", find_column(table, text, "text"))
    if columns is not None:
        return _named_columns(table, [columns] if isinstance(columns, str) else list(columns), taken)
    if source.image is not None:
        return _one("images", source.image)
    return _look(source, label, [c for c in table.columns if c not in taken and c not in ABOUT_LABELS])


def _choose_x(x: NDArray[Any]) -> Choice:
    if x.ndim == 2:
        return Choice("embeddings", [], f"Content: the {x.shape[1]} numbers of each row.")
    return Choice("images", [], f"Content: images of {x.shape[1]} × {x.shape[2]} pixels.")


def _one(kind: Kind, column: Any, others: Sequence[Any] = ()) -> Choice:
    left = f" Left out: {_listed(others)}." if others else ""
    return Choice(kind, [column], f"Content: the {kind} of column {column}.{left}")


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _named_columns(table: pd.DataFrame, names: list[Any], taken: set[Any]) -> Choice:
    if not names:
        raise ValueError("bilevel-clean: columns is empty; name at least one feature column.")
    missing = [str(name) for name in names if name not in table.columns]
    if missing:
        raise ValueError(
            f"bilevel-clean: there is no column {' and no column '.join(missing)}. The columns are "
            f"{', '.join(map(str, table.columns))}."
        )
    used = [name for name in names if name in taken]
    if used:
        raise ValueError(
            f"bilevel-clean: {_listed(used)} holds the labels or the checked marks; leave it out of columns."
        )
    wrong = [
        n for n in names if not (_is_numeric(table[n]) or _is_category(table[n]) or as_numbers(table[n]) is not None)
    ]
    if wrong:
        raise ValueError(f"bilevel-clean: the columns {_listed(wrong)} hold neither numbers nor text; leave them out.")
    return Choice("table", names, f"Content: {_count(names)}.")


def _count(names: list[Any]) -> str:
    return f"{len(names)} column{'s' if len(names) > 1 else ''} ({_listed(names)})"


# --- choosing by the table -------------------------------------------------------------------------------------


def _look(source: Source, label: Any, candidates: list[Any]) -> Choice:
    """Choose images, then text, then columns."""
    table = source.table
    images = [c for c in candidates if _is_images(c, table[c])]
    if images:
        return _one("images", images[0], [c for c in candidates if c != images[0]])
    texts = _text_columns(table, candidates)
    if len(texts) > 1:
        raise ValueError(
            f"bilevel-clean: the columns {_listed(texts)} all look like text; choose one with text=, or name the "
            "feature columns with columns=."
        )
    if texts:
        return _one("text", texts[0], [c for c in candidates if c != texts[0]])
    others = annotators(table, label, candidates)
    if others:
        source.warnings.append(
            f"{_listed(others)} {'hold' if len(others) > 1 else 'holds'} labels of the same classes as {label}, as by "
            "other annotators. They are not used. Where several people labelled each row, give the label of most of "
            "them, and mark rows on which all agree as checked only if they are a random sample."
        )
    why = {c: "labels by others" if c in others else _useless(c, table[c], table[label]) for c in candidates}
    kept = [column for column, reason in why.items() if reason is None]
    left = ", ".join(f"{column} ({reason})" for column, reason in why.items() if reason is not None)
    if not kept:
        raise ValueError(
            "bilevel-clean: no column is left to judge the labels by"
            + (f": {left}" if left else "")
            + ". Name feature columns with columns=, a text with text=, image paths with image=, or give embeddings=."
        )
    return Choice("table", kept, f"Content: {_count(kept)}." + (f" Left out: {left}." if left else ""))


def _is_images(name: Any, column: pd.Series) -> bool:
    """Return whether the cells are encoded images, or names of image files in a column with a fitting name."""
    cells = column.dropna().head(1000).tolist()
    if cells and all(isinstance(cell, Mapping) and {"bytes", "path"} & set(cell) for cell in cells):
        return True
    if not _IMAGE_NAMES.fullmatch(str(name).lower()) or not cells:
        return False
    images = [isinstance(c, bytes) or Path(str(c)).suffix.lower() in SUFFIXES for c in cells]
    return sum(images) > len(images) / 2


def _text_columns(table: pd.DataFrame, candidates: list[Any]) -> list[Any]:
    """Return the columns of texts: those with a fitting name if there are any, else those of several words."""
    strings = {c: _words(table[c]) for c in candidates if _is_string(table[c]) and as_numbers(table[c]) is None}
    named = [c for c in strings if _TEXT_NAMES.fullmatch(str(c).lower())]
    long = [c for c, words in strings.items() if words >= _WORDS and _distinct(table[c]) > 0.5]
    found = [c for c in named if strings[c] >= 2 or len(candidates) == 1]
    return [c for c in found if c in long] or found or long


def _is_string(column: pd.Series) -> bool:
    return not isinstance(column.dtype, pd.CategoricalDtype) and types.infer_dtype(column, skipna=True) == "string"


def _words(column: pd.Series) -> float:
    return float(column.dropna().head(1000).astype(str).str.split().str.len().mean())


def _distinct(column: pd.Series) -> float:
    return column.nunique() / max(1, len(column))


def _is_numeric(column: pd.Series) -> bool:
    return types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)  # booleans are numeric


def _is_category(column: pd.Series) -> bool:
    kinds = ("string", "empty", "categorical", "boolean")
    return isinstance(column.dtype, pd.CategoricalDtype) or types.infer_dtype(column, skipna=True) in kinds


def _useless(name: Any, column: pd.Series, label: pd.Series) -> str | None:
    """Return why a column can't be a feature, or None if it can."""
    if column.notna().sum() == 0:
        return "empty"
    numbers = as_numbers(column)
    if not (_is_numeric(column) or _is_category(column) or numbers is not None):
        return "neither numbers nor text"
    if _repeats(column, label):
        return f"repeats {label.name}"
    whole = types.is_integer_dtype(column.dtype)
    if whole and column.is_unique and (_is_id(name) or column.max() - column.min() == len(column) - 1):
        return "numbers the rows"
    if _is_id(name) and not types.is_float_dtype(column.dtype) and (_distinct(column) > 0.1 or column.nunique() > 100):
        return "an identifier"  # also where rows are repeated, so that its values are not unique
    if not _is_numeric(column) and numbers is None and _distinct(column) > 0.5:
        return "different in nearly every row"
    return None


def _is_id(name: Any) -> bool:
    return str(name).lower() in _ID_NAMES or str(name).lower().endswith(("_id", " id"))


def _repeats(column: pd.Series, label: pd.Series) -> bool:
    """Return whether each value belongs to one label. A model of such a column would believe every label."""
    if types.is_float_dtype(column.dtype) or not 1 < label.nunique() == column.nunique():
        return False
    return len(pd.DataFrame({"a": column.array, "b": label.array}).dropna().drop_duplicates()) == label.nunique()


# --- reading the chosen part -----------------------------------------------------------------------------------


def name_images(source: Source, column: Any) -> None:
    """Move encoded images from the table to `source.cells`, and name the table's cells and rows after them."""
    cells = source.table[column].tolist() if source.cells is None else source.cells
    if source.cells is None and any(isinstance(cell, (Mapping, bytes)) for cell in cells):
        source.cells = cells
        names = [cell.get("path") if isinstance(cell, Mapping) else cell for cell in cells]
        names = [name if isinstance(name, str) else str(row) for row, name in enumerate(names)]
        source.table = source.table.copy(deep=False)  # the user's own frame is not changed
        source.table[column] = names
    if source.names is None:
        found = source.table[column]
        source.names = [str(name) if isinstance(name, (str, Path)) else f"row {row}" for row, name in enumerate(found)]


def load(choice: Choice, source: Source, rows: NDArray[np.int64]) -> tuple[Any, dict[int, str]]:
    """Return the content of these rows, and why some have none, by their position in it."""
    if source.x is not None:
        x = source.x if len(rows) == len(source.x) else source.x[rows]
        return usable_numbers(x) if choice.kind == "embeddings" else (x, {})
    table = source.table.iloc[rows]
    if choice.kind == "images":
        cells = table[choice.columns[0]].tolist() if source.cells is None else [source.cells[row] for row in rows]
        return read_pictures(cells, source.folder)
    if choice.kind == "text":
        column = table[choice.columns[0]]
        texts = column.astype(object).where(column.notna(), "").astype(str).tolist()
        return texts, {place: "the text is empty" for place, text in enumerate(texts) if not text.strip()}
    return _features(table[choice.columns])


def _features(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return numbers as float64, with NaN where a cell is empty or infinite, and everything else as categories, where
    an empty cell is the category "". Only a row without any filled cell can't be used."""
    columns: dict[str, Any] = {}
    filled = np.zeros(len(table), bool)
    for name in table.columns:
        column = table[name]
        numbers = column if _is_numeric(column) else as_numbers(column)
        if numbers is not None:
            values = numbers.to_numpy(np.float64, na_value=np.nan)
            columns[str(name)] = np.where(np.isfinite(values), values, np.nan)
            filled |= np.isfinite(values)
        else:
            columns[str(name)] = pd.Categorical(column.astype(object).where(column.notna(), "").astype(str))
            filled |= column.notna().to_numpy()
    reasons = {int(place): "every column is empty" for place in np.flatnonzero(~filled)}
    return pd.DataFrame(columns, index=table.index), reasons


def usable_numbers(x: NDArray[Any]) -> tuple[NDArray[Any], dict[int, str]]:
    """Return embeddings as floats, and the rows that have a NaN or an infinite value."""
    x = x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(x).all(1))
    return x, {int(row): "NaN or infinite in the embeddings" for row in bad}


def read_embeddings(given: Any, n: int, what: str = "embeddings") -> NDArray[Any]:
    """Return N × D numbers from a .npy file or an array."""
    where = f"the file {given}" if isinstance(given, (str, Path)) else what
    x = _read_npy(Path(given)) if isinstance(given, (str, Path)) else np.asarray(given)
    if x.ndim != 2 or x.dtype.kind not in "biuf" or x.shape[1] == 0:
        raise ValueError(f"bilevel-clean: {where} holds {x.dtype} of shape {x.shape}; N × D numbers can be used.")
    if len(x) != n:
        raise ValueError(
            f"bilevel-clean: {where} has {len(x)} rows, but the table has {n}; compute one row of {what} for "
            "each row of the table, in the same order."
        )
    return x


def _read_npy(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"bilevel-clean: there is no file {path} with embeddings.")
    try:
        # A memory map of a file that claims more than it holds fails, where reading would first take the memory.
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises a dozen kinds on what is damaged
        why = (
            "holds pickled objects, which are never loaded" if "allow_pickle" in str(error) else f"is damaged ({error})"
        )
        raise ValueError(f"bilevel-clean: {path} {why}; write it with numpy.save.") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"bilevel-clean: {path} is an .npz with several arrays; write one array with numpy.save.")
    return np.array(found)
