"""The settings of the study of attribution, and their plain trainings: many at once, without the library.

`Problem.retrained` is the judge: a stack of copies of the model, each trained by a few lines of SGD or Adam, by vmap.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

State = dict[str, Tensor]
CHUNK = 50  # copies of the model that are trained at a time


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    own_batches: whether a training without some rows draws batches of its own from the others, as anybody would train
    on a part of the data. Otherwise the batches stay the same, and the rows that are left out have weight 0 in them.
    twin: the setting of which this is the smooth version.
    """

    name: str
    data: str
    rows: int
    model: str
    batch: int
    lr: float
    epochs: int
    shares: tuple[float, ...]
    momentum: float = 0.0
    own_batches: bool = False
    orders: int = 1
    twin: str = ""

    @property
    def title(self) -> str:
        return f"{self.data}, {self.model}, batches of {self.batch}, rate {self.lr:g}"


ALL = (0.01, 0.05, 0.1, 0.5)
DIGITS: dict[str, Any] = {"data": "digits", "rows": 1000, "batch": 200, "lr": 0.5, "epochs": 20}
SMALL: dict[str, Any] = {"data": "digits", "rows": 1000, "batch": 50, "lr": 1.0, "epochs": 10}
DATTRI: dict[str, Any] = {"data": "MNIST", "batch": 64, "lr": 0.01, "shares": (0.5,), "own_batches": True, "orders": 5}
TWO: dict[str, Any] = {"shares": (0.1, 0.5), "own_batches": True, "orders": 5}
SETTINGS = [
    Setting("digits-lr", model="LR", shares=ALL, **DIGITS),
    Setting("digits-tanh", model="tanh", shares=ALL, **DIGITS),
    Setting("digits-relu", model="ReLU", shares=ALL, **DIGITS),
    Setting("digits-relu-rough", model="ReLU", shares=ALL, **SMALL),
    Setting("digits-tanh-rough", model="tanh", shares=ALL, twin="digits-relu-rough", **SMALL),
    Setting("digits-lr-orders", model="LR", **TWO, **DIGITS),
    Setting("digits-tanh-orders", model="tanh", **TWO, **DIGITS),
    Setting("digits-relu-orders", model="ReLU", **TWO, **DIGITS),
    Setting("mnist-lr", model="LR", rows=500, epochs=20, **DATTRI),
    Setting("mnist-mlp", model="MLP", rows=500, epochs=50, momentum=0.9, **DATTRI),
    Setting("text-gpt", "text", 256, "GPT", 32, 3e-3, 6, (0.1, 0.5)),
    Setting("mnist-lr-5000", model="LR", rows=5000, epochs=20, **DATTRI),
]


def setting(name: str) -> Setting:
    return next(s for s in SETTINGS if s.name == name)


class Problem:
    """A setting with its data: rows, queries, a test set, and a model at its start."""

    def __init__(self, s: Setting, root: Path | None = None, queries: int = 20) -> None:
        self.s = s
        (self.x, self.y), (self.xq, self.yq), self.test = _data(s, queries, root)
        torch.manual_seed(0)
        self.model = _model(s)
        self.adam = s.model == "GPT"

    @cached_property
    def start(self) -> State:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def losses(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, tokens: bool = False) -> Tensor:
        """The loss of each row: for a text, the mean over its characters, or with `tokens` that of each."""
        out = model(x)
        each = cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
        each = each.view(y.shape)
        return each if tokens or y.ndim == 1 else each.mean(1)

    def queries(self, model: Any) -> Tensor:
        return self.losses(model, self.xq, self.yq)

    def batches(self, rows: Tensor, order: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 + order)
        for _ in range(self.s.epochs):
            yield from rows[torch.randperm(len(rows), generator=generator)].split(self.s.batch)

    # --- with the library ---

    def train(self, order: int = 0) -> Callable[[Tensor], Iterator[Any]]:
        """The training as a user of the library would write it, for `Attribution`."""

        def h(model: nn.Module, i: Tensor, weights: Tensor) -> Tensor:
            return (weights[i] * self.losses(model, self.x[i], self.y[i], weights.ndim > 1)).mean()

        def train(weights: Tensor) -> Iterator[Any]:
            torch.manual_seed(order)
            parameters = self.model.parameters()
            optimizer = (
                torch.optim.Adam(parameters, lr=self.s.lr, eps=1e-4)
                if self.adam
                else torch.optim.SGD(parameters, lr=self.s.lr, momentum=self.s.momentum)
            )
            with bilevel.inner(self.model, h, solver="gd", optimizer=optimizer, check=False) as loop:
                for i in self.batches(torch.arange(len(self.x)), order):
                    loop.step(i, weights)
                self.model.eval()
                yield loop
                self.model.train()

        return train

    # --- without it ---

    def retrained(self, masks: Tensor, order: int = 0) -> tuple[State, Tensor, Tensor]:
        """Train once for each mask: the weights, the losses of the queries, and whether each is answered rightly."""
        parts = [self._chunk(m, order) for m in masks.split(CHUNK)]
        states = {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
        self.model.eval()
        found = [self._answers({n: x[k] for n, x in states.items()}) for k in range(len(masks))]
        self.model.train()
        return states, torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])

    def _answers(self, state: State) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            right = functional_call(self.model, state, (self.xq,)).argmax(-1) == self.yq
            return self.queries(lambda x: functional_call(self.model, state, (x,))), right

    def accuracy(self, state: State) -> float:
        self.model.eval()
        with torch.no_grad():
            right = functional_call(self.model, state, (self.test[0],)).argmax(-1) == self.test[1]
        self.model.train()
        return float(right.float().mean())

    def _chunk(self, masks: Tensor, order: int) -> State:
        copies, _ = stack_module_state([self.model] * len(masks))
        z = {n: x.detach().clone() for n, x in copies.items()}
        memory = [{n: torch.zeros_like(x) for n, x in z.items()} for _ in range(2)]

        def loss(state: State, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return (weight * self.losses(lambda x: functional_call(self.model, state, (x,)), x, y)).mean()

        own = self.s.own_batches
        gradient = vmap(grad(loss), in_dims=(0, 0, 0, 0) if own else (0, None, None, 0), randomness="different")
        torch.manual_seed(order)
        for k, (x, y, weight) in enumerate(self._stacked(masks, order), start=1):
            self._move(z, gradient(z, x, y, weight), memory, k)
        return z

    def _stacked(self, masks: Tensor, order: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches for all copies: the same with other weights, or each from its own rows."""
        if not self.s.own_batches:
            for i in self.batches(torch.arange(len(self.x)), order):
                yield self.x[i], self.y[i], masks[:, i]
            return
        for together in zip(
            *(self.batches(m.nonzero()[:, 0], order + 100 * s) for s, m in enumerate(masks)), strict=True
        ):
            i = torch.stack(together)
            yield self.x[i], self.y[i], torch.ones(i.shape)

    def _move(self, z: State, d: State, memory: list[State], k: int) -> None:
        first, second = memory
        with torch.no_grad():
            for n in z:
                if self.adam:
                    first[n].mul_(0.9).add_(d[n], alpha=0.1)
                    second[n].mul_(0.999).addcmul_(d[n], d[n], value=0.001)
                    scale = (second[n] / (1 - 0.999**k)).sqrt_().add_(1e-4)
                    z[n] -= self.s.lr * first[n] / (1 - 0.9**k) / scale
                else:
                    first[n].mul_(self.s.momentum).add_(d[n])
                    z[n] -= self.s.lr * first[n]


# --- data and models -------------------------------------------------------------------------------------------


def _data(s: Setting, queries: int, root: Path | None) -> Any:
    if s.data == "text":
        return _text(s.rows, queries)
    if s.data == "digits":
        from sklearn.datasets import load_digits

        x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = (x[order] / 16).float(), y[order]
    else:
        from bilevel_recipes.data import load

        found = load("mnist", root)
        order = torch.randperm(len(found.x), generator=torch.Generator().manual_seed(0))[: s.rows + queries + 1000]
        pixels = torch.tensor(found.x)[order].flatten(1).float() / 255
        x, y = (pixels - 0.1307) / 0.3081, torch.tensor(found.y)[order]
    n = s.rows
    ends = n, n + queries
    return tuple((x[a:b], y[a:b]) for a, b in ((0, n), ends, (ends[1], ends[1] + 1000)))


def text_and_letters(rows: int, length: int = 32) -> tuple[str, list[str]]:
    """The help on Python's topics, which comes with Python, in the order of its file; and the letters that occur."""
    text = importlib.resources.files("pydoc_data").joinpath("topics.py").read_text(encoding="utf-8")
    text = text.encode().decode("unicode_escape", "ignore")[2000:][: 40 * length * rows]
    return text, sorted(set(text))


def _text(rows: int, queries: int, length: int = 32) -> Any:
    """Chunks of a text. Each row is a chunk, and its labels are the same chunk one letter later."""
    text, letters = text_and_letters(rows, length)
    codes = torch.tensor([letters.index(c) for c in text])
    chunks = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))
    part = [chunks[order[a:b]] for a, b in ((0, rows), (rows, rows + queries), (rows + queries, rows + queries + 200))]
    return tuple((p[:, :-1], p[:, 1:]) for p in part)


def _model(s: Setting) -> nn.Module:
    if s.model == "GPT":
        return GPT()
    size = 64 if s.data == "digits" else 784
    if s.model == "LR":
        return nn.Linear(size, 10)
    if s.model == "MLP":  # that of dattri, with its dropout
        hidden = [nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*hidden, nn.Linear(64, 10))
    return nn.Sequential(nn.Linear(size, 64), nn.Tanh() if s.model == "tanh" else nn.ReLU(), nn.Linear(64, 10))


class GPT(nn.Module):
    """A small transformer over characters, in plain operations."""

    def __init__(self, letters: int = 128, width: int = 48, heads: int = 4, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.out = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        z = self.letters(x) + self.places[: x.shape[-1]]
        for block in self.blocks:
            z = block(z)
        return self.out(z)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        near = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        a = ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).masked_fill(~near, -1e9).softmax(-1)
        x = x + self.back((a @ v).transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))
