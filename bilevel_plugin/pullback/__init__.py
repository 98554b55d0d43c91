"""Pullbacks: how the gradient of one piece of a step is differentiated. One file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable

from ..step.cotangent import Pull
from . import lean, plain
from .blocks import BlockByBlock, Which

PULLBACKS: dict[str, Callable[[], Pull]] = {
    "plain": lambda: plain.pull,
    "lean": lambda: lean.pull,
    "blocks": BlockByBlock,
}

__all__ = ["PULLBACKS", "BlockByBlock", "Pull", "Which"]
