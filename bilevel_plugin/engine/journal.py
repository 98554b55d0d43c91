"""The position of a reverse sweep in a file, so that the sweep can continue after its process was killed.

Each write makes a complete new file and then replaces the old one. The file begins with a checksum of its content. It
also names what a sweep must have in common with it: the number of steps, the last weights, the outer loss, ...
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

from ..autograd.trees import State

_HEAD = b"bilevel_plugin sweep, version 1\n"


class Position(NamedTuple):
    """The position of a sweep: the number of steps that are left, the adjoint there, and the sums for the inputs."""

    left: int
    adjoint: State
    sums: list[Tensor | None]


class Journal:
    """The file of one sweep. `about` describes the sweep: the journal of a different one is refused."""

    def __init__(self, folder: str | os.PathLike[str], about: dict[str, str], every: float) -> None:
        self._path, self._about, self._every = Path(folder) / "sweep.journal", about, every
        self._written = time.monotonic()

    def read(self, like: State, inputs: Sequence[Tensor]) -> Position | None:
        """Return the last position, on the devices of the state and the inputs, or None if there is no file."""
        self._unfinished().unlink(missing_ok=True)  # left by a process that was killed while it wrote
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        head, digest, rest = data[: len(_HEAD)], data[len(_HEAD) : len(_HEAD) + 32], data[len(_HEAD) + 32 :]
        if head != _HEAD or hashlib.sha256(rest).digest() != digest:
            raise ValueError(
                f"bilevel.Reverse: {self._path} is damaged, or is not the journal of a sweep. Delete it, and the sweep "
                "starts again from the last step."
            )
        found = torch.load(io.BytesIO(rest), weights_only=True)
        other = [name for name in self._about if found["about"].get(name) != self._about[name]]
        if other:
            before, now = found["about"].get(other[0]), self._about[other[0]]
            raise ValueError(
                f"bilevel.Reverse: {self._path} belongs to another sweep: {' and '.join(other)} differ ({before} then, "
                f"{now} now). Delete it, name another folder, or set resume=False. A folder serves one hypergradient "
                "at a time."
            )
        sums = [x if x is None else x.to(y.device) for x, y in zip(found["sums"], inputs, strict=True)]
        # within an accumulation the adjoint has "name@grad", too, which the last state may lack
        where = {n: like[n if n in like else n.rpartition("@")[0]].device for n in found["adjoint"]}
        return Position(found["left"], {n: x.to(where[n]) for n, x in found["adjoint"].items()}, sums)

    def write(self, position: Position) -> None:
        """Replace the file, if the last write was long enough ago."""
        if time.monotonic() - self._written < self._every:
            return
        rest = io.BytesIO()
        torch.save({"about": self._about, **position._asdict()}, rest)
        try:
            with open(self._unfinished(), "wb") as file:
                file.write(_HEAD + hashlib.sha256(rest.getbuffer()).digest())
                file.write(rest.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._unfinished(), self._path)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"bilevel.Reverse: {self._path} can't be written: {error.strerror}. Free some space, or set "
                "resume=False",
            ) from None
        self._written = time.monotonic()

    def remove(self) -> None:
        """Delete the file, when the sweep is done."""
        self._path.unlink(missing_ok=True)

    def _unfinished(self) -> Path:
        return self._path.with_suffix(".unfinished")


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return a checksum of all bits of the tensors, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        plain = x.detach().cpu().contiguous()
        digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b"")
    return digest.hexdigest()
