"""The page of the benchmarks, made from benchmarks.json:

    python -m benchmarks.report docs/results

What people have to say about the figures stands in benchmarks_notes.md beside the page, and is added at its end.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bilevel_recipes.runs import write_page

from .problems import LARGE, NAMES
from .runners import BY_NAME, Runner

Row = dict[str, Any]
EXACT = 1e-3  # relative error, in float32, up to which a method counts as exact


def machine(runners: Iterable[Runner]) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "memory_gib": round(memory / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {r.name: f"{r.package} {r.version()}" for r in runners if r.version()},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def load(folder: Path) -> dict[str, Any]:
    file = folder / "benchmarks.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write the results, their page and the pictures; problems in the order of their names, whenever they were run."""
    if "table" in results:
        results["table"] = {n: results["table"][n] for n in NAMES if n in results["table"]}
    (folder / "benchmarks.json").write_text(json.dumps(results, indent=1) + "\n")
    write(folder, results)
    try:
        from . import pictures
    except ImportError:  # no matplotlib
        return
    pictures.draw(folder, results)


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write benchmarks.md."""
    write_page(folder / "benchmarks.md", markdown(results))


# --- figures made of figures ------------------------------------------------------------------------------------


def best(rows: dict[str, Row], key: str, group: str = "peer") -> float | None:
    """The lowest figure among the exact rows of the group."""
    values = [value(row, key) for row in rows.values() if row.get("group") == group and is_exact(row)]
    return min((v for v in values if v is not None), default=None)


def is_exact(row: Row) -> bool:
    return "failed" not in row and row.get("error", 0.0) < EXACT


def value(row: Row, key: str) -> float | None:
    found = row.get(key)
    return statistics.median(found) if isinstance(found, list) and found else None if isinstance(found, list) else found


def times(x: float | None, unit: float | None, digits: int = 2) -> str:
    return "–" if x is None or not unit else f"{x / unit:.{digits}f}"


def megabytes(x: float | None) -> str:
    return "–" if x is None else f"{x / 1e6:,.0f}" if x >= 1e7 else f"{x / 1e6:.1f}"


def short(took: float) -> str:
    return f"{took:.2f}" if took >= 0.1 else f"{took:.4f}"


def seconds(found: Sequence[float]) -> str:
    """Median, and from the least to the most."""
    digits = 2 if statistics.median(found) >= 0.1 else 4
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f}–{max(found):.{digits}f})"


# --- the page ---------------------------------------------------------------------------------------------------


def origin(results: dict[str, Any]) -> str:
    """When and where."""
    s, m = results["setting"], results["machine"]
    malloc = {"keep": "keeps what was freed", "default": "is as it comes"}[s["malloc"]]
    return (
        f"Measured on {m['cpu']}, {s['threads']} cores, {m['memory_gib']} GiB, {m['system']}; last run finished "
        f"{results['when']}. Python {m['python']}, torch {m['torch']}; {', '.join(m['packages'].values())}. "
        f"Size of the problems: {s['size']}. For all runners alike, malloc {malloc}."
    )


def markdown(results: dict[str, Any]) -> str:
    page = ["# Time and memory beside other libraries", ""]
    table = {n: results["table"][n] for n in NAMES if n in results.get("table", {})}
    if table:
        page += ["## In short", "", *summary(table), "", "![time against memory](benchmarks_pareto.png)", ""]
        page += ["## How to read the tables", "", *NOTES, *repeated(table), ""]
    page += ["## How the figures were made", "", f"{origin(results)} The commands were", ""]
    page += ["```", *results["commands"], "```", ""]
    page += ["`python -m benchmarks.report` writes this page from `benchmarks.json`, without measuring anything.", ""]
    for name, found in table.items():
        page += large(name, found, table) if name in LARGE else problem(name, found, table)
    for part, write in (("box", out_of_the_box), ("growth", growth), ("overhead", overhead), ("long", long),
                        ("run", run), ("quality", quality)):  # fmt: skip
        if part in results:
            page += write(results[part])
    return "\n".join(page).rstrip() + "\n"


NOTES = """\
- Every runner starts from the same weights and data. It takes K plain gradient steps in float32, and computes the exact
  gradient of the outer loss. The data are random numbers of the right shapes.
- A **peer** is another library. Raw autograd and JAX are references, and are not counted as peers.
- **seconds** is the median of the rounds. All runners take turns in one process. **× plain steps** and **× encoder
  pass** give the same time in the unit that stands above the table.
- **live MB** is the peak of the bytes that tensors hold. It does not depend on the allocator.
- **/ fastest** and **/ leanest** compare with the fastest and the leanest exact peer.
- **resident MB** (in the details) is the growth of the process at its peak. Each case has its own process, and is
  measured after set-up and one step.
- **error** (in the details) is relative to the float64 result. It is measured on the small size of the problem, with
  Softplus and average pooling instead of functions with kinks.
- **operators** (in the details) are those dispatched in one hypergradient. On a GPU each would be a kernel launch.
- P8 compares with plain training of the same model. **less states** is live MB without the K stored states of the
  weights and the optimizer. **/ training** divides that by the live MB of K plain steps. Neither counts the model
  itself. **error** is in float64, relative to a loop written by hand. The peers are given an attention kernel that
  has a second derivative; ours chooses one by itself. A process that holds more than 8 GiB is ended.""".splitlines()

COMPARED = {"`reverse`": "ours: reverse", "`memory=`": "ours: reverse memory=auto",
            "`blocks=`": "ours: reverse blocks=auto", "`unroll`": "ours: unroll"}  # fmt: skip


def summary(table: dict[str, Any]) -> list[str]:
    """Time and memory of our engines on each problem, relative to the best exact peer."""

    def cell(rows: dict[str, Row], runner: str) -> str:
        row = rows.get(runner, {"failed": "not run"})
        if "failed" in row:
            return "–"
        if best(rows, "live") is None:
            return "ran"
        took = times(value(row, "seconds"), best(rows, "seconds"))
        return f"{took},\u00a0{times(row['live'], best(rows, 'live'))}"

    body = [
        [f"{name}: {found['title'].split(', ')[1]}, K = {found['steps']}",
         *(cell(found["rows"], runner) for runner in COMPARED.values())]
        for name, found in table.items()
    ]  # fmt: skip
    return [
        "Each cell has two numbers: time relative to the fastest exact peer, then memory (live MB) relative to the "
        "leanest. Below 1 is better than every peer. *Ran* means that it finished and no peer did. `memory=` and "
        '`blocks=` are `Reverse(memory="auto")` and `Reverse(blocks="auto")`.',
        "",
        *grid(["problem", *COMPARED], body),
    ]


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def problem(name: str, found: dict[str, Any], table: dict[str, Any]) -> list[str]:
    rows: dict[str, Row] = found["rows"]
    plain = statistics.median(found["plain"]) if found["plain"] else None
    fastest, leanest = (best(rows, key) for key in ("seconds", "live"))

    def cells(runner: str, row: Row) -> list[str]:
        if "failed" in row:
            return [runner, *["–"] * 5]
        took = value(row, "seconds")
        return [runner + " **wrong**" * (not is_exact(row)), "–" if took is None else short(took), times(took, plain),
                times(took, fastest), megabytes(row["live"]), times(row["live"], leanest)]  # fmt: skip

    unit = "× " + found["unit"].removeprefix(f"{found['steps']} ")
    head = ["runner", "seconds", unit, "/ fastest", "live MB", "/ leanest"]
    lines = [*heading(name, found), *grid(head, (cells(r, row) for r, row in rows.items())), "", *details(rows), ""]
    return [*lines, *remarks(found, table), ""]


def details(rows: dict[str, Row]) -> list[str]:
    """The figures that few readers need, folded away."""
    body = [
        [r, seconds(row["seconds"]) if row.get("seconds") else "–", megabytes(row["resident"]), f"{row['error']:.0e}",
         "–" if row["operators"] is None else f"{row['operators']:,}"]
        for r, row in rows.items() if "failed" not in row
    ]  # fmt: skip
    head = ["runner", "seconds (least–most)", "resident MB", "error", "operators"]
    return ['<details markdown="1"><summary>Details</summary>', "", *grid(head, body), "", "</details>"]


def heading(name: str, found: dict[str, Any]) -> list[str]:
    lines = [f"## {name}: {found['title']}, K = {found['steps']}", ""]
    if found["plain"]:
        rounds = f"{len(found['plain'])} round" + "s" * (len(found["plain"]) > 1)
        lines += [f"Unit: {found['unit']}, {seconds(found['plain'])} s. {rounds}.", ""]
    return lines


def remarks(found: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """What stands below a table: why a row has no figures, and what a reader should know of the others."""
    rows: dict[str, Row] = found["rows"]
    remarks = [line for line in common_remarks(found) if line not in repeated(table)]
    remarks += [f"- {r}: compiling took {row['prepare']:.1f} s, which is not counted in its time."
                for r, row in rows.items() if row.get("prepare", 0) > 1 and ("JAX" in r or "compile" in r)]  # fmt: skip
    remarks += [f"- {r}: timed once, since it is slow." for r in found.get("once", ())]
    if found.get("tenth") and any("tenth" in r for r in rows):
        remarks += [f"- memory=tenth: `Reverse(memory={found['tenth']})`, a tenth of the leanest peer's live bytes."]
    return remarks


def common_remarks(found: dict[str, Any]) -> list[str]:
    """Remarks that may hold for several problems; a runner's remark in the words that it has today."""
    rows: dict[str, Row] = found["rows"]
    failed = [f"- {r}: {row['failed'].rstrip('.')}." for r, row in rows.items() if "failed" in row]
    return failed + [f"- {r}: {BY_NAME[r].part[1]}." for r, row in rows.items() if row.get("remark") and r in BY_NAME]


def repeated(table: dict[str, Any]) -> list[str]:
    """The remarks that hold for more than one problem, which are made once for all tables."""
    count = Counter(line for found in table.values() for line in common_remarks(found))
    return [line for line, n in count.items() if n > 1 and "ended:" not in line]


def large(name: str, found: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """P8: beside plain training, since the question is whether what can be trained can be differentiated as well."""
    rows, training = found["rows"], found["training"]
    if "failed" in training:
        return [*heading(name, found), f"Plain training: {training['failed']}.", ""]
    plain = statistics.median(found["plain"]) if found["plain"] else None
    reverse = value(rows.get("ours: reverse", {}), "seconds")

    def cells(runner: str, row: Row) -> list[str]:
        if "failed" in row:
            return [runner, *["–"] * 6]
        took, less = value(row, "seconds"), beyond_iterates(runner, row, training)
        return [runner, times(took, plain), times(took, reverse), megabytes(row["live"]), megabytes(less),
                times(less, training["live"]), f"{row['error']:.0e}"]  # fmt: skip

    head = ["runner", "× plain steps", "/ reverse", "live MB", "less states", "/ training", "error"]
    first = ["plain training", times(plain, plain), times(plain, reverse), megabytes(training["live"])]
    first += [megabytes(training["live"]), "1.00", "–"]
    lines = [*heading(name, found), *grid(head, (first, *(cells(r, row) for r, row in rows.items()))), ""]
    return [*lines, f"- The K stored states take {megabytes(training['iterates'])} MB.", *remarks(found, table), ""]


def beyond_iterates(runner: str, row: Row, training: Row) -> float:
    """Peak bytes of tensors less K·|z|, which `reverse` holds; an unrolled loop has no iterates beside its graphs."""
    return row["live"] - (training["iterates"] if runner.startswith("ours: reverse") else 0)


def out_of_the_box(found: dict[str, Any]) -> list[str]:
    note = (
        "Ours is set up as in the recipes: `bilevel_recipes.malloc.keep_memory`, and on P4 an encoder in channels-last "
        "from `bilevel_recipes.models.build_encoder`. The others are as they come. Each case has its own process, and "
        "its second hypergradient is timed."
    )
    lines = ["## Out of the box", "", note, ""]
    for name, rows in found.items():
        fastest = best(rows, "seconds")
        body = [
            [r, row["failed"], "", ""] if "failed" in row
            else [r, seconds(row["seconds"]), times(fastest, value(row, "seconds")), megabytes(row["resident"])]
            for r, row in rows.items()
        ]  # fmt: skip
        lines += [*grid([f"{name}", "seconds", "× as fast as the fastest peer", "resident MB"], body), ""]
    return lines


def growth(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    horizons = list(dict.fromkeys(k for row in rows.values() for k in row))

    def cell(row: Row) -> str:
        return row["failed"] if "failed" in row else f"{row['seconds']:.2f} s, {megabytes(row['resident'])} MB"

    body = [[r, *(cell(row[k]) if k in row else "" for k in horizons)] for r, row in rows.items()]
    head = ["runner", *(f"K = {k}" for k in horizons)]
    note = (
        "Each case has its own process. The memory is the growth in the first hypergradient, the time that of the "
        "second."
    )
    lines = [f"## P6: how time and memory grow ({found['title']})", "", note, ""]
    return [*lines, *grid(head, body), "", "![growth](benchmarks_growth.png)", ""]


def overhead(found: dict[str, Any]) -> list[str]:
    lines = ["## Overhead: ten parameters", ""]
    if "failed" in found:
        return [*lines, found["failed"], ""]
    rows: dict[str, list[list[float]]] = found["rows"]

    def above(name: str, which: int) -> str:
        return f"{statistics.median(a[which] - b[which] for a, b in zip(rows[name], rows['by hand'], strict=True)):.0f}"

    body = [[name, *(f"{statistics.median(t[i] for t in took):.0f}" for i in (0, 1)), above(name, 0), above(name, 1)]
            for name, took in rows.items()]  # fmt: skip
    head = ["loop", "µs a step", "with its share of the gradient", "step, above by hand", "all, above by hand"]
    note = (
        f"`nn.Linear(4, 2)` on 8 samples, {found['steps']} steps, CPU time of one thread, in turns. *By hand* is the "
        "same loss with `create_graph=True`. `reverse` runs each step again for the gradient."
    )
    return [*lines, note, "", *grid(head, body), ""]


def long(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    cases = [(engine, k, row) for engine, each in rows.items() for k, row in each.items()]
    title = next((row["title"] for *_, row in cases if "title" in row), "")
    body = [
        [engine, k, row["failed"], "", ""] if "failed" in row
        else [engine, k, f"{row['seconds']:.1f}", f"{row['resident'] / 1e6:.1f}", row["plan"]]
        for engine, k, row in cases
    ]  # fmt: skip
    note = (
        "`resident MB` is by how much the process grows in one hypergradient. `forward` has one outer variable, a "
        "regulariser."
    )
    lines = [f"## P7: long loops ({title})", "", note, ""]
    return [*lines, *grid(["engine", "K", "seconds", "resident MB", "plan"], body), ""]


def run(found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    horizons = list(dict.fromkeys(k for each in rows.values() for k in each))
    cases = [row for each in rows.values() for row in each.values()]
    title = next((row["title"] for row in cases if "title" in row), "")

    def last(each: dict[str, Row]) -> str:
        done = [row for row in each.values() if "failed" not in row]
        return times(done[-1]["seconds"], done[-1]["plain"]) if done else "–"

    body = [[name, *(megabytes(each.get(k, {}).get("own")) for k in horizons), last(each)]
            for name, each in rows.items()]  # fmt: skip
    note = (
        "The columns of K show by how many MB the process grows in one hypergradient. Pages of files are not counted. "
        "The last column is the time at the largest K that finished, relative to as many plain steps. A process that "
        f"holds more than {found['limit'] / 2**30:.0f} GiB is ended."
    )
    lines = [f"## P9: a whole run ({title})", "", note, ""]
    lines += [*grid(["loop", *(f"K = {int(k):,}" for k in horizons), "× plain steps"], body), ""]
    why = {name: [f"K = {int(k):,}: {row['failed'].rstrip('.')}" for k, row in each.items() if "failed" in row]
           for name, each in rows.items()}  # fmt: skip
    lines += [f"- {name}: {reasons[0]}." for name, reasons in why.items() if reasons]
    return [*lines, "", "![memory against K](benchmarks_run.png)", ""]


def quality(found: dict[str, Any]) -> list[str]:
    lines = ["## Time to quality: MNIST, 80 % wrong labels", ""]
    if "skipped" in found:
        return [*lines, f"Skipped: {found['skipped']}.", ""]
    body: list[list[str]] = []
    targets: list[str] = []
    for label, row in found["rows"].items():
        if "failed" in row:
            body.append([label, row["failed"]])
            continue
        targets = list(row["reached"])
        cells = [f"not within {row['cap']:.0f} s" if t is None else f"{t:.1f} s" for t in row["reached"].values()]
        top = max(score for _, score in row["curve"])
        body.append([label, *cells, f"{top:.3f}", f"{len(row['curve'])} in {row['curve'][-1][0]:.0f} s"])
    head = ["loop", *(f"F1 ≥ {t}" for t in targets), "highest F1", "outer steps"]
    note = (
        "The paper's protocol with the same rates for all: linear model, K = 100, inner rate 0.05, Adam with rate 0.2 "
        "on λ. A cell is the number of seconds until F1 of the clean class exceeds the target and stays there for 10 "
        "outer steps."
    )
    return [*lines, note, "", *grid(head, body), ""]


def main(argv: Iterable[str] | None = None) -> int:
    folders = [Path(x) for x in (sys.argv[1:] if argv is None else argv)] or [Path("docs/results")]
    for folder in folders:
        write(folder, load(folder))
        print(f"written to {folder}/benchmarks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
