"""Learn how labels went wrong by hypergradients: a noise matrix, and the regularisation of a classifier.

A row of class c was given the label y with probability T[c, y]. A linear classifier p with weights w is trained on the
unchecked rows through T. A step of BiG-SAM adds the loss on the checked rows:

    h(w, λ) = −mean log Σ_c p_c(x)·T[c, y]  +  decay·‖w‖² / 2n       g(w) = −mean log p_y(x)
    w⁺ = w − t·α·∇h − t·(1 − α)·∇g

The outer loss is −log of the probability of all given labels, on rows that the classifier was not trained on. There are
few outer variables λ: T, the decay, α and a temperature.
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

    x: M × D inputs. y: given labels. checked: which labels are verified. fold: the fold of each row. penalty, group:
    for each input the factor of its weight decay, and its entry of `Noise.log_decay` (see `precondition`).
    """

    x: Tensor
    y: Tensor
    checked: Tensor
    fold: Tensor
    penalty: Tensor
    group: Tensor
    classes: int

    @property
    def count(self) -> int:
        return int(self.fold.max()) + 1

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x and y of some rows, and which classifiers are trained on each of them."""
        trained = self.fold[rows][:, None] != torch.arange(self.count, device=self.x.device)
        return self.x[rows], self.y[rows], trained.to(self.x.dtype)

    def classifiers(self) -> nn.Sequential:
        """Return the classifiers of all folds as one model with weights 0: M × D → M × folds × C."""
        linear = nn.Linear(self.x.shape[1], self.count * self.classes, device=self.x.device)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.Unflatten(1, (self.count, self.classes)))

    def curvature(self) -> Callable[[float], float]:
        """Return the largest curvature that α·h + (1 − α)·g can have without the decay, as a function of α."""
        x = torch.cat([self.x, torch.ones_like(self.x[:, :1])], 1)
        noisy, verified = (part.T @ part / len(part) for part in (x[~self.checked], x[self.checked]))
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


def given_label_loss(log_p: Tensor, y: Tensor, log_matrix: Tensor) -> Tensor:
    """Return −log Σ_c p_c·T[c, y] for each row. log_p is M × C, or M × folds × C."""
    through = log_matrix[:, y].T
    return -torch.logsumexp(log_p + (through if log_p.dim() == 2 else through[:, None]), -1)


def outer_loss(folds: Folds, noise: Noise, logits: Tensor) -> Tensor:
    """Return −log of the probability of the given labels and of the prior of T, per row."""
    log_p, at = logits.log_softmax(-1), folds.checked
    given = given_label_loss(log_p[~at], folds.y[~at], noise.log_matrix()).sum()
    verified = F.nll_loss(log_p[at], folds.y[at], reduction="sum")
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
    """Learn the outer variables in place. Return each row's logits by the classifier of its fold, and the outer losses.

    An inner loop of `steps` steps trains the classifiers of all folds. There is one more loop than outer steps, for the
    logits of the last outer variables. outer_steps=0 trains with the present outer variables.
    """
    model, curvature = folds.classifiers(), folds.curvature()
    noisy, verified = folds.part(~folds.checked), folds.part(folds.checked)
    rows, n = torch.arange(len(folds.y), device=folds.x.device), len(folds.y)
    slow = [noise.rate, noise.deviation, noise.log_temperature]
    adam = torch.optim.Adam([{"params": slow, "lr": 0.1}, {"params": [noise.log_decay, noise.share], "lr": 0.3}])

    def decay() -> Tensor:
        return noise.log_decay.exp()[folds.group] * folds.penalty / n

    def h(model: Any, x: Tensor, y: Tensor, trained: Tensor) -> Tensor:
        loss = given_label_loss(model(x).log_softmax(-1), y, noise.log_matrix())
        return (loss * trained).sum() / len(x) + (decay() * model[0].weight.square()).sum() / 2

    def g(model: Any, x: Tensor, y: Tensor, trained: Tensor) -> Tensor:
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
        with bilevel.inner(model, h, g, solver=rule, optimizer=sgd) as loop:
            loop.run(steps, *noisy, outer=verified)
            logits = noise.log_temperature.exp() * loop(folds.x)[rows, folds.fold]
            loss = outer_loss(folds, noise, logits)
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

    matrix_of: a function of the probabilities and the given labels of the unchecked rows that returns the noise matrix.
    """
    at, best = folds.checked, (math.inf, torch.empty(0), 1.0)
    for temperature in torch.logspace(-2, 3, 16, base=2).tolist():
        log_p = (temperature * logits).log_softmax(1)
        matrix = matrix_of(log_p[~at].exp(), folds.y[~at])
        loss = given_label_loss(log_p[~at], folds.y[~at], matrix.log()).sum()
        total = float(loss + F.nll_loss(log_p[at], folds.y[at], reduction="sum"))
        best = min(best, (total, matrix, temperature), key=lambda found: found[0])
    return best[1], best[2]
