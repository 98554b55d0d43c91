"""From figures to a page."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .problems import LARGE, NAMES
from .runners import Runner

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
    (folder / "benchmarks.md").write_text(markdown(results))
    try:
        from . import pictures
    except ImportError:  # no matplotlib
        return
    pictures.draw(folder, results)


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


def seconds(found: Sequence[float]) -> str:
    """Median, and from the least to the most."""
    digits = 2 if statistics.median(found) >= 0.1 else 4
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f}–{max(found):.{digits}f})"


# --- the page ---------------------------------------------------------------------------------------------------


def origin(results: dict[str, Any]) -> str:
    """When and where."""
    s, m = results["setting"], results["machine"]
    return (
        f"Finished {results['when']}. {m['cpu']}, {s['threads']} cores, {m['memory_gib']} GiB, "
        f"{m['system']}, Python {m['python']}, torch {m['torch']}; {', '.join(m['packages'].values())}. "
        f"Size: {s['size']}. malloc of all runners: {s['malloc']}."
    )


def markdown(results: dict[str, Any]) -> str:
    page = [
        "# Side by side with the peers",
        "",
        f"{origin(results)} Made by",
        "",
        "```",
        *results["commands"],
        "```",
        "",
    ]  # fmt: skip
    table = results.get("table", {})
    if table:
        page += [*NOTES, "", "![time against memory](benchmarks_pareto.png)", ""]
    for name in (n for n in NAMES if n in table):
        page += large(name, table[name]) if name in LARGE else problem(name, table[name])
    for part, write in (("box", out_of_the_box), ("growth", growth), ("overhead", overhead), ("long", long),
                        ("run", run), ("quality", quality)):  # fmt: skip
        if part in results:
            page += write(results[part])
    return "\n".join(page).rstrip() + "\n"


NOTES = """\
- All start from the same weights and data, in float32: K plain gradient steps, the exact gradient of the outer loss.
  The data are random numbers of the right shapes.
- **seconds**: median of the rounds (least–most), measured in turns in one process. **× …**: as a multiple of the unit.
  **/ peer**: relative to the fastest exact peer (the two references are no peers).
- **resident**: growth of the process at its peak, each case in a process of its own, after set-up and a step.
  **live**: peak of the bytes that tensors hold, whatever the allocator does. **/ peer**: relative to the leanest one.
- **error**: relative to the float64 result, on the quick size, with Softplus and average pooling in place of kinks.
  **operators**: dispatched in one hypergradient (launches, on a GPU).
- P8: **less iterates**: live bytes less K·|z|, where |z| is counted on the weights and on what the optimizer keeps for
  them. **/ training**: relative to the live bytes of K plain steps, whose attention is fused. Neither counts the model
  itself. **error**: in float64, relative to a loop written by hand. The peers are given the attention that has a
  second derivative; ours takes it by itself. A process that holds more than 8 GiB is ended.""".splitlines()


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def problem(name: str, found: dict[str, Any]) -> list[str]:
    rows: dict[str, Row] = found["rows"]
    plain = statistics.median(found["plain"]) if found["plain"] else None
    fastest, live = (best(rows, key) for key in ("seconds", "live"))

    def cells(runner: str, row: Row) -> list[str]:
        if "failed" in row:
            return [runner, *["–"] * 8]
        took = value(row, "seconds")
        return [
            runner, seconds(row["seconds"]) if row.get("seconds") else "–", times(took, plain), times(took, fastest),
            megabytes(row["resident"]), megabytes(row["live"]),
            times(row["live"], live), f"{row['error']:.0e}" + " **wrong**" * (not is_exact(row)),
            "–" if row["operators"] is None else f"{row['operators']:,}",
        ]  # fmt: skip

    head = ["runner", "seconds", f"× {found['unit']}", "/ peer", "resident MB", "live MB", "/ peer"]
    head += ["error", "operators"]
    lines = [*heading(name, found), *grid(head, (cells(r, row) for r, row in rows.items())), ""]
    return [*lines, *remarks(found), ""]


def heading(name: str, found: dict[str, Any]) -> list[str]:
    lines = [f"## {name}: {found['title']}, K = {found['steps']}", ""]
    if found["plain"]:
        rounds = f"{len(found['plain'])} round" + "s" * (len(found["plain"]) > 1)
        lines += [f"Unit: {found['unit']}, {seconds(found['plain'])} s. {rounds}.", ""]
    return lines


def remarks(found: dict[str, Any]) -> list[str]:
    """What stands below a table: why a row has no figures, and what a reader should know of the others."""
    rows: dict[str, Row] = found["rows"]
    remarks = [f"- {r}: {row['failed'].rstrip('.')}." for r, row in rows.items() if "failed" in row]
    remarks += [f"- {r}: {row['remark']}." for r, row in rows.items() if row.get("remark")]
    remarks += [f"- {r}: compiled in {row['prepare']:.1f} s, which is not in its time." for r, row in rows.items()
                if row.get("prepare", 0) > 1 and ("JAX" in r or "compile" in r)]  # fmt: skip
    remarks += [f"- {r}: so slow that it was timed once." for r in found.get("once", ())]
    if found.get("tenth") and any("tenth" in r for r in rows):
        remarks += [f"- memory=tenth: `Reverse(memory={found['tenth']})`, a tenth of the leanest peer's live bytes."]
    return remarks


def large(name: str, found: dict[str, Any]) -> list[str]:
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

    head = ["runner", f"× {found['unit']}", "/ reverse", "live MB", "less iterates", "/ training", "error"]
    first = ["plain training", times(plain, plain), times(plain, reverse), megabytes(training["live"])]
    first += [megabytes(training["live"]), "1.00", "–"]
    lines = [*heading(name, found), *grid(head, (first, *(cells(r, row) for r, row in rows.items()))), ""]
    return [*lines, f"- K·\\|z\\|, the iterates: {megabytes(training['iterates'])} MB.", *remarks(found), ""]


def beyond_iterates(runner: str, row: Row, training: Row) -> float:
    """Peak bytes of tensors less K·|z|, which `reverse` holds; an unrolled loop has no iterates beside its graphs."""
    return row["live"] - (training["iterates"] if runner.startswith("ours: reverse") else 0)


def out_of_the_box(found: dict[str, Any]) -> list[str]:
    note = (
        "Ours as the recipes set it up (`bilevel_recipes.malloc.keep_memory`; on P4 an encoder in channels-last, as "
        "`bilevel_recipes.models.build_encoder` makes it), all others as they come; each case in a process of its "
        "own, whose second hypergradient is timed."
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
    note = "Each case in a process of its own: how it grows by the first hypergradient, and the time of the second."
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
        f"`nn.Linear(4, 2)` on 8 samples, {found['steps']} steps, one thread, in turns. By hand: the same loss, "
        "`create_graph=True`. `reverse` runs each step again for the gradient."
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
    note = "How far the process grows in one hypergradient; `forward` follows one outer variable, a regulariser."
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
        "How far the process grows in one hypergradient, in MB; pages of files are not counted. Time: at the largest K "
        "that has a figure, over as many plain steps. A process that holds more than "
        f"{found['limit'] / 2**30:.0f} GiB is ended."
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
        "The paper's protocol, the same rates for all: linear model, K = 100, inner rate 0.05, Adam with rate 0.2 on λ."
        " Seconds until F1 of the clean class is above the target and stays there for 10 outer steps."
    )
    return [*lines, note, "", *grid(head, body), ""]
