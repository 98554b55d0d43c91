"""The usual forms of labelled data. Each is opened as a table, together with what a table can't hold."""

from __future__ import annotations

import codecs
import filecmp
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..data import read_npz
from .pictures import SUFFIXES

Array = NDArray[Any]

_KNOWN = ".csv, .tsv, .xlsx, .jsonl, .parquet, .npz, or a folder of images with one folder for each class"
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}


@dataclass
class Source:
    """An opened input: its table, and what a table can't hold.

    folder: where relative paths of images start. x: the content of an .npz, one item for each row of the table.
    names: the names of the rows, if these are not their index. image: the column of images, if it is known. cells: the
    image of each row, if the table has only its name.
    order: for columns whose classes have numbers, the class names in that order.
    unlabelled: why a row may have no label.
    """

    title: str
    table: pd.DataFrame
    folder: Path
    x: Array | None = None
    names: list[str] | None = None
    image: Any = None
    cells: list[Any] | None = None
    order: dict[Any, list[str]] = field(default_factory=dict[Any, list[str]])
    warnings: list[str] = field(default_factory=list[str])
    unlabelled: str = "no label"


def open_source(data: Any, as_text: list[str], verified: Path | None) -> Source:
    """Open a path, a frame, a Hugging Face data set or arrays.

    as_text: the columns of a CSV to take literally, so that "NA" and "007" stay what they are.
    verified: a second folder of images whose labels were checked.
    """
    if isinstance(data, pd.DataFrame):
        return Source("data frame", data, Path.cwd())
    if isinstance(data, (str, Path)):
        return _file(Path(data), as_text, verified)
    if isinstance(data, Mapping):
        return _hugging_face(data) if _is_hugging_face(data) else _arrays({str(k): v for k, v in data.items()})
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _arrays(dict(zip(("x", "y", "checked"), data, strict=False)))
    if _is_hugging_face(data):
        return _hugging_face(data)
    raise TypeError(
        f"bilevel-clean: data is a path ({_KNOWN}), a pandas DataFrame, a datasets.Dataset, or arrays as a dict with "
        f"x, y and checked; got {type(data).__name__}."
    )


def find_column(table: pd.DataFrame, name: Any, what: str) -> Any:
    """Return the name if the table has that column. The error lists the columns, and suggests the closest."""
    if name in table.columns:
        return name
    lower = {str(column).lower(): column for column in table.columns}
    usual = [lower[key] for key in ("label", "labels", "target", "class", "category", "y") if key in lower]
    near = [lower[key] for key in get_close_matches(str(name).lower(), lower, 1)]
    guess = (near + (usual if what == "label" else []))[:1]
    hint = f" Did you mean {what}={guess[0]!r}?" if guess else f" Name one of them with {what}=."
    raise ValueError(
        f"bilevel-clean: there is no column {name!r}. The columns are {', '.join(map(str, table.columns))}.{hint}"
    )


# --- files -----------------------------------------------------------------------------------------------------


def _file(path: Path, as_text: list[str], verified: Path | None) -> Source:
    if path.is_dir():
        return _image_folder(path, verified)
    if not path.exists():
        raise FileNotFoundError(f"bilevel-clean: {path} does not exist; give {_KNOWN}.")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        told = [] if encoding(path) == "utf-8-sig" else [f"{path.name} is not UTF-8; it was read as Latin-1 (Windows)."]
        return Source(path.name, read_delimited(path, as_text), path.absolute().parent, warnings=told)
    if suffix in _READERS:
        return Source(path.name, _READERS[suffix](path), path.absolute().parent)
    if suffix == ".npz":
        try:
            parts = read_npz(path)
        except ValueError as error:
            raise ValueError(str(error).replace("recipes.data:", "bilevel-clean:", 1)) from error
        return _arrays(parts, path.name)
    raise ValueError(f"bilevel-clean: {path} ends in {suffix or 'no suffix'!r}; what can be read is {_KNOWN}.")


def read_delimited(path: Path, as_text: list[str] | None = None) -> pd.DataFrame:
    """Read a .csv or .tsv with a header, in UTF-8 or Latin-1. The columns in `as_text` (None: all) are not parsed."""
    literal: dict[str, Any] = {"dtype": str, "na_filter": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # raised if a line has more cells than the header
            how: dict[str, Any] = {"sep": _separator(path), "encoding": encoding(path), "index_col": False}
            head = pd.read_csv(path, header=None, nrows=1, **literal, **how).iloc[0].tolist()
            refuse_duplicates(head, str(path))
            if as_text is None:
                return pd.read_csv(path, **literal, **how)
            table = pd.read_csv(path, low_memory=False, **how)
            raw = pd.read_csv(path, usecols=[name for name in head if name in as_text], **literal, **how)
            return table.assign(**{str(name): raw[name] for name in raw})
    except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeError) as error:
        raise ValueError(
            f"bilevel-clean: {path} is not a table with as many cells in each line as in its header ({error})."
        ) from error
    except pd.errors.EmptyDataError:
        raise ValueError(f"bilevel-clean: {path} is empty; it needs a header and a line for each row.") from None


def encoding(path: Path) -> str:
    """Return UTF-8, or what a byte order mark says, or else the Latin-1 of Windows, in which most bytes are letters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        start = file.read(2)
        if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        try:
            decoder.decode(start)
            while block := file.read(1 << 20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8-sig"


def _separator(path: Path) -> str:
    """Return the tab of a .tsv, the semicolon that some spreadsheet programs write, or the comma."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with open(path, encoding=encoding(path)) as file:
        head = file.readline(100_000)
    return ";" if ";" in head and "," not in head else ","


def refuse_duplicates(columns: list[Any], where: str) -> None:
    """Refuse columns of the same name, since it is unclear which one is meant."""
    twice = sorted({str(name) for name in columns if columns.count(name) > 1 and name != ""})
    if twice:
        raise ValueError(f"bilevel-clean: {where} has more than one column named {', '.join(twice)}; rename them.")


def _read_whole(path: Path, read: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    try:
        return read(path)
    except ImportError as error:
        raise ImportError(
            f"bilevel-clean: {path.suffix} needs {error.name or 'pyarrow'}: pip install 'bilevel_plugin[formats]'."
        ) from error
    except Exception as error:  # the readers raise a dozen kinds on what is damaged
        raise ValueError(f"bilevel-clean: {path} is damaged, or not a {path.suffix} file ({error}).") from error


def _read_lines(path: Path) -> pd.DataFrame:
    with open(path, encoding="utf-8-sig") as file:
        return pd.DataFrame([json.loads(line) for line in file if line.strip()])


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": lambda path: _read_whole(path, pd.read_parquet),
    ".xlsx": lambda path: _read_whole(path, pd.read_excel),
    ".jsonl": lambda path: _read_whole(path, _read_lines),
}


# --- a folder of images ----------------------------------------------------------------------------------------


def images_below(folder: Path, without: Path | None = None) -> tuple[list[str], int]:
    """Return the sorted relative paths of the images in the folder, and the number of other files.

    Links to folders are followed; a folder is read once, so that links may go in circles.
    """
    images: list[str] = []
    others = 0
    known = {os.path.realpath(folder)}
    for home, folders, files in os.walk(folder, followlinks=True):
        wanted = [f for f in folders if not f.startswith(".") and (without is None or Path(home, f) != without)]
        folders.clear()
        for name in sorted(wanted, key=lambda f: (Path(home, f).is_symlink(), f)):
            real = os.path.realpath(Path(home, name))
            if real not in known:
                known.add(real)
                folders.append(name)
        visible = [f for f in files if not f.startswith(".")]
        found = [f for f in visible if os.path.splitext(f)[1].lower() in SUFFIXES]
        images += [Path(home, f).relative_to(folder).as_posix() for f in found]
        others += len(visible) - len(found)
    return sorted(images), others


def images_of_classes(folder: Path, without: Path | None = None) -> tuple[list[str], int]:
    """Return the same as `images_below`, for a folder with one folder for each class."""
    files, others = images_below(Path(os.path.abspath(folder)), without)
    if not files:
        raise ValueError(f"bilevel-clean: the folder {folder} has no images; give one with a folder for each class.")
    top = {file.split("/")[0] for file in files if "/" in file}
    if top and {name.lower() for name in top} <= _SPLITS:
        raise ValueError(
            f"bilevel-clean: the folders in {folder} are {', '.join(sorted(top))}, which are splits and not classes; "
            f"give one of them, such as {folder / sorted(top)[0]}."
        )
    return files, others


def _image_folder(folder: Path, verified: Path | None) -> Source:
    """Read the names of the images. The first folder of a path is the label."""
    home = Path(os.path.abspath(folder))
    second = None if verified is None else Path(os.path.abspath(verified))
    files, others = images_of_classes(folder, second)
    table = pd.DataFrame({"file": files, "label": _classes_of(files)})
    source = Source(home.name, table, home, names=files, image="file", cells=[home / file for file in files])
    source.unlabelled = "no label: the image is not in the folder of a class"
    if second is not None:
        others += _add_verified(source, second)
    if others:
        source.warnings.append(f"{others} files of the folder are not images by their suffix and were left out.")
    return source


def _classes_of(files: list[str]) -> list[str | None]:
    return [file.split("/")[0] if "/" in file else None for file in files]


def _add_verified(source: Source, second: Path) -> int:
    """Mark the images that are in both folders as checked, and add the other images of the second."""
    files, others = images_below(second)
    if not files:
        raise ValueError(f"bilevel-clean: the folder of checked images {second} has no images.")
    first, known = source.folder, set(source.table["file"])
    same = {file for file in files if file in known and filecmp.cmp(first / file, second / file, shallow=False)}
    other = [file for file in files if file in known and file not in same]
    if other:
        source.warnings.append(
            f"{len(other)} checked images have the path of an image in {first.name}, but other bytes (the first is "
            f"{other[0]}). They were added as rows of their own."
        )
    added = [file for file in files if file not in same]
    names = [f"{second.name}/{file}" for file in added]
    more = pd.DataFrame({"file": names, "label": _classes_of(added), "checked": True})
    marked = source.table.assign(checked=source.table["file"].isin(same))
    source.cells = [first / file for file in source.table["file"]] + [second / file for file in added]
    source.names = [*source.table["file"], *names]
    source.table = pd.concat([marked, more], ignore_index=True)
    source.folder = Path(first.anchor)  # the images are in two folders, which were both given
    return others


# --- objects ---------------------------------------------------------------------------------------------------


def _is_hugging_face(data: Any) -> bool:
    return type(data).__module__.split(".")[0] == "datasets" and "datasets" in sys.modules


def _hugging_face(data: Any) -> Source:
    """Read a datasets.Dataset: class labels by name, images still encoded."""
    import datasets

    if isinstance(data, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        first = next(iter(data), "train")
        raise TypeError(
            f"bilevel-clean: this is a DatasetDict with the splits {', '.join(map(str, data))}; choose one, such as "
            f"data[{first!r}]."
        )
    if not isinstance(data, datasets.Dataset):
        raise TypeError(f"bilevel-clean: a {type(data).__name__} can't be read; load a Dataset without streaming.")
    table: Any = data.to_pandas()
    source = Source(str(data.info.dataset_name or "data set"), table, Path(Path.cwd().anchor))
    for name, feature in data.features.items():
        if isinstance(feature, datasets.ClassLabel):
            source.order[name] = list(feature.names)
            table[name] = [_name_of(value, feature.names) for value in table[name]]
        elif isinstance(feature, datasets.Image) and source.image is None:
            source.image, source.cells = name, [_absolute(cell) for cell in table[name]]
            table[name] = [(cell or {}).get("path") or str(row) for row, cell in enumerate(table[name])]
    return source


def _name_of(number: Any, names: list[str]) -> str | None:
    return None if pd.isna(number) or number < 0 else names[int(number)]


def _absolute(cell: Any) -> Any:
    """Make the path of an image absolute. Such paths may lie anywhere, and are relative to the current folder."""
    if cell is None or cell.get("bytes") or not cell.get("path"):
        return cell
    return {"bytes": None, "path": os.path.abspath(cell["path"])}


def _arrays(parts: dict[str, Any], title: str = "arrays") -> Source:
    """Make a table of the arrays y, checked and truth, and keep x as an array."""
    missing = [key for key in ("x", "y") if key not in parts]
    if missing:
        raise ValueError(
            f"bilevel-clean: {title} has no {' and no '.join(missing)}, but {', '.join(parts) or 'nothing'}. It needs "
            "x (N × H × W, N × H × W × 3 or N × D numbers), y (N labels) and checked (N booleans); columns of other "
            "names can be given as a pandas DataFrame."
        )
    x = _content(parts["x"], title)
    columns = {"label": "y", "checked": "checked", "truth": "truth"}
    table = {key: _column(parts[of], of, len(x), title) for key, of in columns.items() if of in parts}
    source = Source(title, pd.DataFrame(), Path.cwd(), x)
    if "classes" in parts:
        source.order["label"] = _text(parts["classes"])
        for key in [key for key in ("label", "truth") if key in table]:
            table[key] = _decode(table[key], source.order["label"], title, columns[key])
    if "names" in parts:
        source.names = _text(_column(parts["names"], "names", len(x), title))
    source.table = pd.DataFrame(table)
    return source


def _content(x: Any, title: str) -> Array:
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise ValueError(
            f"bilevel-clean: x of {title} is not one array ({error}); all rows need the same shape."
        ) from None
    if x.ndim == 4 and x.shape[-1] == 1:
        x = x[..., 0]
    if x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4) or (x.ndim == 4 and x.shape[-1] != 3):
        raise ValueError(
            f"bilevel-clean: x of {title} is {x.dtype} of shape {x.shape}; N × H × W or N × H × W × 3 images, or N × D "
            "numbers can be read. Texts can be given as a column of a table."
        )
    if x.ndim > 2 and x.dtype != np.uint8:
        raise ValueError(f"bilevel-clean: the images in x of {title} are {x.dtype}; make them uint8, from 0 to 255.")
    return x


def _column(values: Any, name: str, n: int, title: str) -> Array:
    values = np.asarray(values)
    if values.shape != (n,):
        raise ValueError(f"bilevel-clean: {name} of {title} has shape {values.shape}, but x has {n} rows.")
    return np.array(_text(values), dtype=object) if values.dtype.kind == "S" else values


def _text(values: Any) -> list[str]:
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in np.asarray(values).tolist()]


def _decode(values: Array, names: list[str], title: str, which: str) -> Array:
    if values.dtype.kind not in "iu":
        raise ValueError(f"bilevel-clean: with classes, {which} of {title} holds numbers from 0; got {values.dtype}.")
    wrong = sorted({int(v) for v in values if not 0 <= v < len(names)})
    if wrong:
        raise ValueError(
            f"bilevel-clean: {which} of {title} holds {', '.join(map(str, wrong[:5]))}, but classes has only the "
            f"{len(names)} names of 0 to {len(names) - 1}."
        )
    return np.array(names, dtype=object)[values]
