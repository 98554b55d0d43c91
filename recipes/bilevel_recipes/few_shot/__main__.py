"""Train encoders for few-shot tasks, compare solvers, write a report.

The flags below are for studies on public data sets. `bilevel-fewshot PHOTOS` trains an encoder on your own
pictures, and `bilevel-fewshot predict RUN SUPPORT QUERY` recognises new classes. Each has its own --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tyro

from .. import command
from ..malloc import keep_memory
from . import output, photos, predict, study
from .collection import without_prefix
from .study import Settings

OWN = """examples:
  bilevel-fewshot photos                                  a folder with one folder for each class
  bilevel-fewshot list.csv --root photos                  a CSV file with the columns file and label
  bilevel-fewshot photos --encoder torchvision:resnet18 --weights resnet18.pth --frozen      in seconds
  bilevel-fewshot predict runs/photos support query       then: new classes from a few pictures of each
  bilevel-fewshot predict --help                          the flags of the second command
  python -m bilevel_recipes.few_shot --help               studies on public data sets
"""

PREDICT = """examples:
  bilevel-fewshot predict runs/photos support query       with the encoder that bilevel-fewshot photos has trained
  bilevel-fewshot predict torchvision:resnet18 support query --weights resnet18.pth      a model as it is
  bilevel-fewshot predict patches support query           features that are learnt from these pictures
"""

EXAMPLES = """examples:
  python -m bilevel_recipes.few_shot                                       digits and rotated digits, in seconds
  python -m bilevel_recipes.few_shot --omniglot --data-root DATA           one encoder for tasks of all kinds
  python -m bilevel_recipes.few_shot --paper --dataset omniglot --data-root DATA --steps 1,5,10,20
      the paper's rates
  python -m bilevel_recipes.few_shot --adapt all --solvers gd --lr 0.1 --rates tensor --losses-along 1000 \\
      --dataset omniglot --data-root DATA --train-queries 5       all weights from a learnt start (MAML++)
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

# many ways and few queries in training, fewer ways at test time: what learns fastest
OMNIGLOT_SETTINGS: dict[str, Any] = {
    "dataset": ("omniglot",),
    "train_on": "train+val",
    "model": ("conv4-pool",),
    "ways": (120,),
    "train_queries": 2,
    "images": 360,
    "chunk": 360,
    "lr": (9.6,),
    "eta": 3e-3,
    "outer_steps": 3000,
    "also": ("5x1", "5x5", "20x1", "20x5"),
    "curve_episodes": 50,
    "test_steps": (1, 5, 10, 20),
    "test_views": ("shift",),
    "baselines": (),
    "precision": "auto",
}

RECIPE = command.Recipe(
    module="bilevel_recipes.few_shot",
    about=__doc__ or "",
    examples=EXAMPLES,
    settings=Settings,
    presets={
        "paper": ("The paper's rates.", PAPER_SETTINGS),
        "omniglot": ("An encoder for all kinds of tasks on Omniglot.", OMNIGLOT_SETTINGS),
    },
    writes="results.json, curves.csv, table.md, plots, report.html",
    hint=" Here: a smaller --lr or --eta.",
    check=study.check,
    fingerprint=study.fingerprint,
    run=study.run,
    write=output.write,
)


def parse(argv: Sequence[str]) -> Any:
    """Read the command line of a study, of PHOTOS, or of predict; leave with code 2 where a flag is misspelt."""
    argv = _predict_first(argv)
    if not argv or argv[0].startswith("-"):
        return command.parse(RECIPE, argv)
    return _parse_own(argv)


def _predict_first(argv: Sequence[str]) -> list[str]:
    """Return the command line with the word predict in front of the flags that were given before it."""
    groups = (photos.Data, photos.Training, photos.Output, predict.Command)
    switches = {f"--{f.name.replace('_', '-')}" for group in groups for f in fields(group) if f.type == "Switch"}
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        followed = any(word.startswith("--") for word in argv[at + 1 : at + 2])
        at += 1 if "=" in argv[at] or argv[at] in switches or followed else 2  # any other flag has one value
    return ["predict", *argv[:at], *argv[at + 1 :]] if list(argv[at : at + 1]) == ["predict"] else list(argv)


def _parse_own(argv: Sequence[str]) -> Any:
    """Read the command line of PHOTOS, or of predict."""
    words, kind, prog, about, examples = argv, photos.Command, "bilevel-fewshot", photos.__doc__, OWN
    if argv[:1] == ["predict"]:
        words, kind, prog, about, examples = argv[1:], predict.Command, f"{prog} predict", predict.__doc__, PREDICT
    if {"-h", "--help"} & set(words):
        words = ["--help"]  # tyro leaves arguments that are given out of its help
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    sentence = (about or "").partition(": ")[2]
    description = f"{sentence[:1].upper()}{sentence[1:]}\n\n{examples}"
    return tyro.cli(kind, prog=prog, description=description, args=words, config=style)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study, PHOTOS or predict. Without argv, it is the program bilevel-fewshot, which has no studies."""
    installed = argv is None
    argv = _predict_first(sys.argv[1:] if argv is None else argv)
    if not installed and (not argv or argv[0].startswith("-")):
        return command.main(RECIPE, argv)
    chosen = _parse_own(argv or ["--help"])
    keep_memory()
    try:
        _say(predict.run(chosen, argv[1:]) if argv[0] == "predict" else photos.run(chosen, argv))
    except KeyboardInterrupt:
        hint = "" if argv[0] == "predict" else " The same command with --resume goes on with the training."
        print(f"\nbilevel-fewshot: stopped.{hint}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        hint = " Choose a smaller --eta." if isinstance(error, FloatingPointError) else ""
        print(f"bilevel-fewshot: error: {without_prefix(error)}{hint}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    """Print a text, also where the terminal has not all of its characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
