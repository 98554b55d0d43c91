"""What a loop does with its handle: accumulate, only=, h=, direction=, clip=, arguments by name, aux, state.

The judge is the plain loop, with .backward(), .grad and optimizer.step() of torch alone, and central differences of it.
Both are driven by the same body, through a handle of the same shape.
"""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from problems import relative
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bilevel_plugin as bilevel
from benchmarks.measure import live

pytestmark = pytest.mark.usefixtures("double")

ENGINES = {
    "reverse": "reverse",
    "sqrt": bilevel.Reverse("sqrt"),
    "every third": bilevel.Reverse(3),
    "memory": bilevel.Reverse(memory="1MiB"),
    "little memory": bilevel.Reverse(memory="24kB"),
    "truncate": bilevel.Reverse(truncate=4),  # as many as there are steps: exact
    "unroll": "unroll",
    "forward": "forward",
}
FEW = {name: ENGINES[name] for name in ("reverse", "every third", "memory", "unroll", "forward")}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
few_engines = pytest.mark.parametrize("engine", FEW.values(), ids=FEW)
RATE = 0.3
Grads = dict[str, Tensor]


class Plain:
    """The plain loop behind the handle of a block: torch alone."""

    def __init__(
        self,
        model: nn.Module,
        h: Callable[..., Any],
        g: Callable[..., Tensor],
        optimizer: Any = None,
        lr: Any = None,
        direction: Callable[[Grads], Grads] | None = None,
        clip: Callable[[list[Tensor]], object] | None = None,
        solver: str = "gd",
    ) -> None:
        self.model, self.h, self.g, self.lr, self.direction, self.clip = model, h, g, lr, direction, clip
        self.optimizers = optimizer if isinstance(optimizer, list) else [] if optimizer is None else [optimizer]
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if self.optimizers:
            held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
            self.trained = {n: p for n, p in self.trained.items() if id(p) in held}
        self.k, self.gathered, self.solver, self.outer = 0, False, solver, ()

    def chosen(self, only: Any) -> list[Tensor]:
        if only is None:
            return list(self.trained.values())
        if isinstance(only, torch.optim.Optimizer):
            only = [p for group in only.param_groups for p in group["params"]]
        elif isinstance(only, nn.Module):
            only = only.parameters()
        wanted = {id(p) for p in ([only] if isinstance(only, Tensor) else only)}
        return [p for p in self.trained.values() if id(p) in wanted]

    def backward(self, batch: Any, named: Any, only: Any, h: Any) -> SimpleNamespace:
        found = (h or self.h)(self.model, *batch, **named)
        loss, aux = found if isinstance(found, tuple) else (found, None)
        loss.backward(inputs=self.chosen(only))  # λ is a constant
        return SimpleNamespace(h=loss.detach(), aux=aux)

    def accumulate(self, *batch: Any, only: Any = None, h: Any = None, **named: Any) -> SimpleNamespace:
        self.gathered = True
        return self.backward(batch, named, only, h)

    def step(self, *batch: Any, outer: Any = None, only: Any = None, h: Any = None, **named: Any) -> SimpleNamespace:
        chosen = self.chosen(only)
        losses = SimpleNamespace() if self.gathered else self.backward(batch, named, chosen, h)
        self.k += 1
        self.outer = self.outer if outer is None else outer if isinstance(outer, tuple) else (outer,)
        if self.solver == "bigsam":
            alpha = self.k**-0.25
            for p in self.trained.values():
                p.grad = None if p.grad is None else alpha * p.grad
            if alpha < 1:
                ((1 - alpha) * self.g(self.model, *self.outer)).backward(inputs=chosen)
        weights = {id(p) for p in chosen}
        moved = {n: p for n, p in self.trained.items() if id(p) in weights and p.grad is not None}
        if self.direction:
            with torch.no_grad():
                for n, d in self.direction({n: p.grad for n, p in moved.items()}).items():
                    moved[n].grad = d.detach()
        if self.clip:
            self.clip(list(moved.values()))
        self.update(moved)
        for p in self.trained.values():
            p.grad = None
        self.gathered = False
        return losses

    def update(self, moved: dict[str, Tensor]) -> None:
        rate = self.lr(self.k) if callable(self.lr) else self.lr
        rate = None if rate is None else float(torch.as_tensor(rate).detach())
        if not self.optimizers:
            with torch.no_grad():
                for p in moved.values():
                    p -= rate * p.grad
        for optimizer in self.optimizers:
            held = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (1.0 if rate is None else rate)
            optimizer.step()
            for group, before in zip(optimizer.param_groups, held, strict=True):
                group["lr"] = before

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()


@dataclass
class Case:
    """A problem. What the plain loop has otherwise (by hand) is in `by_hand`."""

    model: nn.Module
    h: Callable[..., Any]
    g: Callable[..., Tensor]
    outer: dict[str, Tensor]  # the outer variables
    body: Callable[[Any, Any, Any], object]  # of the handle, the model and its optimizers
    optimizer: Callable[[nn.Module], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    by_hand: dict[str, Any] = field(default_factory=dict)

    def alone(self) -> tuple[dict[str, Tensor], float]:
        """The end of the plain loop, and g there."""
        model = copy.deepcopy(self.model)
        made = self.optimizer(model) if self.optimizer else None
        torch.manual_seed(1)
        options = {"lr": None if made else RATE, **self.options, **self.by_hand}
        loop = Plain(model, self.h, self.g, made, **options)
        self.body(loop, model, made)
        state = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            return state, float(self.g(model, *loop.outer))

    def slopes(self, directions: Tensor, eps: float = 2e-4) -> Tensor:
        """Central differences of fourth order of the plain loop, all outer variables moved together."""
        leaves = list(self.outer.values())
        start = [x.detach().clone() for x in leaves]
        sizes = [x.numel() for x in leaves]

        def at(v: Tensor) -> float:
            with torch.no_grad():
                for x, a, d in zip(leaves, start, v.split(sizes), strict=True):
                    x.copy_(a + d.view(x.shape))
            return self.alone()[1]

        try:
            return torch.tensor(
                [
                    (8 * (at(eps * v) - at(-eps * v)) - (at(2 * eps * v) - at(-2 * eps * v))) / (12 * eps)
                    for v in directions
                ]
            )
        finally:
            with torch.no_grad():
                for x, a in zip(leaves, start, strict=True):
                    x.copy_(a)

    def block(self, engine: Any, unused: bool = False, **more: Any) -> tuple[dict[str, Tensor], float, Tensor]:
        """The end of the block, g there, and the hypergradient, flat. `unused`: some outer variables may have none."""
        model = copy.deepcopy(self.model)
        made = self.optimizer(model) if self.optimizer else None
        options: dict[str, Any] = {"lr": RATE} if made is None else {"optimizer": made}
        options |= {"solver": "gd", "check": False, **self.options, **more}
        torch.manual_seed(1)
        with bilevel.inner(model, self.h, self.g, engine=engine, **options) as loop:
            self.body(loop, model, made)
            state = copy.deepcopy(model.state_dict())
            value = float(loop.value)
            grads = loop.hypergrad(list(self.outer.values()), allow_unused=unused)
            for x in self.outer.values():
                x.grad = None
            loop.backward()
            for g, (name, x) in zip(grads, self.outer.items(), strict=True):
                assert x.grad is not None or unused, f"backward() did not find {name}"
                found = torch.zeros_like(x) if x.grad is None else x.grad
                torch.testing.assert_close(found, g, rtol=1e-10, atol=1e-14)
                x.grad = None
            assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return state, value, torch.cat([g.flatten() for g in grads])


def agree(case: Case, engine: Any, tolerance: float = 1e-6, unused: bool = False, **more: Any) -> Tensor:
    """The block ends where the plain loop does, and its hypergradient is what differences of that loop say."""
    state, value = case.alone()
    found, got, grad = case.block(engine, unused, **more)
    assert list(found) == list(state)
    for name, x in state.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    assert got == pytest.approx(value, rel=1e-12)
    for name, part in zip(case.outer, grad.split([x.numel() for x in case.outer.values()]), strict=True):
        assert unused or float(part.norm()) > 1e-9, f"{name} has no gradient, so that anything flat would agree"
    judge(case, grad, tolerance)
    return grad


def judge(case: Case, grad: Tensor, tolerance: float = 1e-6) -> None:
    directions = torch.randn(2, grad.numel(), generator=torch.Generator().manual_seed(5))
    size = max(float(grad.norm()), 1e-5)  # below that, differences of g = O(1) resolve nothing
    errors = []
    for eps in (2e-4, 2e-5, 2e-6):  # a sharp bend needs a small ε; a wrong gradient agrees with none of them
        errors.append(float((directions @ grad - case.slopes(directions, eps)).norm()) / size)
        if errors[-1] <= tolerance:
            return
    raise AssertionError(f"off by {min(errors):.1e}")


@contextlib.contextmanager
def refused(*words: str):
    """One of our own errors, which says these words."""
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
        yield
    assert re.match(r"bilevel\.\w+: ", str(caught.value)), f"a bare {type(caught.value).__name__}: {caught.value}"
    for word in words:
        assert re.search(word, str(caught.value), re.IGNORECASE), f"{word!r} is not in: {caught.value}"


# --- the problem ---

SAMPLES = 8


def network() -> nn.Module:
    """BatchNorm in training mode in h and in eval mode in g, dropout, and two parts by name."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(first, nn.Linear(4, 2))


def problem(body: Callable[[Any, Any, Any], object], **more: Any) -> Case:
    """Weights of samples and a decay. The body gets x, y and indices by `data()`."""
    _, y, x_val, y_val = data()
    lam, mu = torch.linspace(-1, 1, SAMPLES).requires_grad_(), torch.tensor(-2.0, requires_grad=True)

    def h(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        model.train()
        decay = sum(p.square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(x), y[i], reduction="none")
        return (torch.sigmoid(lam[i]) * loss).mean() / 2 + mu.exp() * decay

    def g(model: nn.Module) -> Tensor:
        model.eval()
        return F.cross_entropy(model(x_val), y_val)

    return Case(network(), h, g, {"lam": lam, "mu": mu}, body, **more)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, x_val = torch.randn(2, SAMPLES, 3, generator=generator)
    y, y_val = torch.randint(2, (2, SAMPLES), generator=generator)
    return x, y, x_val, y_val


HALVES = torch.arange(SAMPLES).split(4)


def draw(i: Tensor) -> Tensor:
    """A micro-batch with noise of its own: random numbers that are drawn between."""
    return data()[0][i] + 0.1 * torch.randn(len(i), 3)


def two_halves(loop: Any, model: Any = None, optimizer: Any = None, steps: int = 3) -> None:
    for _ in range(steps):
        for i in HALVES:
            loop.accumulate(draw(i), i)
        loop.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "weight_decay": 0.1}]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.2, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.05, eps=0.1)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups(model), lr=0.05, eps=0.1)


def clip_norm(most: Any) -> dict[str, Any]:
    # torch adds 1e-6 to the norm
    return {"options": {"clip": most}, "by_hand": {"clip": lambda w: nn.utils.clip_grad_norm_(w, float(most))}}


def clip_value(most: float) -> dict[str, Any]:
    by_hand = lambda w: nn.utils.clip_grad_value_(w, most)
    return {"options": {"clip": bilevel.clip_value(most)}, "by_hand": {"clip": by_hand}}


def bent(d: Grads) -> Grads:
    return {n: 2 * x.tanh() + 0.1 * x.mean() for n, x in d.items()}


UPDATES: dict[str, dict[str, Any]] = {
    "lr": {},
    "lr of k": {"options": {"lr": lambda k: 0.4 / k}},
    "sgd": {"optimizer": sgd},
    "momentum": {"optimizer": momentum},
    "adamw": {"optimizer": adamw},
    "nadam": {"optimizer": nadam},
    "clip": {"optimizer": momentum, **clip_norm(0.1)},
    "clip, lr": clip_norm(0.1),
    "clip_value": {"optimizer": adamw, **clip_value(0.05)},
    "direction": {"optimizer": momentum, "options": {"direction": bent}},
    "direction, lr": {"options": {"direction": bent}},
    "direction, clip": {
        "optimizer": adamw,
        "options": {"direction": bent, "clip": 0.1},
        "by_hand": clip_norm(0.1)["by_hand"],
    },
    "bigsam": {"options": {"solver": "bigsam"}},
    "bigsam, momentum, clip": {
        "optimizer": momentum,
        "options": {"solver": "bigsam", "clip": 0.1},
        "by_hand": clip_norm(0.1)["by_hand"],
    },
}


# --- accumulate ---


@every_engine
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_accumulated_gradients(engine, update):
    agree(problem(two_halves, **update), engine)


@few_engines
@pytest.mark.parametrize("optimizer", [None, momentum, adamw], ids=["lr", "momentum", "adamw"])
def test_mixed_with_ordinary_steps(engine, optimizer):
    def body(loop: Any, model: Any, optimizer: Any) -> None:
        i = torch.arange(5)
        loop.step(draw(i), i)
        two_halves(loop, steps=1)
        loop.step(draw(i), i)
        loop.accumulate(draw(i), i)
        loop.step()

    agree(problem(body, optimizer=optimizer), engine)


def test_truncation_counts_steps_and_not_micro_batches():
    case = problem(two_halves, optimizer=momentum)
    *_, whole = case.block("reverse")
    *_, exact = case.block(bilevel.Reverse(truncate=3))
    torch.testing.assert_close(exact, whole, rtol=1e-10, atol=1e-13)
    # m = 2: the outer variables move in the last two steps only
    *_, two = case.block(bilevel.Reverse(truncate=2))
    expected = truncated_by_hand(case, steps=3, last=2)
    assert relative(two, expected) <= 1e-6
    assert relative(two, whole) > 1e-3


def truncated_by_hand(case: Case, steps: int, last: int) -> Tensor:
    """Differences of a plain loop whose outer variables move in the last steps only."""
    leaves, model = list(case.outer.values()), copy.deepcopy(case.model)
    start = [x.detach().clone() for x in leaves]

    def run(move: list[Tensor]) -> float:
        m = copy.deepcopy(model)
        torch.manual_seed(1)
        loop = Plain(m, case.h, case.g, case.optimizer(m))
        two_halves(loop, steps=steps - last)
        with torch.no_grad():
            for x, v in zip(leaves, move, strict=True):
                x += v
            try:
                with torch.enable_grad():
                    two_halves(loop, steps=last)
                return float(case.g(m))
            finally:
                for x, a in zip(leaves, start, strict=True):
                    x.copy_(a)

    found = []
    for j, x in enumerate(leaves):
        for e in torch.eye(x.numel()):
            move = [torch.zeros_like(y) for y in leaves]
            move[j] = 1e-5 * e.view(x.shape)
            found.append((run(move) - run([-v for v in move])) / 2e-5)
    return torch.tensor(found)


@few_engines
def test_hooks_on_parameters_fire_for_each_micro_batch(engine):
    """tanh(a) + tanh(b) is not tanh(a + b); and the order is hooks, sum, direction, clip."""
    counts = []

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        model[1].weight.register_hook(lambda d: counts.append(1) or (4 * d).tanh())
        model[0][0].weight.register_hook(lambda d: d.clamp(-0.05, 0.05))
        return momentum(model)

    case = problem(two_halves, optimizer=hooked, options={"direction": bent, "clip": 0.2})
    case.by_hand = clip_norm(0.2)["by_hand"]
    case.alone()
    assert len(counts) == 6
    agree(case, engine)
    # the same without the parts that come after
    agree(problem(two_halves, optimizer=hooked), engine)


@few_engines
@pytest.mark.parametrize("optimizer", [None, momentum, adamw], ids=["lr", "momentum", "adamw"])
def test_only_in_accumulate(engine, optimizer):
    """Gradients for one part from one micro-batch, for all from another; then a step of what has one."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        first, second = model
        for i in HALVES:
            loop.accumulate(draw(i), i, only=first)
        loop.step()
        loop.accumulate(draw(HALVES[0]), HALVES[0], only=second)
        loop.accumulate(draw(HALVES[1]), HALVES[1])
        loop.step()
        loop.accumulate(draw(HALVES[0]), HALVES[0], only=list(second.parameters()))
        loop.accumulate(draw(HALVES[1]), HALVES[1], only=first)
        loop.step()

    agree(problem(body, optimizer=optimizer), engine)


@few_engines
def test_another_loss_in_accumulate(engine):
    """Each micro-batch has a loss of its own, one of which reaches a part of the weights only."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            loop.accumulate(draw(HALVES[0]), HALVES[0])
            loop.accumulate(h=spread)
            loop.accumulate(0.5, h=lambda model, c: c * model[1].weight.square().sum())
            loop.step()

    def spread(model: nn.Module) -> Tensor:
        model.train()
        return -case.outer["mu"].exp() * model(data()[0]).softmax(1).var()

    case = problem(body, optimizer=adamw)
    agree(case, engine)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
@pytest.mark.parametrize("what", ["accumulate", "only="])
def test_refused_at_a_fixed_point(engine, what):
    case = problem(two_halves)
    i = HALVES[0]
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE, engine=engine) as loop:
        with refused(what, "reverse"):
            if what == "accumulate":
                loop.accumulate(draw(i), i)
            else:
                loop.step(draw(i), i, only=case.model[1])


@few_engines
def test_a_batch_or_loss_for_a_step_that_is_gathered_is_refused(engine):
    def body(loop: Any, model: Any, optimizer: Any) -> None:
        x, i = draw(HALVES[0]), HALVES[0]
        loop.accumulate(x, i)
        if not isinstance(loop, Plain):
            for wrong in (lambda: loop.step(x, i), lambda: loop.step(x=x, i=i), lambda: loop.step(h=lambda m: m.sum())):
                with refused("accumulate", "without a batch"):
                    wrong()
        loop.step()

    agree(problem(body), engine)


@every_engine
def test_what_no_step_has_taken_has_no_part(engine):
    """Looked at between micro-batches, the loop is that of the steps; the next step takes them nonetheless."""
    found: list[tuple[float, Tensor]] = []

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        two_halves(loop, steps=2)
        for i in HALVES:
            look(loop)
            loop.accumulate(draw(i), i)
        look(loop)
        loop.step()

    def look(loop: Any) -> None:
        if not isinstance(loop, Plain):
            found.append((float(loop.value), loop.hypergrad(case.outer["lam"])))

    case = problem(body, optimizer=adamw)
    case.model[0][1] = nn.LayerNorm(4)  # running statistics would move with each micro-batch
    agree(case, engine)
    for value, grad in found[1:]:
        assert value == found[0][0]
        torch.testing.assert_close(grad, found[0][1], rtol=1e-10, atol=1e-13)


@every_engine
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_left_over_at_the_end_moves_the_statistics_only(engine, steps):
    """As in the plain loop, where a last .backward() without a step has moved the running statistics that g reads."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        two_halves(loop, steps=steps)
        loop.accumulate(draw(HALVES[0]), HALVES[0])
        loop.accumulate(draw(HALVES[1]), HALVES[1])

    agree(problem(body, optimizer=momentum), engine)


@pytest.mark.parametrize("last", [1, 2])
def test_what_is_left_over_does_not_count_as_a_step_of_a_truncation(last):
    """The hypergradient goes back over as many steps as without it."""
    found = []
    for left in (False, True):

        def body(loop: Any, model: Any, optimizer: Any, left: bool = left) -> None:
            two_halves(loop)
            if left:
                loop.accumulate(data()[0], torch.arange(SAMPLES))

        case = problem(body, optimizer=momentum)
        case.model[0][1] = nn.LayerNorm(4)
        *_, grad = case.block(bilevel.Reverse(truncate=last))
        found.append(grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


@few_engines
@pytest.mark.parametrize("where", ["h", "between"])
def test_an_exception_in_a_micro_batch_leaves_the_loop_usable(engine, where):
    """The body catches it and goes on, as a loop that skips a bad batch does."""

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        model(x)  # the statistics have moved before it fails
        raise KeyError("a bad sample")

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        for k in range(3):
            for i in HALVES:
                if k == 1 and not isinstance(loop, Plain):
                    with pytest.raises(KeyError):
                        loop.accumulate(100 * data()[0], h=fails)
                loop.accumulate(draw(i), i)
            if where == "between" and not isinstance(loop, Plain):
                with refused("without a batch"):
                    loop.step(data()[0])
            loop.step()

    case = problem(body, optimizer=adamw)
    case.model[0][3] = nn.Identity()  # what the failing loss drew is gone in a plain loop too
    agree(case, engine)


@few_engines
@pytest.mark.parametrize("optimizer", [None, adamw], ids=["lr", "adamw"])
def test_a_gathered_step_of_one_part(engine, optimizer):
    """accumulate(only=a), step(only=a): a GAN with accumulation."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            for part in model:
                for i in HALVES:
                    loop.accumulate(draw(i), i, only=part)
                loop.step(only=part)

    agree(problem(body, optimizer=optimizer), engine)


@few_engines
def test_a_part_of_what_was_gathered_is_refused(engine):
    """In a plain loop the rest would stay in .grad, or be lost: it is not said which."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        loop.accumulate(draw(HALVES[0]), HALVES[0])
        loop.accumulate(draw(HALVES[1]), HALVES[1], only=model[1])
        if not isinstance(loop, Plain):
            with refused("accumulate", "only="):
                loop.step(only=model[1])
        loop.step()

    agree(problem(body, optimizer=momentum), engine)


@pytest.mark.parametrize("check", ["first", "always"])
def test_the_sentinel_has_nothing_to_say_of_right_loops(check):
    """Warnings are errors here."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        two_halves(loop, steps=2)
        loop.step(draw(HALVES[0]), HALVES[0], only=model[0])
        loop.step(h=lambda m: m[1].weight.square().sum(), only=model[1])
        loop.accumulate(draw(HALVES[1]), HALVES[1])

    agree(problem(body, optimizer=adamw, options={"direction": bent}), "reverse", check=check)


def test_the_sentinel_sees_a_detach_in_a_micro_batch():
    case = problem(two_halves)
    loss = case.h
    case.h = lambda model, x, i: loss(model, x, i) * (1 + model[1].weight.square().sum().detach())
    with pytest.warns(bilevel.DerivativeWarning):
        case.block("reverse", check="always")


# --- memory ---


def peak(micro: int, engine: Any, steps: int = 2) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    lam = torch.zeros(40, requires_grad=True)
    batches = torch.randn(micro, 1000, 40).unbind()
    h = lambda model, x: (lam * model(x)).sigmoid().mean()

    def run() -> None:
        with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            for _ in range(steps):
                for x in batches:
                    loop.accumulate(x)
                loop.step(outer=batches[0])
            loop.hypergrad(lam)

    return live(run)


def test_the_peak_of_memory_does_not_grow_with_the_micro_batches():
    """But for the sum of the gradients, which is as large as the weights."""
    weights = 8 * sum(p.numel() for p in nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).parameters())
    graph = 8 * 1000 * 40  # of one layer's activations
    assert peak(8, "reverse") - peak(2, "reverse") <= weights
    for engine in (
        bilevel.Reverse("sqrt"),
        bilevel.Reverse(3),
        "forward",
    ):  # these may hold iterates between, no graphs
        assert peak(8, engine) - peak(2, engine) <= 6 * 2 * weights
    assert peak(8, "unroll") - peak(2, "unroll") > 6 * graph  # the test would see a graph that is kept


# --- tasks ---


def tasks_case(body: Callable[..., None], **more: Any) -> Case:
    """Two tasks, each with data of its own; lam is shared, rates too. No dropout: a task would draw other numbers."""
    lam = torch.tensor([0.3, -0.4, 0.2], requires_grad=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 1))

    def h(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        model.train()
        out = model(x)
        return (out - y * lam[0]).square().mean() + lam[1].exp() * model[1].weight.square().sum(), {"out": out}

    def g(model: nn.Module, x: Tensor) -> Tensor:
        model.eval()
        return (model(x) - lam[2]).square().mean()

    return Case(model, h, g, {"lam": lam}, body, **more)


def tasks_data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return tuple(torch.randn(2, 8, n, generator=generator) for n in (3, 1, 3))


def agree_on_tasks(case: Case, body: Callable[..., None], engine: Any, batch: Sequence[Tensor]) -> None:
    """Two plain loops, one for each task, whose outer losses are summed."""
    ends: list[dict[str, Tensor]] = []
    one = case.alone

    def alone() -> tuple[Any, float]:
        ends.clear()
        total = 0.0
        for t in range(2):
            case.body = lambda loop, model, made, t=t: body(loop, model, made, [part[t] for part in batch])
            state, value = one()
            ends.append(state)
            total += value
        return None, total

    case.alone = alone
    value = alone()[1]
    model = copy.deepcopy(case.model)
    made = case.optimizer(model) if case.optimizer else None
    options = {**({"optimizer": made} if made else {"lr": RATE}), "solver": "gd", "check": False, **case.options}
    with bilevel.inner(model, case.h, case.g, engine=engine, tasks=2, **options) as loop:
        body(loop, model, made, batch)
        for name, x in loop.weights.items():
            torch.testing.assert_close(x, torch.stack([end[name] for end in ends]), rtol=1e-12, atol=1e-13)
        assert float(loop.value) == pytest.approx(value, rel=1e-12)
        grads = loop.hypergrad(list(case.outer.values()), allow_unused=True)
    judge(case, torch.cat([g.flatten() for g in grads]))


def in_tasks(loop: Any, model: Any, optimizer: Any, batch: Any) -> None:
    x, y, x_val = batch
    dim = x.dim() - 2
    for _ in range(2):
        for i in HALVES:
            found = loop.accumulate(x.index_select(dim, i), y=y.index_select(dim, i))
            assert found.aux["out"].shape == (*x.shape[:-2], 4, 1)
        loop.step(outer=(x_val,))
    loop.step(x, y, only=model[0])
    loop.step(x, h=lambda m, x: m(x).square().mean())


@few_engines
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_tasks(engine, update):
    agree_on_tasks(tasks_case(None, **update), in_tasks, engine, tasks_data())


# --- arguments by name ---


@few_engines
def test_arguments_by_name(engine):
    """loop.step(**batch) with a dict as Hugging Face has it, by position, and mixed."""
    case = problem(lambda *_: None, optimizer=momentum)
    i = HALVES[1]
    calls = {
        "by position": lambda loop, x: loop.step(x, i),
        "by name": lambda loop, x: loop.step(i=i, x=x),
        "mixed": lambda loop, x: loop.step(x, i=i),
        "gathered": lambda loop, x: (loop.accumulate(i=i, x=x), loop.step()),
    }
    found = []
    for call in calls.values():
        case.body = lambda loop, model, made, call=call: [call(loop, draw(i)) for _ in range(3)]
        found.append(agree(case, engine))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-15)


class Encoder(nn.Module):
    """As models of transformers are called: keywords in, an object with .loss and .logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = (self.embed(input_ids).tanh() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.out(hidden)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels, reduction="none"), logits=logits)


@few_engines
def test_a_batch_as_hugging_face_has_it(engine):
    torch.manual_seed(0)
    lam = torch.zeros(2, requires_grad=True)
    batch = {"input_ids": torch.randint(7, (6, 5)), "attention_mask": torch.ones(6, 5, dtype=torch.long)}
    batch["attention_mask"][:3, 3:] = 0
    batch["labels"] = torch.randint(2, (6,))
    kept: dict[type, Any] = {}

    def h(model: nn.Module, **batch: Tensor) -> Any:
        found = model(**batch)
        return (lam.sigmoid()[batch["labels"]] * found.loss).mean(), found.logits

    def g(model: nn.Module) -> Tensor:
        return model(**{**batch, "labels": 1 - batch["labels"]}).loss.mean()

    def body(loop: Any, model: Any, made: Any) -> None:
        found = [loop.step(**batch).aux for _ in range(3)]
        kept.setdefault(type(loop), found)  # the first of each, before λ is moved

    agree(Case(Encoder(), h, g, {"lam": lam}, body, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.1)), engine)
    for got, expected in zip(kept.pop(bilevel.Loop), kept.pop(Plain), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-14)
        assert not got.requires_grad


@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_a_wrong_keyword_is_named(call):
    case = problem(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE) as loop:
        take, x, i = getattr(loop, call), draw(HALVES[0]), HALVES[0]
        with refused("index by name"):
            take(x, index=i)
        with refused("multiple values", "'x'"):
            take(x, i, x=x)
        with refused("missing", "'i'"):
            take(x=x)
        take(x, i)


# --- losses that return something beside ---


@few_engines
def test_aux(engine):
    """A tree of anything, of the values before the step, without a graph."""
    case = problem(lambda *_: None)
    loss = case.h
    kept: dict[type, Any] = {}

    def h(model: nn.Module, x: Tensor, i: Tensor) -> Any:
        value = loss(model, x, i)
        rest = {
            "weight": [model[1].weight * 1, (model[1].bias * 2,)],
            "name": "h",
            "none": None,
            "count": len(i),
            "i": i,
        }
        return value, rest

    def body(loop: Any, model: Any, made: Any) -> None:
        found = [loop.step(draw(HALVES[0]), HALVES[0]).aux, loop.accumulate(draw(HALVES[1]), HALVES[1]).aux]
        loop.step()
        if not isinstance(loop, Plain):
            assert not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(found))
        kept.setdefault(type(loop), [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(found)])

    case.h, case.body = h, body
    agree(case, engine)
    for a, b in zip(kept[bilevel.Loop], kept[Plain], strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        else:
            assert a == b


@few_engines
def test_a_weight_in_aux_is_that_of_before_the_step(engine):
    """It must not move with the steps that follow, nor be a way to write to the loop's weights."""
    model = nn.Linear(2, 1)
    h = lambda m: (m.weight.square().sum(), m.weight)
    with bilevel.inner(model, h, solver="gd", lr=0.1, engine=engine, check=False) as loop:
        start = model.weight.detach().clone()
        aux = [loop.step().aux for _ in range(3)]
        for k, w in enumerate(aux):
            torch.testing.assert_close(w, start * 0.8**k, rtol=1e-12, atol=1e-14)


@few_engines
def test_aux_in_a_later_batch_is_refused(engine):
    """Its dependence on λ would be lost: a hidden state belongs into a buffer."""
    case = problem(two_halves)
    h = lambda model, i, before=0.0: ((model(data()[0][i]) - before).square().mean(), model(data()[0][i]))
    with bilevel.inner(case.model, h, case.g, solver="gd", lr=RATE, engine=engine) as loop:
        aux = loop.step(HALVES[0]).aux
        for wrong in (lambda: loop.step(HALVES[0], aux), lambda: loop.accumulate(HALVES[0], before=aux)):
            with refused("beside its value", "stop_gradient"):
                wrong()
        loop.step(HALVES[0])


def test_g_may_return_something_beside():
    case = problem(two_halves, options={"solver": "bigsam"})
    *_, expected = case.block("reverse")
    outer = case.g
    case.g = lambda model: (outer(model), "rest")
    *_, got = case.block("reverse")
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda v: (v, 1, 2),
        lambda v: [v, 1],
        lambda v: (1, v),
        lambda v: (v.item(), 1),
        lambda v: (v[None], 1),
        lambda v: (),
    ],
)
def test_what_is_no_loss(wrong):
    case = problem(two_halves)
    loss = case.h
    with bilevel.inner(case.model, lambda *a: wrong(loss(*a)), case.g, solver="gd", lr=RATE) as loop:
        with refused("must return a scalar"):
            loop.step(draw(HALVES[0]), HALVES[0])


def test_compiled_with_something_beside(compiler):
    """It runs eagerly, says so, and is right."""
    case = problem(lambda *_: None)
    loss, kept = case.h, []
    case.model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2))
    case.h = lambda model, x, i: (loss(model, x, i), model[1].weight * 1.0)
    case.body = lambda loop, model, made: kept.extend(loop.step(draw(HALVES[0]), HALVES[0]).aux for _ in range(3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bilevel.Reverse: compile=True is off.*more than its value")
        agree(case, bilevel.Reverse(compile=True))
    plain, block = kept[:3], kept[3:6]
    torch.testing.assert_close(block, [x.detach() for x in plain], rtol=1e-12, atol=1e-14)


# --- the handle as a module ---


@few_engines
def test_modes_and_state(engine):
    """loop.train(), loop.eval() set the model's modes; loop.state_dict() is the plain loop's, and a copy."""
    case = problem(lambda *_: None, optimizer=adamw)
    before = {n: x.clone() for n, x in case.model.state_dict().items()}
    x, y, *_ = data()
    kept: dict[type, Any] = {}

    def h(model: nn.Module, i: Tensor) -> Tensor:  # no mode of its own
        return (case.outer["lam"].sigmoid()[i] * F.cross_entropy(model(x[i]), y[i], reduction="none")).mean()

    def body(loop: Any, model: Any, made: Any) -> None:
        loop.train()
        loop.step(HALVES[0])
        loop.eval()
        assert not model.training
        assert not model[0][1].training
        loop.step(HALVES[1])
        loop.train()
        loop.step(HALVES[1])
        state = loop.model.state_dict() if isinstance(loop, Plain) else loop.state_dict()
        copied = {n: t.clone() for n, t in state.items()}
        kept.setdefault(type(loop), copied)
        if not isinstance(loop, Plain):
            assert not any(t.requires_grad for t in state.values())
            for t in state.values():
                t.zero_()  # a copy: nothing moves
            torch.testing.assert_close(loop.state_dict(), copied, rtol=0, atol=0)

    case.h, case.body = h, body
    del case.outer["mu"]
    agree(case, engine)
    got, expected = kept[bilevel.Loop], kept[Plain]
    assert list(got) == list(expected)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    case.model.load_state_dict(got)
    case.model.load_state_dict(before)


def test_modes_are_put_back():
    case = problem(two_halves)
    case.model.train()
    case.model[0][1].eval()
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE) as loop:
        assert loop.eval() is loop
        assert loop.train() is loop
        assert case.model[0][1].training
        assert loop.train(False) is loop
        assert not case.model.training
    assert case.model.training
    assert not case.model[0][1].training


def test_the_state_of_tasks_is_refused():
    case = tasks_case(None)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE, tasks=2) as loop:
        with refused("state_dict", "loop.weights"):
            loop.state_dict()


# --- only= and h= ---


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model[0].parameters(), 0.2, momentum=0.9, weight_decay=0.1)
    return [first, torch.optim.AdamW(model[1].parameters(), 0.05, eps=0.1)]


ONLY: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda model, made: made[0],
    "module": lambda model, made: model[0],
    "parameter": lambda model, made: model[1].weight,
    "generator": lambda model, made: model[0].parameters(),
    "list": lambda model, made: [p for n, p in model.named_parameters() if n.endswith("weight")],
    "set": lambda model, made: {model[1].bias, model[0][0].weight},
    "whole": lambda model, made: model,
}


@few_engines
@pytest.mark.parametrize("only", ONLY.values(), ids=ONLY)
def test_only(engine, only):
    """What is left alone has no decay, momentum or count in that step either."""

    def body(loop: Any, model: Any, made: Any) -> None:
        i = HALVES[0]
        loop.step(draw(i), i)
        loop.step(draw(i), i, only=only(model, made))
        loop.step(draw(i), i, only=only(model, made), h=gentle)
        loop.step(draw(i), i)

    def gentle(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        model.eval()
        return (case.outer["lam"][i, None] * model(x)).tanh().mean()

    case = problem(body, optimizer=both)
    agree(case, engine)


@few_engines
@pytest.mark.parametrize("update", ["lr", "clip", "direction, clip", "bigsam, momentum, clip"])
def test_only_with_one_optimizer(engine, update):
    """The norm that is clipped is that of the part that moves."""

    def body(loop: Any, model: Any, made: Any) -> None:
        i = HALVES[0]
        for part in (model[0], model[1], model[0]):
            loop.step(draw(i), i, only=part)
        loop.step(draw(i), i)

    agree(problem(body, **UPDATES[update]), engine)


WRONG_ONLY: dict[str, Callable[[Any], Any]] = {
    "another module": lambda model: nn.Linear(2, 2),
    "no weights": lambda model: model[0][2],
    "a name": lambda model: "0.weight",
    "names": lambda model: ["0.0.weight"],
    "a dict": lambda model: dict(model.named_parameters()),
    "a number": lambda model: 3,
    "nothing": lambda model: [],
    "another tensor": lambda model: torch.zeros(2, requires_grad=True),
    "a copy": lambda model: model[1].weight.detach().clone(),
    "another optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "a frozen weight": lambda model: model[0][0].bias,
}


@pytest.mark.parametrize("call", ["step", "accumulate"])
@pytest.mark.parametrize("wrong", WRONG_ONLY.values(), ids=WRONG_ONLY)
def test_wrong_things_for_only(wrong, call):
    case = problem(two_halves)
    case.model[0][0].bias.requires_grad_(False)
    i = HALVES[0]
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE) as loop:
        with refused("only="):
            getattr(loop, call)(draw(i), i, only=wrong(case.model))
        loop.step(draw(i), i)


def test_a_loss_that_is_none():
    case = problem(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE) as loop:
        with refused("h=", "got Tensor"):
            loop.step(h=torch.zeros(2))


# --- direction= ---


def meta_sgd(body: Callable[..., None] = two_halves, **more: Any) -> Case:
    """A learnable rate for each weight, which only direction= knows of."""
    case = problem(body, **more)
    rates = {n: torch.full_like(p, 0.7).requires_grad_() for n, p in case.model.named_parameters()}
    case.outer |= {f"rate of {n}": r for n, r in rates.items()}
    case.options = {**case.options, "direction": lambda d: {n: rates[n] * x for n, x in d.items()}}
    return case


@every_engine
@pytest.mark.parametrize("optimizer", [None, momentum, adamw], ids=["lr", "momentum", "adamw"])
def test_outer_variables_of_the_direction(engine, optimizer):
    agree(meta_sgd(optimizer=optimizer), engine)


@few_engines
def test_outer_variables_of_the_direction_with_clipping_and_parts(engine):
    def body(loop: Any, model: Any, made: Any) -> None:
        two_halves(loop, steps=1)
        for part in model:
            loop.step(draw(HALVES[0]), HALVES[0], only=part)

    case = meta_sgd(body, optimizer=both, **clip_norm(0.1))
    agree(case, engine)


@few_engines
def test_a_network_in_the_direction(engine):
    """A learned optimizer: what closes over may be a module's parameters, and mix the weights."""
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

    def learned(d: Grads) -> Grads:
        scale = torch.stack([x.square().mean() for x in d.values()]).sum().add(1e-3).rsqrt()
        return {n: net(scale * x.reshape(-1, 1)).view_as(x) for n, x in d.items()}

    case = problem(two_halves, options={"direction": learned})
    case.outer |= dict(net.named_parameters())
    agree(case, engine)


@pytest.mark.parametrize("solver", ["gd", "bigsam"])
@few_engines
def test_the_threshold_of_clipping_is_an_outer_variable(engine, solver):
    most = torch.tensor(0.1, requires_grad=True)
    case = problem(two_halves, optimizer=momentum, options={"clip": bilevel.clip_norm(most), "solver": solver})
    case.by_hand = {"clip": lambda w: nn.utils.clip_grad_norm_(w, float(most.detach()))}
    case.outer["most"] = most
    agree(case, engine)


WRONG_DIRECTIONS: dict[str, Callable[[Grads], Any]] = {
    "one is missing": lambda d: dict(list(d.items())[1:]),
    "one too many": lambda d: {**d, "another": torch.zeros(())},
    "another name": lambda d: {f"model.{n}": x for n, x in d.items()},
    "another shape": lambda d: {n: x.sum() for n, x in d.items()},
    "transposed": lambda d: {n: x.t() if x.dim() == 2 else x for n, x in d.items()},
    "numbers": lambda d: dict.fromkeys(d, 0.0),
    "nothing": lambda d: None,
    "a list": lambda d: list(d.values()),
    "a tensor": lambda d: torch.cat([x.flatten() for x in d.values()]),
}


@pytest.mark.parametrize("option", ["direction", "clip"])
@pytest.mark.parametrize("wrong", WRONG_DIRECTIONS.values(), ids=WRONG_DIRECTIONS)
def test_wrong_directions(wrong, option):
    case = problem(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=RATE, **{option: wrong}) as loop:
        with refused(f"{option}="):
            loop.step(draw(HALVES[0]), HALVES[0])


@few_engines
def test_a_direction_that_is_written_in_place(engine):
    """p.grad.mul_(0.5) is what plain loops have."""
    agree(problem(two_halves, optimizer=momentum, options={"direction": halved}), engine)


def halved(d: Grads) -> Grads:
    for x in d.values():
        x.mul_(0.5)
    return d


# --- lr= beside optimizer= ---


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("optimizer", [momentum, adamw, nadam, both], ids=["momentum", "adamw", "nadam", "both"])
@pytest.mark.parametrize("form", ["fixed", "function", "tensor", "function of a tensor"])
def test_a_factor_on_the_rates(engine, optimizer, form):
    learnable = torch.tensor(0.6, requires_grad=True)
    factor = {
        "fixed": torch.tensor(0.6),
        "function": lambda k: 0.8 / k,
        "tensor": learnable,
        "function of a tensor": lambda k: learnable / k,
    }[form]
    case = problem(two_halves, optimizer=optimizer, options={"lr": factor})
    if "tensor" in form:
        case.outer["factor"] = learnable
    agree(case, engine)


@few_engines
def test_a_learnable_factor_under_a_scheduler(engine):
    learnable = torch.tensor(0.6, requires_grad=True)

    def body(loop: Any, model: Any, made: Any) -> None:
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 4) for o in made]
        for _ in range(3):
            two_halves(loop, steps=1)
            for scheduler in schedulers:
                scheduler.step()

    case = problem(body, optimizer=both, options={"lr": learnable})
    case.outer["factor"] = learnable
    agree(case, engine)


# --- the optimizer's state after the block ---


@few_engines
@pytest.mark.parametrize("optimizer", [momentum, adamw, nadam, both], ids=["momentum", "adamw", "nadam", "both"])
def test_a_second_block_goes_on_where_the_first_ended(engine, optimizer):
    """Weights, buffers and the optimizers' state are written back: two blocks are one plain loop."""

    def body(loop: Any, model: Any, made: Any) -> None:
        two_halves(loop, steps=1)
        loop.step(draw(HALVES[0]), HALVES[0], only=model[0])

    case = problem(body, optimizer=optimizer)
    models = [copy.deepcopy(case.model) for _ in range(2)]
    made = [optimizer(model) for model in models]
    torch.manual_seed(1)
    plain = Plain(models[0], case.h, case.g, made[0])
    body(plain, models[0], made[0])
    body(plain, models[0], made[0])
    torch.manual_seed(1)
    for _ in range(2):
        with bilevel.inner(models[1], case.h, case.g, solver="gd", optimizer=made[1], engine=engine) as loop:
            body(loop, models[1], made[1])
            loop.commit_(optimizer=True)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-12, atol=1e-13)
    states = [[o.state_dict() for o in (m if isinstance(m, list) else [m])] for m in made]
    torch.testing.assert_close(states[1], states[0], rtol=1e-12, atol=1e-13, check_dtype=False)
    # and a plain loop goes on from there
    for model, stepper in zip(models, made, strict=True):
        torch.manual_seed(4)
        body(Plain(model, case.h, case.g, stepper), model, stepper)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-12, atol=1e-13)


def test_without_the_option_the_optimizer_is_left_alone():
    case = problem(two_halves)
    stepper = adamw(case.model)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", optimizer=stepper) as loop:
        two_halves(loop)
        loop.commit_()
    assert not stepper.state


def test_the_state_of_no_optimizer_or_of_tasks():
    case = tasks_case(None)
    stepper = adamw(case.model)
    x, y, _ = tasks_data()
    with bilevel.inner(case.model, case.h, case.g, solver="gd", optimizer=stepper, tasks=2) as loop:
        loop.step(x, y)
        with refused("commit_"):
            loop.commit_(optimizer=True)
    assert not stepper.state
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=0.1) as loop:
        loop.step(x[0], y[0])
        with refused("commit_", "optimizer"):
            loop.commit_(optimizer=True)


# --- scaled losses ---


@few_engines
@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_a_scaler_is_refused_by_name(engine, call):
    case, i = problem(two_halves), HALVES[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = lambda model, x, i: scaler.scale(case.h(model, x, i))
    with bilevel.inner(case.model, scaled, case.g, solver="gd", lr=RATE, engine=engine) as loop:
        with refused("GradScaler", "bfloat16", "direction="):
            getattr(loop, call)(draw(i), i)


@few_engines
def test_a_scaler_that_is_switched_off_does_nothing(engine):
    case = problem(two_halves, optimizer=momentum)
    loss, scaler = case.h, torch.amp.GradScaler("cpu", enabled=False)
    case.h = lambda model, x, i: scaler.scale(loss(model, x, i))
    agree(case, engine)


@few_engines
def test_a_loss_that_is_scaled_by_hand(engine):
    """h·S, and direction= divides by S: exact where S is a power of 2."""
    scale = 1024.0
    case = problem(two_halves, optimizer=adamw, **clip_norm(0.1))
    *_, expected = case.block(engine)
    loss = case.h
    case.h = lambda model, x, i: scale * loss(model, x, i)
    case.options["direction"] = lambda d: {n: x / scale for n, x in d.items()}
    torch.testing.assert_close(agree(case, engine), expected, rtol=1e-12, atol=1e-15)


# --- all of it at random ---


class Mixed(nn.Module):
    """Two parts, BatchNorm or LayerNorm, and a moving average that the loss keeps in a buffer and reads again."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh()), nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))

    def __getitem__(self, i: int) -> nn.Module:
        return (self.first, self.second)[i]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


LOSSES = ("whole", "stopped", "buffer", "second alone", "beside")
PARTS = (None, "first", "second", "weights", "optimizer")


@dataclass
class Program:
    """What a body does, one call after another: (call, samples, only, loss)."""

    calls: list[tuple[str, int, Any, str]]
    tasks: bool = False

    def __call__(self, loop: Any, model: Any, made: Any, batch: Any = None) -> None:
        x, i, outer = batch or (data()[0], torch.arange(SAMPLES), data()[2])
        dim = i.dim() - 1
        for call, part, only, loss in self.calls:
            chosen = self.part(only, model, made)
            if call == "step()":
                loop.step(outer=(outer,), only=chosen)
                continue
            half = HALVES[part]
            args = (x.index_select(dim, half),) if part else ()
            named = {} if part else {"x": x.index_select(dim, half)}
            take = loop.step if call == "step" else loop.accumulate
            more = {"outer": (outer,)} if call == "step" else {}
            how = {} if loss == "whole" else {"h": self.losses[loss]}
            take(*args, i=i.index_select(dim, half), only=chosen, **named, **more, **how)

    def part(self, only: Any, model: Any, made: Any) -> Any:
        if only is None or (only == "optimizer" and made is None):
            return None
        if only == "optimizer":
            return made[-1] if isinstance(made, list) else made
        if only == "weights":
            return [p for n, p in model.named_parameters() if n.endswith("weight")]
        return model.first if only == "first" else model.second


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, Any, str]]:
    """Steps and gathered steps. Under only= the loss must reach what moves."""
    calls = []

    def one(call: str) -> tuple[str, int, Any, str]:
        loss = draw(st.sampled_from(LOSSES))
        parts = [None, "second", "weights"] if loss in ("stopped", "second alone") else PARTS
        return call, draw(st.integers(0, 1)), draw(st.sampled_from(parts)), loss

    for _ in range(draw(st.integers(1, 4))):
        gathered = draw(st.integers(0, 3))
        calls += [one("accumulate") for _ in range(gathered)] if gathered else [one("step")]
        if gathered:
            calls.append(("step()", 0, None, ""))
    if draw(st.integers(0, 4)) == 4:
        calls.append(one("accumulate"))  # which no step takes
    return calls


def random_case(draw: st.DrawFn | Any) -> tuple[Case, Any]:
    lam = torch.tensor([0.3, -2.0, 0.2, 0.5], requires_grad=True)
    weigh = torch.linspace(-1, 1, SAMPLES).requires_grad_()
    y = data()[1]
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Mixed(draw(st.sampled_from([nn.BatchNorm1d, nn.LayerNorm])))
    stops: list[Callable[[Tensor], Tensor]] = [bilevel.stop_gradient]

    def whole(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        model.train()
        loss = F.cross_entropy(model(x), y[i], reduction="none")
        return (weigh[i].sigmoid() * loss).mean() + lam[1].exp() * sum(p.square().sum() for p in model.parameters())

    def stopped(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        return (lam[0] * model.second(stops[-1](model.first(x)))).square().mean()

    def buffer(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        model.train()
        features = model.first(x)
        before = model.average
        model.average = stops[-1](before.lerp(features.mean(0), 0.5))
        return (model.second(features) - before.sum() - lam[2]).square().mean()

    def second_alone(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        return (model.second.weight.sum(0) - lam[3]).square().sum() + model.second.bias.exp().sum()

    def beside(model: Mixed, x: Tensor, i: Tensor) -> Any:
        model.eval()
        out = model(x)
        return (out.tanh() * weigh[i, None]).mean(), {"out": out}

    def g(model: Mixed, x: Tensor) -> Tensor:
        model.eval()
        return (model(x).logsumexp(1) + lam[2]).square().mean() + (model.average * lam[3]).sum()

    losses = {"whole": whole, "stopped": stopped, "buffer": buffer, "second alone": second_alone, "beside": beside}
    program = Program(draw(programs()))
    program.losses = losses
    optimizer = draw(st.sampled_from([None, None, RANDOM_SGD, RANDOM_ADAMW, RANDOM_BOTH]))
    case = Case(model, whole, g, {"lam": lam, "weigh": weigh}, program, optimizer)
    transform = draw(st.sampled_from(["", "", "bent", "learned", "in place"]))
    if transform == "learned":
        case.outer["rate"] = rate = torch.tensor(0.6, requires_grad=True)
        case.options["direction"] = lambda d: {n: rate * x for n, x in d.items()}
    elif transform:
        case.options["direction"] = bent if transform == "bent" else halved
    clip = draw(st.sampled_from(["", "", "norm", "learned", "value"]))
    if clip == "norm":
        case.options |= clip_norm(0.1)["options"]
        case.by_hand |= clip_norm(0.1)["by_hand"]
    elif clip == "value":
        case.options |= clip_value(0.05)["options"]
        case.by_hand |= clip_value(0.05)["by_hand"]
    elif clip == "learned":
        case.outer["most"] = most = torch.tensor(0.1, requires_grad=True)
        case.options["clip"] = bilevel.clip_norm(most)
        case.by_hand["clip"] = lambda w: nn.utils.clip_grad_norm_(w, float(most.detach()))
    factor = draw(st.sampled_from(["", "", "learned", "of k"]))
    if factor == "learned":
        case.outer["factor"] = case.options["lr"] = torch.tensor(0.5, requires_grad=True)
    elif factor:
        case.options["lr"] = lambda k: 0.5 / k
    if draw(st.integers(0, 3)) == 3:
        case.options["solver"] = "bigsam"
    elif draw(st.integers(0, 3)) == 3:
        made = case.optimizer

        def hooked(model: Mixed) -> Any:
            model.second.weight.register_hook(lambda d: (3 * d).tanh())
            return made(model) if made else None

        case.optimizer = hooked
    alone = case.alone

    def by_detaching() -> tuple[dict[str, Tensor], float]:
        stops.append(lambda x: x.detach())
        try:
            return alone()
        finally:
            stops.pop()

    case.alone = by_detaching
    engine = draw(st.sampled_from([*ENGINES.values(), bilevel.Reverse(compile=False)]))
    what = (transform, clip, factor, case.options.get("solver"), optimizer, engine)
    note(f"{what}, {program.calls}")
    return case, engine


def RANDOM_SGD(model: Mixed) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.8, weight_decay=0.1)


def RANDOM_ADAMW(model: Mixed) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.1, eps=0.1)


def RANDOM_BOTH(model: Mixed) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model.first.parameters(), 0.2, momentum=0.8)
    return [first, torch.optim.AdamW(model.second.parameters(), 0.1, eps=0.1)]


@given(st.data())
def test_programs_at_random(at_random):
    torch.set_default_dtype(torch.float64)
    case, engine = random_case(at_random.draw)
    try:
        agree(case, engine, unused=True)
    finally:
        torch.set_default_dtype(torch.float32)


@given(st.data())
def test_programs_of_tasks_at_random(at_random):
    """The same for two tasks at once: two plain loops, one after the other."""
    torch.set_default_dtype(torch.float64)
    try:
        case, engine = random_case(at_random.draw)
        engine = bilevel.Reverse(memory="48kB") if engine is ENGINES["little memory"] else engine
        x, _, held_out, _ = data()
        batch = torch.stack([x, x.flip(0).sin()]), torch.stack([torch.arange(SAMPLES)] * 2), held_out.expand(2, -1, -1)
        agree_on_tasks(case, case.body, engine, batch)
    finally:
        torch.set_default_dtype(torch.float32)


# --- several processes ---

SIZE = 2


def shared(rank: int | None) -> Case:
    """Each rank has half of the samples; a plain loop has the mean of both ranks' losses."""
    x, y, x_val, y_val = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()), nn.Linear(4, 2))
    lam, mu = torch.linspace(-1, 1, SAMPLES).requires_grad_(), torch.tensor(-2.0, requires_grad=True)

    def part(model: nn.Module, i: Tensor) -> Tensor:
        target = bilevel.stop_gradient(model(x[i])).softmax(1) if rank is not None else model(x[i]).detach().softmax(1)
        out = model(x[i])
        loss = F.cross_entropy(out, y[i], reduction="none") + 0.3 * (out - target).square().sum(1)
        return (lam[i].sigmoid() * loss).mean() + mu.exp() * model[0][0].weight.square().sum()

    def h(model: nn.Module, j: int) -> Any:
        """The j-th micro-batch of a rank, and of both."""
        mine = lambda r: part(model, torch.arange(SAMPLES).view(SIZE, 2, 2)[r, j])
        return (mine(0) + mine(1)) / 2 if rank is None else (mine(rank), {"rank": rank})

    def g(model: nn.Module) -> Tensor:
        outer = lambda r: F.cross_entropy(model(x_val[r::SIZE]), y_val[r::SIZE])
        return (outer(0) + outer(1)) / 2 if rank is None else outer(rank)

    def body(loop: Any, model: Any, made: Any) -> None:
        for j in range(2):
            loop.accumulate(j)
        loop.step()
        loop.step(1, only=model[0])
        loop.accumulate(0, only=model[1])
        loop.accumulate(j=1)
        loop.step()
        loop.step(j=0, only=made[1] if isinstance(made, list) else model[1].weight)
        loop.accumulate(1)  # which no step takes

    return Case(model, h, g, {"lam": lam, "mu": mu}, body)


TOGETHER: dict[str, dict[str, Any]] = {
    "lr": {},
    "both": {"optimizer": both},
    "adamw, clip, direction": {"optimizer": adamw, "options": {"direction": bent, "clip": 0.1}},
    "bigsam": {"options": {"solver": "bigsam"}, "optimizer": momentum},
    "factor": {"optimizer": both, "factor": True},
}
OF_GROUPS = {
    "reverse": "reverse",
    "sqrt": bilevel.Reverse("sqrt"),
    "memory": bilevel.Reverse(memory="1MiB"),
    "unroll": "unroll",
}


def together(name: str, rank: int | None) -> Case:
    case, more = shared(rank), dict(TOGETHER[name])
    if more.pop("factor", False):
        case.outer["factor"] = factor = torch.tensor(0.5, requires_grad=True)
        case.options["lr"] = factor
    case.options |= more.get("options", {})
    case.optimizer = more.get("optimizer")
    if "clip" in case.options and rank is None:
        case.by_hand = clip_norm(0.1)["by_hand"]
    return case


def mistakes(rank: int, group: Any) -> dict[str, str]:
    """What the ranks are told if they do not do the same."""

    def block(call: Callable[[Any, nn.Module], object], **options: Any) -> str:
        case = shared(rank)
        options = {"lr": RATE, "solver": "gd", "check": False, **options}
        try:
            with bilevel.inner(case.model, case.h, case.g, group=group, local=case.outer["lam"], **options) as loop:
                call(loop, case.model)
                loop.hypergrad(case.outer["mu"])
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was wrong"

    def more_micro_batches(loop: Any, model: nn.Module) -> None:
        for j in range(1 + rank):
            loop.accumulate(j)
        loop.step()
        loop.step(0)

    rate = torch.tensor(1.0, requires_grad=True)
    learned = {"direction": lambda d: {n: rate * x for n, x in d.items()}}
    return {
        "more micro-batches": block(more_micro_batches),
        "one gathers": block(lambda loop, model: (loop.accumulate(0), loop.step()) if rank else loop.step(0)),
        "a learned direction": block(lambda loop, model: loop.step(0), **learned),
    }


def main(rank: int, folder: str) -> None:
    import datetime

    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(seconds=40), SIZE, rank)
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    for name in TOGETHER:
        for way, engine in OF_GROUPS.items():
            case = together(name, rank)
            found[f"{name}, {way}"] = case.block(engine, group=group, local=case.outer["lam"])
    found["mistakes"] = mistakes(rank, group)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parent.parent
    command = [sys.executable, "-W", "error", "-c"]
    code = (
        "import sys; sys.path[:0] = ['tests', '.']; import test_handle; test_handle.main(int(sys.argv[1]), sys.argv[2])"
    )
    started = [
        subprocess.Popen([*command, code, str(r), str(folder)], stderr=subprocess.PIPE, text=True, cwd=root)
        for r in range(SIZE)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(errors)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(SIZE)]


needs_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@needs_processes
@pytest.mark.parametrize("engine", OF_GROUPS)
@pytest.mark.parametrize("name", TOGETHER)
def test_processes_find_what_the_plain_loop_on_both_their_batches_does(ranks, name, engine):
    case = together(name, None)
    state, value = case.alone()
    per_rank = [rank[f"{name}, {engine}"] for rank in ranks]
    for found, got, _ in per_rank:
        torch.testing.assert_close(found, state, rtol=1e-11, atol=1e-12)
        assert got == pytest.approx(value, rel=1e-11)
    own = sum(grad[:SAMPLES] for _, _, grad in per_rank)  # a rank has a gradient for its own samples alone
    for r, (_, _, grad) in enumerate(per_rank):
        others = torch.arange(SAMPLES).view(SIZE, 4)[1 - r]
        assert float(grad[others].abs().max()) == 0.0
        assert torch.equal(grad[SAMPLES:], per_rank[0][2][SAMPLES:])
    judge(case, torch.cat([own, per_rank[0][2][SAMPLES:]]))


@needs_processes
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("more micro-batches", "ranks"),
        ("one gathers", "ranks"),
        ("a learned direction", "function of the direction"),
    ],
)
def test_a_mistake_of_one_process_is_told_to_all(ranks, mistake, words):
    for rank in ranks:
        told = rank["mistakes"][mistake]
        assert re.match(r"\w+: bilevel\.\w+: ", told), told
        assert words in told
