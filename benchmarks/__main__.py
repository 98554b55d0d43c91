"""Side by side: our engines, the peers that are installed, raw autograd and JAX, on the same problems."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import extremes, goals, measure, report, whole_run
from .measure import Result, Setting, apart, say
from .problems import LARGE, NAMES, SIZES, make
from .runners import BY_NAME, RUNNERS

PARTS = {
    "table": "time, memory, accuracy and operators of each runner on each problem",
    "box": "out of the box: ours as the recipes set it up, the peers with their defaults, on P3 and P4",
    "growth": "P6: time and memory from the smallest to the largest K",
    "overhead": "microseconds that a step takes beyond a loop written by hand, on a model of ten parameters",
    "long": "P7: K = 10,000 with few iterates (sqrt) and with none (forward)",
    "run": "P9: a whole run of different batches, memory against K",
    "quality": "seconds until the wrong labels of MNIST are found with F1 0.90 (needs the data)",
}
EXAMPLES = """examples:
  python -m benchmarks --quick                                     a quick look, in less than five minutes
  python -m benchmarks --out docs/results                          the tables of the docs, in a little over an hour
  python -m benchmarks --problems P3 --runners ours,higher --parts table --rounds 3
  python -m benchmarks --parts growth --merge                      only P6; the other results in benchmarks.json stay

Peers that are not installed get a row that says so. Time is measured in turns within one process, and memory in a
separate process for each case. The data are random numbers of the right shapes, except for `quality`.
"""
LIMITS = {"P8": 8 * 2**30, "P9": 4 * 2**30}  # bytes that a process may hold
# who takes part, where not everybody does
GROWING = ("ours: reverse", "ours: reverse checkpoint=sqrt", "ours: reverse memory=auto", "ours: unroll", "higher",
           "TorchOpt", "JAX jit + scan")  # fmt: skip
IN_THE_BOX = ("ours: unroll", "ours: reverse memory=auto", "ours: unroll tasks=N")  # and every peer
SKIPPED = ("P4-20", *(name for name in LARGE if "-3" not in name or "256" in name))  # by a quick run
QUICK = ("ours: reverse", "ours: reverse blocks=auto", "ours: reverse micro=4", "ours: reverse memory=auto",
         "ours: unroll", "higher", "TorchOpt", "learn2learn", "Betty", "BOAT", "hypertorch")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=Path("runs/benchmarks"), metavar="DIR",
                   help="folder for benchmarks.md and .json, goals.md and the pictures (runs/benchmarks)")  # fmt: skip
    p.add_argument("--quick", action="store_true",
                   help="fewer samples, steps, rounds and runners; the same as --size quick")  # fmt: skip
    p.add_argument("--size", choices=list(SIZES), default=None, help="size of the problems (full)")
    p.add_argument("--problems", type=listing(NAMES), default=None, metavar="P",
                   help=f"some of {', '.join(NAMES)}, or beginnings: P1,P4 (all; quick: not "
                   f"{', '.join(SKIPPED)})")  # fmt: skip
    everyone = [r.name for r in RUNNERS]
    p.add_argument("--runners", type=listing(everyone), default=None, metavar="R",
                   help=f"some of {', '.join(everyone)}, or beginnings: ours,higher,JAX (all; quick: what is not "
                   "compiled)")  # fmt: skip
    p.add_argument("--parts", type=listing(list(PARTS)), default=None, metavar="PART",
                   help="; ".join(f"{k}: {v}" for k, v in PARTS.items()) + " (all; quick: not quality)")  # fmt: skip
    p.add_argument("--rounds", type=int, default=None, metavar="N", help="timed rounds of the table (3, quick 2)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                   help="number of cores for each runner (all)")  # fmt: skip
    p.add_argument("--malloc", choices=("keep", "default"), default="keep",
                   help="glibc's malloc, for all runners alike: keep what was freed, or return it (keep)")  # fmt: skip
    p.add_argument("--data-root", default=None, metavar="DIR", help="folder of MNIST (./data)")
    p.add_argument("--quality-seconds", type=float, default=None, metavar="S",
                   help="time limit in seconds for each method of `quality` (60, quick 20)")  # fmt: skip
    p.add_argument("--merge", action="store_true", help="keep the results of other problems and parts in --out")
    return p


def listing(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each a known one or the beginning of some."""

    def meant(part: str) -> list[str]:
        return [k for k in known if k.lower() == part] or [k for k in known if k.lower().startswith(part)]

    def parse(text: str) -> list[str]:
        asked = [part.strip().lower() for part in text.split(",") if part.strip()]
        lost = [part for part in asked if not meant(part)]
        if lost or not asked:
            raise argparse.ArgumentTypeError(f"no {', '.join(lost) or 'name'}; known: {', '.join(known)}")
        return [k for k in known if any(k in meant(part) for part in asked)]

    return parse


def table(setting: Setting, name: str, runners: list[str], rounds: int) -> Result:
    """All figures of one problem, runner by runner; what can't run has a reason in place of figures."""
    large = name in LARGE
    setting = replace(setting, limit=LIMITS["P8"] if large else None)
    say(f"{name}: the float64 result")
    exact = apart(measure.exact, setting, name)
    rows: dict[str, Result] = {}
    # the peers first: one of ours gets a tenth of the memory of the leanest
    for runner in sorted((BY_NAME[r] for r in runners), key=lambda r: r.group == "ours"):
        if not runner.takes(name):
            continue
        row: Result = {"group": runner.group, "version": runner.version(), "remark": runner.remark()}
        if why := runner.missing(name, setting.size):
            row["failed"] = why
        elif "failed" in exact:
            row["failed"] = f"no result to judge by: {exact['failed']}"
        else:
            say(f"{name}: memory, {runner.name}")
            held = [r["live"] for r in rows.values() if r["group"] == "peer" and r.get("live")]
            setting = replace(setting, tenth=min(held) // 10 if held else None)
            row |= apart(measure.case, setting, name, runner.name, exact["grads"])
        rows[runner.name] = row
    rows = {r: rows[r] for r in runners if r in rows}
    well = [r for r, row in rows.items() if "failed" not in row]
    took = apart(measure.times, setting, name, well, rounds) if well else {"seconds": {}}
    for r in well:
        rows[r] |= {"failed": took["failed"]} if "failed" in took else {
            "seconds": took["seconds"][r], "prepare": took["prepare"][r]}  # fmt: skip
    more = {"training": apart(measure.training, setting, name)} if large else {}
    p = make(name, setting.size)
    plain = took.get("seconds", {}).get(measure.PLAIN, [])
    return {"title": p.title, "steps": p.steps, "unit": p.unit, "plain": plain, "once": took.get("once", []),
            "tenth": setting.tenth, "rows": rows, **more}  # fmt: skip


def box(setting: Setting, problems: list[str], runners: list[str], rounds: int) -> Result:
    """Each hypergradient in a process of its own: ours set up as in the recipes, the peers with what they come with."""
    found: Result = {}
    for name in (p for p in problems if p[:2] in ("P3", "P4")):
        rows: dict[str, list[Result]] = {}
        for turn in range(max(1, rounds - 2)):
            for runner in (BY_NAME[r] for r in runners):
                if runner.missing() or not (
                    runner.takes(name) and (runner.group == "peer" or runner.name in IN_THE_BOX)
                ):
                    continue
                say(f"{name}, out of the box: round {turn + 1}, {runner.name}")
                malloc, layout = ("keep", "recipe") if runner.group == "ours" else ("default", "plain")
                its = replace(setting, malloc=malloc, layout=layout)
                rows.setdefault(runner.name, []).append(apart(measure.fresh, its, name, runner.name))
        found[name] = {r: next((x for x in runs if "failed" in x), None) or {
            "group": BY_NAME[r].group, "seconds": [x["seconds"] for x in runs],
            "resident": max(x["resident"] for x in runs),
        } for r, runs in rows.items()}  # fmt: skip
    return found


def growth(setting: Setting, runners: list[str]) -> Result:
    """Time and memory of each runner at each K: {runner: {K: {...}}}."""
    found: Result = {}
    for runner in (BY_NAME[r] for r in runners):
        if runner.name in GROWING and not runner.missing():
            rows: Result = {}
            for steps in SIZES[setting.size].horizons:
                say(f"P6: K = {steps}, {runner.name}")
                rows[str(steps)] = apart(measure.fresh, replace(setting, steps=steps), "P6", runner.name)
            found[runner.name] = rows
    return {"title": make("P6", setting.size, steps=1).title, "rows": found}


def long(setting: Setting) -> Result:
    """{engine: {K: figures}}."""
    rows: Result = {}
    for engine in ("reverse checkpoint=sqrt", "forward"):
        for steps in extremes.HORIZONS[setting.size]:
            say(f"P7: K = {steps}, {engine}")
            rows.setdefault(engine, {})[str(steps)] = apart(extremes.long_loop, setting, engine, steps)
    return {"rows": rows}


def run(setting: Setting, runners: list[str]) -> Result:
    """{runner: {K: figures}}; peers that were not asked for are left out."""
    setting, rows = replace(setting, limit=LIMITS["P9"]), dict[str, Result]()
    asked = [c for c in whole_run.CASES if c.group == "ours" or c.name in runners]
    for steps in whole_run.HORIZONS[setting.size]:
        say(f"P9: K = {steps}, plain")
        rows.setdefault("plain run", {})[str(steps)] = apart(whole_run.plain_run, setting, steps)
        for case in (c for c in asked if steps <= c.most):
            say(f"P9: K = {steps}, {case.name}")
            why = case.missing()
            rows.setdefault(case.name, {})[str(steps)] = (
                {"failed": why} if why else apart(whole_run.case, setting, case.name, steps)
            )
    return {"limit": setting.limit, "rows": rows}


def quality(setting: Setting, runners: list[str], root: str | None, cap: float) -> Result:
    try:
        from . import quality as cleaning
    except ImportError as error:
        return {"skipped": f"needs the recipes' packages ({error})"}
    place = cleaning.data(root)
    if not place:
        return {"skipped": f"no MNIST in {root or './data'}: give --data-root"}
    asked = [r for r in runners if not BY_NAME[r].missing()]
    return {"rows": {label: apart(cleaning.clean, setting, solver, runner, place, cap)
                     for label, (solver, runner) in cleaning.cleaners(asked).items()}}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    size = args.size or ("quick" if args.quick else "full")
    rounds = args.rounds or (3 if size == "full" else 2)
    runners = args.runners or [r.name for r in RUNNERS if size != "quick" or r.name in QUICK]
    problems = args.problems or [name for name in NAMES if size == "full" or name not in SKIPPED]
    setting, begin = Setting(size, args.threads, args.malloc), time.perf_counter()
    results: dict[str, Any] = report.load(args.out) if args.merge else {}
    machine = report.machine([r for r in RUNNERS if r.package])
    if (before := results.get("machine", machine)["cpu"]) != machine["cpu"]:
        parser().error(
            f"--merge: what {args.out} has was measured on {before}, and this is {machine['cpu']}. Figures of two "
            "machines are not mixed. Leave out --merge, or give another --out"
        )
    machine["packages"] = results.get("machine", {}).get("packages", {}) | machine["packages"]  # of the parts that stay
    results |= {
        "setting": {"size": size, "threads": args.threads, "malloc": args.malloc, "rounds": rounds},
        "machine": machine,
        "when": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commands": [*results.get("commands", []), shlex.join(["python", "-m", "benchmarks", *argv])],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    cap = args.quality_seconds or (60.0 if size == "full" else 20.0)
    jobs: dict[str, list[tuple[str, Callable[[], Result]]]] = {
        "table": [(name, lambda name=name: table(setting, name, runners, rounds)) for name in problems],
        "box": [("", lambda: box(setting, problems, runners, rounds))],
        "growth": [("", lambda: growth(setting, runners))],
        "overhead": [("", lambda: apart(extremes.overhead, replace(setting, threads=1), rounds))],
        "long": [("", lambda: long(setting))],
        "run": [("", lambda: run(setting, runners))],
        "quality": [("", lambda: quality(setting, runners, args.data_root, cap))],
    }
    for part in args.parts or [part for part in PARTS if size == "full" or part != "quality"]:
        for key, job in jobs[part]:
            if key:
                results.setdefault(part, {})[key] = job()
            else:
                results[part] = job()
            report.save(args.out, results)  # after each job: a run that is stopped has what it did
            goals.write(args.out, results)
    say(f"{time.perf_counter() - begin:.0f} s")
    print(f"\n{report.markdown(results)}\nwritten to {args.out}/benchmarks.md, goals.md, .json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
