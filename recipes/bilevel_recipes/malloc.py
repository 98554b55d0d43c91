"""glibc's malloc, told to keep what it has got: a training loop asks for the same buffers again and again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1


def keep_memory() -> bool:
    """Stop glibc from handing freed buffers back to the kernel; true if that was possible.

    By default every buffer above 32 MiB at most is mapped and unmapped for each use, and the top of the heap is given
    back when it is free: each time the kernel has to map and clear its pages anew. On a CPU that is a good part of the
    time of a small convolutional network. The price: the process stays as large as it was at its largest.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    trim = mallopt(_TRIM_THRESHOLD, _NEVER)
    mapped = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, 32 << 20)  # older versions take no more
    return bool(trim and mapped)
