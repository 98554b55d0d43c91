"""Where does the noise matrix come from? One classifier, one set of folds, eight ways to find T.

    python -m benchmarks.cleaning_matrix --data-root DIR --first-seed 200 --seeds 3 --threads 1 --out docs/results

Writes cleaning_matrix.md. The classifiers are the first ones of the judge in `bilevel_recipes.clean`: of the features
alone, without the neighbours. All the ways have the same inner loop but "hypergradients, gd", which leaves out the
steps on the checked rows.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from bilevel_recipes.clean.judge import Options, stratified
from bilevel_recipes.clean.noise import (
    Folds,
    Noise,
    estimate,
    expectation_maximisation,
    given_label_loss,
    learn,
    precondition,
    uniform_noise,
)
from bilevel_recipes.runs import write_page
from bilevel_recipes.tables import Block, markdown, screen, spread

from .cleaning import listing
from .cleaning_methods import Found, evaluate
from .cleaning_page import leaders
from .cleaning_sets import CACHE, SETS, Loaded, load_set
from .report import machine

Matrix = Callable[[Tensor, Tensor], Tensor]  # from probabilities and given labels of the unchecked rows to T
Figures = dict[str, float]
Results = dict[str, dict[str, list[Figures]]]  # {set: {way: one for each seed}}
STUDIED = ["mnist-pairwise-30", "mnist-pairwise-300", "mnist-class-30", "mnist-class-300", "fashion-pairwise",
           "cifar10-class", "agnews", "adult"]  # fmt: skip
TITLES = {"f1": "F1", "ap": "Average precision", "cpu_seconds": "Seconds of CPU time"}
SMALLEST = 1e-4  # in the true T, so that it has a logarithm
HYPER, EM, TRUE = "hypergradients, bigsam", "EM", "the true T"


# --- ways to find T ---------------------------------------------------------------------------------------------------


def from_counts(counts: Tensor) -> Tensor:
    """Rows (true class) × columns (given label) to T, with one more row in each cell: T may have no zero."""
    return F.normalize(counts + 1, p=1, dim=1)


def no_noise(p: Tensor, y: Tensor) -> Tensor:
    """Nearly the identity: one label in a hundred is wrong."""
    classes = p.shape[1]
    return 0.01 / (classes - 1) + (0.99 - 0.01 / (classes - 1)) * torch.eye(classes, dtype=p.dtype)


def counted(p: Tensor, y: Tensor) -> Tensor:
    """How often a row of each predicted class has each label."""
    classes = p.shape[1]
    return from_counts(F.one_hot(p.argmax(1), classes).to(p.dtype).T @ F.one_hot(y, classes).to(p.dtype))


def confident(p: Tensor, y: Tensor) -> Tensor:
    """The confident joint of cleanlab, which has given labels as rows and true classes as columns."""
    from cleanlab.count import compute_confident_joint

    joint = compute_confident_joint(y.numpy(), F.normalize(p.double(), p=1, dim=1).numpy())
    return from_counts(torch.from_numpy(np.asarray(joint, np.float64)).T.to(p.dtype))


def true_matrix(one: Loaded) -> Tensor:
    """How often the unchecked rows of each true class have each label."""
    rows = ~one.checked
    counts = np.zeros((one.classes, one.classes))
    np.add.at(counts, (one.truth[rows], one.given[rows]), 1)
    found = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return F.normalize(torch.from_numpy(found).float().clamp_min(SMALLEST), p=1, dim=1)


def ways(one: Loaded) -> dict[str, tuple[Matrix, int, str]]:
    """For each way: how T is estimated from held-out probabilities, how many outer steps follow, and the solver."""
    known, steps = true_matrix(one), Options().outer_steps
    return {
        "none": (no_noise, 0, "bigsam"),
        "uniform": (uniform_noise, 0, "bigsam"),
        "counting": (counted, 0, "bigsam"),
        "confident learning": (confident, 0, "bigsam"),
        EM: (expectation_maximisation, 0, "bigsam"),
        "hypergradients, gd": (expectation_maximisation, steps, "gd"),
        HYPER: (expectation_maximisation, steps, "bigsam"),
        TRUE: (lambda p, y: known, 0, "bigsam"),
    }


# --- measuring --------------------------------------------------------------------------------------------------------


def judged(folds: Folds, matrix_of: Matrix, outer_steps: int, solver: str, rounds: int = 2) -> Found:
    """Train, estimate T and a temperature, train again, …; then the outer steps, and the posterior of each label."""
    noise = Noise(folds.classes, alpha=float((~folds.checked).float().mean()))
    train = partial(learn, folds, noise, steps=Options().steps, solver=solver)
    for _ in range(rounds):
        logits, _ = train(outer_steps=0)
        matrix, temperature = estimate(folds, logits, matrix_of)
        noise.set(matrix, temperature * float(noise.log_temperature.detach().exp()))
    logits, _ = train(outer_steps=outer_steps)
    log_p, log_matrix = logits.double().log_softmax(1), noise.log_matrix().detach().double()
    right = log_p.gather(1, folds.y[:, None])[:, 0] + log_matrix.diagonal()[folds.y]
    score = (right + given_label_loss(log_p, folds.y, log_matrix)).exp().numpy()
    return Found(score, score < 0.5)


def cross_validation(one: Loaded, seed: int) -> Folds:
    """The folds and the inputs of the judge's first classifiers."""
    x, penalty = precondition(torch.from_numpy(one.x))
    y, checked = torch.from_numpy(one.given), torch.from_numpy(one.checked)
    fold = stratified(y, checked, Options().folds, seed)
    return Folds(x, y, checked, fold, penalty, torch.zeros(len(penalty), dtype=torch.long), one.classes)


def measure(one: Loaded, seed: int) -> dict[str, Figures]:
    """The figures of every way on one draw."""
    folds = cross_validation(one, seed)
    out: dict[str, Figures] = {}
    for way, (matrix_of, outer_steps, solver) in ways(one).items():
        begin = time.process_time()
        found = judged(folds, matrix_of, outer_steps, solver)
        out[way] = {"cpu_seconds": time.process_time() - begin, **evaluate(one, found)}
    return out


# --- the page ---------------------------------------------------------------------------------------------------------


def summary(results: Results, key: str) -> dict[str, dict[str, tuple[float, float]]]:
    """{set: {way: (mean, standard deviation over the seeds)}}."""
    return {
        name: {way: (float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else float("nan"))
               for way, rows in found.items() for v in [[row[key] for row in rows]]}
        for name, found in results.items()
    }  # fmt: skip


def block(results: Results, key: str) -> Block:
    """Ways as lines, sets as columns and the mean of all sets; the best and what is level with it in bold."""
    table = summary(results, key)
    lines: list[list[str]] = []
    for way in next(iter(table.values())):
        cells = [_cell(row, way, key) for row in table.values()]
        mean = float(np.mean([row[way][0] for row in table.values()]))
        lines.append([way, *cells, f"{mean:.1f}" if key == "cpu_seconds" else f"{mean:.3f}"])
    return TITLES[key], ["T", *table, "mean"], lines


def _cell(row: dict[str, tuple[float, float]], way: str, key: str) -> str:
    if key == "cpu_seconds":
        return f"{row[way][0]:.1f}"
    text = spread({key: row[way][0], f"{key}_std": row[way][1]}, key)
    known = {other: value for other, value in row.items() if other != TRUE}  # the truth is no competitor
    return f"**{text}**" if way in known and way in leaders(known) else text


def reading(results: Results) -> str:
    """What the tables say, counted."""
    sentences: list[str] = []
    for key in ("f1", "ap"):
        table = summary(results, key)
        mean = {way: float(np.mean([row[way][0] for row in table.values()])) for way in next(iter(table.values()))}
        truth = mean.pop(TRUE)
        order = sorted(mean, key=mean.__getitem__, reverse=True)
        above = sum(row[HYPER][0] > row[EM][0] for row in table.values())
        sentences.append(
            f"{TITLES[key]}, mean over the {len(table)} sets: {mean[order[0]]:.3f} for *{order[0]}*, "
            f"{mean[order[1]]:.3f} for *{order[1]}*, {mean[order[2]]:.3f} for *{order[2]}*, and {truth:.3f} with "
            f"the true T. *{HYPER}* starts from *{EM}*, and is above it on {above} of {len(table)} sets."
        )
    return " ".join(sentences)


def page(results: Results, asked: argparse.Namespace) -> str:
    """The study as Markdown."""
    here, draws = machine([]), len(results[asked.sets[0]][TRUE])
    command = (
        f"python -m benchmarks.cleaning_matrix --data-root DIR --sets {','.join(results)} --first-seed "
        f"{asked.first_seed} --seeds {draws} --threads {asked.threads} --out docs/results"
    )
    return f"""# Where the noise matrix comes from

T[c, y] is the probability that a row of class c was given the label y. `bilevel-clean` learns it by exact
hypergradients. This study compares that with other ways to find T. All ways have the same classifiers, folds and
features. The classifiers are the first ones of `bilevel-clean`, which see the features alone. Its second ones, which
also see the neighbours of each row, are left out.

| T | how it is found |
| --- | --- |
| none | almost the identity: 1 % of the labels wrong |
| uniform | maximum likelihood, with one rate for all classes |
| counting | how often each predicted class has each given label |
| confident learning | `compute_confident_joint` of cleanlab |
| EM | maximum likelihood, with uniform noise as prior |
| hypergradients | EM, then {Options().outer_steps} outer steps |
| the true T | counted with the true labels, which no method knows |

T and a temperature are estimated from held-out probabilities, in two rounds. A label is called wrong if its posterior
probability is below one half. If T has almost no noise, hardly any label is called wrong, and the average precision
says more than F1. The solvers are `bigsam`, and `gd`, whose inner steps use the unchecked rows alone. The figures are
mean ± standard deviation over {draws} draws. Bold figures are the best, and those within 0.005 or one standard
deviation of the best. The true T does not compete.

{reading(results)}

{markdown([block(results, key) for key in TITLES])}
`{command}`, {datetime.date.today().isoformat()}, {here["cpu"]}, {here["system"]}, Python {here["python"]}, PyTorch
{here["torch"]}.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.cleaning_matrix", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--data-root", type=Path, action="append", default=[], metavar="DIR",
                   help="where the files are; may be given several times")  # fmt: skip
    p.add_argument("--sets", type=listing(SETS), default=STUDIED, metavar="A,B", help="by default " + ",".join(STUDIED))
    p.add_argument("--seeds", type=int, default=3, metavar="S", help="draws of each set (3)")
    p.add_argument("--first-seed", type=int, default=200, metavar="N", help="seed of the first draw (200)")
    p.add_argument("--threads", type=int, default=1, metavar="N", help="threads (1)")
    p.add_argument("--out", type=Path, default=Path("runs/cleaning"), metavar="DIR",
                   help="where the page goes (runs/cleaning)")  # fmt: skip
    p.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"where features are kept ({CACHE})")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    p = parser()
    asked = p.parse_args(argv)
    if asked.seeds < 1 or asked.threads < 1 or asked.first_seed < 0:
        p.error(f"--seeds ({asked.seeds}) and --threads ({asked.threads}) are at least 1, --first-seed at least 0")
    torch.set_num_threads(asked.threads)
    asked.out.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    with threadpool_limits(asked.threads):
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            for name in asked.sets:
                try:
                    one = load_set(name, seed, asked.data_root, asked.cache)
                except FileNotFoundError as error:
                    p.error(f"{name}: {error}; give its folder with --data-root, or leave it out with --sets")
                add(results.setdefault(name, {}), measure(one, seed), f"{name} {seed}")
            # after each draw of all sets, so that an interrupted run has a page
            write_page(asked.out / "cleaning_matrix.md", page(results, asked))
    print(screen(block(results, key) for key in TITLES))


def add(results: dict[str, list[Figures]], found: dict[str, Figures], title: str) -> None:
    """Add the figures of a draw, and show them."""
    for way, figures in found.items():
        results.setdefault(way, []).append(figures)
        shown = " ".join(f"{key} {figures[key]:.3f}" for key in TITLES)
        print(f"{title} {way}: {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
