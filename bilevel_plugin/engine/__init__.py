"""Engines: how ∂g(w_K)/∂λ is computed. One file for each engine, and the table of their names."""

from __future__ import annotations

from .base import Engine, OuterLoss, Tape
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


def resolve(engine: str | Engine) -> Engine:
    """Return the engine that `inner` was given."""
    if isinstance(engine, Engine):
        return engine
    if engine not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        hint = f" Make an object of it: {engine.__name__}()." if isinstance(engine, type) else ""
        raise ValueError(f"bilevel.inner: unknown engine {engine!r}. Known: {known}, or an Engine object.{hint}")
    return ENGINES[engine]()


__all__ = ["CG", "ENGINES", "Engine", "Forward", "Neumann", "OuterLoss", "Reverse", "Tape", "Unroll", "resolve"]
