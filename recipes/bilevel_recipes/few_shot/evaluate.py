"""Accuracy on tasks of classes that were never trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_plugin.update.solvers import Rate

from .episodes import Batch, Images
from .train import chunk_size, encode, encode_task, loss, prepare, zero_head

AT_ONCE = 200  # the number of tasks whose heads are adapted together


@dataclass(frozen=True)
class Score:
    """The mean accuracy over tasks, and half the width of its 95 % interval: 1.96·deviation/√tasks."""

    mean: float
    interval: float


def score(accuracies: Tensor) -> Score:
    deviation = float(accuracies.std()) if len(accuracies) > 1 else float("nan")
    return Score(float(accuracies.mean()), 1.96 * deviation / len(accuracies) ** 0.5)


VIEWS = ("mirror", "shift")


class Views(nn.Module):
    """The mean of an encoder's features over several views of each image.

    mirror: the image, and the same with left and right swapped. shift: the image, and the same moved by 1/28 of its
    shorter side (at least a pixel) to the left, right, top and bottom, where the border is repeated.
    """

    def __init__(self, encoder: nn.Module, views: Sequence[str]) -> None:
        super().__init__()
        self.encoder, self.views = encoder, views

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        if "shift" in self.views:
            height, width = x.shape[-2:]
            by = max(1, round(min(height, width) / 28))
            wide = F.pad(x, (by,) * 4, mode="replicate")
            places = [(by, 0), (by, 2 * by), (0, by), (2 * by, by)]
            seen += [wide[..., top : top + height, left : left + width] for top, left in places]
        if "mirror" in self.views:
            seen += [part.flip(-1) for part in seen]
        features = [self.encoder(part).flatten(1) for part in seen]
        return torch.stack(features).mean(0) if len(features) > 1 else features[0]


def evaluate(
    encoder: nn.Module,
    images: Images,
    ways: int,
    shots: int,
    queries: int,
    *,
    lr: Rate,
    steps: Sequence[int] = (5,),
    leaky: int = 0,
    features: str = "sphere",
    episodes: int = 600,
    batchnorm: str = "running",
    chunk: int = 220,
    seed: int = 0,
) -> dict[str, Score]:
    """Return the accuracy on the queries of random tasks, of heads adapted on the support sets and of class means.

    "k" for each k in steps: after k steps of rate lr (a number, or a function of the step) on the support set alone.
    "nearest mean": the class whose mean feature on the support set is nearest. "leaky", if its number of steps is not
    0: after so many BiG-SAM steps that see the query labels as well, and are judged by the same; it is no measure of
    anything a user could do.
    """
    items = images.draw(episodes, ways, shots + queries, torch.Generator().manual_seed(seed))
    f = encoded(encoder, images, items, batchnorm, chunk)
    found: dict[str, list[Tensor]] = {}
    for part in f.split(AT_ONCE):
        support, query = part[:, :shots].flatten(1, 2), part[:, shots:].flatten(1, 2)
        nearest = nearest_mean(part[:, :shots].mean(1), query)
        support, query = prepare(features)(support, query)
        y, y_query = (torch.arange(ways, device=f.device).repeat(n).expand(len(part), -1) for n in (shots, queries))
        for name, right in {
            **adapted(support, y, query, y_query, ways, bilevel.GD(lr), steps),
            "nearest mean": nearest == y_query,
            **({"leaky": leaks(support, y, query, y_query, ways, lr, leaky)} if leaky else {}),
        }.items():
            found.setdefault(name, []).append(right.float().mean(1))
    return {name: score(torch.cat(parts)) for name, parts in found.items()}


def evaluate_tasks(
    encoder: nn.Module,
    batches: Iterable[Batch],
    ways: int,
    *,
    lr: Rate,
    steps: Sequence[int] = (5,),
    features: str = "sphere",
    episodes: int = 600,
    batchnorm: str = "running",
    chunk: int = 220,
) -> dict[str, Score]:
    """`evaluate` on tasks from anywhere: batches as `meta_train` takes them, until there were `episodes` tasks.

    It encodes the images of each task again, while `evaluate` encodes each image of the set once.
    """
    training = encoder.training
    judged = copy.deepcopy(encoder).train() if batchnorm == "task" else encoder.eval()  # its statistics will change
    found, done = dict[str, list[Tensor]](), 0
    for (x, y), (x_query, y_query) in batches:
        with torch.no_grad():
            support, query = encode_task(judged, x, x_query, batchnorm, chunk)
        member = F.one_hot(y, ways).to(support)
        means = member.mT @ support / member.sum(1).unsqueeze(-1)
        right = {"nearest mean": nearest_mean(means, query) == y_query}
        support, query = prepare(features)(support, query)
        for name, part in {**adapted(support, y, query, y_query, ways, bilevel.GD(lr), steps), **right}.items():
            found.setdefault(name, []).append(part.float().mean(1))
        done += len(x)
        if done >= episodes:
            break
    encoder.train(training)
    if done < episodes:
        raise ValueError(
            f"recipes.few_shot: the tasks ended after {done}, and {episodes} are needed; give more, or episodes={done}"
        )
    return {name: score(torch.cat(parts)[:episodes]) for name, parts in found.items()}


@torch.no_grad()
def encoded(encoder: nn.Module, images: Images, items: Tensor, batchnorm: str, chunk: int) -> Tensor:
    """Return features of items (tasks, samples, ways). An image is encoded once if no other image affects it."""
    task = items[0].numel()
    size = chunk_size(batchnorm, chunk, task)
    training = encoder.training
    if batchnorm == "task":  # a copy, since its running statistics will change
        encoder, once, place = copy.deepcopy(encoder).train(), items.flatten(), None
    else:
        once, place = items.unique(return_inverse=True)
        encoder.eval()
    f = encode(encoder, (images[part] for part in once.split(size)))
    encoder.train(training)
    return f.reshape(*items.shape, -1) if place is None else f[place]


def adapted(
    support: Tensor, y: Tensor, query: Tensor, y_query: Tensor, ways: int, rule: Any, steps: Sequence[int]
) -> dict[str, Tensor]:
    """Return which queries are right after each of these numbers of steps. Steps on g, if any, use the queries."""
    right: dict[str, Tensor] = {}
    head = zero_head(support.shape[-1], ways).to(support)
    block = bilevel.inner(head, loss, loss, solver=rule, tasks=len(support), engine=bilevel.Reverse(truncate=1))
    with block as loop:
        for k in range(1, max(steps) + 1):
            loop.step(support, y, outer=(query, y_query))
            if k in steps:
                with torch.no_grad():
                    right[str(k)] = loop(query).argmax(-1) == y_query
    return right


def leaks(support: Tensor, y: Tensor, query: Tensor, y_query: Tensor, ways: int, lr: Rate, steps: int) -> Tensor:
    """Return the same with the paper's schedule, whose steps on g use the labels of the queries."""
    rule = bilevel.BiGSAM(lr, lr, bilevel.power(0.25))
    return adapted(support, y, query, y_query, ways, rule, [steps])[str(steps)]


def nearest_mean(means: Tensor, query: Tensor) -> Tensor:
    """Return the class of the nearest mean: (tasks, ways, d), (tasks, n, d) -> (tasks, n)."""
    return torch.cdist(query, means).argmin(-1)
