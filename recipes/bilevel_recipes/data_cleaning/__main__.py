"""`python -m bilevel_recipes.data_cleaning`: find mislabelled samples, compare methods, write a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import bilevel_plugin as bilevel

from .. import command
from ..command import GRID, NAMES, NUMBERS, RATES, Flags, listing
from ..data import READERS
from ..models import MODELS
from . import output, study
from .clean import OUTER_STEPS, SOLVERS
from .study import BASELINES, Settings

EXAMPLES = """examples:
  python -m bilevel_recipes.data_cleaning                                  digits with 60 % wrong labels, in seconds
  python -m bilevel_recipes.data_cleaning --dataset mine.npz --out runs/mine
      your own data: x (N × H × W uint8, or N × D), y (labels), checked (True for verified rows);
      the list of suspects is runs/mine/weights.csv, the pictures are in runs/mine/report.html
  python -m bilevel_recipes.data_cleaning --dataset labels.csv --image-size 32 --model cnn
      image files named in a CSV with columns file,label,checked
  python -m bilevel_recipes.data_cleaning --paper --dataset mnist,fashion-mnist --data-root DATA --seeds 5
      the paper's Table 1 and Figure 1
"""

PAPER_SETTINGS: dict[str, Any] = {
    "judge": ("validation",),
    "rho": (0.9, 0.8, 0.6),
    "solvers": ("gd", "bigsam", "bigsam-convergent"),
    "lr": 0.05,
    "momentum": 0.0,
    "eta": 0.2,
    "baselines": ("validation-only",),
}


FLAGS: Flags = {
    "data": [
        ("dataset", NAMES, "NAME", f"{', '.join(READERS)}, or a path to your own .npz or .csv; {GRID} (digits)"),
        ("data-root", str, "DIR", "where the files are: in torchvision's layout, or as .tar.xz or .npz (./data)"),
        ("download", bool, None, "let torchvision fetch what is missing into --data-root"),
        ("image-size", int, "PX", "resize the images of a .csv to PX × PX"),
        ("rho", RATES, "R", f"fraction of training labels changed to another class; not for own data; {GRID} (0.6)"),
        ("train", int, "N", "noisy training samples (5000, or what the data set allows)"),
        ("validation", NUMBERS, "M", f"clean, checked samples; {GRID} (5000, or what the data set allows)"),
    ],
    "method": [
        ("model", listing(str, list(MODELS)), "NAME", f"{', '.join(MODELS)}; {GRID} (linear)"),
        ("solvers", listing(str, list(SOLVERS)), "NAME", f"inner solvers: {', '.join(SOLVERS)}; {GRID} (bigsam)"),
        (
            "judge", listing(str, list(OUTER_STEPS)), "NAME",
            "what moves the weights: validation (the paper's: the gradient of the validation loss) or evidence (that, "
            f"and the odds of the given label under a model that has not seen it); {GRID} (evidence)",
        ),
        ("steps", NUMBERS, "K", f"inner steps; {GRID}: the paper's Figure 3 (100)"),
        ("every", NUMBERS, "E", f"a BiG-SAM step every E-th time, plain descent between; {GRID}: Figure 2 (1)"),
        ("outer-steps", int, "T", f"outer steps ({', '.join(f'{v} for {k}' for k, v in OUTER_STEPS.items())})"),
        ("lr", float, "T", "inner rate (0.02)"),
        ("momentum", float, "MU", "momentum of the inner loop (0.9)"),
        ("eta", float, "ETA", "outer rate: Adam's, or with evidence the share of the new weight (0.5)"),
        ("influence", float, "B", "weight of the hypergradient in evidence; 0 leaves it out and is faster (1)"),
        ("batch-size", int, "B", "mini-batches in the inner loop (full batch)"),
        ("memory", str, "SIZE", "for a hypergradient, as in 2GiB; less is slower, same result (half of what is free)"),
        ("warm", bool, None, "start each inner loop from the last weights, not from the first"),
    ],
    "comparison": [
        (
            "baselines", listing(str, list(BASELINES)), "NAME",
            "rows beside the solvers. "
            f"{'; '.join(f'{k}: {v}' for k, v in BASELINES.items())}; or none (validation-only)",
        ),
        ("fit-steps", int, "K", "Adam steps of the classifiers in the comparison (200)"),
        ("fit-lr", float, "LR", "their rate (0.003)"),
        ("seeds", int, "S", "seeds 0 to S − 1, of splits, wrong labels and initial weights (1)"),
    ],
    "run": [
        ("device", str, "DEV", "cpu or cuda (cpu)"),
        ("bf16", bool, None, "autocast to bfloat16; weights and their updates stay in float32"),
        ("tf32", bool, None, "let float32 products and convolutions on a GPU round to TF32 (no)"),
        ("channels-last", bool, None, "weights of convolutions in that layout, for a GPU with --bf16 or --tf32 (no)"),
        ("workers", int, "W", "processes that prepare mini-batches (0)"),
        ("threads", int, "N", "torch threads; a run repeats bit for bit with the same number (torch's default)"),
    ],
}  # fmt: skip


def check(s: Settings) -> None:
    bilevel.Reverse(memory=s.memory)  # a size that is none fails here
    for name in s.dataset:
        study.source(name, s.data_root, s.download, s.image_size)


RECIPE = command.Recipe(
    module="bilevel_recipes.data_cleaning",
    about=__doc__ or "",
    examples=EXAMPLES,
    flags=FLAGS,
    paper=PAPER_SETTINGS,
    writes="results.json, curves.csv, weights.csv, table.md, plots, report.html",
    hint=" Here: a smaller --lr.",
    settings=Settings,
    defaults={"baselines": ("validation-only",)},
    check=check,
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
