"""The goals for speed and memory, each with the figure that was found: a page made from benchmarks.json.

    python -m benchmarks.goals docs/results

What people have to say about the figures stands in goals_notes.md beside the page, and is added below the table.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilevel_recipes.runs import write_page

from . import report
from .problems import LARGE

Results = dict[str, Any]
Found = dict[str, tuple[float, float]]  # the place -> the figure there, and the goal there


@dataclass(frozen=True)
class Goal:
    """`figures` gives the figure of each place that has one; the worst of them is shown."""

    text: str
    figures: Callable[[Results], Found]
    at_least: bool = False
    digits: int = 2

    def row(self, results: Results) -> list[str]:
        found = self.figures(results)
        if not found:
            return [self.text, "–", "–", "–", "not measured"]
        ratio: Callable[[str], float] = lambda place: found[place][0] / found[place][1]  # noqa: E731
        place = min(found, key=ratio) if self.at_least else max(found, key=ratio)
        figure, limit = found[place]
        reached = figure >= limit if self.at_least else figure <= limit
        where = place + f" (worst of {len(found)})" * (len(found) > 1)
        goal = f"{'≥' if self.at_least else '≤'} {self.show(limit)}"
        return [self.text, where, goal, self.show(figure), "reached" if reached else "**missed**"]

    def show(self, x: float) -> str:
        return f"{x:.0e}" if 0 < x < 1e-3 else f"{x:.{self.digits}f}"


# --- figures ----------------------------------------------------------------------------------------------------


def row(results: Results, place: str, runner: str) -> dict[str, Any]:
    """The figures of a runner on a problem; none if it did not run, or if its gradient is wrong."""
    found = results.get("table", {}).get(place, {}).get("rows", {}).get(runner, {})
    return found if found.get("seconds") and report.is_exact(found) else {}


def over_peer(key: str, runner: str, goal: dict[str, float]) -> Callable[[Results], Found]:
    """A runner's time or memory as a multiple of the fastest or leanest exact peer's, on each problem."""

    def figures(results: Results) -> Found:
        found: Found = {}
        for place, limit in goal.items():
            mine = report.value(row(results, place, runner), key)
            peer = report.best(results.get("table", {}).get(place, {}).get("rows", {}), key)
            if mine is not None and peer:
                found[place] = mine / peer, limit
        return found

    return figures


def beside_fastest(results: Results) -> Found:
    """unroll's middle round over that of the fastest exact peer; the goal is the peer's own slowest round over it."""
    found: Found = {}
    for place, table in results.get("table", {}).items():
        if place in LARGE:  # timed once, where it is large
            continue
        mine = report.value(row(results, place, "ours: unroll"), "seconds")
        peers = [r["seconds"] for r in table["rows"].values() if r.get("group") == "peer" and report.is_exact(r)]
        rounds = min((r for r in peers if r), key=statistics.median, default=None)
        if mine is not None and rounds and len(rounds) > 1:
            found[place] = mine / statistics.median(rounds), max(rounds) / statistics.median(rounds)
    return found


def over_plain(runner: str, goal: dict[str, float]) -> Callable[[Results], Found]:
    """A runner's time as a multiple of the problem's unit."""

    def figures(results: Results) -> Found:
        found: Found = {}
        for place, limit in goal.items():
            mine = report.value(row(results, place, runner), "seconds")
            plain = results.get("table", {}).get(place, {}).get("plain")
            if mine is not None and plain:
                found[place] = mine / statistics.median(plain), limit
        return found

    return figures


def out_of_the_box(results: Results) -> Found:
    found: Found = {}
    for place, rows in results.get("box", {}).items():
        mine, peer = (report.best(rows, "seconds", group) for group in ("ours", "peer"))
        if mine and peer:
            found[place] = peer / mine, 1.5
    return found


def quality(results: Results) -> Found:
    """Our time to F1 0.90 over the best peer's, who has at least the time that it was given."""
    rows = {n: r for n, r in results.get("quality", {}).get("rows", {}).items() if "reached" in r}
    mine = [r["reached"]["0.9"] for n, r in rows.items() if n.startswith("ours: bigsam") and r["reached"]["0.9"]]
    peers = [r["reached"]["0.9"] or r["cap"] for n, r in rows.items() if not n.startswith("ours")]
    return {"MNIST": (min(mine) / min(peers), 0.2)} if mine and peers else {}


def overhead(results: Results) -> Found:
    rows: dict[str, list[list[float]]] = results.get("overhead", {}).get("rows", {})
    pairs = {n: zip(took, rows["by hand"], strict=True) for n, took in rows.items() if n != "by hand"}
    return {name: (statistics.median(a[0] - b[0] for a, b in each), 150.0) for name, each in pairs.items()}


def linear(results: Results) -> Found:
    """Time of a step at the largest K over that at the smallest, on P6."""
    found: Found = {}
    for name, row in results.get("growth", {}).get("rows", {}).items():
        ks = [k for k, r in row.items() if "seconds" in r]
        if name in ("ours: unroll", "ours: reverse") and len(ks) > 1:
            first, last = (row[k]["seconds"] / int(k) for k in (ks[0], ks[-1]))
            found[f"P6, {name.removeprefix('ours: ')}"] = last / first, 1.2
    return found


def grown_by(rows: dict[str, Any], key: str) -> tuple[int, int, float] | None:
    """(smallest K, largest K, MB by which the largest needs more), if both ran."""
    done = {int(k): r[key] for k, r in rows.items() if key in r}
    if len(done) < 2 or len(done) < len(rows):
        return None
    return min(done), max(done), (done[max(done)] - done[min(done)]) / 1e6


def long(results: Results) -> Found:
    grown = grown_by(results.get("long", {}).get("rows", {}).get("forward", {}), "resident")
    return {f"P7, K = {grown[1]:,}": (max(grown[2], 0.0), 1.0)} if grown else {}


def large(what: str, limit: float) -> Callable[[Results], Found]:
    """Of `blocks`: bytes less the iterates over those of plain training, time over that of `reverse`, or the error."""

    def figures(results: Results) -> Found:
        found: Found = {}
        for place in LARGE:
            mine, reverse = (row(results, place, f"ours: {r}") for r in ("reverse blocks=auto", "reverse"))
            training = results.get("table", {}).get(place, {}).get("training", {})
            if mine and what == "error":
                found[place] = mine["error"], limit
            elif mine and what == "memory" and "live" in training:
                less = report.beyond_iterates("ours: reverse blocks=auto", mine, training)
                found[place] = less / training["live"], limit
            elif mine and reverse and what == "time":
                found[place] = statistics.median(mine["seconds"]) / statistics.median(reverse["seconds"]), limit
        return found

    return figures


def whole_run(what: str) -> Callable[[Results], Found]:
    """Of a run whose batches come back: its growth beyond 2·√K states (none where they are on disk), or its time."""

    def figures(results: Results) -> Found:
        found: Found = {}
        for name, rows in results.get("run", {}).get("rows", {}).items():
            grown = grown_by(rows, "own")
            if "fetch=" not in name or grown is None:
                continue
            least, most, megabytes = grown
            last, place = rows[str(most)], f"P9, {name.removeprefix('ours: ')}, K = {most:,}"
            if what == "time":
                found[place] = last["seconds"] / last["plain"], 3.5
            else:
                states = 0.0 if "store=" in name else 2 * (math.sqrt(most) - math.sqrt(least)) * last["state"] / 1e6
                found[place] = max(megabytes - states, 0.0), 5.0
        return found

    return figures


TENTH = "ours: reverse memory=tenth"
MICRO = "ours: reverse micro=4"
COMPILED = "ours: reverse compile"
GOALS = [
    Goal("`unroll`: time, relative to the fastest peer (goal: within that peer's spread)", beside_fastest),
    Goal("`unroll`: time, relative to K plain steps", over_plain("ours: unroll", {"P1": 2.3, "P2": 2.3, "P3": 3.1})),
    Goal("`unroll`: time, relative to an encoder pass", over_plain("ours: unroll", {"P4-5": 1.2, "P4-20": 1.2})),
    Goal("`memory=` a tenth of the leanest peer's: memory, relative to that peer",
         over_peer("live", TENTH, {"P1": 0.105, "P2": 0.105}), digits=3),
    Goal("the same: time, relative to the fastest peer", over_peer("seconds", TENTH, {"P1": 1.5, "P2": 1.5})),
    Goal("`micro=4`: memory, relative to the leanest peer", over_peer("live", MICRO, {"P3": 0.105}), digits=3),
    Goal("`micro=4`: time, relative to the fastest peer", over_peer("seconds", MICRO, {"P3": 1.5})),
    Goal("`compile=True`: memory, relative to the leanest peer",
         over_peer("live", COMPILED, dict.fromkeys(("P1", "P2", "P3", "P5"), 0.105)), digits=3),
    Goal("`compile=True`: time, relative to the fastest peer",
         over_peer("seconds", COMPILED, dict.fromkeys(("P1", "P2", "P3", "P5"), 1.3))),
    Goal("`blocks=\"auto\"`: memory without the stored states, relative to plain training", large("memory", 1.0)),
    Goal("`blocks=\"auto\"`: time, relative to `reverse`", large("time", 1.4)),
    Goal("`blocks=\"auto\"`: error in float64", large("error", 1e-10)),
    Goal("whole run with `fetch=`: growth in MB from the smallest to the largest K, without the states",
         whole_run("memory"), digits=1),
    Goal("whole run with `fetch=`: time, relative to K plain steps", whole_run("time")),
    Goal("out of the box: how many times as fast as the fastest peer", out_of_the_box, at_least=True),
    Goal("time to F1 0.90, relative to the best peer", quality),
    Goal("overhead of a step on ten parameters, in µs", overhead, digits=0),
    Goal("time of a step at the largest K, relative to the smallest K", linear),
    Goal("`forward`: growth in MB from the smallest to the largest K", long, digits=1),
]  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------------


def page(results: Results) -> str:
    lines = [
        "# Goals: reached or not",
        "",
        "These are our goals for speed and memory. The table shows the figure of the problem that does worst, so a "
        "goal counts as reached only if every problem reaches it.",
        "",
        *report.grid(["what", "where", "goal", "found", ""], (goal.row(results) for goal in GOALS)),
        "",
        "*Not measured* means that this part of the benchmark was not run, or that its runner failed. The goal of a "
        "tenth of the memory has a tolerance of 5 %.",
        "",
        f"{report.origin(results)} The figures come from [the tables](benchmarks.md). `python -m benchmarks.goals` "
        "writes this page; the notes below are kept in `goals_notes.md`.",
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, results: Results) -> None:
    """Write goals.md."""
    write_page(folder / "goals.md", page(results))


def main(argv: Iterable[str] | None = None) -> int:
    folders = [Path(x) for x in (sys.argv[1:] if argv is None else argv)] or [Path("docs/results")]
    for folder in folders:
        write(folder, report.load(folder))
        print(f"written to {folder}/goals.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
