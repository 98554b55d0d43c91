"""Learn how labels went wrong by hypergradients: a noise matrix, and the regularisation of a classifier.

A row of class c was given the label y with probability T[c, y]. A linear classifier p with weights w is trained on the
unchecked rows through T. A step of BiG-SAM adds the loss on the checked rows:

    h(w, λ) = −mean log Σ_c p_c(x)·T[c, y]  +  decay·‖w‖² / 2n       g(w) = −mean log p_y(x)
    w⁺ = w − t·α·∇h − t·(1 − α)·∇g

The outer loss is −log of the probability of all given labels, on rows that the classifier was not trained on. There are
few outer variables λ: T, the decay, α and a temperature.

There are two kinds of known rows. A *checked* row belongs to a random sample, and its right label alone is known. A row
with a *truth* was reviewed: its given label and its right one are known. Reviewed rows are chosen by their features and
their given labels, so their right labels are missing at random elsewhere: the likelihood of all given labels and of the
known right ones is not biased by the choice, if each row counts once. So a reviewed row stays in h and in the estimate
of T, with the classes that it does not have left out of the sum. Only checked rows are in g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

DECAY = 0.5  # the initial weight decay, for inputs of unit length
SPREAD = 1.0  # the standard deviation of the prior of a logit of T around that of uniform noise

IMPOSSIBLE = -1e4  # the logarithm of a probability that is 0 to rounding, with derivatives
STRENGTH = 50.0  # the prior of expectation maximisation counts as so many rows of each class with uniform noise


class Noise(nn.Module):
    """The outer variables λ: the noise matrix T, the decay of each group of inputs, α, and a temperature.

    log T[c, y] = log of uniform noise at one rate + a deviation for each c and y, normalised. The deviations have a
    Gaussian prior: the noise of a class with few rows stays close to that of all classes.
    """

    def __init__(self, classes: int, alpha: float, groups: int = 1, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(rate).logit())
        self.deviation = nn.Parameter(torch.zeros(classes, classes))
        self.log_decay = nn.Parameter(torch.full((groups,), math.log(DECAY)))
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.share = nn.Parameter(torch.tensor(alpha).logit())

    def log_matrix(self) -> Tensor:
        """Return log T, C × C."""
        classes = len(self.deviation)
        right = torch.eye(classes, dtype=torch.bool, device=self.deviation.device)
        wrong = F.logsigmoid(self.rate) - math.log(classes - 1)
        return (torch.where(right, F.logsigmoid(-self.rate), wrong) + self.deviation).log_softmax(1)

    @torch.no_grad()
    def set(self, matrix: Tensor, temperature: float) -> None:
        """Set a noise matrix without zeros, and a temperature."""
        self.rate.copy_((1 - matrix.diagonal().mean()).clamp(1e-3, 0.99).logit())
        self.deviation.zero_()
        deviation = matrix.log() - self.log_matrix()
        self.deviation.copy_(deviation - deviation.mean(1, keepdim=True))
        self.log_temperature.fill_(math.log(temperature))


@dataclass(frozen=True)
class Folds:
    """Rows in folds. Each fold has a classifier that is trained on all other folds.

    x: M × D inputs. y: given labels. truth: the right label of a reviewed row, and -1 elsewhere. checked: which rows
    belong to the random sample. fold: the fold of each row. penalty, group: for each input the factor of its weight
    decay, and its entry of `Noise.log_decay` (see `precondition`).
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    checked: Tensor
    fold: Tensor
    penalty: Tensor
    group: Tensor
    classes: int

    @property
    def count(self) -> int:
        return int(self.fold.max()) + 1

    def own(self, logits: Tensor) -> Tensor:
        """Return M × C of M × folds × C: what the classifier of its fold, which has not seen it, says of each row."""
        return logits[torch.arange(len(self.fold), device=logits.device), self.fold]

    @property
    def noisy(self) -> Tensor:
        """The rows whose given label is known to be that of the data: all but the checked ones without a truth."""
        return ~self.checked | (self.truth >= 0)

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x, y and truth of some rows, and which classifiers are trained on each of them."""
        trained = self.fold[rows][:, None] != torch.arange(self.count, device=self.x.device)
        return self.x[rows], self.y[rows], self.truth[rows], trained.to(self.x.dtype)

    def classifiers(self) -> nn.Sequential:
        """Return the classifiers of all folds as one model with weights 0: M × D → M × folds × C."""
        linear = nn.Linear(self.x.shape[1], self.count * self.classes, device=self.x.device)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.Unflatten(1, (self.count, self.classes)))

    def curvature(self) -> Callable[[float], float]:
        """Return the largest curvature that α·h + (1 − α)·g can have without the decay, as a function of α."""
        x = torch.cat([self.x, torch.ones_like(self.x[:, :1])], 1)
        noisy, verified = (part.T @ part / max(1, len(part)) for part in (x[~self.checked], x[self.checked]))
        return lambda alpha: float(torch.linalg.eigvalsh(alpha * noisy + (1 - alpha) * verified)[-1]) / 2


def precondition(x: Tensor, most: int = 512) -> tuple[Tensor, Tensor]:
    """Return inputs on which gradient descent converges fast, and the penalty that leaves the classifier unchanged.

    The inputs are the principal components of x, scaled to rows of unit mean length and divided by √(v + 4·DECAY/n),
    where v is their variance. The curvature of a decayed linear classifier is then similar in all directions.
    """
    x = x - x.mean(0)
    x = x / x.square().sum(1).mean().sqrt().clamp_min(1e-12)
    variance, axes = torch.linalg.eigh((x.T @ x / len(x)).double())
    variance, axes = variance.flip(0)[:most], axes.flip(1)[:, :most]
    kept = variance > 1e-7 * variance[0]
    kept[0] = True  # one input is kept even if all rows are equal
    scale = (variance[kept] + 4 * DECAY / len(x)).sqrt()
    return x @ (axes[:, kept] / scale).to(x.dtype), scale.pow(-2).to(x.dtype)


def given_label_loss(log_p: Tensor, y: Tensor, log_matrix: Tensor, truth: Tensor | None = None) -> Tensor:
    """Return −log Σ_c p_c·T[c, y] for each row, or −log p_c·T[c, y] where c is known. log_p: M × C or M × folds × C."""
    through = log_matrix[:, y].T
    if truth is not None:
        through = through.masked_fill(others(truth, len(log_matrix)), IMPOSSIBLE)
    return -torch.logsumexp(log_p + (through if log_p.dim() == 2 else through[:, None]), -1)


def others(truth: Tensor, classes: int) -> Tensor:
    """Return M × C booleans: the classes that a row of known class does not have; none where truth is -1."""
    return (truth[:, None] >= 0) & (truth[:, None] != torch.arange(classes, device=truth.device))


def outer_loss(folds: Folds, noise: Noise, logits: Tensor) -> Tensor:
    """Return −log of the probability of the given labels and of the prior of T, per row."""
    log_p, at = logits.log_softmax(-1), folds.noisy
    given = given_label_loss(log_p[at], folds.y[at], noise.log_matrix()).sum()
    verified = F.nll_loss(log_p[~at], folds.y[~at], reduction="sum")
    return (given + verified + noise.deviation.square().sum() / (2 * SPREAD**2)) / len(folds.y)


def learn(
    folds: Folds,
    noise: Noise,
    *,
    steps: int = 40,
    outer_steps: int = 8,
    solver: str = "bigsam",
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Tensor, list[float]]:
    """Learn the outer variables in place. Return the logits of each row by each classifier, and the outer losses.

    An inner loop of `steps` steps trains the classifiers of all folds. There is one more loop than outer steps, for the
    logits of the last outer variables. outer_steps=0 trains with the present outer variables. Without a checked row
    there is no g, so the solver is gd.
    """
    known = bool(folds.checked.any())
    solver = solver if known else "gd"
    model, curvature = folds.classifiers(), folds.curvature()
    noisy, verified = folds.part(~folds.checked), folds.part(folds.checked)
    n = len(folds.y)
    slow = [noise.rate, noise.deviation, noise.log_temperature]
    adam = torch.optim.Adam([{"params": slow, "lr": 0.1}, {"params": [noise.log_decay, noise.share], "lr": 0.3}])

    def decay() -> Tensor:
        return noise.log_decay.exp()[folds.group] * folds.penalty / n

    def h(model: Any, x: Tensor, y: Tensor, truth: Tensor, trained: Tensor) -> Tensor:
        loss = given_label_loss(model(x).log_softmax(-1), y, noise.log_matrix(), truth)
        return (loss * trained).sum() / len(x) + (decay() * model[0].weight.square()).sum() / 2

    def g(model: Any, x: Tensor, y: Tensor, truth: Tensor, trained: Tensor) -> Tensor:
        y = torch.where(truth >= 0, truth, y)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.repeat_interleave(folds.count), reduction="none")
        return (loss.view_as(trained) * trained).sum() / len(x)

    losses: list[float] = []
    while True:
        alpha = torch.sigmoid(noise.share)
        share = float(alpha.detach()) if solver == "bigsam" else 1.0
        # at most the inverse of the largest curvature, which depends on α, so that the loop can't diverge
        rate = 1 / (curvature(share) + share * float(decay().detach().max()))
        sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.8)
        rule = bilevel.BiGSAM(1.0, alpha=alpha) if solver == "bigsam" else bilevel.GD(1.0)
        with bilevel.inner(model, h, g if known else None, solver=rule, optimizer=sgd) as loop:
            loop.run(steps, *noisy, outer=verified if known else None)
            logits = noise.log_temperature.exp() * loop(folds.x)
            loss = outer_loss(folds, noise, folds.own(logits))
            losses.append(loss.item())
            on_step()
            if len(losses) > outer_steps:
                return logits.detach(), losses
            adam.zero_grad()
            loop.backward(loss=loss)
        adam.step()


def expectation_maximisation(p: Tensor, y: Tensor, rounds: int = 30) -> Tensor:
    """Return the T of highest likelihood for these probabilities and given labels, with uniform noise as its prior."""
    matrix = prior = uniform_noise(p, y, rounds)
    given = F.one_hot(y, p.shape[1]).to(p.dtype)
    for _ in range(rounds):
        posterior = F.normalize(p * matrix[:, y].T, p=1, dim=1)
        matrix = F.normalize(posterior.T @ given + STRENGTH * prior, p=1, dim=1)
    return matrix


def uniform_noise(p: Tensor, y: Tensor, rounds: int = 30) -> Tensor:
    """Return the T of highest likelihood among those with one rate for all classes and all wrong labels."""
    classes, rate = p.shape[1], 0.1
    eye, right = torch.eye(classes, device=p.device, dtype=p.dtype), p.gather(1, y[:, None])[:, 0].clamp_min(1e-9)
    for _ in range(rounds):
        wrong = (1 - right) * rate / (classes - 1)
        rate = float((wrong / (wrong + right * (1 - rate))).mean().clamp(1e-3, 0.95))
    return (1 - rate) * eye + rate * (1 - eye) / (classes - 1)


def estimate(
    folds: Folds, logits: Tensor, matrix_of: Callable[[Tensor, Tensor], Tensor] = expectation_maximisation
) -> tuple[Tensor, float]:
    """Return the noise matrix and the temperature of highest likelihood for these logits.

    matrix_of: a function of the probabilities and the given labels of the noisy rows that returns the noise matrix. The
    probabilities of a reviewed row are 1 for its right class and 0 for the others.
    """
    at, best = folds.noisy, (math.inf, torch.empty(0), 1.0)
    y, truth = folds.y[at], folds.truth[at]
    known = F.one_hot(truth.clamp_min(0), folds.classes).to(logits.dtype)
    for temperature in torch.logspace(-2, 3, 16, base=2).tolist():
        log_p = (temperature * logits).log_softmax(1)
        matrix = matrix_of(torch.where(truth[:, None] >= 0, known, log_p[at].exp()), y)
        loss = given_label_loss(log_p[at], y, matrix.log()).sum()
        total = float(loss + F.nll_loss(log_p[~at], folds.y[~at], reduction="sum"))
        best = min(best, (total, matrix, temperature), key=lambda found: found[0])
    return best[1], best[2]


def mix(folds: Folds, log_p: Tensor, rounds: int = 60) -> tuple[Tensor, Tensor]:
    """Return log p of the rows by several judges together, and the noise matrix of highest likelihood.

    log_p: judges × M × C. The judges are mixed as softmax(Σ_j w_j·log p_j). Their weights w_j > 0 and T are few outer
    variables, which are learnt on the labels of rows that no judge was trained on (`outer_loss`).
    """
    noise = Noise(folds.classes, alpha=0.5).to(log_p.device)
    weights = torch.full((len(log_p),), -math.log(len(log_p)), device=log_p.device, requires_grad=True)

    def mixed() -> Tensor:
        return torch.tensordot(weights.exp(), log_p, 1)

    adam = torch.optim.Adam([weights, noise.rate, noise.deviation], 0.1)
    noise.set(*estimate(folds, mixed().detach()))
    with torch.no_grad():
        weights += noise.log_temperature
    for _ in range(rounds):
        adam.zero_grad()
        outer_loss(folds, noise, mixed()).backward()
        adam.step()
    return mixed().detach().double().log_softmax(1), noise.log_matrix().detach().double().exp()
