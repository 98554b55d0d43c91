"""Pullbacks: how the derivative of one step is computed. One file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable

from . import lean, plain
from .base import Pull, Pulled
from .blocks import BlockByBlock, Which

PULLBACKS: dict[str, Callable[[], Pull]] = {
    "plain": lambda: plain.pull,
    "lean": lambda: lean.pull,
    "blocks": BlockByBlock,
}

__all__ = ["PULLBACKS", "BlockByBlock", "Pull", "Pulled", "Which"]
