"""`python -m bilevel_recipes.few_shot`: train encoders for few-shot tasks, compare solvers, write a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .. import command
from ..command import GRID, NUMBERS, RATES, Flags, listing
from ..models import ENCODERS
from . import output, study
from .sources import SOURCES
from .study import UNTRAINED, Settings
from .train import SOLVERS

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

FLAGS: Flags = {
    "data": [
        ("dataset", listing(str, list(SOURCES)), "NAME", f"{', '.join(SOURCES)}; {GRID} (digits)"),
        ("data-root", str, "DIR", "where the files are (./data)"),
        ("download", bool, None, "let torchvision fetch Omniglot into --data-root"),
        ("turns", int, "R", "1: images as they are; 2, 3, 4: each turn by 90° makes classes of its own (4)"),
        ("ways", NUMBERS, "N", f"classes in a task; {GRID} (5)"),
        ("shots", NUMBERS, "N", f"images of each class to learn from; {GRID} (1)"),
        ("queries", int, "N", "images of each class to be judged by (10)"),
        ("train-queries", int, "N", "the same in meta-training (as many)"),
    ],
    "method": [
        ("model", listing(str, list(ENCODERS)), "NAME", f"encoders: {', '.join(ENCODERS)}; {GRID} (conv4)"),
        ("solvers", listing(str, list(SOLVERS)), "NAME", f"inner solvers: {', '.join(SOLVERS)}; {GRID} (bigsam)"),
        ("steps", NUMBERS, "K", f"inner steps; {GRID} (5)"),
        ("every", NUMBERS, "E", f"a step on g every E-th time; {GRID} (1)"),
        ("lr", RATES, "T", f"inner rate t, on h; {GRID} (0.4)"),
        ("s", float, "S", "inner rate on g (that on h)"),
        ("images", int, "N", "images in a meta-batch, about: 16 tasks of 5-way 1-shot, 3 of 20-way 5-shot (880)"),
        ("tasks", int, "N", "tasks in a meta-batch, instead"),
        ("outer-steps", int, "T", "meta-batches (300)"),
        ("eta", float, "ETA", "Adam's rate for the encoder (0.002)"),
        ("no-decay", bool, None, "keep that rate; without this flag it falls to 0 along half a cosine"),
        (
            "features", str, "HOW",
            "what heads see. centred: features less their mean over the support set; sphere: that, scaled to one "
            "length; raw: as they are (sphere)",
        ),
        (
            "batchnorm", str, "HOW",
            "running: BatchNorm has running statistics at test time; task: those of the task's own images, support and "
            "query, in training and at test time (transductive) (running)",
        ),
        ("chunk", int, "N", "images in one pass of the encoder; BatchNorm's batch in training (220)"),
    ],
    "evaluation": [
        ("also", listing(str), "WxS", "test each encoder on other tasks as well: 5x1,20x5 (none)"),
        ("test-on", str, "SPLIT", "test, or val for choosing rates (test)"),
        ("test-steps", NUMBERS, "K", "numbers of adaptation steps to measure beside --steps (1,5,10,20,50)"),
        ("test-episodes", int, "N", "test tasks (1000)"),
        ("curve-points", int, "N", "evaluations on the way (10)"),
        ("curve-episodes", int, "N", "test tasks of each of those (200)"),
        ("baselines", listing(str, [UNTRAINED]), "NAME", "untrained: heads on a random encoder; or none (untrained)"),
        ("seeds", int, "S", "seeds 0 to S − 1, of initial weights and training tasks (1)"),
    ],
    "run": [
        ("save-every", int, "N", "outer steps between checkpoints: what a kill can lose at most (50)"),
        ("device", str, "DEV", "cpu or cuda (cpu)"),
        ("bf16", bool, None, "autocast of the encoder to bfloat16; weights and heads stay in float32"),
        ("tf32", bool, None, "let float32 products and convolutions on a GPU round to TF32 (no)"),
        ("threads", int, "N", "torch threads; a run repeats bit for bit with the same number (torch's default)"),
    ],
}  # fmt: skip


RECIPE = command.Recipe(
    module="bilevel_recipes.few_shot",
    about=__doc__ or "",
    examples=EXAMPLES,
    flags=FLAGS,
    paper=PAPER_SETTINGS,
    writes="results.json, curves.csv, table.md, plots, report.html",
    hint=" Here: a smaller --lr or --eta.",
    settings=Settings,
    defaults={"baselines": (UNTRAINED,)},
    check=study.check,
    fingerprint=study.fingerprint,
    run=study.run,
    write=output.write,
)


def parser() -> argparse.ArgumentParser:
    return command.parser(RECIPE)


def settings(args: argparse.Namespace) -> Settings:
    return command.settings(RECIPE, args)


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(RECIPE, argv)


if __name__ == "__main__":
    sys.exit(main())
