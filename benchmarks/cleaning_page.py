"""From the results of `benchmarks.cleaning` to tables, a page and a picture."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bilevel_recipes.runs import write_page
from bilevel_recipes.tables import Block
from bilevel_recipes.tables import screen as in_columns

from .cleaning_methods import METHODS
from .cleaning_sets import SETS, SOURCES
from .report import grid

Results = dict[str, Any]
LEVEL = 0.005  # a method this close to the best is level with it, or one within the best one's standard deviation
QUALITY = {"f1": "F1", "ap": "Average precision", "p100": "Precision at 100"}
PALETTE = ("#d62728", "#e08214", "#8c510a", "#1f77b4", "#17becf", "#5aa7d6", "#2ca02c", "#9467bd", "#e377c2", "#7f7f7f")
COLOURS = dict(zip(METHODS, PALETTE, strict=True))


# --- figures --------------------------------------------------------------------------------------------------------


def figures(results: Results, key: str) -> dict[str, dict[str, tuple[float, float]]]:
    """{set: {method: (mean, standard deviation)}} over the seeds, without the sets that have no such figure."""
    out: dict[str, dict[str, tuple[float, float]]] = {}
    for name in _shown(results):
        for method in (m for m in METHODS if m in results["results"][name]):
            found = [row[key] for row in results["results"][name][method].values() if row[key] is not None]
            if found:
                spread = float(np.std(found, ddof=1)) if len(found) > 1 else float("nan")
                out.setdefault(name, {})[method] = (float(np.mean(found)), spread)
    return out


def _shown(results: Results) -> list[str]:
    """The sets of the page: those on which our method was measured, or all of them if it was nowhere."""
    found = [name for name in SETS if name in results.get("results", {})]
    return [name for name in found if "ours" in results["results"][name]] or found


def leaders(row: dict[str, tuple[float, float]]) -> set[str]:
    """The best method and those that are level with it."""
    best, spread = max(row.values())
    return {method for method, (mean, _) in row.items() if mean >= best - max(LEVEL, np.nan_to_num(spread))}


def table(results: Results, key: str, title: str) -> Block:
    """Sets as lines, methods as columns, the leaders in bold; last, on how many sets a method leads."""
    rows = figures(results, key)
    methods = [m for m in METHODS if any(m in row for row in rows.values())]
    lead = {name: leaders(row) for name, row in rows.items()}
    lines = [[name, *(_cell(row.get(m), m in lead[name]) for m in methods)] for name, row in rows.items()]
    led = [
        "best or level",
        *(f"{sum(m in lead[name] for name in rows)} of {sum(m in row for row in rows.values())}" for m in methods),
    ]
    return title, ["set", *methods], [*lines, led]


def _cell(found: tuple[float, float] | None, leads: bool) -> str:
    if found is None:
        return "–"
    mean, spread = found
    text = f"{mean:.3f}" if np.isnan(spread) else f"{mean:.3f} ±{spread:.3f}".replace("±0", "±")
    return f"**{text}**" if leads else text


def means(rows: dict[str, dict[str, tuple[float, float]]], title: str) -> Block:
    """Means alone."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[name, *(f"{row[c][0]:.1f}" if c in row else "–" for c in columns)] for name, row in rows.items()]
    return title, ["set", *columns], lines


def blocks(results: Results) -> list[Block]:
    alarms = {
        name: row
        for name, row in figures(results, "false_alarms").items()
        if not (SETS[name].rate or SETS[name].people)
    }
    made = figures(results, "feature_seconds")
    seconds = {
        name: {"features": next(iter(made[name].values())), **row}
        for name, row in figures(results, "cpu_seconds").items()
    }
    return [
        *(table(results, key, title) for key, title in QUALITY.items()),
        means(alarms, "False alarms where no label is wrong"),
        means(seconds, "Seconds of CPU time"),
    ]


def mixed(results: Results) -> list[str]:
    """A sentence if methods had different features on the same draw, since the code of the features has changed."""
    names = [
        name
        for name, methods in results.get("results", {}).items()
        for seed in {seed for rows in methods.values() for seed in rows}
        if len({rows[seed]["features"] for rows in methods.values() if seed in rows}) > 1
    ]
    found = ", ".join(dict.fromkeys(names))
    return [f"Not comparable: methods had different features on {found}. Run all of them again."] if names else []


def screen(results: Results) -> str:
    """The tables as plain text, and what is missing."""
    absent = [f"{name}: not run: {why}" for name, why in results.get("missing", {}).items()] + mixed(results)
    shown = [(title, head, [[c.strip("*") for c in line] for line in lines]) for title, head, lines in blocks(results)]
    return "\n".join([in_columns(block for block in shown if block[2]), *absent])


# --- the page -------------------------------------------------------------------------------------------------------


def write(folder: Path, results: Results) -> None:
    """Write cleaning.md and cleaning.png."""
    write_page(folder / "cleaning.md", markdown(results))
    picture(folder / "cleaning.png", results)


NOTES = """\
- **F1** is that of the labels called wrong, among the rows that nobody has checked.
- **Average precision** and **precision at 100** judge only the ranking. Precision at 100 is the precision among the 100
  lowest scores, or among as many as there are wrong labels if these are fewer. Ties count with their expectation.
- **Bold** figures are the best mean, and those within 0.005 or one standard deviation of it.
- Only sets on which the present judge was measured are shown. The labels of *human* sets were given by people.
- All methods have the same features (`bilevel_recipes.clean.features`, `auto`), the given labels, and which rows are
  checked.
- **cleanlab** is `find_label_issues` and `get_label_quality_scores` with their defaults. Their probabilities come from
  five folds of all rows, where checked rows have their right labels. The model is scikit-learn's logistic regression
  with its defaults. In *cleanlab-regularised* its C is chosen from 10⁻⁵ to 10² by cross-validation (on at most 10,000
  rows). In *cleanlab-knn* the model is k nearest neighbours, with k of 10, 20, 35 or 50 by cross-validation.
- *cleanlab-best-filter* has the probabilities of cleanlab-regularised, and the `filter_by` of the best F1, which the
  truth alone can tell. *cleanlab-network* has the probabilities of the small network of `--features network`.
- **ours** is the default; *ours-hypergradients* takes 8 outer steps, *ours-network* is `--features network`. *margin*
  is the mean logit margin of the given label in a training of that network on all rows (arXiv 2510.16211).
- **checked-alone** is a logistic regression of the checked rows, with C by cross-validation. A label is called wrong if
  it predicts another one.
- **Seconds of CPU time** are those of all threads together. The time for the features has to be added for each method.
- Published labels count as true. A few of them are wrong, so no method can reach 1 everywhere.""".splitlines()


def in_short(results: Results) -> list[str]:
    """On how many sets each method is best or level with the best."""
    found = [table(results, key, title) for key, title in QUALITY.items()]
    rows = [[title, *lines[-1][1:]] for title, _, lines in found]
    lead = "On how many sets each method is the best, or level with the best:"
    return [lead, "", *grid(["measure", *found[0][1][1:]], rows), ""]


def markdown(results: Results) -> str:
    seeds = sorted({int(s) for name in _shown(results) for rows in results["results"][name].values() for s in rows})
    options = f"--seeds {len(seeds)}" + (f" --first-seed {seeds[0]}" if seeds[:1] > [0] else "")
    page = [
        "# How well wrong labels are found", "",
        *in_short(results),
        f"Finished {results['when']}. {origin(results)} Mean ± standard deviation of the "
        f"draws with the seeds {', '.join(map(str, seeds))}. Made by", "",
        "```", f"python -m benchmarks.cleaning --data-root DIR {options} --threads {results['threads']} \\",
        "    --out docs/results", "```", "",
        *(f"**{sentence}**\n" for sentence in mixed(results)),
        *NOTES, "", "![F1 and average precision of each method on each set](cleaning.png)", "",
    ]  # fmt: skip
    for title, head, lines in blocks(results):
        if lines:
            page += [f"## {title}", "", *grid(head, lines), ""]
    return "\n".join([*page, *the_sets(results)]) + "\n"


def origin(results: Results) -> str:
    m = results["machine"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("scikit-learn", "cleanlab", "numpy"))
    threads = f"{results['threads']} thread" + "s" * (results["threads"] > 1)
    return f"{m['cpu']}, {threads}, {m['memory_gib']} GiB, Python {m['python']}, torch {m['torch']}, {packages}."


def the_sets(results: Results) -> list[str]:
    """What each set is, which were not run, and where the files come from."""
    missing = results.get("missing", {})
    sets = [
        f"| {name} | {plan.title}{f'. **Not run: {missing[name]}**' if name in missing else ''} |"
        for name, plan in SETS.items()
        if name in missing or name in _shown(results)
    ]
    files = [
        f"| {name} | {', '.join(f'`{f}`' for f in o.files) or '–'} | {o.published} |" for name, o in SOURCES.items()
    ]
    return [
        "## The sets", "", "| set | what it is |", "| --- | --- |", *sets, "",
        "The share of wrong labels is that among the rows that are not checked. *Uniform*: any row gets any other "
        "class. *Pairwise*: class c becomes c + 1. *Class-dependent*: every other class has wrong labels, at rates "
        "that triple from the first to the last of them. The rows, the checked ones and the wrong labels are drawn "
        "anew by each seed.",
        "", "## The files", "", "Any one of the files in a `--data-root`.", "",
        "| source | file | published at |", "| --- | --- | --- |", *files,
    ]  # fmt: skip


def picture(file: Path, results: Results) -> None:
    """A dot for each method and set; F1 on the left, average precision on the right."""
    from matplotlib.figure import Figure

    names = list(figures(results, "f1"))
    if not names:
        return
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(names)), layout="constrained")
    for ax, key in zip(figure.subplots(1, 2, sharey=True), ("f1", "ap"), strict=True):
        rows = figures(results, key)
        for method, colour in COLOURS.items():
            at = [i for i, name in enumerate(names) if method in rows[name]]
            style = {"marker": "D", "s": 44, "zorder": 4} if method == "ours" else {"marker": "o", "s": 30, "zorder": 3}
            ax.scatter([rows[names[i]][method][0] for i in at], at, color=colour, label=method, alpha=0.85, **style)
        ax.set(title=QUALITY[key], yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
        ax.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=110)
