"""The figures that tell how far a verdict can be trusted, as numbers and as lines of text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .rows import Rows
from .verdict import Verdict

WORST = 3  # how many classes are named as the noisiest


def figures(rows: Rows, verdict: Verdict) -> dict[str, Any]:
    """Return the figures of the trust lines, with class names, for a file of results."""
    return {
        "rows": len(rows.table),
        "checked": int(verdict.checked.sum()),
        "skipped": len(rows.skipped),
        "suspects": int(verdict.issue.sum()),
        "estimated_noise": verdict.noise_rate,
        "estimated_noise_by_class": dict(zip(rows.classes, verdict.noise_by_class.tolist(), strict=True)),
        "checked_accuracy": verdict.checked_accuracy,
        "base_accuracy": verdict.base_accuracy,
        "expected_precision": verdict.expected_precision,
        "warnings": [*rows.warnings, *verdict.warnings],
    }


def lines(rows: Rows, verdict: Verdict, features: str) -> list[tuple[str, str]]:
    """Return a pair for each line: the name of a figure, and the figure in words. features: their description."""
    f = figures(rows, verdict)
    unchecked = len(verdict.score) - f["checked"]
    told = [
        ("judged by", " ".join(filter(None, (rows.note, features)))),
        ("rows", f"{f['rows']:,}, of which {f['checked']:,} are checked and {f['skipped']:,} were skipped"),
        ("suspects", f"{f['suspects']:,} of the {unchecked:,} labels that nobody checked"),
        ("estimated noise", f"{_percent(f['estimated_noise'])} of those labels are wrong{_worst(rows, verdict)}"),
        (
            "model",
            f"predicts {_percent(f['checked_accuracy'])} of the checked labels without having seen them; "
            f"always saying the most frequent class would get {_percent(f['base_accuracy'])}",
        ),
    ]
    if f["suspects"]:
        told.append(("precision", f"{_percent(f['expected_precision'])} of the suspects are expected to be wrong"))
    return told + [("warning", text) for text in f["warnings"]]


def text(rows: Rows, verdict: Verdict, features: str) -> str:
    """Return the trust lines in two columns."""
    told = lines(rows, verdict, features)
    width = max(len(name) for name, _ in told)
    return "\n".join(f"{name.ljust(width)}  {words}" for name, words in told)


def _percent(share: float) -> str:
    return "an unknown share" if math.isnan(share) else f"{100 * share:.1f} %"


def _worst(rows: Rows, verdict: Verdict) -> str:
    """Return the noisiest classes, in words."""
    share = verdict.noise_by_class.tolist()
    order = [c for c in np.argsort(-verdict.noise_by_class, kind="stable") if not math.isnan(share[c])][:WORST]
    return "; by given label, most in " + ", ".join(f"{rows.classes[c]} ({_percent(share[c])})" for c in order)
