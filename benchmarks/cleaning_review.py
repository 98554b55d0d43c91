"""A reviewer who is always right: what becomes of the list, of its figures and of "you can stop" as the review goes on.

    python -m benchmarks.cleaning_review --data-root DIR --out docs/results

Two tables. The first follows long reviews: the rows that are left, by the ranking and the list of the first run and by
those of a run that knows the review. The second counts in how many of many short reviews the true figures lie inside of
the intervals that are shown. Writes cleaning_review.json and cleaning_review.md; a review that the file already has is
not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from bilevel_recipes.clean.judge import judge
from bilevel_recipes.clean.verdict import Verdict
from bilevel_recipes.runs import write_page

from .cleaning import update
from .cleaning_methods import Found, metrics
from .cleaning_sets import Draw, Noisy, draw, read
from .report import grid

Results = dict[str, Any]
ROUNDS = (100, 300, 1000)
SHORT = (100,)
LONG = {f"{people}, {checked} checked": Draw("CIFAR-10N", 2500, checked, "human", 0.0, people=people)
        for people in ("aggre", "random1", "worse") for checked in (0, 200)}  # fmt: skip
DRAWS = 200


def short_reviews() -> dict[str, Draw]:
    """Small draws of several kinds, by turns: labels by people and three kinds of noise, 0 to 100 rows checked."""
    kinds = [
        *(Draw("CIFAR-10N", 800, 0, "human", 0.0, people=people) for people in ("aggre", "random1", "worse")),
        Draw("digits", 800, 0, "uniform", 0.10),
        Draw("digits", 800, 0, "class-dependent", 0.20),
        Draw("digits", 800, 0, "uniform", 0.01),
    ]
    found: dict[str, Draw] = {}
    for seed in range(DRAWS):
        kind, checked = kinds[seed % len(kinds)], (0, 40, 100)[seed // len(kinds) % 3]
        noise = kind.people or f"{kind.noise} {kind.rate:g}"
        plan = Draw(kind.source, kind.rows, checked, kind.noise, kind.rate, people=kind.people)
        found[f"{seed}: {kind.source} {noise}, {checked} checked"] = plan
    return found


def review(one: Noisy, rounds: Sequence[int], seed: int) -> list[Results]:
    """Review the most suspicious rows without a mistake, run again after each round, and return what each run says."""
    x = one.content
    wrong, truth = one.given != one.truth, np.full(len(one.given), -1)

    def run() -> Verdict:
        return judge(x, one.given, one.checked, truth=truth, classes=len(one.names), seed=seed)

    first = last = run()
    found = [stage(0, first, first, first, wrong)]
    for count in rounds:
        order = np.argsort(last.score, kind="stable")
        order = order[~last.known[order]][: count - int((truth >= 0).sum())]
        truth[order] = one.truth[order]
        before, last = last, run()
        found.append(stage(count, first, before, last, wrong))
    return found


def stage(count: int, first: Verdict, before: Verdict, now: Verdict, wrong: NDArray[np.bool_]) -> Results:
    """Return the figures of the rows that are left: by the first run, by the last one and by this one."""
    free = ~now.known

    def quality(verdict: Verdict) -> dict[str, float]:
        return metrics(wrong[free], Found(verdict.belief[free], verdict.issue[free]))

    listed = int(now.issue.sum())
    return {
        "reviewed": count, "free": int(free.sum()), "left": int(wrong[free].sum()), "said": [*now.left],
        "listed": listed, "right": float(wrong[now.issue].mean()) if listed else None, "precision": [*now.precision],
        "stop": now.can_stop, "first": quality(first), "before": quality(before), "now": quality(now),
    }  # fmt: skip


# --- the page -------------------------------------------------------------------------------------------------------


LONG_HEAD = ["labels", "reviewed", "AP, first run", "AP, now", "F1, first run", "F1, now", "left", "said", "stop?"]
SHORT_HEAD = ["figure", "all", "labels by people", "digits", "nothing checked", "40 or 100 checked"]


def markdown(results: Results) -> str:
    long = [line for name in LONG if name in results.get("long", {}) for line in _lines(name, results["long"][name])]
    short = results.get("short", {})
    return f"""# A review by someone who is always right

Made by `python -m benchmarks.cleaning_review --data-root DIR --out docs/results`. The rows with the lowest scores are
reviewed, the true labels are given, and `bilevel-clean` runs again. It knows of these rows that they are no random
sample.

## Long reviews

{LONG["aggre, 0 checked"].rows:,} images of CIFAR-10 with labels by people (CIFAR-10N), one draw of each. All figures
are about the rows that nobody has looked at: how well the first run's ranking and list find their wrong labels, and how
well those of the run do that knows the review. *Left* is the true number of wrong labels, then what is said, with its
90 % interval.

{chr(10).join(grid(LONG_HEAD, long))}

## Do the intervals hold?

{len(short)} short reviews of {SHORT[0]} rows of 800: labels by people, and digits with 10 % uniform, 20 %
class-dependent and 1 % uniform noise; 0, 40 or 100 rows checked. The intervals are meant to hold in 90 % of the cases.

{chr(10).join(grid(SHORT_HEAD, coverage(short)))}

*You can stop* was said in {_stops(short)[0]} of the {2 * len(short)} runs; in {_stops(short)[1]} of these, more than
1 % of the labels that were left were wrong.
"""


def _lines(name: str, stages: list[Results]) -> list[list[str]]:
    return [
        [name, str(s["reviewed"]), f"{s['first']['ap']:.3f}", f"{s['now']['ap']:.3f}", f"{s['first']['f1']:.3f}",
         f"{s['now']['f1']:.3f}", str(s["left"]), "{:.0f} ({:.0f} to {:.0f})".format(*s["said"]),
         "yes" if s["stop"] else "no"]
        for s in stages
    ]  # fmt: skip


def coverage(short: Results) -> list[list[str]]:
    """Return for each figure how often the truth is inside of its interval."""
    columns: list[Callable[[str], bool]] = [
        lambda name: True, lambda name: "CIFAR" in name, lambda name: "digits" in name,
        lambda name: ", 0 checked" in name, lambda name: ", 0 checked" not in name,
    ]  # fmt: skip

    def inside(s: Results, key: str) -> bool | None:
        if key == "left":
            return s["said"][1] <= s["left"] <= s["said"][2]
        return None if s["right"] is None else s["precision"][1] <= s["right"] <= s["precision"][2]

    lines: list[list[str]] = []
    for k, when in enumerate(("before a review", "after it")):
        for key, words in (("left", "wrong labels"), ("precision", "precision of the list")):
            cells: list[str] = []
            for fits in columns:
                known = [inside(stages[k], key) for name, stages in short.items() if fits(name)]
                held = [h for h in known if h is not None]
                cells.append(f"{np.mean(held):.0%} of {len(held)}" if held else "–")
            lines.append([f"{words}, {when}", *cells])
    return lines


def _stops(short: Results) -> tuple[int, int]:
    said = [s for stages in short.values() for s in stages if s["stop"]]
    return len(said), sum(s["left"] > 0.01 * s["free"] for s in said)


# --- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.cleaning_review", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--data-root", type=Path, action="append", default=[], metavar="DIR", help="where the files are")
    p.add_argument("--out", type=Path, default=Path("runs/cleaning"), metavar="DIR", help="where the page goes")
    p.add_argument("--only", choices=("long", "short"), help="one of the two tables")
    asked = p.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    file, features = asked.out / "cleaning_review.json", _Features(asked.data_root)
    results = update(file, lambda r: None)
    with threadpool_limits(1):
        for part, plans, rounds in (("long", LONG, ROUNDS), ("short", short_reviews(), SHORT)):
            for seed, (name, plan) in enumerate(plans.items()):
                if asked.only not in (None, part) or name in results.get(part, {}):
                    continue
                stages = review(features.of(plan, seed), rounds, seed)
                results = update(file, lambda r, a=part, n=name, s=stages: r.setdefault(a, {}).update({n: s}))
                print(name, stages[-1]["said"], stages[-1]["left"], file=sys.stderr, flush=True)
    write_page(asked.out / "cleaning_review.md", markdown(json.loads(file.read_text())))


class _Features:
    """Draws with features of a whole source, which are made once: they do not depend on labels."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots, self.known = roots, dict[str, Any]()

    def of(self, plan: Draw, seed: int) -> Noisy:
        from dataclasses import replace

        from bilevel_recipes.clean.features import features

        if plan.source not in self.known:
            source = read(plan.source, self.roots)
            some = Draw(plan.source, min(4000, len(source.y)), 0, "uniform", 0.0)
            one = draw(source, some, 0)
            part = replace(source, content=features(one.as_rows("source")).x, y=one.truth)
            human = source.human and {name: labels[one.positions] for name, labels in source.human.items()}
            self.known[plan.source] = replace(part, kind="embeddings", human=human)
        return draw(self.known[plan.source], plan, seed)


if __name__ == "__main__":
    main()
