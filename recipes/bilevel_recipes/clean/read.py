"""Labelled data of the usual forms, read for the cleaning recipe.

`read("table.csv", label="species", checked="checked")` reads a table, `read("photos", checked="verified")` a folder of
images with a second folder of checked ones, and `read(frame, text="review", checked=marks)` a pandas DataFrame.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .cells import quantity, several_labels
from .content import Choice, choose, load, name_images, read_embeddings, usable_numbers
from .marks import Marks, checked_column, checked_rows
from .rows import Rows, fingerprint, take
from .sources import Source, find_column, open_source, refuse_duplicates

__all__ = ["Rows", "fingerprint", "read"]

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")
_MISSING_NAMES = frozenset(["nan", "na", "n/a", "null", "none", "<na>", "?"])


def read(
    data: Any,
    *,
    label: Any = None,
    checked: Any = None,
    image: Any = None,
    text: Any = None,
    columns: Any = None,
    embeddings: Any = None,
    root: str | Path | None = None,
    pred_probs: Any = None,
) -> Rows:
    """Read labelled rows, and say which of them can't be used.

    data: a path to .csv, .tsv, .parquet, .npz or a folder of images with one folder for each class; a pandas DataFrame;
    a datasets.Dataset; or a dict or tuple of the arrays x, y and checked.
    label: the column of the given labels; "label" by default.
    checked: which labels a person has verified, if any: a column (by default "checked", if there is one) of true and
    false, of names of people or of the right labels; a file that lists names or row numbers; a second folder of images;
    or one boolean for each row. They should be a random sample.
    image, text, columns: the column of image paths, of texts, or the feature columns. Without any of them, they are
    chosen by the contents of the table, and `Rows.note` says what was chosen.
    embeddings: a .npy file or an array with one row for each row of the table; it replaces the other features.
    pred_probs: a .npy file or an array with one row for each row of the table and one column for each class: the
    probabilities of models that were not trained on that row, as cleanlab has them. The columns are in the order of
    `Rows.classes`, or where labels are whole numbers from 0, in the order of these. Other features are optional then.
    root: the folder in which image paths start, by default that of the table. Paths that lead out of it are refused.
    """
    source = _open(data, label, checked, text, root)
    if _second_folder(data, checked) is not None:
        checked = None  # the source has them in its column
    given = find_column(source.table, "label" if label is None else label, "label")
    marks_in = checked_column(source.table, checked)
    taken = {given, marks_in}
    choice = _choose(source, given, taken, image, text, columns, embeddings, pred_probs)
    if choice is not None and choice.kind == "images" and choice.columns:
        name_images(source, choice.columns[0])
    names = source.names or [str(key) for key in source.table.index]
    labels = _label_names(source.table[given])
    found = checked_rows(source, checked, marks_in, names, labels)
    marks = found.checked
    source.warnings += [] if found.warning is None else [found.warning]
    reasons = {row: source.unlabelled for row, name in enumerate(labels) if name is None}
    _refuse(str(given), labels, marks, reasons, names)
    rows = np.array([row for row in range(len(labels)) if row not in reasons])
    content = _contents(choice, source, rows, embeddings)
    reasons |= {int(rows[place]): why for place, why in content.pop("reasons").items()}
    _refuse(str(given), labels, marks, reasons, names)
    keep = np.array([place for place, row in enumerate(rows) if row not in reasons])
    used = rows[keep].astype(np.int64)
    classes = _sorted([labels[row] for row in used], source.order.get(given, []))
    source.warnings += content.pop("warnings") + _name_warnings(classes)
    for part in ("content", "shown"):
        content[part] = content[part] if len(keep) == len(rows) else take(content[part], keep)
    return Rows(
        title=source.title, table=source.table, used=used, checked=marks[used], classes=classes, **content,
        y=pd.Categorical([labels[row] for row in used], categories=classes).codes.astype(np.int64),
        names=[names[row] for row in used], skipped=_skipped(reasons, names), warnings=source.warnings,
        label=given, values=_values(source.table[given], labels, classes), truth=_right(found, used, classes),
        probabilities=None if pred_probs is None else _probabilities(pred_probs, used, len(names), classes),
    )  # fmt: skip


def _open(data: Any, label: Any, checked: Any, text: Any, root: str | Path | None) -> Source:
    as_text = [str(name) for name in ("label" if label is None else label, text) if name is not None]
    source = open_source(data, as_text, _second_folder(data, checked))
    if source.table.columns.nlevels > 1:
        raise ValueError("bilevel-clean: the columns of the table have several levels; flatten them to one name each.")
    refuse_duplicates([str(column) for column in source.table.columns], source.title)
    if source.table.empty:
        raise ValueError(f"bilevel-clean: {source.title} is empty; it needs columns, and a line for each row.")
    if root is not None:
        if not Path(root).is_dir():
            raise FileNotFoundError(f"bilevel-clean: root={str(root)!r} is not a folder.")
        if source.cells is not None:
            raise ValueError(f"bilevel-clean: root goes with image paths in a table; {source.title} has the images.")
        source.folder = Path(root)
    source.folder = Path(os.path.abspath(source.folder))
    return source


def _second_folder(data: Any, checked: Any) -> Path | None:
    paths = isinstance(data, (str, Path)) and isinstance(checked, (str, Path))
    return Path(checked) if paths and Path(data).is_dir() and Path(checked).is_dir() else None


def _choose(
    source: Source, label: Any, taken: set[Any], image: Any, text: Any, columns: Any, embeddings: Any, pred_probs: Any
) -> Choice | None:
    """Return the choice of features, or with embeddings or probabilities what to show beside them: perhaps nothing."""
    try:
        return choose(source, label, taken, image, text, columns)
    except ValueError:
        if (embeddings is None and pred_probs is None) or not (image is None and text is None and columns is None):
            raise
        return None


def _contents(choice: Choice | None, source: Source, rows: NDArray[np.int64], embeddings: Any) -> dict[str, Any]:
    """Return the fields of Rows with the content, and why some rows can't be used, by their position."""
    fields: dict[str, Any] = {"shown": None, "shown_kind": None, "warnings": []}
    items, reasons = load(choice, source, rows) if choice is not None else (None, {})
    if embeddings is None and choice is None:
        note = "Content: nothing but the probabilities that were given."
        return fields | {"kind": "table", "content": None, "reasons": {}, "note": note}
    if embeddings is None:
        assert choice is not None
        return fields | {"kind": choice.kind, "content": items, "reasons": reasons, "note": choice.note}
    if choice is not None and choice.kind != "embeddings":
        fields |= {"shown": items, "shown_kind": choice.kind}
        if choice.kind == "images" and reasons:
            fields["warnings"] = [
                f"{len(reasons)} images could not be read; their rows are judged by embeddings alone."
            ]
    x, reasons = usable_numbers(read_embeddings(embeddings, len(source.table))[rows])
    note = f"Content: embeddings of {x.shape[1]} numbers."
    return fields | {"kind": "embeddings", "content": x, "reasons": reasons, "note": note}


# --- labels ----------------------------------------------------------------------------------------------------


def _label_names(column: pd.Series) -> list[str | None]:
    """Return the name of each row's class, or None if it has no label."""
    try:
        codes, found = pd.factorize(column.astype(object))
    except TypeError as error:
        raise ValueError(f"bilevel-clean: the column {column.name} does not hold one label in each row.") from error
    names = [_class_name(value) for value in found]
    return [names[code] if code >= 0 else None for code in codes]


def _class_name(value: Any) -> str | None:
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)  # whole numbers become floats in a column where some are missing
    return str(value) if str(value).strip() else None


def _sorted(labels: list[Any], order: list[str]) -> list[str]:
    """Return the classes that occur, in the given order, or sorted by number or alphabet."""
    classes = set(labels)
    if order:
        return [name for name in order if name in classes]
    if all(map(_NUMBER.fullmatch, classes)):
        return sorted(classes, key=lambda name: (float(name), name))
    return sorted(classes)


def _values(column: pd.Series, labels: list[str | None], classes: list[str]) -> list[Any]:
    first = {name: row for row, name in reversed(list(enumerate(labels)))}
    values = [column.iloc[first[name]] for name in classes]
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def _probabilities(given: Any, used: NDArray[np.int64], rows: int, classes: list[str]) -> NDArray[np.float32]:
    """Return the probabilities of the used rows, with a column for each of the classes."""
    p = read_embeddings(given, rows, "pred_probs")[used]
    numbers = [int(name) if name.isdecimal() else -1 for name in classes]
    if p.shape[1] != len(classes) and 0 <= min(numbers) <= max(numbers) < p.shape[1]:
        p = p[:, numbers]  # labels are numbers from 0, and some class has no row
    bad = [] if p.shape[1] == len(classes) else [f"has {p.shape[1]} columns for {len(classes)} classes"]
    if not bad and not (np.isfinite(p).all() and p.min() >= -1e-6 and p.sum(1).max() <= 1.01):
        bad = ["holds what are no probabilities: each row has numbers from 0 to 1 that add up to 1"]
    if bad:
        raise ValueError(
            f"bilevel-clean: pred_probs {bad[0]}. The columns are those of {', '.join(classes[:10])}"
            f"{', …' if len(classes) > 10 else ''}; predict_proba of scikit-learn has them in this order."
        )
    return np.clip(p, 0, 1).astype(np.float32)


def _right(marks: Marks, used: NDArray[np.int64], classes: list[str]) -> NDArray[np.int64] | None:
    """Return the number of the right label of each row, where the column of marks has it."""
    if marks.right is None:
        return None
    return pd.Categorical([marks.right[row] for row in used], categories=classes).codes.astype(np.int64)


def _name_warnings(classes: list[str]) -> list[str]:
    """Return a sentence for classes that are probably the same, and for classes that are probably missing labels."""
    same: dict[str, list[str]] = {}
    for name in classes:
        same.setdefault(name.strip().casefold(), []).append(name)
    pairs = [f"{' and '.join(map(repr, group))}" for group in same.values() if len(group) > 1]
    empty = [repr(name) for name in classes if name.strip().lower() in _MISSING_NAMES]
    return [
        *(f"The classes {pair} differ only by case or white space; they were not merged." for pair in pairs),
        *(f"The class {name} is taken for a class of that name; a missing label is an empty cell." for name in empty),
    ]


# --- refusals --------------------------------------------------------------------------------------------------


def _skipped(reasons: dict[int, str], names: list[str]) -> pd.DataFrame:
    rows = sorted(reasons)
    frame = {"row": rows, "name": [names[row] for row in rows], "reason": [reasons[row] for row in rows]}
    return pd.DataFrame(frame).astype({"row": np.int64, "name": object, "reason": object})


def _refuse(
    label: str, labels: list[str | None], marks: NDArray[np.bool_], reasons: dict[int, str], names: list[str]
) -> None:
    """Refuse labels that can't be judged. This runs before the content is read, which may take long, and after."""
    if len(reasons) > len(labels) / 2:
        first = "".join(f"\n  {names[row]}: {reasons[row]}" for row in sorted(reasons)[:5])
        raise ValueError(
            f"bilevel-clean: {len(reasons)} of {len(labels)} rows can't be used. The first are:{first}\nCorrect them, "
            "or choose other columns with label=, image=, text= or columns=."
        )
    used = [row for row in range(len(labels)) if row not in reasons]
    given = np.array([labels[row] for row in used], dtype=object)
    classes = {str(name) for name in given}
    _refuse_classes(label, classes, len(used))
    checked = marks[used]
    if checked.all():
        raise ValueError("bilevel-clean: all rows are checked, so there is nothing to judge; leave some unchecked.")
    if checked.any() and len(set(given[checked])) == 1:
        raise ValueError(
            f"bilevel-clean: all {checked.sum()} checked rows are of one class, {given[checked][0]!r}; check rows "
            "of every class."
        )


def _refuse_classes(label: str, classes: set[str], rows: int) -> None:
    """Refuse what is no single class in each row: one class, several labels in a cell, a quantity, an identifier."""
    if len(classes) == 1:
        raise ValueError(
            f"bilevel-clean: there is only one class, {next(iter(classes))!r}: nothing can be mislabelled."
        )
    if (mark := several_labels(classes)) is not None:
        example = next(name for name in sorted(classes) if mark in name)
        raise ValueError(
            f"bilevel-clean: the column {label} holds several labels in a cell, such as {example!r}. Rows with several "
            f"labels can't be judged together. Make one column of yes and no for each label, as with "
            f"table[{label!r}].str.get_dummies({mark!r}), and judge one at a time with label=."
        )
    if all(map(_NUMBER.fullmatch, classes)) and (why := quantity(label, classes, rows)) is not None:
        raise ValueError(
            f"bilevel-clean: the label column {label} has {why} in {rows} rows; it looks like numbers to regress. "
            "Choose a column of classes with label=, or make classes of the numbers, as with pandas.cut. If they do "
            "number classes, write them as words, such as c17."
        )
    if len(classes) > rows / 2:
        raise ValueError(
            f"bilevel-clean: there are {len(classes)} classes in {rows} rows, so most classes have one row. Is another "
            "column the label? Choose it with label=."
        )
