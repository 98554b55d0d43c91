"""Files of data sets, as they are published, but small."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

RNG = np.random.default_rng(0)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    head = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.astype(">i4" if kind == 12 else np.uint8).tobytes()


def mnist_files(n: int = 30, folder: str = "MNIST") -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for part in ("train", "t10k"):
        files[f"{folder}/raw/{part}-images-idx3-ubyte"] = idx(RNG.integers(0, 256, (n, 28, 28)))
        files[f"{folder}/raw/{part}-labels-idx1-ubyte"] = idx(np.arange(n) % 10)
    return files


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def subset(**change: Any) -> dict[str, np.ndarray]:
    part: dict[str, Any] = {
        "x_train": RNG.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(20) % 10,
        "x_test": RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "y_test": np.arange(6),
    }
    return {k: np.asarray(v) for k, v in (part | change).items() if v is not None}
