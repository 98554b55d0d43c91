"""The paper's Table 1 beside ours: F1 of the clean class. python -m docs.figures.paper

All figures are read from docs/results/data_cleaning_table1.md, which `make paper` writes.
"""

from .style import BLUE, GREEN, RED, Path, panels, save

TABLE = Path(__file__).parent.parent / "results" / "data_cleaning_table1.md"
MARKS = {  # column -> label, colour, marker, fill, place beside the tick
    "gd": ("ours: gd", RED, "o", RED, -0.1),
    "bigsam": ("ours: bigsam", BLUE, "o", BLUE, 0.1),
    "validation-only": ("ours: a classifier of the checked samples alone", GREEN, "_", GREEN, 0.0),
    "paper: basic": ("paper: basic (ResNet-18)", RED, "D", "white", -0.25),
    "paper: improved": ("paper: improved (ResNet-18)", BLUE, "D", "white", 0.25),
}


def table() -> list[dict[str, str]]:
    """The lines of the table, by column."""
    cells = [
        [c.strip(" *") for c in line.split("|")[1:-1]] for line in TABLE.read_text().splitlines() if line[:1] == "|"
    ]
    head, _, *lines = cells
    return [dict(zip(head, line, strict=True)) for line in lines]


def main() -> None:
    lines = table()
    names = list(dict.fromkeys(line["data set"] for line in lines))
    figure, axes = panels(names, 4.2, 3.2)
    for ax, name in zip(axes, names, strict=True):
        rows = sorted((line for line in lines if line["data set"] == name), key=lambda line: line["ρ"])
        for column, (label, colour, marker, fill, shift) in MARKS.items():
            mean, *spread = zip(*(map(float, row[column].split(" ± ")) for row in rows), strict=True)
            ax.errorbar([i + shift for i in range(len(rows))], mean, *spread, fmt=marker, color=colour, mfc=fill,
                        markersize=24 if marker == "_" else 6, capsize=2, label=label)  # fmt: skip
        ax.set_xticks(range(len(rows)), [f"ρ = {row['ρ']}" for row in rows])
        ax.set(ylim=(0.2, 1), ylabel="F1 of the clean class")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    save(figure, __file__)


if __name__ == "__main__":
    main()
