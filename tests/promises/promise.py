"""The promise of this library, as a judgement of one construct: right, or refused by name, or warned of by name.

A *construct* is a loop as it stands in a user's file: `build(lam)` makes its model, losses and batches, the same each
time. The plain loop is run here by hand, and central differences of its outer loss in float64 are the judge.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

SAMPLES, STEPS, RATE, TOLERANCE = 6, 4, 0.3, 1e-5

# Some texts list what might be the cause. A cause that is merely in such a list is not named.
_GUESSES = re.compile(
    r"Likely causes:.*?bilevel\.gradcheck names the module\.|Something that h, g or direction= reads.*", re.DOTALL
)
_OURS = re.compile(r"bilevel\.\w+: ")


@dataclass
class Loop:
    """A loop as the user has it.

    `batch` is what h takes after the model: a tuple, or a function of the step k = 0, 1, …; `before(k)` is what the
    loop does before step k, and `after()` what it does after the last one; `transform` is what it does to the
    gradients, by name, before the optimizer's step.
    """

    model: nn.Module
    h: Callable[..., Tensor]
    g: Callable[..., Tensor]
    batch: tuple[Any, ...] | Callable[[int], tuple[Any, ...]] = ()
    outer: tuple[Any, ...] = ()
    before: Callable[[int], object] = lambda k: None
    after: Callable[[], object] = lambda: None
    transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def given(self, k: int) -> tuple[Any, ...]:
        return self.batch(k) if callable(self.batch) else self.batch


Build = Callable[[Tensor], Loop]

# The engines and pullbacks, and tasks= with a single task, whose loop is the plain one.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "reverse": dict,
    "sqrt": lambda: {"engine": bilevel.Reverse("sqrt")},
    "memory": lambda: {"engine": bilevel.Reverse(memory="1GiB")},
    "blocks": lambda: {"engine": bilevel.Reverse(blocks=nn.Linear)},
    "auto": lambda: {"engine": bilevel.Reverse(blocks="auto")},
    "unroll": lambda: {"engine": "unroll"},
    "forward": lambda: {"engine": "forward"},
    "tasks": lambda: {"tasks": 1},
    "micro": lambda: {"micro": 2},
    "accumulate": lambda: {"accumulate": 2},
}


@dataclass
class Verdict:
    """What a block makes of a construct.

    kind: "right"; "unchecked" (right, with a warning that the sentinel could not look); "false alarm" (right, but a
    DerivativeWarning says otherwise); "refused" by an error of this library; "bare" (another error); "warned" (wrong,
    with a DerivativeWarning); "silent" (wrong, and nothing says so, or merely that the sentinel could not look).
    """

    kind: str
    error: float = 0.0  # of the hypergradient, relative to its norm; of the outer loss where that is wrong already
    text: str = ""
    gradient: Tensor | None = None
    notes: str = ""  # other warnings of this library: what it does not do, and why

    def names(self, words: Iterable[str]) -> bool:
        """Whether every one of these expressions is found in what was said, besides a list of likely causes."""
        said = _GUESSES.sub("", self.text)
        return all(re.search(word, said, re.IGNORECASE) for word in words)

    def keeps(self, *words: str) -> bool:
        """Whether the promise is kept: right, or refused or warned of by the name of the thing."""
        return self.kind in ("right", "unchecked") or (self.kind in ("refused", "warned") and self.names(words))

    def __str__(self) -> str:
        return f"{self.kind} (off by {self.error:.2g}): {self.text}"


def start() -> Tensor:
    return torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)


def plain(build: Build, lam: Tensor, steps: int = STEPS) -> float:
    """The outer loss after the loop as it stood in the user's file."""
    torch.manual_seed(0)
    loop = build(lam.detach().clone())
    named = {n: p for n, p in loop.model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(named.values(), RATE)
    torch.manual_seed(1)
    for k in range(steps):
        loop.before(k)
        optimizer.zero_grad()
        loop.h(loop.model, *loop.given(k)).backward()
        if loop.transform is not None:
            grads = loop.transform({n: p.grad for n, p in named.items() if p.grad is not None})
            for n, grad in grads.items():
                named[n].grad = grad.detach().clone()
        optimizer.step()
    torch.manual_seed(2)
    return float(loop.g(loop.model, *loop.outer).detach())


@functools.cache
def truth(build: Build, steps: int = STEPS) -> tuple[float, Tensor]:
    """The outer loss of the plain loop, and its gradient by central differences of fourth order."""
    lam, eps = start(), 2e-4
    slopes: list[float] = []
    for i in range(len(lam)):
        e = torch.zeros_like(lam)
        e[i] = eps
        near, far = (plain(build, lam + s * e, steps) - plain(build, lam - s * e, steps) for s in (1, 2))
        slopes.append((8 * near - far) / (12 * eps))
    return plain(build, lam, steps), torch.tensor(slopes, dtype=torch.float64)


def verdict(build: Build, variant: str = "reverse", steps: int = STEPS, **options: Any) -> Verdict:
    """Run the construct in a block, and judge what comes of it."""
    options = {**VARIANTS[variant](), **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value, gradient = _block(build, steps, **options)
        except Exception as error:  # whatever a user would see is judged
            text = f"{type(error).__name__}: {error}"
            return Verdict("refused" if _OURS.match(str(error)) else "bare", float("nan"), text)
    texts = [str(w.message) for w in caught if issubclass(w.category, bilevel.DerivativeWarning)]
    expected, slopes = truth(build, steps)
    off = abs(value - expected) / max(abs(expected), 1e-12)
    if off <= 1e-10:
        off = float((gradient - slopes).norm() / max(float(slopes.norm()), float(gradient.norm()), 1e-300))
    wrong = not off <= TOLERANCE
    alarms = [text for text in texts if "could not be checked" not in text]
    if wrong:
        kind = "warned" if alarms else "silent"
    else:
        kind = "false alarm" if alarms else "unchecked" if texts else "right"
    notes = " | ".join(str(w.message) for w in caught if _OURS.match(str(w.message)) and str(w.message) not in texts)
    return Verdict(kind, off, " | ".join(texts), gradient, notes)


def _block(build: Build, steps: int, **options: Any) -> tuple[float, Tensor]:
    """The outer loss and the hypergradient in a block. `micro` and `accumulate` are options of its steps."""
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loop = build(lam)
    of_step = {key: options.pop(key) for key in ("micro", "reduction") if key in options}
    given, outer, h, parts = loop.given, loop.outer, loop.h, options.pop("accumulate", 1)
    if parts > 1:
        h = lambda model, *batch: loop.h(model, *batch) / parts
    if "tasks" in options:
        given, outer = (lambda k: _one_task(loop.given(k))), _one_task(loop.outer)
    if loop.transform is not None:
        options["direction"] = loop.transform
    torch.manual_seed(1)
    how: dict[str, Any] = {"solver": "gd", "lr": RATE, "check": "always", **options}
    with bilevel.inner(loop.model, h, loop.g, **how) as block:
        for k in range(steps):
            loop.before(k)
            for part in _parts(given(k), parts):
                block.accumulate(*part)
            block.step(*(() if parts > 1 else given(k)), outer=outer, **of_step)
        loop.after()
        torch.manual_seed(2)
        gradient = block.hypergrad(lam)
        torch.manual_seed(2)
        return float(block.value), gradient


def _parts(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    """The batch in equal parts along its rows; none if it stays whole."""
    size = SAMPLES // parts
    cut = lambda x, i: x[i * size : (i + 1) * size] if isinstance(x, Tensor) and x.ndim else x
    return [tuple(cut(x, i) for x in batch) for i in range(parts)] if parts > 1 else []


def _one_task(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.unsqueeze(0) if isinstance(x, Tensor) else x for x in batch)


def keeps_the_promise(build: Build, variant: str, *words: str, steps: int = STEPS, **options: Any) -> None:
    """Right, or refused by an error that names the thing (`words`), or warned of by a warning that does."""
    found = verdict(build, variant, steps, **options)
    assert found.keeps(*words), f"{found}\nIt is to be right, or to name {words}."


def is_right(build: Build, variant: str = "reverse", steps: int = STEPS, **options: Any) -> None:
    """Right, and without any warning of a derivative."""
    found = verdict(build, variant, steps, **options)
    assert found.kind == "right", str(found)


class Refused(AssertionError):
    """What is to be right was refused by an error of this library."""


def opened(build: Build, variant: str, use: Callable[[Any, Loop, Tensor], Any], steps: int = 3, **options: Any) -> Any:
    """Return `use(block, loop, lam)` after some steps. Every error is a failure: `Refused`, or a bare one."""
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loop = build(lam)
    options = {"solver": "gd", "lr": RATE, "check": False, **VARIANTS[variant](), **options}
    given, outer = loop.given, loop.outer
    if "tasks" in options:
        given, outer = (lambda k: _one_task(loop.given(k))), _one_task(loop.outer)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bilevel.Reverse: blocks= is off")
        try:
            with bilevel.inner(loop.model, loop.h, loop.g, **options) as block:
                for k in range(steps):
                    loop.before(k)
                    block.step(*given(k), outer=outer)
                return use(block, loop, lam)
        except AssertionError:
            raise
        except Exception as error:
            if _OURS.match(str(error)):
                raise Refused(str(error)) from error
            raise AssertionError(f"a bare {type(error).__name__}: {error}") from error


def refuses(run: Callable[[], object], *words: str) -> None:
    """What is run raises an error of this library, which names the thing."""
    try:
        run()
    except Exception as why:
        found = Verdict("refused" if _OURS.match(str(why)) else "bare", float("nan"), f"{type(why).__name__}: {why}")
    else:
        found = Verdict("silent")
    assert found.kind == "refused", str(found)
    assert found.names(words), f"names none of {words}: {found}"


# --- fixtures ----------------------------------------------------------------------------------------------------


def each(names: str) -> pytest.MarkDecorator:
    """The fixture `variant`: these of VARIANTS. Which of them do not keep the promise yet is in red.py."""
    return pytest.mark.parametrize("variant", names.split())


def constructs(found: Mapping[str, Any], names: str) -> pytest.MarkDecorator:
    """The fixtures `construct` and `variant`: all pairs of them."""
    params = [pytest.param(b, v, id=f"{n}-{v}") for n, b in found.items() for v in names.split()]
    return pytest.mark.parametrize(("construct", "variant"), params)


# --- what most constructs are made of ----------------------------------------------------------------------------


def rows(n: int = SAMPLES, width: int = 3) -> tuple[Tensor, Tensor]:
    """Samples and targets."""
    x = torch.randn(n, width, dtype=torch.float64)
    return x, (x.sum(1) + 0.3 * torch.randn(n, dtype=torch.float64)).tanh()


def indexed(n: int = SAMPLES) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, targets, and the row of each in the training set: what λ is indexed by."""
    return *rows(n), torch.arange(n)


def mlp(*middle: nn.Module, bias: bool = True, width: int = 4) -> nn.Sequential:
    first, last = nn.Linear(3, width, bias=bias), nn.Linear(width, 1, bias=bias)
    return nn.Sequential(first, *middle, nn.Tanh(), last).double()


def error(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).squeeze(-1), y)


def squares(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return (model(x).squeeze(-1) - y).square()


def weighted(lam: Tensor) -> Callable[..., Tensor]:
    """The inner loss of data cleaning: the mean over samples, each with its weight σ(λ)."""

    def h(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (torch.sigmoid(lam[i]) * squares(model, x, y)).mean()

    return h
