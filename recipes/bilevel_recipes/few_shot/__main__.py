"""Train encoders for few-shot tasks, compare solvers, write a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import command
from . import output, study
from .study import Settings

EXAMPLES = """examples:
  python -m bilevel_recipes.few_shot                                       digits and their turns as classes, in seconds
  python -m bilevel_recipes.few_shot --dataset omniglot --data-root DATA --model conv4-pool --ways 60 \\
      --train-queries 5 --images 360 --chunk 360 --lr 4.8 --outer-steps 4000 --also 5x1,20x1 --solvers gd,bigsam
      many ways in training, tested with fewer: what learns fastest; --bf16 if the processor has it
  python -m bilevel_recipes.few_shot --paper --dataset omniglot --data-root DATA --steps 1,5,10,20
      the paper's rates
  python -m bilevel_recipes.few_shot --dataset mini-imagenet --data-root DATA --model resnet18 --tasks 4
      DATA holds the cached pickles, or train.csv, val.csv, test.csv and images/
"""

PAPER_SETTINGS: dict[str, Any] = {
    "solvers": ("gd", "bigsam-paper"),
    "lr": (0.01,),
    "s": 0.01,
    "eta": 1e-3,
    "no_decay": True,
    "features": "raw",
}

RECIPE = command.Recipe(
    module="bilevel_recipes.few_shot",
    about=__doc__ or "",
    examples=EXAMPLES,
    settings=Settings,
    paper=PAPER_SETTINGS,
    writes="results.json, curves.csv, table.md, plots, report.html",
    hint=" Here: a smaller --lr or --eta.",
    check=study.check,
    fingerprint=study.fingerprint,
    run=study.run,
    write=output.write,
)


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(RECIPE, argv)


if __name__ == "__main__":
    sys.exit(main())
