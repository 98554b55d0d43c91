"""`python -m recipes.data_cleaning`: find mislabelled samples, compare methods, write a report."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import runs
from ..data import READERS
from ..models import MODELS
from . import output, study
from .clean import OUTER_STEPS, SOLVERS
from .study import BASELINES, Settings

EXAMPLES = """examples:
  python -m recipes.data_cleaning                                  digits with 60 % wrong labels, in seconds
  python -m recipes.data_cleaning --dataset mine.npz --out runs/mine
      your own data: x (N × H × W uint8, or N × D), y (labels), checked (True for verified rows);
      the list of suspects is runs/mine/weights.csv, the pictures are in runs/mine/report.html
  python -m recipes.data_cleaning --dataset labels.csv --image-size 32 --model cnn
      image files named in a CSV with columns file,label,checked
  python -m recipes.data_cleaning --paper --dataset mnist,fashion-mnist --data-root DATA --seeds 5 --out runs/table1
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


def _text(flags: dict[str, Any]) -> str:
    return " ".join(f"--{k} {','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in flags.items())


def listing(kind: Callable[[str], Any], known: Sequence[str] | None = None) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: values separated by commas, each of them known."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part.strip()) for part in text.split(",") if part.strip() and part.strip() != "none")
        wrong = [v for v in values if known is not None and v not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"no {', '.join(wrong)}; known: {', '.join(known or ())}")
        return values

    parse.__name__ = f"list of {kind.__name__}"
    return parse


GRID = "several, separated by commas, make a grid"
NAMES, NUMBERS, RATES = listing(str), listing(int), listing(float)

# group -> flag, type (bool: a switch), how help shows the value, what it means (and the default)
FLAGS: dict[str, list[tuple[str, Any, str | None, str]]] = {
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
        ("checkpoint", str, "C", "keep every C-th inner state, or 'sqrt': less memory for one more forward pass (1)"),
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
        ("bf16", bool, None, "autocast to bfloat16"),
        ("workers", int, "W", "processes that prepare mini-batches (0)"),
        ("threads", int, "N", "torch threads; a run repeats bit for bit with the same number (torch's default)"),
    ],
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m recipes.data_cleaning",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in FLAGS.items():
        group = p.add_argument_group(title)
        for name, kind, shown, words in flags:
            how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": shown}
            group.add_argument(f"--{name}", default=None, help=words.replace("%", "%%"), **how)
    p.add_argument("--paper", action="store_true", help=f"the paper's protocol: {_text(PAPER_SETTINGS)}")
    out = "where to write results.json, curves.csv, weights.csv, table.md, plots, report.html (runs/data_cleaning)"
    p.add_argument("--out", type=Path, default=Path("runs/data_cleaning"), metavar="DIR", help=out)
    p.add_argument("--resume", action="store_true", help="go on with the run in --out, to the same result")
    p.add_argument("--quiet", action="store_true", help="no progress bars")
    return p


def settings(args: argparse.Namespace) -> Settings:
    """The flags that were given, over the paper's or the recipe's defaults."""
    chosen: dict[str, Any] = {"baselines": ("validation-only",), **(PAPER_SETTINGS if args.paper else {})}
    chosen |= {k: v for k, v in vars(args).items() if v is not None and k in Settings.__dataclass_fields__}
    if isinstance(chosen.get("checkpoint"), str) and chosen["checkpoint"] != "sqrt":
        chosen["checkpoint"] = int(chosen["checkpoint"])
    return Settings(**chosen)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    p = parser()
    args = p.parse_args(argv)
    begin = time.perf_counter()
    try:
        s = settings(args)
        for name in s.dataset:  # before anything is written: a wrong path is the commonest mistake
            study.source(name, s.data_root, s.download, s.image_size)
        runs.open_folder(args.out, study.fingerprint(s), args.resume)
        records = study.run(s, args.out, args.quiet)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command with --resume goes on from {args.out}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        hint = " Here: a smaller --lr." if isinstance(error, FloatingPointError) else ""
        print(f"{p.prog}: error: {error}{hint}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "recipes.data_cleaning", *(a for a in argv if a != "--resume")])
    table, page = output.write(s, records, args.out, command)
    print(table)
    print(f"\n{time.perf_counter() - begin:.0f} s; table, curves, weights and plots are in {args.out}")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
