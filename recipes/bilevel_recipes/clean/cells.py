"""Cells as people write them: numbers with thousands and currencies, dates, and columns that are no features."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
from pandas.api import types

MOST = 0.9  # the share of the filled cells that have to be numbers, or dates
_MONEY = re.compile(r"[\s\u00a0\u202f'’]|[$€£¥₹%]|\b(?:usd|eur|gbp|chf|jpy|inr)\b", re.IGNORECASE)
_ENGLISH = re.compile(r"[-+(]?\d{1,3}(?:,\d{3})*(?:\.\d+)?\)?|[-+(]?\d+(?:\.\d+)?(?:e[-+]?\d+)?\)?", re.IGNORECASE)
_EUROPEAN = re.compile(r"[-+(]?\d{1,3}(?:\.\d{3})*(?:,\d+)?\)?|[-+(]?\d+(?:,\d+)?\)?")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/. ](\d{1,2}|[A-Za-z]{3,9})[-/. ]\d{2,4}([T ].*)?")
_MISSING = {"", "-", "–", "na", "n/a", "nan", "none", "null", "?", "unknown"}


def as_numbers(column: pd.Series) -> pd.Series | None:
    """Return a column of dates, or of texts that are numbers or dates, as numbers (dates as days); else None."""
    if types.is_datetime64_any_dtype(column.dtype):
        return _days(column)
    if isinstance(column.dtype, pd.CategoricalDtype) or types.infer_dtype(column, skipna=True) not in (
        "string",
        "date",
        "datetime",
    ):
        return None
    if types.infer_dtype(column, skipna=True) != "string":
        return _days(pd.Series(pd.to_datetime(column, errors="coerce"), index=column.index))
    cells = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    filled = cells[~cells.str.lower().isin(_MISSING)]
    if filled.empty:
        return None
    return _numbers(cells, filled) if filled.str.contains(r"\d", regex=True).mean() >= MOST else None


def _numbers(cells: pd.Series, filled: pd.Series) -> pd.Series | None:
    if filled.map(lambda v: bool(_DATE.fullmatch(v))).mean() >= MOST:
        first = bool(filled.str.match(r"(1[3-9]|2\d|3[01])[-/. ]").any())  # a day, since no month is above 12
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas says when it can't find one format for all cells
            dates = pd.to_datetime(cells, errors="coerce", dayfirst=first, format="mixed", utc=True)
        return _days(dates) if dates.notna().sum() >= MOST * len(filled) else None
    plain = filled.str.replace(_MONEY, "", regex=True)
    # "1.234" may be either: it is European if another cell can only be that, as "1.234,5" or "0,5"
    english, european = (plain.map(lambda v, p=p: bool(p.fullmatch(v))).mean() for p in (_ENGLISH, _EUROPEAN))
    if max(english, european) < MOST:
        return None
    text = cells.str.replace(_MONEY, "", regex=True).str.replace(r"^\((.*)\)$", r"-\1", regex=True)
    if european > english:
        text = text.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
    else:
        text = text.str.replace(",", "", regex=False)
    return pd.Series(pd.to_numeric(text, errors="coerce"), index=cells.index, dtype=np.float64)


def _days(column: pd.Series) -> pd.Series:
    """Return days since 1970, with NaN for what is no date."""
    dates = column.dt.tz_convert(None) if getattr(column.dt, "tz", None) is not None else column
    days = (dates - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    return days.astype(np.float64)


# --- labels that are none --------------------------------------------------------------------------------------

_SEPARATORS = ("|", ";", ",", "/")
_QUANTITIES = re.compile(
    "(.*_)?(age|price|cost|amount|salary|income|year|weight|height|length|duration|temperature)s?(_.*)?"
)
_NUMERIC = 30  # with fewer different whole numbers, they are taken for numbered classes


def several_labels(classes: set[str]) -> str | None:
    """Return the separator if cells hold several labels, as "cat|dog" beside "cat" and "dog"; else None."""
    for mark in _SEPARATORS:
        joined = [name for name in classes if mark in name]
        parts = {part.strip() for name in joined for part in name.split(mark)}
        alone = {name for name in classes if mark not in name}
        if len(joined) >= 3 and len(joined) > len(parts) / 2 and len(parts & alone) >= len(parts) / 2:
            return mark
    return None


def quantity(name: str, classes: set[str], rows: int) -> str | None:
    """Return why labels are probably a quantity and no classes; or None. `classes` are numbers."""
    values = np.array(sorted(map(float, classes)))
    if len(values) > 10 and not np.equal(values, np.round(values)).all():
        return f"{len(values)} different numbers, some with decimals"
    if len(values) <= _NUMERIC:
        return None
    if _QUANTITIES.fullmatch(name.lower()):
        return f"{len(values)} different numbers in a column called {name}"
    gaps = values[-1] - values[0] + 1 > 1.5 * len(values)
    return f"{len(values)} different numbers with gaps between them" if gaps and rows < 100 * len(values) else None


def annotators(table: pd.DataFrame, label: object, candidates: list[object]) -> list[object]:
    """Return the columns with labels of the same rows by others: the same classes, and mostly the same as given."""
    given = table[label].astype(str)
    classes = set(given[table[label].notna()])
    found: list[object] = []
    if len(classes) < 2:
        return found
    for name in candidates:
        column = table[name].dropna()
        if types.is_float_dtype(column.dtype) or not 2 <= column.nunique() <= len(classes):
            continue
        values = column.astype(str)
        chance = float((values.value_counts(normalize=True) * given.value_counts(normalize=True)).sum())
        agree = float((values == given[column.index]).mean()) if column.index.is_unique else 0.0
        if set(values) <= classes and agree > 0.5 + chance / 2:
            found.append(name)
    return found
