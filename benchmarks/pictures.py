"""The pictures: time against memory, how both grow with K, and the memory of a whole run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from bilevel_recipes.plots import COLOURS, panels

from .runners import RUNNERS

LEAST = 1e5  # bytes: what is below can't be told from nothing


def draw(folder: Path, results: dict[str, Any]) -> None:
    table = {name: found for name, found in results.get("table", {}).items() if found["plain"]}
    if table:
        named = {n: f"{n}: {t['title'].split(', ')[1]}" for n, t in table.items()}
        # the names of P8 have K in them
        figure, axes = panels([t if n.startswith("P8") else f"{t}, K = {table[n]['steps']}" for n, t in named.items()])
        for ax, found in zip(axes, table.values(), strict=True):
            pareto(ax, found)
        save(figure, axes, folder / "benchmarks_pareto.png")
    rows = results.get("growth", {}).get("rows")
    if rows:
        figure, axes = panels(["P6: time", "P6: memory"])
        for ax, key, label, scale in zip(axes, ("seconds", "resident"), ("seconds", "MB"), (1, 1e6), strict=True):
            grow(ax, rows, key, scale)
            ax.set(xlabel="K", ylabel=label)
        save(figure, axes, folder / "benchmarks_growth.png")
    rows = results.get("run", {}).get("rows")
    if rows:
        figure, axes = panels(["P9: memory of a whole run of K different batches"], width=7.0, height=4.6)
        whole_run(axes[0], rows, results["run"]["limit"])
        save(figure, axes, folder / "benchmarks_run.png")


def whole_run(ax: Any, rows: dict[str, Any], limit: int) -> None:
    """Memory against K. A cross where a process was ended that asked for a larger K."""
    for name, row in rows.items():
        if name == "plain run":
            continue
        points = {int(k): max(r["own"], LEAST) / 1e6 for k, r in row.items() if "own" in r}
        if not points:
            continue
        line = {"marker": MARKS[name][0], "color": MARKS[name][1], "linestyle": MARKS[name][2]}
        ax.plot(list(points), list(points.values()), label=name, **line)
        ended = [max(r["step"], max(points)) for r in row.values() if "limit" in r]
        if ended:
            k, least = max(points), limit / 1e6
            ax.plot([k, ended[0]], [points[k], least], ":", color=line["color"])
            ax.plot([ended[0]], [least], "x", markersize=9, markeredgewidth=2, color=line["color"])
    ax.axhline(limit / 1e6, color="0.6", linewidth=1)
    words = f"limit, {limit / 2**30:.0f} GiB: a process that held more was ended (×)"
    ax.annotate(words, (0.01, limit / 1e6), xycoords=("axes fraction", "data"), xytext=(0, 3),
                textcoords="offset points", fontsize=8, color="0.4")  # fmt: skip
    decades(ax, "x")
    decades(ax, "y")
    ax.set(xlabel="steps K, each on a batch of its own", ylabel="MB that the process grows by")


MARKS = {
    "ours: checkpoint=sqrt": ("o", COLOURS[5], "-"), "ours: fetch=, checkpoint=sqrt": ("s", COLOURS[0], "-"),
    "ours: fetch=, store=": ("^", COLOURS[2], "-"),
    "higher": ("D", COLOURS[1], "-"), "TorchOpt": ("v", COLOURS[4], (0, (4, 4))),  # the two lie upon each other
}  # fmt: skip


def pareto(ax: Any, found: dict[str, Any]) -> None:
    """Each runner a point, with its fastest and slowest round: below and to the left of all others is best."""
    plain = statistics.median(found["plain"])
    for runner, row in found["rows"].items():
        if row.get("seconds") and "failed" not in row:
            x, y = max(row["resident"], LEAST) / 1e6, [t / plain for t in row["seconds"]]
            middle = statistics.median(y)
            ax.errorbar(x, middle, [[middle - min(y)], [max(y) - middle]], label=runner, capsize=2, **look(runner))
    decades(ax, "x")
    decades(ax, "y")
    ax.set(xlabel="resident MB above the start", ylabel=f"× {found['unit']}")


def grow(ax: Any, rows: dict[str, Any], key: str, scale: float) -> None:
    for runner, row in rows.items():
        points = {int(k): max(r[key], LEAST * (scale > 1)) / scale for k, r in row.items() if "failed" not in r}
        ax.plot(list(points), list(points.values()), label=runner, markersize=5, **look(runner) | {"linestyle": "-"})
    decades(ax, "x")
    decades(ax, "y")


def decades(ax: Any, which: str) -> None:
    """A logarithmic axis with plain numbers, wide enough for two of them."""
    ax.set(**{f"{which}scale": "log"})
    low, high = getattr(ax, f"get_{which}lim")()
    ax.set(**{f"{which}lim": (low / 1.3, high * 1.3)})
    axis = getattr(ax, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 30 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def look(runner: str) -> dict[str, Any]:
    """Ours in blue and green, peers in warm colours, references in black; a marker for each."""
    group = next(r.group for r in RUNNERS if r.name == runner)
    place = [r.name for r in RUNNERS if r.group == group].index(runner)
    palette = {"ours": (0, 5, 2), "peer": (1, 4, 3), "reference": (7,)}[group]
    colour = COLOURS[palette[place % len(palette)]]
    return {"marker": "os^Dv*PX"[place % 8], "color": colour, "linestyle": "none"}


def save(figure: Any, axes: list[Any], path: Path) -> None:
    """With one legend for all panels, below them."""
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = min(4, 2 * len(axes))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
