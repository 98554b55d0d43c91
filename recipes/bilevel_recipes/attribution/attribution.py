"""Attribution of the losses of queries to training rows, through a training function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel_plugin.check.trainings import Train, at_end

from .. import runs
from .gradients import gradients_of
from .influence import Influence
from .trust import Trust, trust

FILE = "influence.pt"
Queries = Callable[[Any], Tensor]
Progress = Callable[[float, str], None]
R = TypeVar("R")


@dataclass(frozen=True)
class Attribution:
    """Which rows of a training made its model answer these queries as it does.

        def train(weights):                                      # a weight for each row
            def h(model, i):
                return (weights[i] * cross_entropy(model(x[i]), y[i], reduction="none")).mean()
            with bilevel.inner(net, h, solver="gd", optimizer=sgd) as loop:
                for i in batches:
                    loop.step(i)
                yield loop                                       # trained: the block is still open

        found = Attribution(train, len(x), (x_test, y_test), leave_out=0.1).explain()
        print(found.top(0))                                      # the rows that helped and hurt query 0 most

    Attributes:
        train: a function that trains with a weight for each row, and yields its loop inside of the block (or takes a
            hypergradient there, as for `bilevel.check_loop`). It has to train in the same way each time it is called:
            from the same start, on the same batches.
        rows: how many rows there are, or their names. For a weight of each token, the shape of the weights, such as
            (rows, tokens).
        queries: a function from the trained model to one loss for each query; or a pair of inputs and labels, for the
            cross entropy.
        leave_out: which question is asked. 1 is about single rows, and another whole number about so many at once. A
            share, such as 0.1 or 0.5, is about subsets without this share of the rows. It sets the weight at which
            training is linearised, 1 − share: the mean over these subsets. For large shares that predicts far better.
        names: what the queries are called.
        dtype, device: of the weights.
    """

    train: Train
    rows: int | tuple[int, ...] | Sequence[str]
    queries: Queries | tuple[Tensor, Tensor]
    leave_out: float | int = 1
    names: Sequence[str] | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    _shape: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        shape = (self.rows,) if isinstance(self.rows, int) else self.rows
        plain = isinstance(shape, tuple) and all(isinstance(n, int) for n in shape)
        shape = tuple(shape) if plain else (len(shape),)
        if not shape or min(shape) < 1:  # pyright: ignore
            raise ValueError(
                f"attribution: rows is a number, the names of the rows or the shape of the weights; got {shape}."
            )
        object.__setattr__(self, "_shape", shape)
        if not 0 <= self.share < 1:
            raise ValueError(
                f"attribution: leave_out is a number of rows, less than {shape[0]}, or a share below 1; got "
                f"{self.leave_out!r}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights: (rows,), or (rows, tokens)."""
        return self._shape

    @property
    def share(self) -> float:
        """The share of the rows that is left out."""
        whole = isinstance(self.leave_out, int)
        return self.leave_out / self.shape[0] if whole else float(self.leave_out)

    def point(self) -> Tensor:
        """Return the weights at which training is linearised: 1 − share for each row, or 1 for a single row."""
        mean = 1.0 if self.leave_out == 1 else 1 - self.share
        return torch.full(self.shape, mean, dtype=self.dtype, device=self.device).requires_grad_()

    def losses(self, weights: Tensor) -> Tensor:
        """Train with these weights, such as 0 for rows to leave out, and return the loss of each query."""
        return trained(
            self.train, weights.detach().clone().requires_grad_(), lambda loop: self.losses_of(loop).detach()
        )

    def losses_of(self, model: Any) -> Tensor:
        """Return the loss of each query by this model."""
        if isinstance(self.queries, tuple):
            x, y = self.queries
            found = cross_entropy(model(x), y, reduction="none")
        else:
            found = self.queries(model)
        if found.ndim != 1:
            raise ValueError(
                f"attribution: queries(model) has to return one loss for each query, as a vector; got the shape "
                f"{tuple(found.shape)}. A cross entropy needs reduction='none'."
            )
        return found

    def explain(self, *, folder: str | Path | None = None, progress: Progress | None = None) -> Influence:
        """Train once at the point of linearisation, and return the influence of every row on every query.

        folder: where finished queries are kept, so that an interrupted call goes on from there.
        progress: a function that is called with the share of the work that is done, and its name.
        """
        say = progress or (lambda share, words: None)
        say(0.0, "training")
        weights = self.point()

        def use(loop: Any) -> _Saved:
            losses = self.losses_of(loop).detach()
            done = _Saved(folder, losses, self.shape, float(weights.detach().flatten()[0]))
            todo = range(len(done.effects), len(losses))
            for q, found in zip(todo, gradients_of(loop, weights, self.losses_of, todo), strict=True):
                say(q / len(losses), f"query {q + 1} of {len(losses)}")
                done.add(-found.detach().to("cpu", torch.float32))
            return done

        done = trained(self.train, weights, use)
        say(1.0, "done")
        named = () if isinstance(self.rows, (int, tuple)) else tuple(map(str, self.rows))
        return Influence(
            torch.stack(done.effects), done.losses, self.share, float(weights.detach().flatten()[0]),
            named or tuple(map(str, range(self.shape[0]))), tuple(self.names or map(str, range(len(done.losses)))),
        )  # fmt: skip

    def trust(self, found: Influence, *, subsets: int = 8, seed: int = 0, progress: Progress | None = None) -> Trust:
        """Train again to see how far the influence can be believed; see `Trust`. It takes 10 + subsets trainings."""
        return trust(self, found, subsets=subsets, seed=seed, progress=progress)


def trained(train: Train, weights: Tensor, use: Callable[[Any], R]) -> R:
    """Return what `use` makes of the loop of a training, while its block is open."""
    found: list[R] = []
    at_end(train, weights, lambda loop, *_: found.append(use(loop)))
    if not found:
        raise TypeError(
            "attribution: the function that trains handed over no loop. Write `yield loop` as the last line of its "
            "block, so that the loop can be asked for gradients while the block is open."
        )
    return found[0]


class _Saved:
    """The queries that are finished, in memory and, with a folder, on disk."""

    def __init__(self, folder: str | Path | None, losses: Tensor, shape: tuple[int, ...], weight: float) -> None:
        self._path = None if folder is None else Path(folder) / FILE
        self.losses = losses.cpu()
        self._made = {"losses": self.losses, "weight": weight}
        self.effects: list[Tensor] = []
        state = runs.load(self._path) if self._path is not None else None
        if state is None:
            return
        same = state["weight"] == weight and torch.equal(state["losses"], self.losses)
        if not same or state["effects"].shape[1:] != shape:
            raise ValueError(
                f"attribution: {self._path} has queries of another training: rows, queries, leave_out, seed or data "
                "differ. Use the same, or another folder."
            )
        self.effects = list(state["effects"])

    def add(self, effects: Tensor) -> None:
        self.effects.append(effects)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            runs.save(self._path, {**self._made, "effects": torch.stack(self.effects)})
