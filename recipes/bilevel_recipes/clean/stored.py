"""A fitted cleaner in one file: arrays and JSON in a .npz, whose checksums cover all of it; never pickle."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import runs
from .calibration import Range
from .rows import Rows
from .verdict import Verdict

FORMAT = 2  # a file with another number is refused
# Columns of these types are restored as they were. Of other columns, the values are restored without the type.
_TYPES = ("str", "string", "category", "boolean", "Int", "UInt", "Float", "datetime64[", "timedelta64[")


def save(path: Path, rows: Rows, verdict: Verdict, more: dict[str, Any]) -> None:
    """Write the rows without their content, the verdict, and further values for JSON.

    Of columns of the table that are not plain, the values are left out.
    """
    arrays: dict[str, Any] = {}
    document = {
        "format": FORMAT,
        "rows": _pack("rows", rows, arrays, leave_out=("content", "shown", "probabilities")),
        "verdict": _pack("verdict", verdict, arrays),
        **more,
    }
    text = json.dumps(document, default=_plain)
    buffer = io.BytesIO()
    np.savez(buffer, document=np.frombuffer(text.encode(), np.uint8), **arrays)
    runs.write(path, buffer.getvalue())


def load(path: Path) -> tuple[Rows, Verdict, dict[str, Any]]:
    """Read what `save` has written. The content of the rows, and what to show of them, is None."""
    if not path.is_file():
        raise FileNotFoundError(f"bilevel-clean: there is no saved cleaner in {path.parent}.")
    try:
        with zipfile.ZipFile(path) as whole:
            broken = whole.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        document = json.loads(arrays.pop("document").tobytes())
        found = document.pop("format")
    except Exception as error:  # zipfile and NumPy raise a dozen kinds here
        raise ValueError(
            f"bilevel-clean: {path} is damaged or no saved cleaner ({error}). To replace it, fit again, or run with "
            "--overwrite."
        ) from error
    if found != FORMAT:
        raise ValueError(
            f"bilevel-clean: {path} was saved by another version (format {found}; this one reads {FORMAT}); fit again."
        )
    rows = Rows(**_unpack("rows", document.pop("rows"), arrays), content=None)
    parts = _unpack("verdict", document.pop("verdict"), arrays)
    return rows, Verdict(**{k: Range(*v) if k in ("left", "precision") else v for k, v in parts.items()}), document


def _pack(prefix: str, part: Any, arrays: dict[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Move the arrays of a dataclass and the columns of its frames to `arrays`, and return the rest."""
    rest: dict[str, Any] = {}
    for name in (f.name for f in fields(part) if f.name not in leave_out):
        value, key = getattr(part, name), f"{prefix}.{name}"
        if isinstance(value, np.ndarray):
            arrays[key] = value
        elif isinstance(value, pd.DataFrame):
            rest[name] = {
                "columns": _pack_columns(f"{key}.column", value, arrays),
                "index": _pack_columns(f"{key}.index", value.index.to_frame(), arrays),
                "index_names": list(value.index.names),
            }
        else:
            rest[name] = value
    return rest


def _unpack(prefix: str, rest: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    values = {key.split(".")[1]: a for key, a in arrays.items() if key.startswith(f"{prefix}.") and key.count(".") == 1}
    for name, value in rest.items():
        if isinstance(value, dict) and "index_names" in value:
            levels = _unpack_columns(f"{prefix}.{name}.index", value["index"], arrays)
            index = pd.MultiIndex.from_frame(levels) if len(levels.columns) > 1 else pd.Index(levels.iloc[:, 0])
            index.names = value["index_names"]
            value = _unpack_columns(f"{prefix}.{name}.column", value["columns"], arrays).set_index(index)
        values[name] = value
    return values


def _pack_columns(prefix: str, frame: pd.DataFrame, arrays: dict[str, Any]) -> list[list[Any]]:
    """Return [name, type, values] for each column, where values is None if they are an array."""
    packed: list[list[Any]] = []
    for n, (name, column) in enumerate(frame.items()):
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
            arrays[f"{prefix}.{n}"] = column.to_numpy()
            packed.append([name, str(column.dtype), None])
        else:
            kind = str(column.dtype) if str(column.dtype).startswith(_TYPES) else "object"
            values = column.astype(object).where(column.notna(), None) if is_plain(column) else [None] * len(column)
            packed.append([name, kind, list(values)])
    return packed


def is_plain(column: pd.Series) -> bool:
    """Return whether a column can be stored: numbers, texts and dates can, images, lists and other objects can't."""
    return column.dtype != object or column.map(lambda v: v is None or pd.api.types.is_scalar(v)).all()


def _unpack_columns(prefix: str, packed: list[list[Any]], arrays: dict[str, Any]) -> pd.DataFrame:
    columns = {
        n: pd.Series(arrays[f"{prefix}.{n}"] if values is None else values, dtype=kind)
        for n, (_, kind, values) in enumerate(packed)
    }
    frame = pd.DataFrame(columns)
    frame.columns = pd.Index([name for name, *_ in packed])
    return frame


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: a number of NumPy to a number, anything else to its text."""
    return value.item() if isinstance(value, np.generic) else str(value)
