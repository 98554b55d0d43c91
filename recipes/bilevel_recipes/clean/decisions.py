"""The decisions of a review: read from the CSV file that the report exports, and applied to the rows."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .rows import Rows, take

COLUMNS = ["row", "name", "given_label", "decision", "label"]
DECISIONS = ("keep", "relabel", "drop", "unsure", "new")
DROPPED, NEW = "dropped by decision", "of a new class by decision"


def read_decisions(source: str | Path | pd.DataFrame, rows: Rows) -> pd.DataFrame:
    """Read the decisions that the report exported, and check that they are about these rows.

    source: a file, or a frame with the columns of such a file. The frame that is returned has one line for each
    decision: row (the position in rows.table), name, given_label, decision (keep, relabel, drop, unsure or new) and
    label (the label from now on, which for new is that of a new class; empty for drop). Files that a spreadsheet
    program saved, with semicolons or tabs, a byte order mark or Windows line ends, are read as well. Columns beyond
    these five are ignored.
    Everything that is wrong in the file is reported in one ValueError.
    """
    name = "the frame of decisions" if isinstance(source, pd.DataFrame) else str(source)
    found = _from_frame(source) if isinstance(source, pd.DataFrame) else _read(Path(source))
    problems = [*_problems(found, rows)]
    if problems:
        known = ", ".join(repr(c) for c in rows.classes)
        raise ValueError(
            f"bilevel-clean: {name} can't be used with these data; nothing was applied. Correct or delete these lines, "
            f"or export the decisions again from the report of these data (the classes are {known}):\n"
            + "\n".join(problems)
        )
    found = found.drop(columns="line").astype({"row": np.int64})
    found["label"] = np.where(found.decision.isin(["keep", "unsure"]), found.given_label, found.label)
    found.loc[found.decision == "drop", "label"] = ""
    return found


def decided(rows: Rows, decisions: pd.DataFrame) -> Rows:
    """Apply decisions to rows: of what was kept or relabelled, the right label is known.

    Suspects that were reviewed are no random sample, so they do not count as checked. But the rows of `random_order`
    up to the first that nobody has decided are one, however each of them was found; these count as checked.
    Rows that were dropped, or are of a new class, are not used, and are listed among the skipped ones.
    """
    where = {int(row): i for i, row in enumerate(rows.used)}
    number = {name: c for c, name in enumerate(rows.classes)}
    truth, checked, stays = rows.right.copy(), rows.checked.copy(), np.ones(len(rows.used), bool)
    sample = _sampled(rows, decisions)
    for row, decision, label in zip(decisions.row, decisions.decision, decisions.label, strict=True):
        i = where[int(row)]
        if decision in ("drop", "new"):
            stays[i] = False
        elif decision != "unsure":
            truth[i], checked[i] = number[label], rows.checked[i] or int(row) in sample
    gone = decisions.loc[decisions.decision.isin(["drop", "new"])]
    reasons = np.where(gone.decision == "drop", DROPPED, NEW)
    gone, keep = gone[["row", "name"]].assign(reason=reasons), np.flatnonzero(stays)
    return replace(
        rows,
        used=rows.used[keep],
        y=rows.y[keep],
        truth=truth[keep],
        checked=checked[keep],
        content=take(rows.content, keep),
        shown=take(rows.shown, keep),
        probabilities=take(rows.probabilities, keep),
        names=[rows.names[i] for i in keep],
        skipped=pd.concat([rows.skipped, gone], ignore_index=True) if len(gone) else rows.skipped,
    )


def random_order(rows: Rows, decisions: pd.DataFrame | None = None) -> list[int]:
    """Return the numbers of the rows that were not checked, in a random order that is fixed for these data.

    It is the same before and after decisions are applied, and does not depend on how suspicious a row is.
    """
    before = set() if decisions is None else {int(row) for row in decisions.row}
    free = {int(row) for row, known in zip(rows.used, rows.known, strict=True) if not known} | before
    draw = np.random.default_rng(int(review_key(rows, decisions)[:16], 16))
    return draw.permutation(np.array(sorted(free), np.int64)).tolist()


def _sampled(rows: Rows, decisions: pd.DataFrame) -> set[int]:
    """Return the rows of the random order up to the first that was not decided."""
    done = {int(row) for row in decisions.row}
    return set(takewhile(done.__contains__, random_order(rows)))


def review_key(rows: Rows, decisions: pd.DataFrame | None = None) -> str:
    """Return a SHA-256 of row numbers, names and given labels, the same before and after decisions are applied."""
    given = {int(r): (n, rows.classes[c]) for r, n, c in zip(rows.used, rows.names, rows.y, strict=True)}
    if decisions is not None:
        lines = zip(decisions.row, decisions.name, decisions.given_label, strict=True)
        given |= {int(r): (str(n), str(label)) for r, n, label in lines}
    return hashlib.sha256(json.dumps(sorted(given.items())).encode()).hexdigest()


def _read(path: Path) -> pd.DataFrame:
    """The lines of the file as text, with the number that each has in the file."""
    text = _text(path)
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [cell.strip().lower() for cell in next(reader, [])]
        _need_columns(str(path), header)
        at = [header.index(c) for c in COLUMNS]
        cells = [(reader.line_num, line + [""] * len(header)) for line in reader if any(map(str.strip, line))]
    except csv.Error as error:
        raise ValueError(f"bilevel-clean: {path} is not a CSV file ({error}); export it from the report.") from error
    return _frame([[number, *(line[i] for i in at)] for number, line in cells])


def _from_frame(given: pd.DataFrame) -> pd.DataFrame:
    """Return the same from a frame, whose lines are numbered like those of a file with a header."""
    _need_columns("the frame of decisions", given.columns)
    cells = given[COLUMNS].astype(object).where(given[COLUMNS].notna(), "").to_numpy().tolist()
    return _frame([[number, *map(str, line)] for number, line in enumerate(cells, 2)])


def _frame(lines: list[list[Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(lines, columns=["line", *COLUMNS]).astype({"row": object})
    frame["decision"] = [d.strip().lower() for d in frame.decision]
    frame["row"] = pd.Series([_number(r) for r in frame.row], dtype=object)
    return frame


def _need_columns(name: str, header: Iterable[Any]) -> None:
    missing = [c for c in COLUMNS if c not in [*header]]
    if missing:
        raise ValueError(
            f"bilevel-clean: {name} has no column {', '.join(missing)}. Decisions have the columns "
            f"{','.join(COLUMNS)}; export them from the report."
        )


def _text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(
            f"bilevel-clean: there is no file {path}; --decisions takes the CSV file that the report exports."
        )
    raw = path.read_bytes()
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"bilevel-clean: {path} is not UTF-8 ({error}). In the spreadsheet program, save it as 'CSV UTF-8'."
        ) from error


def _number(cell: str) -> int | str:
    """Return the row as a number, or the cell itself, which the error then shows."""
    cell = cell.strip()
    return int(cell) if cell.isascii() and cell.isdigit() else cell


def _problems(found: pd.DataFrame, rows: Rows) -> Iterator[str]:
    """Yield, line by line, each reason why a decision is not about these rows or can't be understood."""
    given = {int(r): (n, rows.classes[c]) for r, n, c in zip(rows.used, rows.names, rows.y, strict=True)}
    reasons = {int(r): str(why) for r, why in zip(rows.skipped["row"], rows.skipped["reason"], strict=True)}
    first: dict[Any, int] = {}
    for line, row, name, label, decision, new in found.itertuples(index=False):
        start = f"  line {line}: "
        if first.setdefault(row, line) != line:
            yield f"{start}row {row} was decided in line {first[row]} already"
        elif row in given:
            checks = (_changed(given[row], name, label), _unclear(decision, label, new, rows.classes))
            yield from (f"{start}row {row} ({name}) {problem}" for problem in checks if problem)
        else:
            why = f"is skipped ({reasons[row]})" if row in reasons else "does not exist"
            yield f"{start}row {row!r} ({name}) {why}; rows are numbered from 0 to {len(rows.table) - 1}"


def _changed(now: tuple[str, str], name: str, label: str) -> str:
    """Return how the row differs from the one that was decided about, or "" if it is the same."""
    if now[0] != name:
        return f"is called {now[0]!r} in the data"
    return f"had the label {label!r} when it was decided and has {now[1]!r} now" if now[1] != label else ""


def _unclear(decision: str, given: str, label: str, classes: list[str]) -> str:
    """Return why the decision can't be understood, or "" if it can."""
    if decision not in DECISIONS:
        return f"has the decision {decision!r}; it must be one of {', '.join(DECISIONS)}"
    if decision == "relabel" and label not in classes:
        return f"is relabelled {label!r}, which is not one of the classes; write new instead of relabel for a new class"
    if decision == "new" and (not label.strip() or label in classes):
        return f"is of the new class {label!r}; a new class has a name that no other class has"
    if decision in ("keep", "unsure") and label not in ("", given):
        return f"keeps its label {given!r}, but the column label says {label!r}; write relabel to change it"
    return ""
