"""Bodies of a loop that a plain loop and a block both run, through a handle of the same shape.

The judge is the plain loop, with .backward(), .grad and optimizer.step() of torch alone, and central differences of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel

LR = 0.3
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
        options = {"lr": None if made else LR, **self.options, **self.by_hand}
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
        options: dict[str, Any] = {"lr": LR} if made is None else {"optimizer": made}
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


# --- the problem ---


SAMPLES = 8


def network() -> nn.Module:
    """BatchNorm in training mode in h and in eval mode in g, dropout, and two parts by name."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(first, nn.Linear(4, 2))


def weighted_samples(body: Callable[[Any, Any, Any], object], **more: Any) -> Case:
    """Weights of samples and a decay. The body gets x, y and indices by `data()`."""
    _, y, x_val, y_val = samples()
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


def samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, x_val = torch.randn(2, SAMPLES, 3, generator=generator)
    y, y_val = torch.randint(2, (2, SAMPLES), generator=generator)
    return x, y, x_val, y_val


HALVES = torch.arange(SAMPLES).split(4)


def draw(i: Tensor) -> Tensor:
    """A micro-batch with noise of its own: random numbers that are drawn between."""
    return samples()[0][i] + 0.1 * torch.randn(len(i), 3)


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
    options = {**({"optimizer": made} if made else {"lr": LR}), "solver": "gd", "check": False, **case.options}
    with bilevel.inner(model, case.h, case.g, engine=engine, tasks=2, **options) as loop:
        body(loop, model, made, batch)
        for name, x in loop.weights.items():
            torch.testing.assert_close(x, torch.stack([end[name] for end in ends]), rtol=1e-12, atol=1e-13)
        assert float(loop.value) == pytest.approx(value, rel=1e-12)
        grads = loop.hypergrad(list(case.outer.values()), allow_unused=True)
    judge(case, torch.cat([g.flatten() for g in grads]))


# --- optimizers and directions ---


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model[0].parameters(), 0.2, momentum=0.9, weight_decay=0.1)
    return [first, torch.optim.AdamW(model[1].parameters(), 0.05, eps=0.1)]


def halved(d: Grads) -> Grads:
    for x in d.values():
        x.mul_(0.5)
    return d
