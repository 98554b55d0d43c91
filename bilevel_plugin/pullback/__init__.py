"""Pullbacks: how the derivative of one step is computed. One file each, and the table of their names."""

from __future__ import annotations

from . import lean, plain
from .base import Pull, Pulled

PULLBACKS: dict[str, Pull] = {"plain": plain.pull, "lean": lean.pull}

__all__ = ["PULLBACKS", "Pull", "Pulled"]
