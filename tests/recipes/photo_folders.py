"""Folders of pictures, and commands of bilevel-fewshot that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from bilevel_recipes.few_shot.__main__ import main


def write_digits(folder: Path, classes: range, count: int, begin: int = 0) -> Path:
    digits = load_digits()
    for c in classes:
        (folder / f"digit {c}").mkdir(parents=True)
        for i in np.flatnonzero(digits.target == c)[begin : begin + count]:
            Image.fromarray((digits.images[i] * 255 / 16).astype(np.uint8)).save(folder / f"digit {c}" / f"{i}.png")
    return folder


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The error of a command that is refused: one line."""
    assert main([*map(str, argv), *([] if "--quiet" in argv else ["--quiet"])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bilevel-fewshot: error: ")
    assert error.count("\n") == 1
    assert "bilevel-clean" not in error
    return error
