"""The paper's Table 1 beside ours: F1 of the clean class. python -m docs.figures.paper

Ours are read from docs/results/data_cleaning_table1.md, which the recipe wrote; the paper's means are in the recipe.
"""

import re

from bilevel_recipes.data_cleaning.score import PAPER

from .style import BLUE, GREEN, RED, Path, panels, save

TABLE = Path(__file__).parent.parent / "results" / "data_cleaning_table1.md"
ROWS = {  # method -> label, colour, marker
    "gd": ("ours: gd", RED, "o"),
    "bigsam": ("ours: bigsam", BLUE, "o"),
    "validation-only": ("ours: a classifier on the checked samples alone", GREEN, "_"),
}


def ours() -> dict[tuple[str, float], dict[str, tuple[float, float]]]:
    """(data set, ρ) -> method -> mean and standard deviation of the F1 of the clean class."""
    found: dict[tuple[str, float], dict[str, tuple[float, float]]] = {}
    for line in TABLE.read_text().splitlines():
        if cell := re.match(r"\*\*(.+), linear, ρ = (.+)\*\*", line):
            rows = found.setdefault((cell[1], float(cell[2])), {})
        elif row := re.match(r"\| (\S+).*? \| ([\d.]+) ± ([\d.]+) \|", line):
            rows[row[1]] = float(row[2]), float(row[3])
    return found


def main() -> None:
    table = ours()
    names = list(dict.fromkeys(name for name, _ in table))
    figure, axes = panels([f"{name}, linear model, 5 seeds" for name in names], 4.8, 3.8)
    for ax, name in zip(axes, names, strict=True):
        rhos = sorted(rho for n, rho in table if n == name)
        for shift, (method, (label, colour, marker)) in zip((-0.1, 0.1, 0), ROWS.items(), strict=True):
            mean, spread = zip(*(table[name, rho][method] for rho in rhos), strict=True)
            places = [i + shift for i in range(len(rhos))]
            size = 24 if marker == "_" else 6
            ax.errorbar(places, mean, spread, fmt=marker, markersize=size, color=colour, label=label, capsize=2)
        for place, model, colour in ((1, "basic", RED), (0, "improved", BLUE)):
            shift = -0.2 if model == "basic" else 0.2
            values = [PAPER[name][rho][place] for rho in rhos]
            ax.plot([i + shift for i in range(len(rhos))], values, "D", color=colour, mfc="white",
                    label=f"paper: {model} (ResNet-18)")  # fmt: skip
        ax.set_xticks(range(len(rhos)), [f"ρ = {rho}" for rho in rhos])
        ax.set(ylim=(0.4, 1), ylabel="F1 of the clean class")
    entries = axes[0].get_legend_handles_labels()
    figure.set_figheight(4.3)
    figure.legend(*entries, loc="outside lower center", ncols=3, fontsize=9)
    save(figure, __file__)


if __name__ == "__main__":
    main()
