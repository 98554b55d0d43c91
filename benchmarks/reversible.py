"""The training run backwards: bits a weight and step, and the time, beside the states of checkpoint="sqrt".

    make reversible

Each case runs its steps and one hypergradient with every engine in turn, on one thread, and takes the processor time
(with --turns, of the fastest turn). The hypergradients of the three engines are compared bit for bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

HEAD = """# Training run backwards

Made by `make reversible`. `Reverse("reversible")` keeps the last state, and of each step what rounding loses.

- **bits** is what it keeps of a step for each weight; **state** is the size of a state for each weight, in bits.
- **memory** is what it keeps in all over what `checkpoint="sqrt"` keeps at the end of the loop, and **time** is the
  processor time of the steps and of one hypergradient over that of "sqrt" and of storing every state.
- **equal** says whether the hypergradient has the same bits as that of storing every state.
"""


@dataclass(frozen=True)
class Case:
    """A model, its batches and the losses of them."""

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    steps: int
    optimizers: tuple[str, ...]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int, letters: int = 128) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        y = self.letters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(y))).transpose(1, 2)


def digits(samples: int, *shape: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ten noisy patterns."""
    patterns = torch.randn(10, *shape)
    while True:
        y = torch.randint(10, (samples,))
        yield patterns[y] + torch.randn(samples, *shape), y


def text(samples: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the documentation of this project, letter by letter."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    letters = torch.tensor([min(ord(c), 127) for page in pages for c in page.read_text(encoding="utf-8")])
    while True:
        at = torch.randint(len(letters) - length - 1, (samples,))[:, None] + torch.arange(length)
        yield letters[at], letters[at + 1]


SHORT = "SGD, 0.9", "AdamW, β₂ 0.999"
CASES = (
    Case(
        "MLP, 64-64-10", lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)),
        lambda: digits(50, 64), 100, (*SHORT, "AdamW, β₂ 0.95", "SGD, 0.9, Nesterov", "NAdam"),
    ),
    Case(
        "MLP, 64-512-512-10",
        lambda: nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)),
        lambda: digits(200, 64), 40, SHORT,
    ),
    Case(
        "CNN, 3 convolutions",
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
        ),
        lambda: digits(32, 3, 16, 16), 40, SHORT,
    ),
    Case("GPT, 4 layers of 128", lambda: GPT(4, 128, 64), lambda: text(8, 64), 20, ("SGD, 0.9", "AdamW, β₂ 0.95")),
    Case("GPT, batch × 4", lambda: GPT(4, 128, 64), lambda: text(32, 64), 10, ("AdamW, β₂ 0.95",)),
)  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, 0.9": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "SGD, 0.9, Nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "AdamW, β₂ 0.999": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW, β₂ 0.95": lambda p: torch.optim.AdamW(p, 1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
}


def solve(case: Case, optimizer: str, engine: bilevel.Reverse, steps: int) -> tuple[Tensor, Any, float]:
    """The hypergradient of a rate and a regulariser, the plan, and the seconds of the processor."""
    torch.manual_seed(0)
    model, batches = case.model(), case.batches()
    mu, rate = torch.tensor(-8.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)

    def h(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + mu.exp() * sum(p.square().sum() for p in model.parameters())

    def g(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    start = time.process_time()
    with bilevel.inner(
        model, h, g, solver="gd", optimizer=OPTIMIZERS[optimizer](model.parameters()), lr=rate, engine=engine,
        check=False,
    ) as loop:  # fmt: skip
        for _ in range(steps):
            loop.step(*next(batches))
        plan = loop.plan
        found = torch.stack(loop.hypergrad([mu, rate], outer=next(batches)))
    return found, plan, time.process_time() - start


def row(case: Case, optimizer: str, turns: int, steps: int) -> str:
    engines = {
        "reversible": bilevel.Reverse("reversible"), "sqrt": bilevel.Reverse("sqrt"), "every": bilevel.Reverse()
    }  # fmt: skip
    seconds = dict.fromkeys(engines, float("inf"))
    found: dict[str, tuple[Tensor, Any]] = {}
    for _ in range(turns):
        for name, engine in engines.items():
            *found[name], time_ = solve(case, optimizer, engine, steps)  # pyright: ignore
            seconds[name] = min(seconds[name], time_)
    weights = sum(p.numel() for p in case.model().parameters())
    state = weights * (2 if optimizer.startswith("SGD") else 3)
    kept = found["reversible"][1].differences
    return (
        f"| {case.name} | {weights:,} | {optimizer} | {steps} | {8 * kept / weights / (steps - 1):.2f} | "
        f"{32 * state // weights} | {(kept + 4 * state) / (4 * state * found['sqrt'][1].states):.2f} | "
        f"{seconds['reversible'] / seconds['sqrt']:.2f} | {seconds['reversible'] / seconds['every']:.2f} | "
        f"{'yes' if torch.equal(found['reversible'][0], found['every'][0]) else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--optimizer", default="", help="optimizers whose names have this in them")
    parser.add_argument("--steps", type=int, default=0, help="K, in place of that of each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    solve(CASES[0], "SGD, 0.9", bilevel.Reverse("reversible"), 3)  # what torch loads when it is first needed
    print(HEAD)
    print("| model | weights | optimizer | K | bits | state | memory / sqrt | time / sqrt | time / every | equal |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for optimizer in case.optimizers:
            if options.only in case.name and options.optimizer in optimizer:
                print(row(case, optimizer, options.turns, options.steps or case.steps), flush=True)


if __name__ == "__main__":
    main()
