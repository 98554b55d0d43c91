"""What the commands of all recipes share: flags, the order of events, and errors in one line."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ranks, runs
from .malloc import keep_memory

GRID = "several, separated by commas, make a grid"

# group -> flag, type (bool: a switch), how help shows the value, what it means (and the default)
Flags = Mapping[str, Sequence[tuple[str, Any, str | None, str]]]


def listing(kind: Callable[[str], Any], known: Sequence[str] | None = None) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: values separated by commas, each of them known."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part.strip()) for part in text.split(",") if part.strip() and part.strip() != "none")
        wrong = [v for v in values if known is not None and v not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"no {', '.join(wrong)}; known: {', '.join(known or ())}")
        return values

    parse.__name__ = f"list of {kind.__name__}"
    return parse


NAMES, NUMBERS, RATES = listing(str), listing(int), listing(float)


@dataclass(frozen=True)
class Recipe:
    """A recipe as a command.

    paper: what --paper sets. writes: the files that --out gets. hint: what to do when values are not finite.
    settings: the dataclass of the recipe's settings. defaults: what the command has otherwise than it.
    check: fails on what is wrong before anything is written.
    fingerprint: what a resumed run must share. run: (settings, folder, quiet) -> records.
    write: (settings, records, folder, command) -> the table in plain text, and the path of the report.
    """

    module: str
    about: str
    examples: str
    flags: Flags
    paper: Mapping[str, Any]
    writes: str
    hint: str
    settings: Callable[..., Any]
    defaults: Mapping[str, Any]
    check: Callable[[Any], None]
    fingerprint: Callable[[Any], dict[str, Any]]
    run: Callable[[Any, Path, bool], list[dict[str, Any]]]
    write: Callable[[Any, list[dict[str, Any]], Path, str], tuple[str, Path]]


def parser(recipe: Recipe) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=f"python -m {recipe.module}",
        description=recipe.about,
        epilog=recipe.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in recipe.flags.items():
        group = p.add_argument_group(title)
        for name, kind, shown, words in flags:
            how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": shown}
            group.add_argument(f"--{name}", default=None, help=words.replace("%", "%%"), **how)
    p.add_argument("--paper", action="store_true", help=f"the paper's protocol: {_text(recipe.paper)}")
    out = Path("runs") / recipe.module.rpartition(".")[2]
    p.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"where to write {recipe.writes} ({out})")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out, to the same result")
    p.add_argument("--quiet", action="store_true", help="no progress bars")
    return p


def _text(flags: Mapping[str, Any]) -> str:
    def value(v: Any) -> str:
        return "" if v is True else " " + (",".join(map(str, v)) if isinstance(v, tuple) else str(v))

    return " ".join(f"--{k.replace('_', '-')}{value(v)}" for k, v in flags.items())


def settings(recipe: Recipe, args: argparse.Namespace) -> Any:
    """The flags that were given, over those of --paper if that was, over the command's defaults."""
    names = [name.replace("-", "_") for flags in recipe.flags.values() for name, *_ in flags]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return recipe.settings(**{**recipe.defaults, **(recipe.paper if args.paper else {}), **given})


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    p = parser(recipe)
    args = p.parse_args(argv)
    begin = time.perf_counter()
    keep_memory()
    try:
        s = settings(recipe, args)
        ranks.join(s.device)
        recipe.check(s)  # before anything is written: a wrong path is the commonest mistake
        if ranks.first():
            runs.open_folder(args.out, recipe.fingerprint(s), args.resume)
        ranks.wait()
        records = recipe.run(s, args.out, args.quiet or not ranks.first())
        if not ranks.first():
            return 0
        command = shlex.join(["python", "-m", recipe.module, *(a for a in argv if a != "--resume")])
        table, page = recipe.write(s, records, args.out, command)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command with --resume goes on from {args.out}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        hint = recipe.hint if isinstance(error, FloatingPointError) else ""
        print(f"{p.prog}: error: {error}{hint}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not ranks.lost(error):
            raise
        print(f"{p.prog}: another process of this run is gone ({error}); --resume goes on from {args.out}, with any "
              "number of processes", file=sys.stderr)  # fmt: skip
        return 3
    finally:
        ranks.leave()
    print(table)
    print(f"\n{time.perf_counter() - begin:.0f} s; {recipe.writes} are in {args.out}")
    print(page)
    return 0
