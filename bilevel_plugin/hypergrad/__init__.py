"""Engines: how ∂g(w_K)/∂λ is computed. One file an engine, and the table of their names."""

from __future__ import annotations

from .base import Engine, Tape
from .forward import Forward
from .implicit import CG, Neumann
from .reverse import Reverse
from .unroll import Unroll

ENGINES: dict[str, type[Engine]] = {
    "reverse": Reverse,
    "unroll": Unroll,
    "forward": Forward,
    "cg": CG,
    "neumann": Neumann,
}


def resolve(hypergrad: str | Engine) -> Engine:
    """The engine that `inner` was asked for."""
    if isinstance(hypergrad, Engine):
        return hypergrad
    if hypergrad not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise ValueError(f"bilevel.inner: unknown hypergrad engine {hypergrad!r}. Known: {known}, or an Engine object.")
    return ENGINES[hypergrad]()


__all__ = ["CG", "ENGINES", "Engine", "Forward", "Neumann", "Reverse", "Tape", "Unroll", "resolve"]
