"""How far hypergradients can be followed: forecasts of ten problems, with outer variables of every kind.

    make forecasts

For each problem the outer variable moves along −gradient by 1, 3, 10, 30 and 100 % of its own size. A cell has the
change of the outer loss that happened over the change that was promised. The radius that is found with one seed is then
tried with fresh seeds, which have other rows, initial weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel
from bilevel_plugin import Forecast

HEAD = """# How far hypergradients can be followed

Made by `make forecasts`. [What a forecast is](../worth-following.md). All problems train on handwritten digits. In
each, the outer variable λ moves along −gradient by a part of its own size. A cell has the change of the outer loss
that happened, over the change that the gradient promised: 1 is perfect, and what is not between 0.8 and 1.2 is
**bold**. The radius is the size up to which all are. With five fresh seeds (other rows, initial weights and
batches), the last column says how often the promise held at this radius, for their own gradients.
"""
FRESH = 5
Problem = tuple[Callable[[Any], Iterator[Any]], Any]
Lines = list[str]


class Digits:
    """400 rows to train on and 200 for the outer loss, a model at its start, and batches."""

    def __init__(self, seed: int, hidden: nn.Module | None = None, rows: int = 400) -> None:
        from sklearn.datasets import load_digits

        x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        x, y = (x[order] / 16).float(), y[order]
        self.x, self.y, self.xv, self.yv = x[:rows], y[:rows], x[rows : rows + 200], y[rows : rows + 200]
        torch.manual_seed(seed)
        self.seed = seed
        self.model: nn.Module = (
            nn.Linear(64, 10) if hidden is None else nn.Sequential(nn.Linear(64, 64), hidden, nn.Linear(64, 10))
        )

    def g(self, model: nn.Module) -> Tensor:
        return cross_entropy(model(self.xv), self.yv)

    def batches(self, epochs: int, size: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epochs):
            yield from torch.randperm(len(self.x), generator=generator).split(size)

    def problem(self, h: Any, lam: Any, epochs: int = 20, size: int = 100, **how: Any) -> Problem:
        """A training on these batches, and its outer variable."""

        def train(_: Any) -> Iterator[Any]:
            given = {"lr": 0.5} if not how else {k: v() if k == "optimizer" else v for k, v in how.items()}
            with bilevel.inner(self.model, h, self.g, solver="gd", check=False, **given) as loop:
                for i in self.batches(epochs, size):
                    loop.step(i)
                yield loop

        return train, lam


def weights_of_rows(hidden: nn.Module | None, **how: Any) -> Callable[[int], Problem]:
    def make(seed: int) -> Problem:
        d = Digits(seed, hidden)
        wrong = torch.rand(len(d.y)) < 0.2
        y = torch.where(wrong, (d.y + 1) % 10, d.y)
        lam = torch.ones(len(d.x), requires_grad=True)

        def h(m: nn.Module, i: Tensor) -> Tensor:
            return (lam[i] * cross_entropy(m(d.x[i]), y[i], reduction="none")).mean()

        return d.problem(h, lam, **how)

    return make


def decay(seed: int) -> Problem:
    d = Digits(seed, rows=100)
    lam = torch.full((10,), 0.01).requires_grad_()

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return cross_entropy(m(d.x[i]), d.y[i]) + (lam * m.weight.square().sum(1)).sum()

    return d.problem(h, lam, epochs=100)


def rates(seed: int) -> Problem:
    d = Digits(seed, nn.Tanh())
    lam = torch.full((20,), 0.5).requires_grad_()

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return cross_entropy(m(d.x[i]), d.y[i])

    return d.problem(h, lam, epochs=5, lr=lambda k: lam[k - 1])


def adam_rate(seed: int) -> Problem:
    d = Digits(seed, nn.Tanh())
    lam = torch.tensor(0.003, requires_grad=True)

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return cross_entropy(m(d.x[i]), d.y[i])

    def adam() -> torch.optim.Optimizer:

        return torch.optim.Adam(d.model.parameters(), lr=1.0, eps=1e-4)

    return d.problem(h, lam, epochs=5, optimizer=adam, lr=lam)


def noise_matrix(seed: int) -> Problem:
    d = Digits(seed)
    y = torch.where(torch.rand(len(d.y)) < 0.3, (d.y + 1) % 10, d.y)
    lam = (3 * torch.eye(10)).requires_grad_()  # the rows of the matrix are its softmax

    def h(m: nn.Module, i: Tensor) -> Tensor:
        given = m(d.x[i]).softmax(1) @ lam.softmax(1)
        return -given.gather(1, y[i][:, None]).log().mean()

    return d.problem(h, lam)


def initial_weights(seed: int) -> Problem:
    d = Digits(seed, nn.Tanh(), rows=50)

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return cross_entropy(m(d.x[i]), d.y[i])

    return d.problem(h, list(d.model.parameters()), epochs=10, size=50)


def labels(seed: int) -> Problem:
    d = Digits(seed)
    lam = nn.functional.one_hot(d.y, 10).float().mul(0.9).add(0.01).requires_grad_()

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return -(lam[i] * m(d.x[i]).log_softmax(1)).sum(1).mean()

    return d.problem(h, lam)


def images(seed: int) -> Problem:
    d = Digits(seed, nn.Tanh())
    lam = torch.stack([d.x[d.y == c].mean(0) for c in range(10)]).requires_grad_()

    def h(m: nn.Module, i: Tensor) -> Tensor:
        return cross_entropy(m(lam), torch.arange(10))

    return d.problem(h, lam, epochs=5)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "weights of rows, linear": weights_of_rows(None),
    "weights of rows, tanh network": weights_of_rows(nn.Tanh()),
    "weights of rows, ReLU, batches of 20, rate 1": weights_of_rows(nn.ReLU(), size=20, lr=1.0),
    "weight decay of each class": decay,
    "learning rate of each step": rates,
    "Adam's rate": adam_rate,
    "noise matrix": noise_matrix,
    "initial weights": initial_weights,
    "soft labels": labels,
    "images to train on": images,
}


def held(make: Callable[[int], Problem], radius: float) -> str:
    """How often the promise holds at this radius with fresh seeds."""
    if not radius:
        return "–"
    kept = sum(bilevel.forecast(*make(seed), sizes=(radius,)).radius > 0 for seed in range(1, FRESH + 1))
    return f"{kept} of {FRESH}"


def cells(found: Forecast) -> Lines:
    out: Lines = []
    for p, r in zip(found.promised, found.realised, strict=True):
        ratio = r / p
        out.append(f"{ratio:.2f}" if 0.8 <= ratio <= 1.2 else f"**{ratio:.2f}**" if abs(ratio) < 100 else "**far off**")
    return out


def main() -> None:
    torch.set_num_threads(1)
    print(HEAD)
    sizes = (0.01, 0.03, 0.1, 0.3, 1.0)
    print("<!-- --8<-- [start:table] -->\n")
    print("| outer variable | metasmoothness | " + " | ".join(f"{s:.0%}" for s in sizes) + " | radius | fresh seeds |")
    print("| --- " + "| ---: " * (len(sizes) + 3) + "|")
    for name, make in PROBLEMS.items():
        found = bilevel.forecast(*make(0), sizes=sizes)
        radius = f"{found.radius:.0%}" if found.radius else "none"
        line = [name, f"{found.smoothness:.2f}", *cells(found), radius, held(make, found.radius)]
        print("| " + " | ".join(line) + " |", flush=True)
    print("\n<!-- --8<-- [end:table] -->")


if __name__ == "__main__":
    main()
