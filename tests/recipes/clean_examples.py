"""Small data sets of each kind, and a verdict about them, for tests of what comes after the judge."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bilevel_recipes.clean.calibration import Range
from bilevel_recipes.clean.rows import Kind, Rows
from bilevel_recipes.clean.verdict import Verdict

CLASSES = ["cat", "dog", "bird"]


def _content(kind: Kind, n: int, rng: np.random.Generator) -> object:
    if kind == "images":
        return [rng.integers(0, 256, (12, 12, 3), dtype=np.uint8) for _ in range(n)]
    if kind == "text":
        return [f"Sentence {i} about {rng.choice(['fur', 'feathers', 'paws'])}." for i in range(n)]
    if kind == "table":
        return pd.DataFrame({"weight": rng.normal(5, 2, n).round(3), "colour": rng.choice(["black", "white"], n)})
    return rng.normal(size=(n, 4)).astype(np.float32)


def example_rows(kind: Kind = "images", n: int = 120, classes: list[str] | None = None, seed: int = 0) -> Rows:
    """n rows that can be judged, every tenth of them checked, and two rows before them that are skipped."""
    rng = np.random.default_rng(seed)
    classes = CLASSES if classes is None else classes
    y = rng.integers(0, len(classes), n)
    used = np.arange(2, n + 2)
    names = [f"photo_{i:04d}.png" if kind == "images" else str(i) for i in used]
    table = pd.DataFrame({"file": ["gone.png", "bare.png", *names], "label": ["", "", *(classes[c] for c in y)]})
    skipped = pd.DataFrame(
        {"row": [0, 1], "name": ["gone.png", "bare.png"], "reason": ["the file is damaged", "no label"]}
    )
    checked = np.arange(n) % 10 == 0
    return Rows(f"example of {kind}", kind, table, used, y, checked, classes, _content(kind, n, rng), names, skipped)


def example_verdict(rows: Rows, share: float = 0.5, seed: int = 0) -> Verdict:
    """Call about this share of the unchecked rows wrong; the scores are all different."""
    rng = np.random.default_rng(seed)
    n, c = len(rows.y), len(rows.classes)
    score = np.where(rows.known, 1.0, rng.permutation(n) / n)
    issue = (score < share) & ~rows.known
    other = (rows.y + rng.integers(1, c, n)) % c
    probabilities = rng.dirichlet(np.full(c, 0.3), n) * 0.5
    probabilities[np.arange(n), np.where(issue, other, rows.y)] += 0.5
    noise = np.full((c, c), 0.2 / (c - 1))
    np.fill_diagonal(noise, 0.8)
    return Verdict(
        score=score,
        belief=score,
        issue=issue,
        suggested=np.where(issue, other, rows.y),
        probabilities=probabilities.astype(np.float32),
        noise=noise,
        given=rows.y,
        truth=rows.right,
        checked=rows.checked,
        checked_accuracy=0.91,
        base_accuracy=0.4,
        left=Range(30.0, 20.0, 45.0),
        precision=Range(0.8, 0.7, 0.9),
        by_class=np.linspace(0.1, 0.3, c),
        near=((np.arange(n)[:, None] + np.arange(1, 4)) % n).astype(np.int32),
        method="A linear model and a noise matrix, both learnt from the checked rows.",
        warnings=["The class 'bird' has 4 checked rows; its suspects are less certain."],
        history=[{"step": k, "outer_loss": 1 / (k + 1), "weight_decay": 0.1 * k} for k in range(5)],
        seconds=1.5,
    )
