"""What each library makes of the loops that people have: right, silently wrong, an error, or not there.

    python -m benchmarks.peers_matrix --out docs/results      the table of the docs, in two to three minutes of one core

The judge is the plain loop, written as a user writes it: central differences of g at its end, in float64. hypertorch is
not on the package index: HYPERTORCH names a checkout of its repository. A library that is not installed keeps the
column that was measured before. Why a library is off stands in peers_notes.md beside the page, and is added at its end.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import bilevel_plugin as bilevel
from bilevel_recipes.runs import write_page

from . import measure
from .peers_loops import (
    LIBRARIES,
    OURS,
    ROWS,
    SECOND,
    STEPS,
    Grads,
    Loop,
    NotThereError,
    Row,
    built,
    hypertorch_reverse,
    truth,
)
from .problems import MAKERS, SIZES, Problem
from .runners import BY_NAME, importable

RIGHT = 1e-5  # relative to the norm: what is nearer than this to the differences is right
MEMORY = {  # problems of benchmarks/problems.py, samples, steps
    "memory: a small transformer, K = 100": ("P5", 16, 100),
    "memory: an MLP with many weights, K = 20": ("P2", 200, 20),
}
DEFAULT, LEAN = "ours: reverse", "ours: reverse checkpoint=sqrt"
SHORT = (
    "SGD",
    "SGD with momentum and weight decay",
    "Adam",
    "clipped gradients",
    "a learnt rate",
    "BatchNorm, with g in eval mode",
    "activation checkpointing",
    "tied weights",
    "a line in the loop that reads `model` (EMA)",
    "attention (`nn.TransformerEncoderLayer`)",
    "`weight_norm`",
    *MEMORY,
)
HEAD = f"""# The same loops in seven libraries

Made by `make peers`. Each row is a training loop that people have. It is small, in float64, and has {STEPS} steps. The
outer variables are a weight for each sample, or the options that the row names. Central differences of the plain loop,
without any library, decide what is right. Adam is run with three seeds, and the cell has the median.

Each library is used as its own documentation says. Where it has an option for something, that option is used. Where it
has two ways, the better one counts.

| cell | meaning |
| --- | --- |
| ✓ | right: the relative error is below {RIGHT:.0e} |
| **a percentage** | silently wrong, by this much |
| warns | wrong by this much, and a `DerivativeWarning` says so |
| error | the loop ends in an [error](#errors-warnings-and-what-is-not-there) |
| – | the library has no such feature |

"""
Cell = dict[str, Any]


# --- one cell ---------------------------------------------------------------------------------------------------


def error(row: Row, how: Callable[[Loop], Grads], seed: int) -> tuple[float, str]:
    """How far off it is, relative to the norm, and the first line of our own warning, if there is one."""
    loop = built(row.make, seed)
    before = [x.clone() for x in loop.model.state_dict().values()]
    with warnings.catch_warnings(record=True) as seen, redirect_stdout(None):
        warnings.simplefilter("always")
        got = flat(how(loop))
    if row.what == "model":
        got, expected = flat(loop.model.state_dict().values()), flat(before)
    elif row.what == "average":
        plain = built(row.make, seed)
        plain.plain()
        got, expected = flat(loop.average), flat(plain.average)
    else:
        expected = truth(row.make, seed)
    warned = [str(w.message).splitlines()[0] for w in seen if w.category is bilevel.DerivativeWarning]
    return float((got - expected).norm() / expected.norm()), (warned or [""])[0]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1).double() for x in tensors])


def cell(row: Row, library: str) -> Cell:
    """What a library makes of a loop, in the better of its ways."""
    ways = [how for how in (LIBRARIES[library].how, SECOND.get(library)) if how]
    return min((attempt(row, how) for how in ways), key=lambda c: c.get("error", float("inf")))


def attempt(row: Row, how: Callable[[Loop], Grads]) -> Cell:
    """Right if it is so with each of the row's seeds; else the median of the errors."""

    def errors() -> tuple[list[float], list[str]]:
        found = [error(row, how, seed) for seed in row.seeds]
        return sorted(off for off, _ in found), [warned for _, warned in found]

    try:
        offs, warned = errors()
    except NotThereError as why:
        return {"outcome": "not there", "note": str(why)}
    except Exception as why:  # they fail in many ways
        note = f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:120]}"
        if row.remedy:
            with sdpa_kernel(SDPBackend.MATH):
                offs, _ = errors()
            note += f". Under `{row.remedy}` it is {'right' if offs[-1] <= RIGHT else 'wrong'}"
        return {"outcome": "error", "note": note}
    if offs[-1] <= RIGHT:
        return {"outcome": "right", "error": offs[-1]}
    note = warned[0] if all(warned) else ""
    return {"outcome": "warns" if note else "wrong", "error": offs[len(offs) // 2], "errors": offs, "note": note}


# --- memory -----------------------------------------------------------------------------------------------------


def memory(library: str, problem: str, samples: int, steps: int) -> Cell:
    """Peak bytes of tensors of one hypergradient, beside those of K plain steps, in float32."""
    plain = held_bytes("plain", problem, samples, steps)
    held = held_bytes(DEFAULT if library == OURS else library, problem, samples, steps)
    found = {"outcome": "measured", "live": held, "plain": plain, "ratio": held / plain}
    return {**found, "lean": held_bytes(LEAN, problem, samples, steps) / plain} if library == OURS else found


@functools.cache
def held_bytes(runner: str, problem: str, samples: int, steps: int) -> int:
    """The peak of the bytes that tensors hold."""
    torch.manual_seed(0)
    size = replace(SIZES["full"], samples=samples, texts=samples)
    p = replace(MAKERS[problem](problem, size, False, torch.float32), steps=steps)
    run: Callable[[], Any] = {
        "plain": lambda: functools.partial(p.train, p.batches()[0]),
        "hypertorch": lambda: functools.partial(by_hypertorch, p),
    }.get(runner, lambda: BY_NAME[runner].build(p))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        return measure.live(run)


def by_hypertorch(p: Problem) -> Grads:
    """Its `reverse`, the leaner of its two ways."""
    inner, outer = p.batches()
    steps = [inner[k % len(inner)] for k in range(p.steps)]
    return hypertorch_reverse(Loop(p.model, p.outer, p.h, p.g, steps, outer, {"lr": p.lr}, keeps_average=False))


# --- the page ---------------------------------------------------------------------------------------------------


def measured(
    library: str, rows: Sequence[Row] = tuple(ROWS), memories: Mapping[str, tuple[str, int, int]] = MEMORY
) -> dict[str, Any]:
    """Its version, the date, and a cell for each row."""
    logging.disable(logging.INFO)  # Betty reports each set-up
    torch.set_default_dtype(torch.float64)
    try:
        cells = {row.title: cell(row, library) for row in rows}
    finally:
        torch.set_default_dtype(torch.float32)
        logging.disable(logging.NOTSET)
    cells |= {title: memory(library, *of) for title, of in memories.items()}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"version": LIBRARIES[library].version(), "date": today, "torch": torch.__version__, "cells": cells}


def percent(off: float) -> str:
    return f"{100 * off:.2g} %" if off < 0.1 else f"{100 * off:.0f} %"


def shown(c: Cell) -> str:
    """A cell as text."""
    if c["outcome"] == "measured":
        return f"{c['ratio']:.1f} ×"
    if c["outcome"] in ("wrong", "warns"):
        return f"**{percent(c['error'])}**" if c["outcome"] == "wrong" else f"warns ({percent(c['error'])})"
    return {"right": "✓", "error": "error", "not there": "–", "not installed": "not installed here"}[c["outcome"]]


def table(found: dict[str, Any], titles: Iterable[str]) -> str:
    none = {"outcome": "not installed"}
    lines = [f"| your loop has | {' | '.join(LIBRARIES)} |", f"| --- |{' :---: |' * len(LIBRARIES)}"]
    for title in titles:
        cells = [found.get(n, {}).get("cells", {}).get(title, none) for n in LIBRARIES]
        lines.append(f"| {title} | {' | '.join(map(shown, cells))} |")
    return "\n".join(lines) + "\n"


def page(found: dict[str, Any]) -> str:
    ours, dates = found[OURS], " and ".join(sorted({of["date"] for of in found.values()}))
    versions = ", ".join(f"{name} {of['version']}" for name, of in found.items() if name != OURS)
    held = [ours["cells"][title] for title in MEMORY]
    samples = [of[1] for of in MEMORY.values()]
    plain, lean = (" and ".join(f"{of[key] / unit:.1f}" for of in held) for key, unit in (("plain", 1e6), ("lean", 1)))
    notes = "\n".join(
        f"### {name}\n\n{lines}\n"
        for name, of in found.items()
        if (lines := "\n".join(f"- **{t}**: {c['note'].rstrip('.')}." for t, c in of["cells"].items() if c.get("note")))
    ).replace("<", "‹")
    return f"""{HEAD}{table(found, [row.title for row in ROWS])}
Measured on {dates} with torch {ours["torch"]} on a CPU; {versions}.

## Memory

{table(found, MEMORY)}
These are the peak bytes that tensors hold during one hypergradient, divided by those of K plain training steps of the
same model in float32. Plain training holds {plain} MB. Ours is the default engine, `"reverse"`, which stores K sets of
weights. With `Reverse(checkpoint="sqrt")` it is {lean} ×. Ours includes the check of the derivatives in float64, which
runs once for a model. hypertorch is run with its `reverse`, the leaner of its two ways.

- *A small transformer*: 2 layers of width 64, 28 tokens, batches of {samples[0]}. The graph takes most of the memory.
- *An MLP with many weights*: 784-300-10, {samples[1]} samples. The weights take most of the memory, so storing them
  gains nothing.

## Short form

README and the home page show these rows.

<!-- --8<-- [start:short] -->

{table(found, SHORT).replace(f"| {OURS} |", "| ours |", 1)}
✓: right. **A percentage**: silently wrong, by this much. *Error*: the loop stops. –: the library has no such feature.
Memory is relative to plain training; with `Reverse(checkpoint="sqrt")` ours is {lean} ×. Measured on {dates}:
{versions}.
<!-- --8<-- [end:short] -->

## Errors, warnings, and what is not there

{notes}"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers_matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="where peers.md and .json go (runs/peers)")
    parser.add_argument(
        "--libraries", default=",".join(LIBRARIES), help="some of them, by commas; none: the page alone"
    )
    options = parser.parse_args(arguments)
    asked = [name for name in options.libraries.split(",") if name]
    if unknown := set(asked) - set(LIBRARIES):
        parser.error(f"no {', '.join(sorted(unknown))}; known: {', '.join(LIBRARIES)}")
    torch.set_num_threads(1)
    if place := os.environ.get("HYPERTORCH"):
        sys.path.append(place)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "peers.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in asked:
        if importable(LIBRARIES[name].module) is True:
            measure.say(name)
            found[name] = measured(name)
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    found = {name: found[name] for name in LIBRARIES if name in found}
    write_page(options.out / "peers.md", page(found))
    print(table(found, [*(row.title for row in ROWS), *MEMORY]))


if __name__ == "__main__":
    main()
