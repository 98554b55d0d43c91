"""Judge every label: estimate how probably it is right, given its row, all other rows, and how labels go wrong.

1. Classifiers of the rows are cross-fitted, and the noise of the labels is learnt with them (`noise.py`).
2. The mean posterior of a row's nearest neighbours becomes a second input, beside the features.
3. Classifiers of both are cross-fitted, the noise is learnt further, and the posterior of each label is its score.

A label is called wrong if the probability that it is right is below one half. If classifiers of the checked rows alone
predict the checked rows better, those judge instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .noise import Folds, Noise, estimate, expectation_maximisation, learn, precondition
from .verdict import Verdict

Progress = Callable[[float, str], None]
LEARNT_FROM = 5000  # the number of rows from which the few outer variables are learnt; all rows are judged with them
FEWEST = 0.01  # added to a share of neighbours before its logarithm is taken
WEAK = 0.15  # a model is weak unless it predicts this share of the rows that are not of the most frequent class


@dataclass(frozen=True)
class Options:
    """The settings of the judge. The measured results are those of the defaults."""

    folds: int = 5
    """Number of parts of the data. Each row is judged by a classifier that was trained on the other parts."""
    neighbours: int = 15
    """Number of neighbours with which each row is compared."""
    steps: int = 40
    """Number of steps that train a classifier (inner steps)."""
    outer_steps: int = 8
    """Number of hypergradients that learn the noise with the first classifiers. The second ones take half as many."""
    solver: Literal["bigsam", "gd"] = "bigsam"
    """Solver that trains a classifier: bigsam also takes steps on the checked rows, gd uses only the unchecked ones."""

    def __post_init__(self) -> None:
        for name, least in {"folds": 2, "neighbours": 1, "steps": 1, "outer_steps": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"bilevel-clean: {name} must be at least {least}; got {getattr(self, name)}.")
        if self.solver not in ("bigsam", "gd"):
            raise ValueError(f"bilevel-clean: solver must be bigsam or gd; got {self.solver!r}.")


def judge(
    x: NDArray[Any],
    given: NDArray[Any],
    checked: NDArray[np.bool_],
    *,
    classes: int,
    names: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    options: Options | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judge the given label of each row.

    x: M × D features. given: M labels from 0. checked: M booleans, true where a person has verified the label.
    names: the names of the classes, for warnings. progress: a function that is called with the share of the work that
    is done, and the name of the current part.
    """
    begin, options = time.perf_counter(), options or Options()
    _refuse(x, given, checked, classes)
    place = torch.device(device)
    rows = torch.from_numpy(_centred(x)).to(place)
    # copies, since PyTorch warns of read-only arrays and refuses those with negative strides
    y, known = (torch.from_numpy(np.array(a, kind)).to(place) for a, kind in ((given, np.int64), (checked, np.bool_)))
    steps = _Progress(8 + options.outer_steps + options.outer_steps // 2, progress)
    fold = stratified(y, known, min(options.folds, int(known.sum())), seed)
    case = _Case(y, known, fold, classes, options, seed, steps)
    posterior, log_p, noise, history = case.judge(rows)
    warnings: list[str] = []
    alone = checked_alone(rows, y, known, fold, classes)
    steps("checked rows alone")
    method = "Linear classifiers of features and nearest neighbours judge, with a noise matrix from hypergradients."
    if _is_worse(log_p, alone, y, known):
        log_p, method = alone, "A classifier of the checked rows alone judges."
        noise = expectation_maximisation(alone[~known].exp(), y[~known])
        posterior = _posterior(log_p, noise.log(), y)
        warnings.append(
            "The labels that nobody checked did not help to predict the checked ones, so a classifier of the checked "
            "rows alone judges. That happens where most labels are wrong, or wrong in the same way."
        )
    return _verdict(
        y, known, posterior, log_p, noise, classes=classes, names=names, method=method, warnings=warnings,
        history=history, seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _centred(x: NDArray[Any]) -> NDArray[np.float32]:
    """Centre and scale the features so that single precision can hold them, even if they are huge or far from 0."""
    if x.dtype != np.float32:
        x = x - x.mean(0, dtype=np.float64)
    exponent = np.frexp(np.abs(x).max())[1]  # a power of two leaves the digits as they are
    return np.ascontiguousarray(np.ldexp(x, -exponent), dtype=np.float32)


@dataclass(frozen=True)
class _Case:
    """A data set that is judged."""

    y: Tensor
    checked: Tensor
    fold: Tensor
    classes: int
    options: Options
    seed: int
    progress: _Progress
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, list[dict[str, Any]]]:
        """Return the posterior of the classes, log p, the noise matrix, and the outer losses."""
        share = float((~self.checked).float().mean())
        noise = Noise(self.classes, alpha=share, groups=2).to(x.device)
        folds = self.folds(x)
        logits = self.cross_fit(folds, noise, "features", self.options.outer_steps, rounds=2)
        posterior = _posterior(logits.log_softmax(1), noise.log_matrix().detach(), self.y)
        posterior[self.checked] = F.one_hot(self.y[self.checked], self.classes).double()
        near = neighbours(x, min(self.options.neighbours, len(x) - 1))
        self.progress("neighbours", 2)
        share_of = posterior.float()[near].mean(1)
        both = self.folds(x, (share_of + FEWEST).log().log_softmax(1))
        logits = self.cross_fit(both, noise, "neighbours", self.options.outer_steps // 2, rounds=1)
        log_p, matrix = logits.double().log_softmax(1), noise.log_matrix().detach().double()
        return _posterior(log_p, matrix, self.y), log_p, matrix.exp(), self.history

    def folds(self, *inputs: Tensor) -> Folds:
        """Return the rows with these groups of inputs. Each group is preconditioned, and has its own weight decay."""
        parts = [precondition(x) for x in inputs]
        group = torch.cat([torch.full_like(p, i, dtype=torch.long) for i, (_, p) in enumerate(parts)])
        x, penalty = torch.cat([x for x, _ in parts], 1), torch.cat([p for _, p in parts])
        return Folds(x, self.y, self.checked, self.fold, penalty, group, self.classes)

    def cross_fit(self, folds: Folds, noise: Noise, name: str, outer_steps: int, rounds: int) -> Tensor:
        """Learn the outer variables from some rows. Return the logits of all rows, from classifiers of other folds."""
        rows = self._sample()
        some = folds if rows is None else _take(folds, rows)
        train = partial(learn, noise=noise, steps=self.options.steps, solver=self.options.solver)
        for _ in range(rounds):  # expectation maximisation is a good start for the hypergradients
            logits, _ = train(some, outer_steps=0)
            noise.set(*_rescaled(estimate(some, logits), noise))
            self.progress(name)
        logits, losses = train(some, outer_steps=outer_steps, on_step=lambda: self.progress(name))
        self.history.extend({"inputs": name, "step": i, "loss": loss} for i, loss in enumerate(losses))
        if rows is not None:
            logits, _ = train(folds, outer_steps=0)
            noise.set(*_rescaled(estimate(folds, logits), noise))
            logits, _ = train(folds, outer_steps=0)
        return logits

    def _sample(self) -> Tensor | None:
        """Return the rows to learn the outer variables from, up to a third of them checked; None for all rows."""
        if len(self.y) <= LEARNT_FROM:
            return None
        draw = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.y), generator=draw).to(self.y.device)
        verified, others = order[self.checked[order]], order[~self.checked[order]]
        verified = verified[: LEARNT_FROM // 3]
        return torch.cat([verified, others[: LEARNT_FROM - len(verified)]])


class _Progress:
    """A counter of parts of the work, which reports to a function."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self.total, self.done, self.tell = total, 0, tell

    def __call__(self, what: str, parts: int = 1) -> None:
        self.done += parts
        if self.tell is not None:
            self.tell(min(1.0, self.done / self.total), what)


def _take(folds: Folds, rows: Tensor) -> Folds:
    x, y, checked, fold = (a[rows] for a in (folds.x, folds.y, folds.checked, folds.fold))
    return replace(folds, x=x, y=y, checked=checked, fold=fold)


def _rescaled(found: tuple[Tensor, float], noise: Noise) -> tuple[Tensor, float]:
    """Multiply a temperature by that which the logits had already."""
    return found[0], found[1] * float(noise.log_temperature.detach().exp())


def stratified(y: Tensor, checked: Tensor, count: int, seed: int) -> Tensor:
    """Return a fold for each row. Each fold gets its share of the checked and of the other rows of each class."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=draw).to(y.device)
    kinds = y[order] + (int(y.max()) + 1) * checked[order]
    order = order[torch.argsort(kinds, stable=True)]
    fold = torch.empty_like(y)
    fold[order] = torch.arange(len(y), device=y.device) % count
    return fold


def neighbours(x: Tensor, k: int, chunk: int = 1024, most: int = 64) -> Tensor:
    """Return the k nearest other rows of each row, M × k, by cosine in the first principal components."""
    x = x - x.mean(0)
    if x.shape[1] > most and len(x) > LEARNT_FROM:  # only where it saves much
        x = x @ torch.linalg.eigh((x.T @ x / len(x)).double())[1][:, -most:].to(x.dtype)
    x, found = F.normalize(x, dim=1), list[Tensor]()
    for begin in range(0, len(x), chunk):
        near = x[begin : begin + chunk] @ x.T
        here = torch.arange(len(near), device=x.device)
        near[here, here + begin] = -2.0
        found.append(near.topk(k, sorted=False).indices)
    return torch.cat(found)


def _posterior(log_p: Tensor, log_matrix: Tensor, y: Tensor) -> Tensor:
    """Return P(class | row, given label) ∝ p_c·T[c, y], in double precision, so that scores near 0 and 1 differ."""
    return (log_p.double() + log_matrix.double()[:, y].T).softmax(1)


def checked_alone(x: Tensor, y: Tensor, checked: Tensor, fold: Tensor, classes: int) -> Tensor:
    """Return log p of each row by a classifier of the checked rows alone, without the fold of a row that is checked."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    inputs, penalty = precondition(x)
    inputs = (inputs * penalty.rsqrt()).double().cpu().numpy()  # the principal components themselves
    labels, at, folds = y.cpu().numpy(), checked.cpu().numpy(), fold.cpu().numpy()

    def predict(train: NDArray[np.bool_], rows: NDArray[np.bool_], c: float) -> NDArray[Any]:
        """Return log p of some rows, with a little of each class, so that a class without a checked row has a log."""
        p = np.full((int(rows.sum()), classes), 1e-3 / classes)
        present = np.unique(labels[train])
        if len(present) == 1:
            p[:, present] += 1 - 1e-3
        else:
            model = LogisticRegression(C=c, max_iter=500).fit(inputs[train], labels[train])
            p[:, present] += (1 - 1e-3) * model.predict_proba(inputs[rows])
        return np.log(p)

    best: tuple[float, NDArray[Any], float] = (-math.inf, np.empty(0), 1.0)
    with threadpool_limits(1):  # the problems are small, so threads would only wait for each other
        for c in (0.1, 1.0, 10.0, 100.0):
            held = np.zeros((len(labels), classes))
            for f in np.unique(folds[at]):
                rows = at & (folds == f)
                held[rows] = predict(at & (folds != f), rows, c)
            score = float(held[at, labels[at]].mean())
            best = max(best, (score, held, c), key=lambda found: found[0])
        best[1][~at] = predict(at, ~at, best[2])
    return torch.from_numpy(best[1]).to(x.device)


def _is_worse(log_p: Tensor, alone: Tensor, y: Tensor, checked: Tensor) -> bool:
    """Return whether classifiers of the checked rows alone predict these better, by twice the standard error."""
    labels = y[checked, None]
    gap = (alone[checked].gather(1, labels) - log_p[checked].gather(1, labels))[:, 0].double().cpu()
    return len(gap) > 1 and float(gap.mean()) > 2 * float(gap.std()) / math.sqrt(len(gap))


def _verdict(
    y: Tensor, checked: Tensor, posterior: Tensor, log_p: Tensor, noise: Tensor, *, classes: int,
    names: Sequence[str] | None, method: str, warnings: list[str], history: list[dict[str, Any]], seconds: float,
) -> Verdict:  # fmt: skip
    right = posterior.gather(1, y[:, None])[:, 0]
    issue = (right < 0.5) & ~checked
    other = posterior.scatter(1, y[:, None], -1.0).argmax(1)
    predicted = log_p.argmax(1)
    accuracy = float((predicted == y)[checked].double().mean())
    counts = torch.bincount(y[checked], minlength=classes)
    base = float(counts.max() / counts.sum())
    called = [str(c) for c in range(classes)] if names is None else list(names)
    found = Verdict(
        score=torch.where(checked, 1.0, right).cpu().numpy(),
        issue=issue.cpu().numpy(),
        suggested=torch.where(issue, other, y).cpu().numpy(),
        probabilities=log_p.exp().float().cpu().numpy(),
        noise=noise.double().cpu().numpy(),
        given=y.cpu().numpy(),
        checked=checked.cpu().numpy(),
        checked_accuracy=accuracy,
        base_accuracy=base,
        false_alarms=_false_alarms(right, checked),
        method=method,
        warnings=warnings,
        history=history,
        seconds=seconds,
    )
    warnings.extend(_doubts(found, [called[c] for c in torch.nonzero(counts == 0)[:, 0].tolist()]))
    return found


def _false_alarms(right: Tensor, checked: Tensor) -> float:
    """Return the share of right labels that are called wrong, as seen on the checked rows when judged like the others.

    If few rows are checked, perhaps none of them is called wrong by chance. So one false alarm is added, with as many
    right rows as the scores expect for one. These are at most as many as there are checked rows, since scores can be
    too confident.
    """
    flagged, count, others = float((right < 0.5)[checked].sum()), float(checked.sum()), right[~checked]
    believed = float(others[others < 0.5].sum() / others.sum())
    return (flagged + 1) / (count + min(count, 1 / max(believed, 1e-9)))


def _doubts(found: Verdict, unchecked: list[str]) -> list[str]:
    """Return a sentence for each reason to trust the verdict less. unchecked: classes without a checked row."""
    told: list[str] = []
    if found.checked_accuracy < found.base_accuracy + WEAK * (1 - found.base_accuracy):
        told.append(
            f"The model is weak: it predicts {found.checked_accuracy:.0%} of the checked labels, and always saying the "
            f"most frequent class would get {found.base_accuracy:.0%}. Its list is little better than chance; better "
            "features may help, such as embeddings of a pretrained model."
        )
    if (count := int(found.checked.sum())) < 20:
        told.append(
            f"Only {count} rows are checked, so the accuracy on them is uncertain; check some more, if you can."
        )
    if unchecked:
        shown = ", ".join(unchecked[:10]) + (f" and {len(unchecked) - 10} more" if len(unchecked) > 10 else "")
        told.append(
            f"No row of these classes is checked: {shown}. What is said of them rests on unchecked labels alone."
        )
    if found.noise_rate > 0.5:
        told.append(
            f"An estimated {found.noise_rate:.0%} of the unchecked labels are wrong. The list then depends on the "
            "checked rows; make sure that they are right."
        )
    return told


def _refuse(x: NDArray[Any], given: NDArray[Any], checked: NDArray[Any], classes: int) -> None:
    shapes = np.shape(x), np.shape(given), np.shape(checked)
    if len(shapes[0]) != 2 or shapes[0][1] == 0 or shapes[1:] != ((shapes[0][0],), (shapes[0][0],)):
        raise ValueError(
            "bilevel-clean: judge takes features (rows × numbers), and one label and one mark for each row; got arrays "
            f"of shapes {', '.join(map(str, shapes))}."
        )
    if not np.isfinite(x).all():
        raise ValueError("bilevel-clean: the features hold NaN or infinite numbers; fill or drop those rows first.")
    if np.asarray(checked).dtype != np.bool_:
        raise TypeError(f"bilevel-clean: checked must hold booleans; got {np.asarray(checked).dtype}.")
    if not np.issubdtype(np.asarray(given).dtype, np.integer):
        raise TypeError(
            "bilevel-clean: labels must be whole numbers, the positions of their classes; got "
            f"{np.asarray(given).dtype}."
        )
    if len(given) and (np.min(given) < 0 or np.max(given) >= classes):
        raise ValueError(
            f"bilevel-clean: labels must lie in 0 to {classes - 1}; got {np.min(given)} to {np.max(given)}."
        )
    if checked.all() or len(np.unique(given[checked])) < 2:
        raise ValueError(
            "bilevel-clean: some rows must be checked, of at least two classes, and some must not be; got "
            f"{int(checked.sum())} checked of {len(checked)} rows, of {len(np.unique(given[checked]))} classes."
        )
