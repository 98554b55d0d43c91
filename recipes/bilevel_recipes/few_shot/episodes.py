"""Tasks drawn from a set of classes: many at once, by index, with no loop over tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..device import place
from .augment import Augment
from .sources import Part

Pair = tuple[Tensor, Tensor]
Batch = tuple[Pair, Pair]  # (support images, labels), (query images, labels); first dimension: the tasks


class Images:
    """The images of some classes on the device; an image turned by 90° · r belongs to a class of its own.

    Item i is image i mod N, turned i div N times; class c is class c mod C of the part, turned c div C times.
    """

    def __init__(self, part: Part, turns: int = 4, device: str = "cpu", scale: Pair | None = None) -> None:
        x, y = torch.from_numpy(part.x), torch.from_numpy(part.y)
        order = y.argsort(stable=True)
        x = (x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2))[order].contiguous()
        if turns > 1 and x.shape[-1] != x.shape[-2]:
            raise ValueError(f"recipes.few_shot: images of {x.shape[-2]} × {x.shape[-1]} can't be turned; use turns=1")
        self.shape, self.turns, self.device = tuple(x.shape[1:]), turns, torch.device(device)
        self._x = x.flatten(2).to(device)
        counts = torch.bincount(y)
        self._fewest, self._most = int(counts.min()), int(counts.max())  # read once, since a GPU makes the host wait
        self._counts = counts.to(device)
        self._starts = self._counts.cumsum(0) - self._counts
        pixels = torch.arange(x.shape[-1] * x.shape[-2]).reshape(x.shape[-2:])
        self._turned = torch.stack([pixels.rot90(r, (0, 1)).flatten() for r in range(turns)]).to(device)
        # one mean and one deviation for each colour, those of the training classes, also for the test classes
        wide = x.double()
        self.scale = scale or (wide.mean((0, 2, 3)).float(), wide.std((0, 2, 3)).float().clamp_min(1e-6))
        self._mean, self._std = (v.to(device)[:, None] for v in self.scale)

    @property
    def classes(self) -> int:
        return len(self._counts) * self.turns

    @property
    def items(self) -> int:
        return len(self._x) * self.turns

    @property
    def fewest(self) -> int:
        """The number of images of the smallest class."""
        return self._fewest

    def digest(self) -> bytes:
        """Return a checksum of all images and of the number in each class."""
        counts = repr(self._counts.tolist()).encode()
        return hashlib.sha256(counts + self._x.cpu().contiguous().numpy().tobytes()).digest()

    def __getitem__(self, items: Tensor) -> Tensor:
        """Return the normalised images of these items: (*items.shape, channels, height, width)."""
        flat = items.flatten()
        turn, row = flat // len(self._x), flat % len(self._x)
        pixels = self._x[row].gather(2, self._turned[turn][:, None].expand(-1, self.shape[0], -1))
        return ((pixels - self._mean) / self._std).reshape(*items.shape, *self.shape)

    def draw(self, tasks: int, ways: int, samples: int, generator: torch.Generator) -> Tensor:
        """Return items of random tasks, (tasks, samples, ways). No class and no image occurs twice in a task."""
        if ways > self.classes or samples > self._fewest:
            raise ValueError(
                f"recipes.few_shot: {ways} ways with {samples} images of each class were asked for; there are "
                f"{self.classes} classes (with their turns), the smallest of {self._fewest} images"
            )
        lot = torch.rand(tasks, self.classes, generator=generator, device=generator.device)
        chosen = place(lot.topk(ways).indices, self.device)
        turn, kind = chosen // len(self._counts), chosen % len(self._counts)
        counts = self._counts[kind]
        lot = torch.rand(tasks, ways, self._most, generator=generator, device=generator.device)
        lot = place(lot, self.device).masked_fill(
            torch.arange(lot.shape[-1], device=self.device) >= counts[..., None], -1
        )
        row = self._starts[kind][..., None] + lot.topk(samples).indices
        return (row + turn[..., None] * len(self._x)).transpose(1, 2).contiguous()


class Episodes:
    """Batches of tasks without end: ((support, labels), (query, labels)), images (tasks, n, C, H, W).

    What comes next depends on the seed and on how many batches were drawn; `state_dict` remembers both.
    augment: random changes of each image.
    """

    def __init__(
        self,
        images: Images,
        tasks: int,
        ways: int,
        shots: int,
        queries: int,
        seed: int = 0,
        augment: Augment | None = None,
    ) -> None:
        self.images, self.tasks, self.ways, self.shots, self.queries = images, tasks, ways, shots, queries
        self.augment = augment
        self._generator = torch.Generator().manual_seed(seed)
        images.draw(1, ways, shots + queries, torch.Generator())  # an impossible request fails here

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        items = self.images.draw(self.tasks, self.ways, self.shots + self.queries, self._generator)
        x = self.images[items]
        if self.augment is not None:
            x = self.augment(x.flatten(0, 2), self._generator).view(x.shape)
        support, query = x[:, : self.shots].flatten(1, 2), x[:, self.shots :].flatten(1, 2)
        return (support, self.labels(self.shots)), (query, self.labels(self.queries))

    def labels(self, samples: int) -> Tensor:
        """Return 0, 1, …, ways − 1 for each of the samples, in each task."""
        return torch.arange(self.ways, device=self.images.device).repeat(samples).expand(self.tasks, -1)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def next_batch(source: Iterator[Batch], done: int, wanted: int) -> Batch:
    """Return the next batch of tasks. `done` tasks were used, and `wanted` are needed."""
    try:
        return next(source)
    except StopIteration:
        raise ValueError(
            f"recipes.few_shot: the tasks ended after {done} batches, and {wanted} are needed (outer_steps); give an "
            "iterator without end, or fewer outer steps"
        ) from None


def collect_tasks(sample: Callable[[], Pair], *, tasks: int, ways: int, shots: int) -> Iterator[Batch]:
    """Yield batches from a source that returns one task at a time: `collect_tasks(taskset.sample, ...)`.

    There are batches as long as there are tasks for whole ones: without end, unless `sample` raises StopIteration.

    sample: gives (images, labels) of one task, shots and queries together and in any order, as a TaskDataset of
        learn2learn does. Labels are 0, …, ways − 1 (its RemapLabels), as many of each.
    shots: the first so many images of each class are its support set, the others its queries.
    """
    while True:
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for _ in range(tasks):
            try:
                task = sample()
            except StopIteration:  # of an iterator behind `sample`; inside a generator it would be another error
                return
            found.append(_support_and_query(*task, ways, shots))
        x, y, x_query, y_query = (torch.stack(part) for part in zip(*found, strict=True))
        yield (x, y), (x_query, y_query)


def _support_and_query(x: Tensor, y: Tensor, ways: int, shots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    labels, counts = y.unique(return_counts=True)
    if labels.tolist() != list(range(ways)):
        raise ValueError(
            f"recipes.few_shot: a task of {ways} ways has labels 0, …, {ways - 1}; got {labels.tolist()}. In "
            "learn2learn, NWays says how many there are, and RemapLabels, after LoadData, counts them from 0"
        )
    if len(x) != len(y) or len(set(counts.tolist())) > 1 or int(counts[0]) <= shots:
        raise ValueError(
            f"recipes.few_shot: a task has {len(x)} images, and of each label {counts.tolist()}; wanted are as many of "
            f"each, and more than shots={shots}, so that queries are left. In learn2learn, KShots draws shots + queries"
        )
    rows = y.argsort(stable=True).view(ways, -1).T  # a sample of each class after the other, as in Episodes
    support, query = rows[:shots].flatten(), rows[shots:].flatten()
    return x[support], y[support], x[query], y[query]
