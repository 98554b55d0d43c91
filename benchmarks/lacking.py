"""Options that this checkout of the library does not take yet: a runner whose name has one says so in its row."""

from __future__ import annotations

import dataclasses
import inspect

import bilevel_plugin as bilevel

_TAKEN = {
    "Reverse": {field.name for field in dataclasses.fields(bilevel.Reverse)},
    "Loop.step": {
        name for name, p in inspect.signature(bilevel.Loop.step).parameters.items() if p.kind is p.KEYWORD_ONLY
    },
}
_WANTED = {"blocks=": "Reverse", "store=": "Reverse", "micro=": "Loop.step", "fetch=": "Loop.step"}


def lacking(runner: str) -> str:
    """Why the runner can't run, or nothing."""
    asked = {option: owner for option, owner in _WANTED.items() if option in runner}
    lost = [f"{owner} has no {option}" for option, owner in asked.items() if option[:-1] not in _TAKEN[owner]]
    return ", ".join(lost) and f"not in this checkout: {', '.join(lost)}"
