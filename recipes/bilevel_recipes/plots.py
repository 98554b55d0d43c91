"""Figures for recipes: one look, each saved as .png and .svg."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .runs import write

# Okabe and Ito's colours: told apart by colour-blind readers too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000"]
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.frameon": False,
    "svg.hashsalt": "recipes",  # the same figure gives the same bytes
}

Curves = Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]  # label -> (x, y) of each seed


def panels(titles: Sequence[str], width: float = 4.4, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """Axes in rows of up to three, one for each title; four are two rows of two."""
    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = -(-len(titles) // columns)
    with plt.rc_context(_STYLE):
        size = (width * columns, height * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for ax in axes[len(titles) :]:
        ax.remove()
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, fontsize=10)
    return figure, axes[: len(titles)]


def curves(
    ax: Axes, lines: Curves, xlabel: str, ylabel: str, log: bool = False,
    looks: Mapping[str, tuple[str, str]] | None = None,
) -> None:  # fmt: skip
    """Mean over seeds with a band of ± one standard deviation; seeds that took different times are averaged by step.

    looks: colour and line style for each label. More than four labels have no bands, which would hide each other.
    """
    whole = all(float(v).is_integer() for seeds in lines.values() for x, _ in seeds for v in x)
    for plain, (label, seeds) in zip(COLOURS * 3, lines.items(), strict=False):
        colour, style = looks[label] if looks else (plain, "-")
        shortest = min(len(x) for x, _ in seeds)
        x = np.mean([np.asarray(x[:shortest], float) for x, _ in seeds], axis=0)
        y = np.array([np.asarray(y[:shortest], float) for _, y in seeds])
        ax.plot(x, y.mean(0), style, label=label, color=colour, marker="o", markersize=3)
        if len(seeds) > 1 and len(lines) <= 4:
            ax.fill_between(x, y.mean(0) - y.std(0), y.mean(0) + y.std(0), color=colour, alpha=0.15, linewidth=0)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    elif whole:  # there is no step 2.5
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below all panels, each label once."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = 3 if len(axes) > 1 else 1
    # the legend gets room of its own: with many labels it would squeeze the panels
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(found) / columns))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=9)


def level(ax: Axes, y: float, label: str, colour: str = "0.35", style: str = "--") -> None:
    """A horizontal line: a baseline or a published figure."""
    ax.axhline(y, color=colour, linestyle=style, linewidth=1, label=label)


def histogram(ax: Axes, values: Mapping[str, Any], xlabel: str) -> None:
    """Overlaid histograms on common bins."""
    every = np.concatenate([np.asarray(v) for v in values.values()])
    low, high = float(every.min()), float(every.max())
    bins = np.linspace(low, high if high > low else low + 1, 41)
    for colour, (label, v) in zip(COLOURS, values.items(), strict=False):
        ax.hist(np.asarray(v), bins.tolist(), label=f"{label} ({len(v)})", color=colour, alpha=0.6)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("samples")
    ax.legend()


def save(figure: Figure, path: Path) -> Path:
    """Write path.png and path.svg, close the figure, and return the .png."""
    with plt.rc_context(_STYLE):
        kinds: dict[str, Any] = {"png": {"dpi": 130}, "svg": {"metadata": {"Date": None}}}
        for kind, options in kinds.items():
            content = io.BytesIO()
            figure.savefig(content, format=kind, **options)
            write(path.with_suffix(f".{kind}"), content.getvalue())
    plt.close(figure)
    return path.with_suffix(".png")
