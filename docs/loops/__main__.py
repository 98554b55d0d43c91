"""Measure the loops of the gallery, and write docs/results/loops.md and the pages of docs/loops/."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from pathlib import Path

import torch

from bilevel_recipes.runs import write_page

from . import (
    END,
    FOLDER,
    HYPERGRADIENT,
    Entry,
    changed_lines,
    difference,
    end_error,
    entries,
    hypergradient_error,
    peak,
    seconds,
)

RESULTS = FOLDER.parent / "results" / "loops.md"
MADE = "<!-- Made by `python -m docs.loops --pages`; edit the files in docs/loops/{} instead. -->"
ROW = re.compile(r"^\| \[[^\]]*\]\(\.\./loops/(\w+)\.md\) \|.*$", re.MULTILINE)

PAGE = """\
{made}

# {title}

*{sentence}*

{prose}

## What changed

From `docs/loops/{name}/plain.py` to `wrapped.py`. A line that was only indented is not marked.

~~~diff
{diff}
~~~

## The whole loop

<!-- excerpt of docs/loops/{name}/wrapped.py -->
```python
{code}
```

The model and the data are made in `docs/loops/{name}/setup.py`.
[Its errors, time and memory](../results/loops.md) are in the table of all loops.
"""

INDEX = """\
{made}

# Loops

Find the loop that is most like yours. Each page shows a plain loop, the same loop with a block around it, and the
difference between the two. All are tested: the block ends where the plain loop ends, and its hypergradient agrees with
central differences of the plain loop. [The table](../results/loops.md) has the errors, the time and the memory of each.

{items}

Each loop is a folder `docs/loops/<name>/` with the files `setup.py`, `plain.py` and `wrapped.py`.
`python -m docs.loops` measures all loops and writes these pages.
"""

TABLE = """\
# The gallery in figures

{cores} cores, no GPU, torch {torch}, one thread, float64. Made by `python -m docs.loops`; not edited by hand.

Every loop of [the gallery](../loops/index.md) was run without and with the block.

- **Lines**: the lines of the plain loop's file, and the lines that the block adds and removes. Empty lines and lines
  that were only indented do not count.
- **End point**: the largest relative difference between the trained tensors, or the outer loss, of the two runs. The
  tests accept {end:.0e}.
- **Hypergradient**: its relative error against central differences of the plain loop, along three random directions.
  The tests accept {grad:.0e}. First-order MAML is compared with the gradient that the plain loop takes, which is not
  the derivative of its outer loss.
- **Time** and **peak memory**: those of training *and* hypergradient, relative to training alone. The time is the
  median of the CPU time over eleven runs. The memory is the peak of the bytes that tensors hold. The loops are tiny: a
  plain run takes {fastest:.0f} to {slowest:.0f} ms. So the time is mostly that of Python, and the memory is a few
  kilobytes. [The benchmarks](benchmarks.md) have larger models.

| loop | lines | changed | end point | hypergradient | plain, ms | time | peak memory |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{rows}
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m docs.loops", description=__doc__)
    p.add_argument("names", nargs="*", help="loops; all if none is named, and the rows of others stay in the table")
    p.add_argument("--check", action="store_true", help="print the errors of the loops, and write nothing")
    p.add_argument("--pages", action="store_true", help="write the pages, and measure nothing")
    return p


# --- pages ------------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """The text of every page of docs/loops/."""
    found = {FOLDER / f"{entry.name}.md": page(entry) for entry in entries()}
    items = "\n".join(f"- [{title(e)}]({e.name}.md): {_sentence(e)}" for e in sorted(entries(), key=_order))
    return found | {FOLDER / "index.md": INDEX.format(made=MADE.format("__main__.py"), items=items)}


def page(entry: Entry) -> str:
    prose = re.sub(r"\A# .*\n+", "", entry.docstring("wrapped"))
    diff, code = "\n".join(difference(entry)), "\n".join(entry.code("wrapped"))
    return PAGE.format(made=MADE.format(entry.name), title=title(entry), sentence=_sentence(entry), prose=prose,
                       name=entry.name, diff=diff, code=code)  # fmt: skip


def title(entry: Entry) -> str:
    """The first line of wrapped.py's docstring if it is a title, else the name of the folder in words."""
    named = re.match(r"# (.*)", entry.docstring("wrapped"))
    return named[1] if named else entry.name.replace("_", " ").capitalize()


def _sentence(entry: Entry) -> str:
    return " ".join(entry.docstring("setup").split())


def _order(entry: Entry) -> str:
    return title(entry).lower()


# --- figures ----------------------------------------------------------------------------------------------------


def check(loops: list[Entry]) -> bool:
    """Print the errors of each loop; whether all are as small as the tests want them."""
    fine = True
    for entry in loops:
        lines, added, removed = changed_lines(entry)
        end, grad = end_error(entry), hypergradient_error(entry)
        good = end <= END and grad <= HYPERGRADIENT
        fine &= good
        print(f"{entry.name}: {lines} lines, +{added} −{removed}; end point {end:.1e}, hypergradient {grad:.1e}"
              + ("" if good else ": too large"))  # fmt: skip
    return fine


def row(entry: Entry) -> str:
    """The figures of a loop, measured now."""
    lines, added, removed = changed_lines(entry)
    plain, wrapped = seconds(entry)
    before, after = peak(entry)
    cells = [f"[{title(entry)}](../loops/{entry.name}.md)", f"{lines}", f"+{added} −{removed}",
             _error(end_error(entry)), _error(hypergradient_error(entry)), f"{plain * 1e3:.0f}",
             f"{wrapped / plain:.1f}", f"{after / before:.1f}"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _error(x: float) -> str:
    return f"{x:.0e}" if x else "0"


def rows() -> dict[str, str]:
    """Those of the table as it stands, by the names of the loops."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return {m[1]: m[0] for m in ROW.finditer(text)}


def table(found: dict[str, str]) -> str:
    in_order = [found[entry.name] for entry in sorted(entries(), key=_order) if entry.name in found]
    times = [float(line.split("|")[6]) for line in in_order]
    return TABLE.format(cores=os.cpu_count(), torch=torch.__version__, end=END, grad=HYPERGRADIENT,
                        fastest=min(times), slowest=max(times), rows="\n".join(in_order))  # fmt: skip


def main() -> int:
    args = parser().parse_args()
    torch.set_num_threads(1)
    known = {entry.name: entry for entry in entries()}
    for name in args.names:
        if name not in known:
            sys.exit(
                f"{name}: no folder of docs/loops with setup.py, plain.py and wrapped.py. There are {list(known)}."
            )
    loops = [known[name] for name in args.names] or list(known.values())
    if args.check:
        return 0 if check(loops) else 1
    failed, measured = [], rows()
    for entry in [] if args.pages else loops:
        try:
            measured[entry.name] = row(entry)
            print(measured[entry.name], flush=True)
        except Exception:  # the others are measured all the same; this one has no figures
            traceback.print_exc()
            measured.pop(entry.name, None)
            failed.append(entry.name)
    if not args.pages and measured:
        write_page(RESULTS, table(measured))
    for path, text in pages().items():
        path.write_text(text)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
