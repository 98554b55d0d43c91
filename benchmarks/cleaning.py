"""Finding wrong labels on many kinds of data sets: our recipe, cleanlab with three models, the checked rows alone.

    python -m benchmarks.cleaning --data-root DIR --seeds 3 --threads 1 --out docs/results

Writes cleaning.json, cleaning.md and cleaning.png. A result that cleaning.json already has is not computed again, so
that an interrupted run goes on; `--fresh METHOD` computes those of a method anew.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from bilevel_recipes.tables import plain

from . import cleaning_page
from .cleaning_methods import METHODS, evaluate
from .cleaning_sets import CACHE, SETS, Loaded, load_set
from .report import machine

Results = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.cleaning", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--data-root", type=Path, action="append", default=[], metavar="DIR",
                   help="where the files are; may be given several times; what is missing is not run")  # fmt: skip
    p.add_argument("--sets", type=listing(SETS), default=list(SETS), metavar="A,B", help="some of " + ", ".join(SETS))
    p.add_argument("--methods", type=listing(METHODS), default=list(METHODS), metavar="A,B",
                   help="some of " + ", ".join(METHODS))  # fmt: skip
    p.add_argument("--seeds", type=int, default=3, metavar="S", help="draws of each set (3)")
    p.add_argument("--first-seed", type=int, default=0, metavar="N",
                   help="seed of the first draw (0); others than a method was developed on are fairer")  # fmt: skip
    p.add_argument("--threads", type=int, default=1, metavar="N", help="threads of every method (1)")
    p.add_argument("--fresh", type=listing(METHODS), default=[], metavar="A,B", help="methods to compute anew")
    p.add_argument("--out", type=Path, default=Path("runs/cleaning"), metavar="DIR",
                   help="where the page goes (runs/cleaning)")  # fmt: skip
    p.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"where features are kept ({CACHE})")
    return p


def listing(known: Sequence[str] | dict[str, Any]) -> Callable[[str], list[str]]:
    """Names between commas, all of them known."""

    def split(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return split


def main(argv: Sequence[str] | None = None) -> None:
    p = parser()
    asked = p.parse_args(argv)
    if asked.seeds < 1 or asked.threads < 1 or asked.first_seed < 0:
        p.error(f"--seeds ({asked.seeds}) and --threads ({asked.threads}) are at least 1, --first-seed at least 0")
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "cleaning.json"
    torch.set_num_threads(asked.threads)
    fresh = set(asked.fresh)
    with threadpool_limits(asked.threads):
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            for name in asked.sets:
                run(file, name, seed, asked, fresh)
    results = update(file, lambda r: r.update(origin(asked.threads)))
    print(cleaning_page.screen(results))
    cleaning_page.write(asked.out, results)


def run(file: Path, name: str, seed: int, asked: argparse.Namespace, fresh: set[str]) -> None:
    """Run the methods on one draw of a set, or note which file of it is missing."""
    try:
        one = load_set(name, seed, asked.data_root, asked.cache)
    except FileNotFoundError as error:
        why = str(error)
        update(file, lambda r: r.setdefault("missing", {}).update({name: why}))
        print(f"{name}: not run: {why}", file=sys.stderr)
        return
    update(file, lambda r: r.setdefault("missing", {}).pop(name, None))
    for method in asked.methods:
        known = stored(json.loads(file.read_text()), name, method).get(str(seed))
        if known and known["features"] == one.fingerprint and method not in fresh:
            continue
        row = measure(one, method, seed)
        update(file, lambda r, m=method, row=row: stored(r, name, m).update({str(seed): row}))
        figures = " ".join(
            f"{key} {row[key]:.3f}" for key in ("f1", "ap", "p100", "cpu_seconds") if row[key] is not None
        )
        print(f"{name} {seed} {method}: {row['flagged']} flagged, {row['wrong']} wrong; {figures}", file=sys.stderr)


def measure(one: Loaded, method: str, seed: int) -> Results:
    """The metrics of a method on a draw, and how long it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = METHODS[method](one, seed)
    took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return plain({**evaluate(one, found), **took, "feature_seconds": one.seconds, "features": one.fingerprint})


def stored(results: Results, name: str, method: str) -> Results:
    """The results of a method on a set, by seed."""
    return results.setdefault("results", {}).setdefault(name, {}).setdefault(method, {})


def update(file: Path, change: Callable[[Results], Any]) -> Results:
    """Change the results in a file, one process at a time: two runs may share it."""
    with open(file, "a+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        text = handle.read()
        results = json.loads(text) if text else {}
        change(results)
        handle.seek(0)
        handle.truncate()
        handle.write(json.dumps(results, indent=1) + "\n")
    return results


def origin(threads: int) -> Results:
    """When and where."""
    return {"machine": machine([]), "threads": threads, "when": datetime.date.today().isoformat()}


if __name__ == "__main__":
    main()
