"""Checks of the options of `Reverse`."""

from __future__ import annotations

import os

from .budget import parse

Place = str | os.PathLike[str]


def is_folder(store: Place) -> bool:
    """Whether states are stored in a file."""
    return store not in ("device", "host")


def check_states(checkpoint: int | str, memory: int | str | None, *, compiles: bool) -> None:
    """Raise if the options that say which states are stored are wrong."""
    named = checkpoint in ("sqrt", "reversible")
    if not named and (isinstance(checkpoint, str) or checkpoint < 1):
        raise ValueError(f"bilevel.Reverse: checkpoint must be 'sqrt', 'reversible' or at least 1, got {checkpoint!r}.")
    if checkpoint == "reversible" and compiles:
        raise ValueError(
            "bilevel.Reverse: checkpoint='reversible' needs the gradient of a step by itself, and compile= runs the "
            "step as a whole. Leave out one of them."
        )
    if memory is not None:
        parse(memory)
        if checkpoint != 1:
            raise ValueError("bilevel.Reverse: memory= decides what to store: leave out checkpoint= or memory=.")


def check_place(store: Place, *, resume: bool) -> None:
    """Raise if the place of the states is not one, or if a sweep could not be resumed from there."""
    if isinstance(store, str) and is_folder(store) and not _is_path(store):
        raise ValueError(
            "bilevel.Reverse: store must be 'device', 'host' or a folder, as a path with a separator (like "
            f"'./states') or as a pathlib.Path, got {store!r}."
        )
    if resume and not is_folder(store):
        raise ValueError(
            "bilevel.Reverse: resume=True writes how far the sweep has come into a folder: name one by store=."
        )


def _is_path(place: str) -> bool:
    return os.sep in place or bool(os.altsep and os.altsep in place)
