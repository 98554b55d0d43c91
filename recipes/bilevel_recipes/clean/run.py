"""A cleaning run on disk: its files, and the check whether an earlier run can be continued."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import runs, tables
from . import trust
from .cleaner import FILE, Cleaner
from .compare import Comparison
from .decisions import decided, read_decisions
from .read import fingerprint, read
from .rows import Rows

REPORT = "report.html"
# cleaner.npz is written first. If it is there, the others can be made again without another fit.
FILES = (FILE, "label_issues.csv", "suspects.csv", "cleaned.csv", REPORT, "results.json")


def check_folder(folder: Path, data: Path, resume: bool, overwrite: bool) -> None:
    """Raise before the work begins if the folder can't be written to, if data would be overwritten, or if an earlier
    run is there and neither --resume nor --overwrite was given."""
    place, source = folder.resolve(), data.resolve()
    if source in (place / name for name in FILES) or (source.is_dir() and place.is_relative_to(source)):
        raise ValueError(
            f"bilevel-clean: {data} is or would be among the results in {folder}; use an --out outside of the data."
        )
    if resume and overwrite:
        raise ValueError("bilevel-clean: --resume keeps a run and --overwrite replaces it; give one of them.")
    there = [name for name in FILES if (folder / name).exists()]
    if there and not (resume or overwrite):
        raise FileExistsError(
            f"bilevel-clean: {folder} holds a run already ({', '.join(there)}). Use --resume to write what is missing "
            "in it, --overwrite to replace it, or another --out."
        )
    parent = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"bilevel-clean: {folder} can't be made, as {parent} is a file; use another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"bilevel-clean: nothing can be written in {parent}; use another --out.")


def resumed(folder: Path, cleaner: Cleaner, data: Any, how: dict[str, Any], decisions: Path | None) -> Cleaner | None:
    """Return the cleaner that was saved in the folder, with its data, or None if there is none.

    Raise if its settings or its data differ from the present ones.
    """
    if not (folder / FILE).exists():
        return None
    old = Cleaner.load(folder)
    then, now = old.settings(), cleaner.settings()
    other = [f"{k} was {then[k]} and is {now[k]}" for k in now if then[k] != now[k] and k != "threads"]
    if other:
        raise ValueError(
            f"bilevel-clean: the run in {folder} has other settings ({'; '.join(other)}). Use the same, or --overwrite."
        )
    rows = data if isinstance(data, Rows) else read(data, **how)
    new = rows if decisions is None else decided(rows, read_decisions(decisions, rows))
    if old.fitted.fingerprint != fingerprint(new):
        raise ValueError(
            f"bilevel-clean: the data is not that of the run in {folder}: {changes(old.rows, new)}. Use --overwrite to "
            "judge it anew."
        )
    return Cleaner.load(folder, rows)


def changes(old: Rows, new: Rows) -> str:
    """Return in words what differs between two versions of the same data."""
    was, now = _by_name(old), _by_name(new)
    both = was.keys() & now.keys()
    counts = {
        "rows were added": len(now.keys() - was.keys()),
        "rows were removed": len(was.keys() - now.keys()),
        "labels were changed": sum(was[k][0] != now[k][0] for k in both),
        "rows are checked that were not, or the reverse": sum(was[k][1] != now[k][1] for k in both),
    }
    told = [f"{count:,} {words}" for words, count in counts.items() if count]
    return ", ".join(told) or "the contents of rows were changed"


def _by_name(rows: Rows) -> dict[str, tuple[str, bool]]:
    return {n: (rows.classes[y], bool(c)) for n, y, c in zip(rows.names, rows.labels, rows.known, strict=True)}


def write(folder: Path, cleaner: Cleaner, command: str, comparison: Comparison | None, keep: bool) -> list[str]:
    """Write the files of the run, or with `keep` only those that are missing. Return their names.

    comparison: the comparison with other methods, if the truth is known. The report and results.json contain it.
    """
    makers: dict[str, Callable[[Path], Any]] = {
        FILE: lambda path: cleaner.save(path.parent),
        "label_issues.csv": lambda path: _table(path, cleaner.frame),
        "suspects.csv": lambda path: _table(path, cleaner.issues()),
        "cleaned.csv": lambda path: _cleaned(path, cleaner),
        REPORT: lambda path: cleaner.report(path, command=command, table=comparison and comparison.table),
        "results.json": lambda path: runs.write_text(path, results(cleaner, command, comparison)),
    }
    todo = [name for name in FILES if not (keep and (folder / name).exists())]
    for name in todo:  # a kill between two files must not leave old ones beside a new cleaner
        if name != FILE:
            (folder / name).unlink(missing_ok=True)
    for name in todo:
        makers[name](folder / name)
    return todo


def results(cleaner: Cleaner, command: str, comparison: Comparison | None) -> str:
    """Return the document results.json: how it was made, and every figure."""
    rows, verdict = cleaner.rows, cleaner.verdict
    document = {
        "command": command,
        "settings": cleaner.settings(),
        "versions": runs.versions(),
        "data": {"title": rows.title, "kind": rows.kind, "note": rows.note, "fingerprint": cleaner.fitted.fingerprint},
        "features": cleaner.fitted.words,
        "method": verdict.method,
        "trust": trust.figures(rows, verdict),
        "noise_matrix": {"classes": rows.classes, "given_by_true_class": verdict.noise.tolist()},
        "seconds": verdict.seconds,
        **({} if comparison is None else {"comparison": comparison.figures}),
    }
    return json.dumps(tables.plain(document), indent=1, ensure_ascii=False) + "\n"


def _cleaned(path: Path, cleaner: Cleaner) -> None:
    """Write the table after cleaning; of arrays also cleaned.npz, with x, y and the number of each row in the data."""
    table, rows = cleaner.cleaned(), cleaner.rows
    _table(path, table, index=_index_matters(cleaner))
    if isinstance(rows.content, np.ndarray) and {*rows.table.columns} <= {"label", "checked", "truth"}:
        place = {int(row): i for i, row in enumerate(rows.used)}
        number = table.index.to_numpy(int)
        known = np.array([row in place for row in number], bool)  # rows of a new class have no content here
        x = rows.content[[place[int(row)] for row in number[known]]]
        y = table[rows.label].to_numpy()[known]
        y = y if y.dtype != object else y.astype(str)
        runs.write(path.with_suffix(".npz"), _npz(x=x, y=y, row=number[known]))


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _table(path: Path, frame: pd.DataFrame, index: bool = True) -> None:
    label = list(frame.index.names) if frame.index.nlevels > 1 else frame.index.name or "row"
    runs.write_text(path, frame.to_csv(index=index, index_label=label))


def _index_matters(cleaner: Cleaner) -> bool:
    """Return whether the index holds what no column does: the row number in an array, or a name."""
    table = cleaner.rows.table
    return set(table.columns) <= {"label", "checked", "truth"} or not isinstance(table.index, pd.RangeIndex)
