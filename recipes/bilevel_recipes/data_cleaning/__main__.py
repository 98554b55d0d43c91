"""The paper's study of data cleaning: methods compared on public data with labels changed at random."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import command
from . import output, study

EXAMPLES = """examples:
  python -m bilevel_recipes.data_cleaning
      digits with 60 % wrong labels, in seconds
  python -m bilevel_recipes.data_cleaning --paper --data-root DATA --seeds 5 \\
      --dataset mnist,fashion-mnist,mnist-qmnist-labels,svhn,cifar10
      the paper's Table 1 and Figure 1; python -m bilevel_recipes.data_cleaning.table1 makes one page of it

To find wrong labels in your own data, use bilevel-clean.
"""

PAPER_SETTINGS: dict[str, Any] = {
    "rho": (0.9, 0.8, 0.6),
    "solvers": ("gd", "bigsam", "bigsam-convergent"),
}

RECIPE = command.Recipe(
    module="bilevel_recipes.data_cleaning",
    about=__doc__ or "",
    examples=EXAMPLES,
    settings=study.Settings,
    presets={"paper": ("The paper's noise levels and its two models, beside ours.", PAPER_SETTINGS)},
    writes="results.json, curves.csv, table.md, plots, report.html",
    hint=" Here: a smaller --lr.",
    check=study.check,
    fingerprint=study.fingerprint,
    run=study.run,
    write=output.write,
)


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(RECIPE, argv)


if __name__ == "__main__":
    sys.exit(main())
