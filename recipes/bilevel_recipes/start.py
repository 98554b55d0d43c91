"""The installed programs. Their imports take seconds, and Ctrl-C in that time ends them with a sentence as well."""

from __future__ import annotations

import importlib
import sys


def clean() -> int:
    return _run("bilevel-clean", "clean")


def fewshot() -> int:
    return _run("bilevel-fewshot", "few_shot")


def attribute() -> int:
    return _run("bilevel-attribute", "attribution")


def _run(program: str, package: str) -> int:
    try:
        return importlib.import_module(f"bilevel_recipes.{package}.__main__").main()
    except KeyboardInterrupt:
        print(f"\n{program}: stopped.", file=sys.stderr)
        return 130
