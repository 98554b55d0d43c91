"""The figures that tell how far a verdict can be trusted, as numbers and as lines of text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .calibration import Range
from .rows import Rows
from .verdict import SURE, Verdict

WORST = 3  # how many classes are named as the noisiest


def figures(rows: Rows, verdict: Verdict) -> dict[str, Any]:
    """Return the figures of the trust lines, with class names, for a file of results.

    Estimates are triples: the value, and the ends of an interval that holds the true figure with 90 % probability.
    """
    return {
        "rows": len(rows.table),
        "checked": int(verdict.checked.sum()),
        "reviewed": int((verdict.truth >= 0).sum()),
        "found": verdict.found,
        "skipped": len(rows.skipped),
        "suspects": int(verdict.issue.sum()),
        "estimated_noise": [*verdict.noise_rate],
        "wrong_labels_left": [*verdict.left],
        "estimated_noise_by_class": dict(zip(rows.classes, verdict.by_class.tolist(), strict=True)),
        "checked_accuracy": verdict.checked_accuracy,
        "base_accuracy": verdict.base_accuracy,
        "expected_precision": [*verdict.precision],
        "can_stop": verdict.can_stop,
        "checked_in_doubt": [rows.names[i] for i in verdict.doubted],
        "warnings": [*rows.warnings, *verdict.warnings],
    }


def lines(rows: Rows, verdict: Verdict, features: str) -> list[tuple[str, str]]:
    """Return a pair for each line: the name of a figure, and the figure in words. features: their description."""
    checked, reviewed = int(verdict.checked.sum()), int((verdict.truth >= 0).sum())
    free, suspects, left = int((~verdict.known).sum()), int(verdict.issue.sum()), verdict.left
    told = [
        ("judged by", " ".join(filter(None, (rows.note, features)))),
        ("rows", f"{len(rows.table):,}, of which {checked:,} are checked and {len(rows.skipped):,} were skipped"),
        ("suspects", f"{suspects:,} of the {free:,} labels that nobody checked"),
        ("estimated noise", f"{percents(verdict.noise_rate)} of those labels are wrong{_worst(rows, verdict)}"),
    ]
    if reviewed:
        told.append((
            "review", f"{verdict.found:,} of {reviewed:,} reviewed labels were wrong; "
            f"{left.value:,.0f} ({left.low:,.0f} to {left.high:,.0f}) wrong labels are left. {advice(verdict)}"
        ))  # fmt: skip
    if checked:
        told.append((
            "model", f"predicts {percent(verdict.checked_accuracy)} of the checked labels without having seen them; "
            f"always saying the most frequent class would get {percent(verdict.base_accuracy)}"
        ))  # fmt: skip
    if suspects:
        told.append(("precision", f"{percents(verdict.precision)} of the suspects are expected to be wrong"))
    if len(verdict.doubted):
        names = ", ".join(rows.names[i] for i in verdict.doubted[:5])
        told.append(("in doubt", f"{len(verdict.doubted):,} labels that were called right, such as {names}"))
    return told + [("warning", text) for text in (*rows.warnings, *verdict.warnings)]


def advice(verdict: Verdict) -> str:
    """Return whether to go on with the review."""
    if verdict.can_stop:
        return f"You can stop: at most {percent(verdict.noise_rate.high)} of the labels that are left are wrong."
    return f"It pays to go on until at most {100 * SURE:g} % of the labels that are left can be wrong."


def text(rows: Rows, verdict: Verdict, features: str) -> str:
    """Return the trust lines in two columns."""
    told = lines(rows, verdict, features)
    width = max(len(name) for name, _ in told)
    return "\n".join(f"{name.ljust(width)}  {words}" for name, words in told)


def percent(share: float) -> str:
    return "an unknown share" if math.isnan(share) else f"{100 * share:.1f} %"


def percents(share: Range) -> str:
    """Return an estimate with its interval."""
    return percent(share.value) + (
        "" if math.isnan(share.value) else f" ({100 * share.low:.1f} to {percent(share.high)})"
    )


def _worst(rows: Rows, verdict: Verdict) -> str:
    """Return the noisiest classes, in words."""
    share = verdict.by_class.tolist()
    order = [c for c in np.argsort(-verdict.by_class, kind="stable") if not math.isnan(share[c])][:WORST]
    return "; by given label, most in " + ", ".join(f"{rows.classes[c]} ({percent(share[c])})" for c in order)
