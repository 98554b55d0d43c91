"""What rounding loses, in few bits: the difference between a tensor and a prediction, in units in the last place.

The bits of floating-point numbers of one sign are in the order of their sizes, so the difference of the bits as
integers is exact whatever the prediction is. If it is right up to rounding, nearly all differences are −1, 0 or 1. They
are packed, four or two in a byte; the few that are larger follow, packed more widely; and the bytes go through a
Huffman code.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .store import Kept, Store

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WIDTHS = (2, 4, 8)  # bits of a packed integer
_RARE = 32  # a width is used if at most one in so many integers does not fit


def as_integers(x: Tensor) -> Tensor:
    """Return the bits of a flat tensor as integers. For numbers of one sign they are in the order of their sizes."""
    return x.view(_INTEGERS[x.dtype.itemsize])


def checksum(bits: Tensor) -> int:
    """Return a checksum of integers, which does not depend on their order."""
    return int((bits * bits).sum(dtype=torch.int64))


def encode(numbers: Tensor) -> bytes:
    """Return signed integers in few bytes, if most of them are small."""
    found = bytearray()
    for width in _WIDTHS[_WIDTHS.index(_width(numbers)) :]:
        fields = _fields(numbers, width)
        _add(found, width, _bytes(_pack(fields, width)), zlib.Z_HUFFMAN_ONLY)
        numbers = numbers[fields == 0]
        if not len(numbers):
            return bytes(found)
    size = 8 * numbers.itemsize - 1
    even = (numbers << 1) ^ (numbers >> size)  # the sign is the last bit, so the first bytes are zeros, mostly
    _add(found, 0, _bytes(even.view(torch.uint8).view(-1, numbers.itemsize).T), zlib.Z_DEFAULT_STRATEGY)
    return bytes(found)


def _fields(numbers: Tensor, width: int) -> Tensor:
    """Return the numbers from 1 on, in so many bits; 0 stands for one that does not fit."""
    half = 2 ** (width - 1)
    fields = numbers.clamp(-128, 127).to(torch.int8).view(torch.uint8) + half
    return fields.masked_fill_(fields > min(2 * half - 1, 254), 0)


def _width(numbers: Tensor) -> int:
    """Return the first width that nearly all of some of the integers fit in."""
    some = numbers[: 2**12]
    return next((w for w in _WIDTHS if int((_fields(some, w) == 0).sum()) * _RARE <= len(some)), _WIDTHS[-1])


def decode(data: bytes | memoryview, count: int, dtype: torch.dtype) -> Tensor:
    """Return the integers that `encode` was given, which were so many, of this dtype."""
    levels: list[tuple[Tensor, Tensor]] = []
    numbers = torch.empty(0, dtype=dtype)
    for width, part in _parts(data):
        if not width:
            even = _tensor(part).view(dtype.itemsize, -1).T.contiguous().view(-1).view(dtype)
            numbers = ((even >> 1) & torch.iinfo(dtype).max) ^ -(even & 1)
            break
        fields = _unpack(_tensor(part), width)[:count]
        large = fields == 0
        levels.append((fields.to(dtype).sub_(2 ** (width - 1)), large))
        count = int(large.sum())
    for small, large in reversed(levels):
        numbers = small.masked_scatter_(large, numbers) if len(numbers) else small
    return numbers


def _pack(fields: Tensor, width: int) -> Tensor:
    """Return bytes, each of which holds 8/width numbers of so many bits."""
    each = 8 // width
    if each == 1:
        return fields
    columns = torch.nn.functional.pad(fields, (0, -len(fields) % each)).view(each, -1)
    packed = columns[0].clone()
    for i in range(1, each):
        packed |= columns[i] << (width * i)
    return packed


def _unpack(packed: Tensor, width: int) -> Tensor:
    each = 8 // width
    if each == 1:
        return packed
    return torch.cat([(packed >> (width * i)) & (2**width - 1) for i in range(each)])


def _add(found: bytearray, width: int, data: bytes, strategy: int) -> None:
    """Append the compressed data, after its width and its length."""
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    coded = coder.compress(data) + coder.flush()
    found += width.to_bytes(1, "little") + len(coded).to_bytes(6, "little") + coded


def _parts(data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    begin = 0
    while begin < len(data):
        end = begin + 7 + int.from_bytes(data[begin + 1 : begin + 7], "little")
        yield data[begin], zlib.decompress(data[begin + 7 : end], -15)
        begin = end


def _bytes(x: Tensor) -> bytes:
    x = x.cpu().contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def raw(x: Tensor) -> bytes:
    """Return the bytes of a tensor as they are."""
    return _bytes(x.detach())


def from_raw(data: bytes, like: Tensor) -> Tensor:
    """Return the tensor of these bytes, with the shape, the dtype and the device of another one."""
    return _tensor(data).view(like.dtype).view(like.shape).to(like.device)


class Log:
    """Bytes that are appended, kept in a store in chunks of one size, and read from any place."""

    def __init__(self, store: Store) -> None:
        self._store, self._chunks = store, dict[int, Kept]()
        self._tail = torch.empty(0, dtype=torch.uint8)  # the chunk that is not full yet
        self.size = self._first = 0  # where the next record begins, and where the first one does that is still needed
        self._open: tuple[int, Tensor] = -1, self._tail  # the chunk that was read last

    @property
    def nbytes(self) -> int:
        return self.size - self._first

    def append(self, data: bytes) -> int:
        """Append the data, and return their size."""
        if not len(self._tail):
            self._tail = torch.zeros(max(2**16, len(data)), dtype=torch.uint8)
        size, new = len(self._tail), _tensor(data)
        while len(new):
            at = self.size % size
            part = new[: size - at]
            self._tail[at : at + len(part)] = part
            self.size, new = self.size + len(part), new[len(part) :]
            if self.size % size == 0:
                self._chunks[self.size // size - 1] = self._store.keep({"chunk": self._tail})
        return len(data)

    def read(self, begin: int, end: int) -> bytes:
        size, found = max(1, len(self._tail)), b""
        while begin < end:
            chunk, at = divmod(begin, size)
            part = min(end - begin, size - at)
            found += _bytes(self._chunk(chunk)[at : at + part])
            begin += part
        return found

    def _chunk(self, i: int) -> Tensor:
        if i not in self._chunks:
            return self._tail
        if self._open[0] != i:
            self._open = i, self._store.fetch(self._chunks[i])["chunk"]
        return self._open[1]

    def forget_before(self, begin: int) -> None:
        """Drop the chunks whose bytes are all before this place."""
        self._first = begin
        for i in [i for i in self._chunks if (i + 1) * len(self._tail) <= begin]:
            self._store.drop(self._chunks.pop(i))
