"""How far a reverse sweep has come, in a file, so that it can go on after the process was killed.

The file is replaced as a whole, by one that is complete, and begins with the checksum of the rest. What it has to fit
(the number of steps, the weights that they lead to, the outer loss, ...) is in it by name.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..graph import State

_HEAD = b"bilevel_plugin sweep, version 1\n"


class Position(NamedTuple):
    """Where a sweep stands: the recorded steps that are left, the adjoint there, the sums of the inputs so far."""

    left: int
    adjoint: State
    sums: list[Tensor | None]


class Journal:
    """The file of one sweep. `about` is what the sweep is of: a journal of another is refused."""

    def __init__(self, folder: str | os.PathLike[str], about: dict[str, str], every: float) -> None:
        self._path, self._about, self._every = Path(folder) / "sweep.journal", about, every
        self._written = time.monotonic()

    def read(self, like: State, inputs: Sequence[Tensor]) -> Position | None:
        """The position that was written last, on the devices of the state and the inputs; None if there is no file."""
        self._beside().unlink(missing_ok=True)  # of a process that was killed while it wrote
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        head, digest, rest = data[: len(_HEAD)], data[len(_HEAD) : len(_HEAD) + 32], data[len(_HEAD) + 32 :]
        if head != _HEAD or hashlib.sha256(rest).digest() != digest:
            raise ValueError(
                f"bilevel.Reverse: {self._path} is damaged, or no journal of a sweep. Delete it, and the sweep starts "
                "again from the last step."
            )
        found = torch.load(io.BytesIO(rest), weights_only=True)
        other = [name for name in self._about if found["about"].get(name) != self._about[name]]
        if other:
            before, now = found["about"].get(other[0]), self._about[other[0]]
            raise ValueError(
                f"bilevel.Reverse: {self._path} is of another sweep: {' and '.join(other)} differ ({before} then, "
                f"{now} now). Delete it, name another folder, or set resume=False. A folder serves one hypergradient "
                "at a time."
            )
        sums = [x if x is None else x.to(y.device) for x, y in zip(found["sums"], inputs, strict=True)]
        return Position(found["left"], {n: x.to(like[n].device) for n, x in found["adjoint"].items()}, sums)

    def write(self, position: Position) -> None:
        """Replace the file, if the last time was long enough ago."""
        if time.monotonic() - self._written < self._every:
            return
        rest = io.BytesIO()
        torch.save({"about": self._about, **position._asdict()}, rest)
        try:
            with open(self._beside(), "wb") as file:
                file.write(_HEAD + hashlib.sha256(rest.getbuffer()).digest())
                file.write(rest.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._beside(), self._path)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"bilevel.Reverse: {self._path} can't be written: {error.strerror}. Free some space, or set "
                "resume=False",
            ) from None
        self._written = time.monotonic()

    def remove(self) -> None:
        """Once the sweep is done."""
        self._path.unlink(missing_ok=True)

    def _beside(self) -> Path:
        return self._path.with_suffix(".unfinished")


def checksum(tensors: Iterable[Tensor]) -> str:
    """Of all bits of the tensors, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        plain = x.detach().cpu().contiguous()
        digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b"")
    return digest.hexdigest()
