"""Who is told of the blocks that are opened in this thread: `check_loop`, which runs a function that opens its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_WATCHING = threading.local()
Watcher = Callable[[Any, Any], None]  # (the block, its loop)


def opened(block: Any, loop: Any) -> None:
    """Tell the innermost watcher of a new block."""
    if watchers := getattr(_WATCHING, "stack", None):
        watchers[-1](block, loop)


@contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Let the watcher see every block that is opened inside."""
    stack: list[Watcher] = _WATCHING.__dict__.setdefault("stack", [])
    stack.append(watcher)
    try:
        yield
    finally:
        stack.pop()
