"""Tables and figures of a study as text: on screen, in Markdown, in CSV, in JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Block = tuple[str, list[str], list[list[str]]]  # title, header, lines


def block(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Block:
    """A table without the columns that are empty in all lines."""
    used = [c for c in range(len(header)) if any(line[c] for line in lines)]
    return title, [header[c] for c in used], [[line[c] or "–" for c in used] for line in lines]


def screen(blocks: Iterable[Block]) -> str:
    """Plain text, in columns."""
    out: list[str] = []
    for title, head, lines in blocks:
        table = [head, *lines]
        first, *rest = (max(map(len, column)) for column in zip(*table, strict=True))
        out += ["", title]
        for name, *cells in table:
            out.append("  ".join([name.ljust(first), *(c.rjust(w) for c, w in zip(cells, rest, strict=True))]).rstrip())
    return "\n".join(out[1:])


def markdown(blocks: Iterable[Block]) -> str:
    out: list[str] = []
    for title, head, lines in blocks:
        out += [f"**{title}**", "", "| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
        out += ["| " + " | ".join(line) + " |" for line in lines] + [""]
    return "\n".join(out)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def spread(row: Mapping[str, Any], key: str, form: str = ".3f") -> str:
    """row[key] ± row[key_std], without the latter where it is NaN; nothing where the row has no such key."""
    if key not in row:
        return ""
    std = row[f"{key}_std"]
    return f"{row[key]:{form}}" + ("" if math.isnan(std) else f" ± {std:{form}}")


def plain(value: Any) -> Any:
    """The same for JSON, which has no NaN: None."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
