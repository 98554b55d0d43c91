"""Print the errors of the loops of this folder: of the library where it has what a loop needs, else of the oracle.

With `--cut`, the oracle takes companions and computed values for constants in the hypergradient too: what a block does
that does not know of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import bilevel_plugin as bilevel
from docs.loops import END, HYPERGRADIENT, changed_lines, end_error, hypergradient_error

from . import NAMES, NEEDS, Next, oracle


@contextmanager
def able(name: str) -> Iterator[str]:
    """A library that has what this loop needs, and who that is."""
    need = NEEDS.get(name)
    if need is None or hasattr(bilevel, need) or hasattr(bilevel.Loop, need):
        yield "library"
        return
    names = {"inner": oracle.inner, "ema": oracle.ema, "copy": oracle.copy, "sam": oracle.Sam}
    before = {n: getattr(bilevel, n, None) for n in names}
    for n, x in names.items():
        setattr(bilevel, n, x)
    try:
        yield "oracle"
    finally:
        for n, x in before.items():
            delattr(bilevel, n) if x is None else setattr(bilevel, n, x)


def main() -> int:
    torch.set_num_threads(1)
    fine, oracle.CUT = True, "--cut" in sys.argv
    for name in [x for x in sys.argv[1:] if x != "--cut"] or NAMES:
        entry = Next(name)
        lines, added, removed = changed_lines(entry)
        with able(name) as who:
            end, grad = end_error(entry), hypergradient_error(entry)
        good = end <= END and grad <= HYPERGRADIENT
        fine &= good
        print(f"{name} ({who}): {lines} lines, +{added} −{removed}; end point {end:.1e}, hypergradient {grad:.1e}"
              + ("" if good else ": too large"), flush=True)  # fmt: skip
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
