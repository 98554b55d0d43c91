"""The marks of verified labels: a column, a list of rows, or booleans."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .sources import Source, read_delimited

_TRUE = {"1", "1.0", "true", "t", "yes", "y", "x", "✓", "✔", "ok", "checked", "verified"}
_FALSE = {"", "0", "0.0", "false", "f", "no", "n", "-"}
_DOUBT = {
    "?",
    "??",
    "maybe",
    "unsure",
    "todo",
    "pending",
    "unknown",
    "none",
    "nobody",
    "null",
    "nan",
    "n/a",
    "na",
    "open",
}
_PEOPLE = 50  # more different names than that are no names of people who check labels


@dataclass(frozen=True)
class Marks:
    """Which rows were checked, and for each row its right label if the column of marks has it, else None.

    warning: a sentence about what the marks were taken for, where they are not plainly true and false.
    """

    checked: NDArray[np.bool_]
    right: list[str | None] | None = None
    warning: str | None = None


def checked_column(table: pd.DataFrame, checked: Any) -> Any:
    """Return the column of checked marks, or None if the marks are given in another way."""
    if checked is None:
        return "checked" if "checked" in table.columns else None
    if isinstance(checked, (str, Path, int)):
        if isinstance(checked, str) and checked in table.columns:
            return checked
        if isinstance(checked, int) or not Path(checked).exists():
            near = get_close_matches(str(checked), [str(c) for c in table.columns], 1)
            hint = f" Did you mean checked={near[0]!r}?" if near else ""
            raise ValueError(
                f"bilevel-clean: checked={str(checked)!r} is neither a column nor a file. The columns are "
                f"{', '.join(map(str, table.columns))}.{hint}"
            )
    return None


def checked_rows(source: Source, checked: Any, column: Any, names: list[str], labels: list[str | None]) -> Marks:
    """Return the marks of the rows of the table. labels: the given label of each row."""
    table = source.table
    if column is not None:
        return _column(table[column], f"the column {column}", {label for label in labels if label is not None})
    if checked is None:
        return Marks(np.zeros(len(table), np.bool_))
    if isinstance(checked, (str, Path)):
        numbered = source.names is None and pd.api.types.is_integer_dtype(table.index.dtype)
        return Marks(_listed(Path(checked), names, numbered))
    if isinstance(checked, pd.Series) and len(checked) == len(table) and not checked.index.equals(table.index):
        raise ValueError("bilevel-clean: the index of checked is not that of the table; give checked.to_numpy().")
    marks = pd.Series(list(checked))
    if len(marks) != len(table):
        raise ValueError(
            f"bilevel-clean: checked has {len(marks)} entries, but the table has {len(table)} rows; give one boolean "
            "for each row."
        )
    return _column(marks, "checked", set())


def _column(column: pd.Series, what: str, classes: set[str]) -> Marks:
    """Read marks of true and false, names of those who checked a label, or the labels that they found right."""
    cells = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    text = cells.str.lower()
    other = sorted(set(text) - _TRUE - _FALSE)
    if not other and not (classes and set(cells) - {""} <= classes and len(set(cells) - {""}) > 2):
        return Marks(text.isin(_TRUE).to_numpy(np.bool_))
    filled = (cells != "").to_numpy(np.bool_)
    if set(cells[filled]) <= classes:
        told = (
            f"{what[0].upper()}{what[1:]} holds labels; they are taken for the right ones of the rows that have them."
        )
        return Marks(filled, [cell or None for cell in cells], told)
    mixed = set(text) & (_TRUE | _FALSE) - {""} or set(text) & _DOUBT
    names = not any(any(map(str.isdigit, name)) for name in other) and len(other) <= min(_PEOPLE, filled.sum() / 2)
    if mixed or not names or filled.all():
        count = int(text.isin(other).sum())
        raise ValueError(
            f"bilevel-clean: {what} holds {', '.join(other[:5])}{', …' if len(other) > 5 else ''} in {count} rows; "
            "true, yes, x and 1 mean checked, and false, no, 0 and nothing mean not checked. Names of people, or the "
            "right labels themselves, can stand there as well, with nothing in the rows that were not checked."
        )
    people = ", ".join(sorted(set(cells[filled]))[:5])
    told = f"{what[0].upper()}{what[1:]} holds names ({people}); rows with one count as checked."
    return Marks(filled, None, told)


def _listed(path: Path, names: list[str], numbered: bool) -> NDArray[np.bool_]:
    """Mark the rows that a file lists by name, or by their number from 0 unless the names are numbers too."""
    if path.is_dir():
        raise ValueError(
            f"bilevel-clean: a folder of checked images ({path}) goes with data that are a folder as well."
        )
    plain = [_plain(name) for name in names]
    places, by_file = _places(plain), _places([posixpath.basename(name) for name in plain])
    marks = np.zeros(len(names), np.bool_)
    unknown: list[str] = []
    several: list[str] = []
    for entry in _entries(path):
        key = _plain(entry)
        found = places.get(key) or by_file.get(key) or []
        if not found and not numbered and key.isdecimal() and int(key) < len(names):
            found = [int(key)]
        if len(found) != 1:
            (several if found else unknown).append(entry)
        marks[found] = True
    _refuse(path, unknown, several)
    return marks


def _places(keys: list[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        places[key].append(row)
    return places


def _refuse(path: Path, unknown: list[str], several: list[str]) -> None:
    parts = [
        f"{len(entries)} {what}: {', '.join(entries)}"
        for entries, what in ((unknown, "match no row"), (several, "match several rows"))
        if entries
    ]
    if parts:
        raise ValueError(f"bilevel-clean: of the entries in {path}, {'; '.join(parts)}. Correct or remove them.")


def _plain(name: str) -> str:
    return posixpath.normpath(name.strip().replace("\\", "/"))


def _entries(path: Path) -> list[str]:
    """Return the lines of a text file, or the column name, file or row of a table."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeError as error:
        raise ValueError(f"bilevel-clean: {path} is not a text file in UTF-8 ({error}).") from error
    if path.suffix.lower() not in (".csv", ".tsv") or not lines:
        return lines
    table = read_delimited(path)
    column = next((c for name in ("name", "file", "row") for c in table if str(c).strip().lower() == name), None)
    if column is not None:
        return [entry for entry in table[column] if entry.strip()]
    if len(table.columns) > 1:
        raise ValueError(
            f"bilevel-clean: {path} has the columns {', '.join(map(str, table.columns))}; the one that lists the "
            "checked rows is called name, file or row."
        )
    return lines
