"""What the commands of all recipes share: flags, the order of events, and errors in one line.

The flags of a command are the fields of its settings: name, type and default are the field's, the help is the string
below it. The base classes of the settings are the groups of the help.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from . import ranks, runs
from .malloc import keep_memory


def value(
    kind: Callable[[str], Any], shown: str, known: Sequence[str] | None = None,
    least: float = -math.inf, below: float = math.inf, many: bool = False,
) -> Any:  # fmt: skip
    """How a flag reads its text: as one value, or with `many` as several that are separated by commas.

    Each value must be among the known ones, at least `least`, and less than `below`.
    """

    def one(text: str) -> Any:
        found = kind(text)
        if known is not None and found not in known:
            raise ValueError(f"there is no {found!r}; known: {', '.join(known)}")
        if isinstance(found, (int, float)) and not least <= found < below:
            limits = f"at least {least:g}" + (f" and less than {below:g}" if below < math.inf else "")
            raise ValueError(f"it must be {limits}; got {text}")
        return found

    def read(texts: list[str]) -> Any:
        if not many:
            return one(texts[0])
        parts = [part.strip() for part in texts[0].split(",")]
        return tuple(one(part) for part in parts if part not in ("", "none"))

    def write(found: Any) -> list[str]:
        return [",".join(map(str, found)) or "none"] if many else [str(found)]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{shown},…" if many else shown,
        instance_from_str=read,
        is_instance=lambda found: isinstance(found, tuple) == many,
        str_from_instance=write,
    )


def names(known: Sequence[str] | None = None) -> Any:
    """Several names, separated by commas."""
    return value(str, "|".join(known) if known else "NAME", known, many=True)


Count = Annotated[int, value(int, "N", least=1)]
Counts = Annotated[tuple[int, ...], value(int, "N", least=1, many=True)]
Whole = Annotated[int, value(int, "N", least=0)]
Wholes = Annotated[tuple[int, ...], value(int, "N", least=0, many=True)]
Rate = Annotated[float, value(float, "X", least=0)]
Rates = Annotated[tuple[float, ...], value(float, "X", least=0, many=True)]
Fractions = Annotated[tuple[float, ...], value(float, "R", least=0, below=1, many=True)]


@dataclass(frozen=True)
class Recipe:
    """A recipe as a command.

    settings: the dataclass of the recipe's settings. presets: by the name of its flag, a sentence for the help and the
    settings that it changes. writes: the files that --out gets. hint: what to do when values are not finite. check:
    fails on what is wrong before anything is written. fingerprint: what a resumed run must share. run: (settings,
    folder, quiet) -> records.
    write: (settings, records, folder, command) -> the table in plain text, and the path of the report.
    """

    module: str
    about: str
    examples: str
    settings: Callable[..., Any]
    presets: Mapping[str, tuple[str, Mapping[str, Any]]]
    writes: str
    hint: str
    check: Callable[[Any], None]
    fingerprint: Callable[[Any], dict[str, Any]]
    run: Callable[[Any, Path, bool], list[dict[str, Any]]]
    write: Callable[[Any, list[dict[str, Any]], Path, str], tuple[str, Path]]


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Path
    """The folder to write to."""
    resume: bool = False
    """Continue the run in --out, with the same result."""
    quiet: bool = False
    """Show no progress bars."""


def parse(recipe: Recipe, argv: Sequence[str]) -> tuple[Any, Output]:
    """Return the settings and the output options; a flag overrides a preset, which overrides the default."""
    chosen = [name for name in recipe.presets if f"--{name}" in argv]
    if len(chosen) > 1:
        both = " and ".join(f"--{name}" for name in chosen)
        print(f"python -m {recipe.module}: error: {both} set the same flags. Give one of them.", file=sys.stderr)
        raise SystemExit(2)
    start = recipe.settings(**(recipe.presets[chosen[0]][1] if chosen else {}))
    groups: dict[str, Any] = {base.__name__.lower(): base for base in type(start).__bases__}
    parts = {name: base(**_values(start, base)) for name, base in groups.items()}
    output = Output(Path("runs") / recipe.module.rpartition(".")[2])
    switches = [
        (name, Annotated[bool, tyro.conf.arg(help=f"{words} Sets {_text(values)}.")], field(default=False))
        for name, (words, values) in recipe.presets.items()
    ]
    presets = make_dataclass("Presets", switches, frozen=True)
    presets.__doc__ = "Several settings at once; other flags override them."
    parts |= {"presets": presets()}
    kinds = [*((name, base, field()) for name, base in groups.items()), ("presets", presets, field())]
    flags = make_dataclass("Flags", [*kinds, ("output", Output)])
    found: Any = tyro.cli(
        flags,
        prog=f"python -m {recipe.module}",
        description=f"{recipe.about}\n{recipe.examples}",
        args=list(argv),
        default=flags(**parts, output=output),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    given = {k: v for name, base in groups.items() for k, v in _values(getattr(found, name), base).items()}
    return recipe.settings(**given), found.output


def _values(settings: Any, group: Any) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in fields(group)}


def _text(flags: Mapping[str, Any]) -> str:
    def shown(v: Any) -> str:
        return "" if v is True else " " + ((",".join(map(str, v)) or "none") if isinstance(v, tuple) else str(v))

    return " ".join(f"--{k.replace('_', '-')}{shown(v)}" for k, v in flags.items())


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    s, output = parse(recipe, argv)
    begin, prog = time.perf_counter(), f"python -m {recipe.module}"
    keep_memory()
    try:
        ranks.join(s.device)
        recipe.check(s)  # before anything is written, since a wrong path is the commonest mistake
        if ranks.is_main():
            runs.open_folder(output.out, recipe.fingerprint(s), output.resume)
        ranks.barrier()
        records = recipe.run(s, output.out, output.quiet or not ranks.is_main())
        if not ranks.is_main():
            return 0
        command = shlex.join(["python", "-m", recipe.module, *(a for a in argv if a != "--resume")])
        table, page = recipe.write(s, records, output.out, command)
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped. The same command with --resume continues from {output.out}.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        hint = recipe.hint if isinstance(error, FloatingPointError) else ""
        print(f"{prog}: error: {error}{hint}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not ranks.is_lost(error):
            raise
        print(f"{prog}: another process of this run has ended ({error}). --resume continues from {output.out}, with "
              "any number of processes.", file=sys.stderr)  # fmt: skip
        return 3
    finally:
        ranks.leave()
    print(table)
    print(f"\n{time.perf_counter() - begin:.0f} s; {recipe.writes} are in {output.out}")
    print(page)
    return 0
