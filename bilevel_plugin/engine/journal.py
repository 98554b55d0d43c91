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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.derive import Gradients
from ..autograd.trees import State, tensors_of
from ..step.step import Step
from .base import OuterLoss

_HEAD = b"bilevel_plugin sweep, version 1\n"


class Position(NamedTuple):
    """The position of a sweep: the number of steps that are left, the adjoint there, and the sums for the inputs."""

    left: int
    adjoint: State
    sums: list[Tensor | None]

    @classmethod
    def of(cls, left: int, adjoint: State, inputs: Sequence[Tensor], found: Gradients) -> Position:
        return cls(left, adjoint, [found.direct[id(x)][1] if id(x) in found.direct else None for x in inputs])


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
        return Position(found["left"], {n: x.to(like[n].device) for n, x in found["adjoint"].items()}, sums)

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


def about(
    steps: Mapping[int, Step],
    last: State,
    inputs: Sequence[Tensor] | None,
    found: Gradients,
    a: State,
    losses: Mapping[tuple[int, int], Sequence[OuterLoss]],
) -> dict[str, str]:
    """Describe a sweep: its steps, its last state, its outer losses with their gradients, and what it is to find."""
    if inputs is None:
        raise ValueError(
            "bilevel.Reverse: resume=True keeps sums for inputs that are named. Call loop.backward(inputs) or "
            "loop.hypergrad(inputs)."
        )
    records = [piece.record for step in steps.values() for piece in step.pieces]
    if found.cut or any(x.cut for x in (*records, *(loss for at in losses.values() for loss in at))):
        raise ValueError(
            "bilevel.Reverse: resume=True, and a tensor of a batch requires grad: the graph behind it would be "
            "another one when the script is run again. Compute it inside h (or g), or set resume=False."
        )
    first = steps[min(steps)] if steps else None
    return {
        "the version of torch": str(torch.__version__),
        "the number of steps": str(max(steps, default=-1) + 1),
        "the shapes of the weights": str({n: tuple(x.shape) for n, x in last.items()}),
        "the shapes of the inputs": str([tuple(x.shape) for x in inputs]),
        "the numbers of the inputs": checksum(inputs),
        "the first batch": checksum(tensors_of([t.batch for t in first.pieces[0].terms]) if first is not None else []),
        "the weights after the last step": checksum(last.values()),
        "the outer loss": checksum([*a.values(), *found.values()]),
        "the steps that have an outer loss": str(sorted(losses)),
        "the values or weights of the outer losses": checksum(
            x for at in losses.values() for loss in at for x in loss.numbers
        ),
    }


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return a checksum of all bits of the tensors, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for x in tensors:
        plain = x.detach().cpu().contiguous()
        digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b"")
    return digest.hexdigest()
