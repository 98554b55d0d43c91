"""Storage for iterates: rows of a few large buffers, and a file for those that do not fit.

A tensor that lives long, allocated between the short-lived tensors of a step, leaves a hole in the heap beside it. A
list of iterates took several times its own size for that reason. Rows of a buffer that is allocated as one do not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import time
import weakref
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.trees import State
from .layout import Layout, Shards, known

_BUFFER = 32 * 2**20  # the largest size of a buffer in bytes, unless a single row is larger


class Store:
    """Copies of states in rows of buffers. Each further buffer has an eighth as many rows as there are already.

    A row is used again when its state is dropped. No more than `most` rows are allocated while one of them is free.
    With `place` "host" the rows are in (pinned) host memory. Any place other than "host" and "device" is a folder: of
    the states, `most` (None: 0) are in memory, and the others in a file in that folder. With `shards`, this process
    keeps a part of each state.
    """

    def __init__(self, rows: int = 4, place: str | os.PathLike[str] = "device") -> None:
        self._least, self._offload = rows, place == "host"
        self.file = None if place in ("device", "host") else StateFile(place)
        self.most: int | None = None
        self.shards: Shards | None = None
        self._buffers: list[tuple[tuple[str, ...], list[State]]] = []  # the names in a row, and the rows
        self._free: dict[tuple[str, ...], list[State]] = defaultdict(list)
        self._devices: dict[str, torch.device] = {}

    @property
    def rows(self) -> int:
        """The number of allocated rows, including free ones."""
        return sum(len(rows) for _, rows in self._buffers)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, including free ones."""
        return sum(x.nbytes for _, rows in self._buffers for row in rows for x in row.values())

    @property
    def in_memory(self) -> int:
        """The number of states in rows."""
        return self.rows - sum(map(len, self._free.values()))

    def keep(self, z: State) -> Kept:
        """Store a copy of z, or of this rank's part of it, for `fetch`."""
        z = z if self.shards is None else self.shards.cut(z)
        if self.file is not None and self.in_memory >= (self.most or 0):
            return self.file.write(z)
        return self.keep_in_memory(z)

    def keep_in_memory(self, z: State) -> State:
        """Store a copy of z in a row."""
        names = tuple(sorted(z))  # shapes and types stay the same; momentum adds tensors
        free = self._free[names]
        if not free:
            self._devices.update((n, x.device) for n, x in z.items())
            if self.most is not None and self.rows >= self.most:
                self.shrink(self.most)  # drops rows with other names
            wanted = max(self._least, self.rows // 8)
            free += self._grow(names, z, wanted if self.most is None else max(1, min(wanted, self.most - self.rows)))
        kept = free.pop()
        with torch.no_grad():
            for n, x in z.items():
                kept[n].copy_(x, non_blocking=True)
        return kept

    def move_to_file(self, kept: Kept) -> Kept:
        """Move a state from its row to the file, and free the row."""
        if self.file is None or isinstance(kept, Record):
            return kept
        moved = self.file.write(kept)
        self.drop(kept)
        return moved

    def fetch(self, kept: Kept) -> State:
        """Return a stored state, on the devices that it was on."""
        if isinstance(kept, Record):
            assert self.file is not None
            z = self.file.read(kept)
        else:
            z = {n: x.to(self._devices[n], non_blocking=True) for n, x in kept.items()} if self._offload else kept
        return z if self.shards is None else self.shards.join(z)

    def replace(self, kept: State | None, z: State) -> State:
        """Store a copy of z in place of an earlier state, in the same row if it has the same names."""
        if kept is None or kept.keys() != z.keys():
            new = self.keep_in_memory(z)
            if kept is not None:
                self.drop(kept)
            return new
        rows = {x.untyped_storage().data_ptr() for x in kept.values()}
        with torch.no_grad():
            # unchanged tensors are in the row already; one that is there under another name is read before it is lost
            moved = {n: x for n, x in z.items() if x.data_ptr() != kept[n].data_ptr()}
            moved = {n: x.clone() if x.untyped_storage().data_ptr() in rows else x for n, x in moved.items()}
            for n, x in moved.items():
                kept[n].copy_(x, non_blocking=True)
        return kept

    def drop(self, kept: Kept) -> None:
        """Free the room of a state that `keep` returned."""
        if isinstance(kept, Record):
            assert self.file is not None
            self.file.drop(kept)
            return
        self._free[tuple(sorted(kept))].append(kept)

    def shrink(self, most: int) -> None:
        """Release buffers until no more than `most` rows are left, or none has enough free rows.

        States in such a buffer move to free rows of others. What `keep` returned for them stays valid.
        """
        self.most = most
        for buffer in sorted(self._buffers, key=lambda b: len(b[1])):
            names, rows = buffer
            if self.rows <= most:
                return
            free = self._free[names]
            inside = {id(row) for row in free} & {id(row) for row in rows}
            elsewhere = [row for row in free if id(row) not in inside]
            living = [row for row in rows if id(row) not in inside]
            missing = len(living) - len(elsewhere)
            if missing >= len(rows):
                continue
            self._buffers = [b for b in self._buffers if b is not buffer]
            if missing > 0:
                elsewhere += self._grow(names, living[0], missing)
            for row in living:
                to = elsewhere.pop()
                with torch.no_grad():
                    for n, x in row.items():
                        to[n].copy_(x)
                row.update(to)
                home = next(others for _, others in self._buffers if any(other is to for other in others))
                home[next(i for i, other in enumerate(home) if other is to)] = row
            self._free[names] = elsewhere

    def _grow(self, names: tuple[str, ...], z: State, rows: int) -> list[State]:
        offload = self._offload and any(self._devices[n].type != "meta" for n in z)
        pin = offload and any(self._devices[n].type != "cpu" for n in z)
        layout = Layout.of(z)
        rows = max(1, min(rows, _BUFFER // max(layout.nbytes, 1)))
        buffers = {
            (dtype, device): torch.empty(rows, size, dtype=dtype, device="cpu" if offload else device, pin_memory=pin)
            for (dtype, device), size in layout.sizes.items()
        }
        bought = [layout.views({kind: buffer[i] for kind, buffer in buffers.items()}) for i in range(rows)]
        self._buffers.append((names, bought))
        return list(bought)


class Record(NamedTuple):
    """A state in a file: where it begins, and its layout."""

    begin: int
    layout: Layout

    @property
    def size(self) -> int:
        return self.layout.nbytes


Kept = State | Record


class StateFile:
    """States in a file without a name, whose disk space is freed however the process ends.

    All states are written from one buffer, and each is read into a new one. The system is told that the pages are not
    needed in memory. Disk space is allocated before it is written to, so a full disk is a clear error and leaves no
    half-written state.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.states = self.nbytes = self.written = 0
        self.seconds = 0.0  # the time that writing has taken
        self._end = self._room = 0
        self._fd = -1
        self._free: dict[int, list[int]] = defaultdict(list)  # where dropped records of a size begin
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layouts: list[Layout] = []  # those of the records, each once

    def write(self, z: State) -> Record:
        """Write a copy of z to the file."""
        started = time.perf_counter()
        layout = known(Layout.of(z), self._layouts)
        size = layout.nbytes
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        places = layout.views(layout.in_bytes(self._buffer))
        with torch.no_grad():
            for n, x in z.items():
                places[n].copy_(x)
        free = self._free[size]
        record = Record(free.pop() if free else self._append(size), layout)
        self._transfer(os.pwritev, self._buffer, record)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, record.begin, size, os.POSIX_FADV_DONTNEED)
        self.states, self.nbytes, self.written = self.states + 1, self.nbytes + size, self.written + 1
        self.seconds += time.perf_counter() - started
        return record

    def read(self, record: Record) -> State:
        buffer = torch.empty(record.size, dtype=torch.uint8)
        self._transfer(os.preadv, buffer, record)
        flat = {kind: x.to(kind[1]) for kind, x in record.layout.in_bytes(buffer).items()}
        return record.layout.views(flat)

    def drop(self, record: Record) -> None:
        self.states, self.nbytes = self.states - 1, self.nbytes - record.size
        self._free[record.size].append(record.begin)

    def _transfer(self, call: object, buffer: Tensor, record: Record) -> None:
        done = 0
        while done < record.size:
            part = (ctypes.c_char * (record.size - done)).from_address(buffer.data_ptr() + done)
            moved = call(self._fd, [part], record.begin + done)  # pyright: ignore
            if moved <= 0:
                raise OSError(f"bilevel.Reverse: a state can't be read back from the file in store={self.folder!r}.")
            done += moved

    def _append(self, size: int) -> int:
        """Return where to write a further record, after allocating disk space for it."""
        if self._fd < 0:
            self._open()
        begin, self._end = self._end, self._end + size
        if self._end > self._room:
            more = max(size, min(_BUFFER, self._room // 8 // max(size, 1) * size))
            left = shutil.disk_usage(self.folder).free
            if more > left:
                more = size
            try:
                if size > left:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if hasattr(os, "posix_fallocate") and size:
                    os.posix_fallocate(self._fd, self._room, more)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                self._end = begin
                raise OSError(
                    errno.ENOSPC,
                    f"bilevel.Reverse: the disk of store={self.folder!r} has {left} bytes left, and the next state "
                    f"takes {size}; {self.states} states are there. Free some space, name another folder, or keep "
                    "fewer states with checkpoint=",
                ) from None
            self._room += more
        return begin

    def _open(self) -> None:
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="bilevel-") as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise type(error)(
                error.errno,
                f"bilevel.Reverse: store={self.folder!r} can't be written to: {error.strerror}. Name a folder that is "
                "there and that you may write to",
            ) from None
        weakref.finalize(self, os.close, self._fd)
