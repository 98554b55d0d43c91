"""How good is the sentinel? False alarms on the honest problems of the zoo, and what it misses of the dishonest ones.

    python tests/sentinel_study.py [--honest N] [--dishonest N] [--seeds S] [--out FILE]

Each problem is run as a user would run it, in its own precision, with check="always", and its warnings are recorded.
How far a dishonest fault moves the hypergradient is measured in float64, against differences of the plain loop.
`bilevel.gradcheck` judges the same problems in float64, as its documentation advises. A refusal, which is an error
that begins with "bilevel.", counts as caught, since nothing wrong is returned; any other error is a failure of the
library, and counts as neither. FILE gets one line of JSON for each problem.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import zoo
from problems import relative
from torch import Tensor

import bilevel_plugin as bilevel

LARGE, SMALL = 0.05, 0.01  # relative errors of the hypergradient; a large one should not be missed
SIZES = (
    "honest",
    "dishonest, off by more than 5 %",
    "dishonest, off by 1 to 5 %",
    "dishonest, off by less than 1 %",
    "dishonest, true hypergradient undefined",
    "dishonest, refused or failed in float64",
)


@dataclass
class Row:
    """What was found out about one problem."""

    name: str
    honest: bool
    reference: str
    warnings: dict[str, int] = field(default_factory=dict)  # how many of each class
    alarm: bool = False  # whether one of them was the sentinel's
    message: str = ""  # of the sentinel's first warning
    refused: str = ""  # the error, if the library refused the problem
    failed: str = ""  # any other error
    moved: float | None = None  # how far the hypergradient is off in float64, relative to the true one
    gradcheck: str = ""  # "ok", "wrong", or the error that it raised

    @property
    def caught(self) -> bool:
        return self.alarm or bool(self.refused)

    @property
    def size(self) -> str:
        """The row of the table that the problem belongs to."""
        if self.honest:
            return SIZES[0]
        if self.moved is None:
            return SIZES[4 if self.reference == "undefined" else 5]
        return SIZES[1 if self.moved > LARGE else 2 if self.moved > SMALL else 3]


def hypergradient(problem: zoo.Problem, check: str | bool) -> Tensor:
    """Return the hypergradient of engine="reverse" along the problem's directions."""
    h, g = problem.losses()
    with zoo.seeded(0), torch.autocast("cpu", torch.bfloat16, enabled=problem.autocast):
        with bilevel.inner(problem.model, h, g, engine="reverse", check=check, **problem.options) as loop:
            for _ in range(problem.steps):
                loop.step(*problem.batch, outer=problem.outer)
            return problem.along(loop.hypergrad(problem.lam))


def examine(problem: zoo.Problem, honest: bool, gradcheck: bool) -> Row:
    """Run one problem, and say what became of it."""
    row = Row(problem.name, honest, problem.reference)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            hypergradient(problem, check="always")
        except Exception as error:
            text = _first_line(error)
            row.refused, row.failed = (text, "") if str(error).startswith("bilevel.") else ("", text)
    row.warnings = dict(Counter(w.category.__name__ for w in caught))
    alarms = [str(w.message) for w in caught if issubclass(w.category, bilevel.DerivativeWarning)]
    row.alarm, row.message = bool(alarms), alarms[0] if alarms else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not honest and problem.reference == "differences":
            row.moved = _moved(problem)
        if gradcheck:
            row.gradcheck = _gradcheck(problem)
    return row


def _moved(problem: zoo.Problem) -> float | None:
    """Return how far the hypergradient is from the true one in float64, or None if the library gives none."""
    true = problem.true_hypergradient()
    try:
        return relative(hypergradient(problem.twin(), check=False), true)
    except Exception:
        return None


def _gradcheck(problem: zoo.Problem) -> str:
    twin = problem.twin()
    given = {"outer": twin.outer, "steps": twin.steps, **twin.options}
    try:
        report = bilevel.gradcheck(twin.model, *twin.losses(), twin.lam, *twin.batch, **given)
    except Exception as error:
        return _first_line(error)
    return "ok" if report else "wrong"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def spread(problems: Iterator[zoo.Problem], count: int | None) -> list[zoo.Problem]:
    """Return as many of the problems as asked for, at even distances."""
    found = list(problems)
    n = len(found) if count is None else min(count, len(found))
    return [found[i * len(found) // n] for i in range(n)]


def table(rows: Sequence[Row]) -> str:
    """Return the summary in Markdown."""
    lines = [
        "| problems | count | sentinel warns | refused | failed | silent | gradcheck says no | gradcheck fails |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in SIZES:
        of = [r for r in rows if r.size == size]
        checked = [r.gradcheck for r in of if r.gradcheck]
        columns = [[r.alarm for r in of], [bool(r.refused) for r in of], [bool(r.failed) for r in of]]
        columns += [[not r.caught and not r.failed for r in of]]
        columns += [[said == "wrong" for said in checked], [said not in ("ok", "wrong") for said in checked]]
        if of:
            lines.append(f"| {size} | {len(of)} | {' | '.join(map(_share, columns))} |")
    both = Counter((r.caught, r.gradcheck == "wrong") for r in rows if r.size == SIZES[1] and r.gradcheck)
    found = [both[key] for key in ((True, True), (True, False), (False, True), (False, False))]
    ways = ("both", "the sentinel or a refusal alone", "gradcheck alone", "neither")
    parts = ", ".join(f"{n} by {way}" for n, way in zip(found, ways, strict=True))
    lines += ["", f"Of those that are off by more than 5 %, found: {parts}"]
    classes = Counter(name for r in rows for name in r.warnings)
    lines += ["", "Problems with warnings, by class: " + (", ".join(f"{n} {c}" for c, n in classes.items()) or "none")]
    lines += _names("Honest problems with a false alarm", [r for r in rows if r.honest and r.alarm])
    lines += _names("Honest problems that were refused", [r for r in rows if r.honest and r.refused])
    lines += _names("Problems that failed", [r for r in rows if r.failed])
    large = [r for r in rows if r.size in (SIZES[1], SIZES[4]) and not r.caught]
    lines += _names("Dishonest problems that the sentinel misses, off by more than 5 % or undefined", large)
    return "\n".join(lines)


def _share(of: Sequence[bool]) -> str:
    return f"{sum(of)} ({100 * sum(of) / len(of):.1f} %)" if of else "–"


def _names(title: str, rows: Sequence[Row]) -> list[str]:
    def note(row: Row) -> str:
        off = "undefined" if row.moved is None else f"off by {100 * row.moved:.1f} %"
        said = row.failed or row.refused or row.message.partition("\n")[0]
        return (said if row.honest or row.failed else f"{off}, gradcheck: {row.gradcheck or 'not run'}")[:200]

    return ["", f"{title}: {len(rows)}", *(f"- {r.name} ({note(r)})" for r in rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    from tqdm import tqdm  # not needed by the tests, which import this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, metavar="N", help="how many honest problems to run (default: all)")
    parser.add_argument("--dishonest", type=int, metavar="N", help="how many dishonest ones (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="how many times to draw the zoo (default: 1)")
    parser.add_argument("--gradcheck", choices=("dishonest", "all", "none"), default="dishonest", help="what it judges")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write one line of JSON for each problem")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    todo: list[tuple[zoo.Problem, bool]] = [(p, True) for p in spread(zoo.honest(options.seeds), options.honest)]
    todo += [(p, False) for p in spread(zoo.dishonest(options.seeds), options.dishonest)]
    rows: list[Row] = []
    for problem, honest in tqdm(todo, unit="problem"):
        wanted = options.gradcheck == "all" or (options.gradcheck == "dishonest" and not honest)
        rows.append(examine(problem, honest, wanted))
    if options.out:
        lines: list[dict[str, Any]] = [asdict(r) for r in rows]
        options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(
        "# The sentinel on honest and dishonest problems\n\n"
        "Made by `make sentinel`, from the problems of `tests/zoo.py`. Honest: autograd gives the true derivative. "
        "Dishonest: a stop-gradient, a custom backward, a straight-through estimator, spectral_norm. They are "
        "sorted by how far the hypergradient is off from central differences of the plain loop in float64.\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
