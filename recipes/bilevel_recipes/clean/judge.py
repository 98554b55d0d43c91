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

from .calibration import Evidence, calibrated, wished
from .noise import Folds, Noise, estimate, expectation_maximisation, learn, mix, precondition
from .verdict import Verdict

Progress = Callable[[float, str], None]
LEARNT_FROM = 5000  # the number of rows from which the few outer variables are learnt; all rows are judged with them
FEWEST = 0.01  # added to a share of neighbours before its logarithm is taken
SHOWN = 5  # the number of nearest rows that a verdict keeps
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
    outer_steps: int = 0
    """Number of hypergradients that learn the noise with the first classifiers, after expectation maximisation, and
    half as many with the second ones. They take four times as long with 8, and seldom change the list."""
    solver: Literal["bigsam", "gd"] = "bigsam"
    """Solver that trains a classifier: bigsam also takes steps on the checked rows, gd uses only the unchecked ones."""
    recall: float | None = None
    """The share of all wrong labels that the list is expected to hold. By default the list has the best expected F1."""
    precision: float | None = None
    """The share of the list that is expected to be wrong."""
    length: int | None = None
    """The number of labels in the list."""

    def __post_init__(self) -> None:
        for name, least in {"folds": 2, "neighbours": 1, "steps": 1, "outer_steps": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"bilevel-clean: {name} must be at least {least}; got {getattr(self, name)}.")
        wishes = {name: v for name in ("recall", "precision", "length") if (v := getattr(self, name)) is not None}
        if len(wishes) > 1:
            raise ValueError(f"bilevel-clean: the list has a {' or a '.join(wishes)}; give one of them.")
        for name, value in wishes.items():
            if value < 0 or (name != "length" and not 0 < value < 1):
                kind = "a number of rows" if name == "length" else "between 0 and 1"
                raise ValueError(f"bilevel-clean: {name} must be {kind}; got {value}.")
        if self.solver not in ("bigsam", "gd"):
            raise ValueError(f"bilevel-clean: solver must be bigsam or gd; got {self.solver!r}.")


def judge(
    x: NDArray[Any] | Sequence[NDArray[Any]],
    given: NDArray[Any],
    checked: NDArray[np.bool_],
    *,
    truth: NDArray[Any] | None = None,
    classes: int,
    names: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    options: Options | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judge the given label of each row.

    x: M × D features, or several such views of the rows, each of which has a judge of its own. given: M labels from 0.
    checked: M booleans, true for the rows of a random sample whose labels a person has verified; there may be none.
    truth: the right label of each row that was reviewed, whose given label is that of the data all the same; -1
    elsewhere. names: the names of the classes, for warnings. progress: a function that is called with the share of the
    work that is done, and the name of the current part.
    """
    begin, options = time.perf_counter(), options or Options()
    views = [x] if isinstance(x, np.ndarray) else list(x)
    reviewed = np.full(len(given), -1) if truth is None else np.asarray(truth)
    for view in views:
        _refuse(view, given, checked, reviewed, classes)
    place = torch.device(device)
    inputs = [torch.from_numpy(_centred(view)).to(place) for view in views]
    # copies, since PyTorch warns of read-only arrays and refuses those with negative strides
    arrays = ((given, np.int64), (reviewed, np.int64), (checked, np.bool_))
    y, t, known = (torch.from_numpy(np.array(a, kind)).to(place) for a, kind in arrays)
    steps = _Progress(len(views) * (7 + options.outer_steps + options.outer_steps // 2) + 1, progress)
    count = min(options.folds, int(known.sum()) or len(y))
    fold = stratified(torch.where(t >= 0, t, y), known, count, seed)
    case = _Case(y, t, known, fold, classes, options, seed, steps)
    log_p, noise = case.mixed([case.judge(rows) for rows in inputs])
    posterior, warnings = _posterior(log_p, noise.log(), y), list[str]()
    method = _method(len(views), options, bool(known.any()))
    right = torch.where(t >= 0, t, y)
    if len(torch.unique(right[known])) > 1:
        alone = checked_alone(inputs[0], right, known, fold, classes)
        if _is_worse(log_p, alone, right, known):
            log_p, method = alone, "A classifier of the checked rows alone judges."
            noise = expectation_maximisation(alone[~known].exp(), y[~known])
            posterior = _posterior(log_p, noise.log(), y)
            warnings.append(
                "The labels that nobody checked did not help to predict the checked ones, so a classifier of the "
                "checked rows alone judges. That happens where most labels are wrong, or wrong in the same way."
            )
    steps("checked rows alone")
    return _verdict(
        y, t, known, posterior, log_p, noise, options=options, names=names, method=method, warnings=warnings,
        history=case.history, near=case.nearest[0], seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _method(views: int, options: Options, checked: bool) -> str:
    """Return a sentence that names the judge."""
    by = "hypergradients" if options.outer_steps else "expectation maximisation"
    told = f"Linear classifiers of features and nearest neighbours judge, with a noise matrix from {by}."
    if views > 1:
        told += f" {views} views of the rows have a judge each; the weights of their mix are learnt."
    return told if checked else told + " No row is checked, so the labels are judged by each other alone."


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
    truth: Tensor
    checked: Tensor
    fold: Tensor
    classes: int
    options: Options
    seed: int
    progress: _Progress
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    nearest: list[Tensor] = field(default_factory=list[Tensor])

    def judge(self, x: Tensor) -> tuple[Tensor, Noise]:
        """Return the logits of all rows, by classifiers that have not seen their labels, and the noise."""
        share = float((~self.checked).float().mean())
        noise = Noise(self.classes, alpha=min(share, 1 - 1e-6), groups=2).to(x.device)
        folds = self.folds(x)
        logits = self.cross_fit(folds, noise, "features", self.options.outer_steps, rounds=2)
        near = neighbours(x, min(self.options.neighbours, len(x) - 1))
        self.nearest.append(near[:, :SHOWN])
        self.progress("neighbours", 2)
        share = self.votes(logits, noise.log_matrix().detach(), near)
        both = self.folds(x, (share + FEWEST).log().log_softmax(1))
        return both.own(self.cross_fit(both, noise, "neighbours", self.options.outer_steps // 2, rounds=1)), noise

    def votes(self, logits: Tensor, log_matrix: Tensor, near: Tensor) -> Tensor:
        """Return the mean posterior of the neighbours of each row, by the classifier that has not seen the row.

        A neighbour's own classifier would have seen the row, and through it a row would be judged by its own label.
        """
        known = torch.where(self.truth >= 0, self.truth, self.y)
        at = self.checked | (self.truth >= 0)
        votes = torch.empty(len(self.y), self.classes, device=logits.device)
        for fold in range(logits.shape[1]):
            posterior = _posterior(logits[:, fold].log_softmax(1), log_matrix, self.y).float()
            posterior[at] = F.one_hot(known[at], self.classes).float()
            rows = self.fold == fold
            votes[rows] = posterior[near[rows]].mean(1)
        return votes

    def mixed(self, judged: list[tuple[Tensor, Noise]]) -> tuple[Tensor, Tensor]:
        """Return log p of the classes by all judges together, and the noise matrix."""
        if len(judged) == 1:
            logits, noise = judged[0]
            return logits.double().log_softmax(1), noise.log_matrix().detach().double().exp()
        parts = torch.stack([logits.log_softmax(1) for logits, _ in judged])
        folds = self.folds(torch.zeros_like(parts[0]))
        return mix(folds, parts)

    def folds(self, *inputs: Tensor) -> Folds:
        """Return the rows with these groups of inputs. Each group is preconditioned, and has its own weight decay."""
        parts = [precondition(x) for x in inputs]
        group = torch.cat([torch.full_like(p, i, dtype=torch.long) for i, (_, p) in enumerate(parts)])
        x, penalty = torch.cat([x for x, _ in parts], 1), torch.cat([p for _, p in parts])
        return Folds(x, self.y, self.truth, self.checked, self.fold, penalty, group, self.classes)

    def cross_fit(self, folds: Folds, noise: Noise, name: str, outer_steps: int, rounds: int) -> Tensor:
        """Learn the outer variables from some rows. Return the logits of all rows, M × folds × C."""
        rows = self._sample()
        some = folds if rows is None else _take(folds, rows)
        train = partial(learn, noise=noise, steps=self.options.steps, solver=self.options.solver)
        for _ in range(rounds):  # expectation maximisation is a good start for the hypergradients
            logits, _ = train(some, outer_steps=0)
            noise.set(*_rescaled(estimate(some, some.own(logits)), noise))
            self.progress(name)
        logits, losses = train(some, outer_steps=outer_steps, on_step=lambda: self.progress(name))
        self.history.extend({"inputs": name, "step": i, "loss": loss} for i, loss in enumerate(losses))
        if rows is not None:
            logits, _ = train(folds, outer_steps=0)
            noise.set(*_rescaled(estimate(folds, folds.own(logits)), noise))
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
    names = ("x", "y", "truth", "checked", "fold")
    return replace(folds, **{name: getattr(folds, name)[rows] for name in names})


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
    """Return the k nearest other rows of each row, M × k, nearest first, by cosine in the first components."""
    x = x - x.mean(0)
    if x.shape[1] > most and len(x) > LEARNT_FROM:  # only where it saves much
        x = x @ torch.linalg.eigh((x.T @ x / len(x)).double())[1][:, -most:].to(x.dtype)
    x, found = F.normalize(x, dim=1), list[Tensor]()
    for begin in range(0, len(x), chunk):
        near = x[begin : begin + chunk] @ x.T
        here = torch.arange(len(near), device=x.device)
        near[here, here + begin] = -2.0
        found.append(near.topk(k).indices)
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
    y: Tensor, truth: Tensor, checked: Tensor, posterior: Tensor, log_p: Tensor, noise: Tensor, *, options: Options,
    names: Sequence[str] | None, method: str, warnings: list[str], history: list[dict[str, Any]], near: Tensor,
    seconds: float,
) -> Verdict:  # fmt: skip
    classes, right = posterior.shape[1], posterior.gather(1, y[:, None])[:, 0]
    labels, known = torch.where(truth >= 0, truth, y), checked | (truth >= 0)
    other = posterior.scatter(1, y[:, None], -1.0).argmax(1)
    counts = torch.bincount(labels[checked], minlength=classes)
    evidence = Evidence(
        belief=right.cpu().numpy(),
        known=known.cpu().numpy(),
        wrong=((truth >= 0) & (truth != y)).cpu().numpy(),
        both=(truth >= 0).cpu().numpy(),
        checked=checked.cpu().numpy(),
    )
    trust = calibrated(evidence)
    issue = np.zeros(len(y), bool)
    issue[wished(evidence, trust, length=options.length, recall=options.recall, precision=options.precision)] = True
    found = Verdict(
        score=torch.where(known, 1.0, right).cpu().numpy(),
        belief=evidence.belief,
        issue=issue,
        suggested=np.where(issue, other.cpu().numpy(), labels.cpu().numpy()),
        probabilities=log_p.exp().float().cpu().numpy(),
        noise=noise.double().cpu().numpy(),
        given=y.cpu().numpy(),
        truth=truth.cpu().numpy(),
        checked=evidence.checked,
        checked_accuracy=float((log_p.argmax(1) == labels)[checked].double().mean()),
        base_accuracy=float(counts.max() / counts.sum()) if checked.any() else math.nan,
        left=trust.wrong(~evidence.known),
        precision=trust.share(issue),
        by_class=trust.by_class(y.cpu().numpy(), classes),
        near=near.cpu().numpy().astype(np.int32),
        method=method,
        warnings=warnings,
        history=history,
        seconds=seconds,
    )
    called = [str(c) for c in range(classes)] if names is None else list(names)
    warnings.extend(_doubts(found, [called[c] for c in torch.nonzero(counts == 0)[:, 0].tolist()]))
    return found


def _doubts(found: Verdict, unchecked: list[str]) -> list[str]:
    """Return a sentence for each reason to trust the verdict less. unchecked: classes without a checked row."""
    told: list[str] = []
    if found.checked_accuracy < found.base_accuracy + WEAK * (1 - found.base_accuracy):
        told.append(
            f"The model is weak: it predicts {found.checked_accuracy:.0%} of the checked labels, and always saying the "
            f"most frequent class would get {found.base_accuracy:.0%}. Its list is little better than chance; better "
            "features may help, such as embeddings of a pretrained model."
        )
    count = int(found.checked.sum())
    if not count and (found.truth >= 0).any():
        told.append(
            "The only known rows are suspects that were reviewed, which are no random sample. The intervals rest on "
            "their scores; decide some rows of the random sample on the page for figures that are counted."
        )
    if 0 < count < 20:
        told.append(
            f"Only {count} rows are checked, so the accuracy on them is uncertain; check some more, if you can."
        )
    if unchecked and count:
        shown = ", ".join(unchecked[:10]) + (f" and {len(unchecked) - 10} more" if len(unchecked) > 10 else "")
        told.append(
            f"No row of these classes is checked: {shown}. What is said of them rests on unchecked labels alone."
        )
    if found.noise_rate.value > 0.5:
        told.append(
            f"An estimated {found.noise_rate.value:.0%} of the unchecked labels are wrong. The list then depends on "
            "the checked rows; make sure that they are right."
        )
    return told


def _refuse(x: NDArray[Any], given: NDArray[Any], checked: NDArray[Any], truth: NDArray[Any], classes: int) -> None:
    shapes = np.shape(x), np.shape(given), np.shape(checked), np.shape(truth)
    if len(shapes[0]) != 2 or min(shapes[0]) == 0 or set(shapes[1:]) != {(shapes[0][0],)}:
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
    if np.min(truth) < -1 or np.max(truth) >= classes:
        raise ValueError(
            f"bilevel-clean: truth must lie in -1 to {classes - 1}; got {np.min(truth)} to {np.max(truth)}."
        )
    if (checked | (truth >= 0)).all() or len(np.unique(given)) < 2:
        raise ValueError(
            "bilevel-clean: some rows must be unknown, and there must be two classes; got "
            f"{int((checked | (truth >= 0)).sum())} known of {len(checked)} rows, of {len(np.unique(given))} classes."
        )
