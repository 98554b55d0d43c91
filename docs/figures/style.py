"""One look for all figures of the docs: that of the recipes, one colour for each solver, saved beside the script."""

from pathlib import Path

from matplotlib.figure import Figure

import bilevel_plugin as bilevel
from bilevel_recipes.plots import COLOURS, legend, panels

BLUE, RED, GREEN, PINK, AMBER, SKY, _, BLACK = COLOURS
SOLVERS = {  # by rate: what each figure compares
    "GD": (bilevel.GD, "0.45"),
    "BiG-SAM, power(0.25): the paper's": (bilevel.BiGSAM, RED),
    "BiG-SAM, convergent()": (lambda t: bilevel.BiGSAM(t, alpha=bilevel.convergent()), BLUE),
}


def save(figure: Figure, script: str) -> None:
    path = Path(script).with_suffix(".png")
    figure.savefig(path, dpi=130)
    print(f"docs/figures/{path.name}")


__all__ = ["AMBER", "BLACK", "BLUE", "GREEN", "PINK", "RED", "SKY", "SOLVERS", "Path", "legend", "panels", "save"]
