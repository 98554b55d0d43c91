"""Reverse("reversible"): every state comes out bit for bit, and so does the hypergradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bilevel_plugin as bilevel

SGD, Adam, AdamW, NAdam, RAdam, RMSprop = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop
)  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9),
    "sgd, decay": lambda p: SGD(p, 0.1, momentum=0.99, weight_decay=0.01),
    "sgd, dampening": lambda p: SGD(p, 0.1, momentum=0.5, dampening=0.3),
    "sgd, nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd, maximize": lambda p: SGD(p, 0.01, momentum=0.9, maximize=True),
    "adam": lambda p: Adam(p, 0.01),
    "adam, decay": lambda p: Adam(p, 0.01, weight_decay=0.1),
    "adam, amsgrad": lambda p: Adam(p, 0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1),
    "adamw, β₁ = 0": lambda p: AdamW(p, 0.01, betas=(0.0, 0.95)),
    "nadam": lambda p: NAdam(p, 0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: RAdam(p, 0.01),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.9, centered=True),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


def solve(
    engine: Any,
    optimizer: Any = OPTIMIZERS["sgd"],
    make: Any = mlp,
    steps: int = 12,
    dtype: torch.dtype = torch.float32,
    schedule: bool = False,
    only: bool = False,
    accumulate: bool = False,
    wrt_start: bool = True,
    **options: Any,
) -> list[Tensor]:
    """Hypergradients for weights of the samples, a regulariser, a rate and w_0; twice, and on from there."""
    torch.manual_seed(0)
    model = make().to(dtype)
    x, y = torch.randn(30, 5, dtype=dtype), torch.randint(3, (30,))
    lam, mu, rate = torch.zeros(30, dtype=dtype), torch.tensor(-3.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    inputs = [lam.requires_grad_(), mu.requires_grad_(), rate.requires_grad_()]

    def h(model: nn.Module, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in model.parameters())
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean() + mu.exp() * decay

    g = lambda model, x, y: F.cross_entropy(model(x), y)
    optimizer = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) if schedule else None
    found: list[Tensor] = []
    with bilevel.inner(
        model, h, g, solver="gd", optimizer=optimizer, lr=rate, engine=engine, check=False, **options
    ) as loop:
        for turn in range(2):
            for k in range(steps):
                i = torch.randperm(30)[:10]
                part = [model[0].weight] if only and k % 3 == 1 else None
                if accumulate and k % 2:
                    loop.accumulate(x[i], y[i], i)
                    loop.accumulate(x, y, torch.arange(30))
                    loop.step()
                else:
                    loop.step(x[i], y[i], i, only=part)
                if scheduler is not None:
                    scheduler.step()
            model.train(turn == 0)
            for _ in range(2):
                found += loop.hypergrad([*inputs, *(model.parameters() if wrt_start else ())], outer=(x, y))
            model.train()
    return found


def agree(*args: Any, plain: Any = "reverse", **options: Any) -> None:
    mine, theirs = solve(bilevel.Reverse("reversible"), *args, **options), solve(plain, *args, **options)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_optimizer_runs_backwards_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    agree(OPTIMIZERS[name], dtype=dtype)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": True}, {"only": True}, {"clip": 0.1}, {"make": cnn}, {"accumulate": True},
        {"direction": lambda d: {n: x + 0.01 * torch.randn_like(x) for n, x in d.items()}},
    ],
    ids=["schedule", "only", "clip", "cnn", "accumulate", "noise"],
)  # fmt: skip
def test_whatever_the_step_has_besides(name: str, options: dict[str, Any]) -> None:
    agree(OPTIMIZERS[name], **options)


@pytest.mark.parametrize("name", ["sgd, nesterov", "adamw", "nadam", "radam"])
def test_weights_of_low_precision(name: str) -> None:
    agree(OPTIMIZERS[name], dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "options", [{"truncate": 5}, {"truncate": 100}, {"folder": True}, {"blocks": nn.Linear}], ids=str
)
def test_whatever_the_engine_does_besides(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    more = {"store": tmp_path} if "folder" in options else {}
    options = {n: x for n, x in options.items() if n != "folder"}
    wrt_start = options.get("truncate", 100) == 100
    mine = solve(bilevel.Reverse("reversible", **options, **more), OPTIMIZERS[name], wrt_start=wrt_start)
    for a, b in zip(mine, solve(bilevel.Reverse(**options), OPTIMIZERS[name], wrt_start=wrt_start), strict=True):
        assert torch.equal(a, b)
    assert list(tmp_path.iterdir()) == []


def problem(seed: int = 0, **sizes: int) -> tuple[nn.Module, Tensor, Any, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    model, lam = (
        nn.Sequential(nn.Linear(4, sizes.get("width", 6)), nn.Tanh(), nn.Linear(sizes.get("width", 6), 3)),
        torch.zeros(12),
    )
    h = lambda model, x, y: (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()
    g = lambda model, x, y: F.cross_entropy(model(x), y)
    return model, lam.requires_grad_(), h, g, (torch.randn(12, 4), torch.randint(3, (12,)))


def states_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Tensor]], Tensor, Any]:
    """The states that the sweep of 30 steps comes to, the hypergradient and the plan."""
    model, lam, h, g, batch = problem()
    states: list[dict[str, Tensor]] = []
    plain = bilevel.Step.pull

    def pull(self: Any, z: dict[str, Tensor], *args: Any) -> Any:
        states.append({n: x.detach().clone() for n, x in z.items()})
        return plain(self, z, *args)

    adam = AdamW(model.parameters(), 0.01)
    with monkeypatch.context() as patched, bilevel.inner(
        model, h, g, solver="gd", optimizer=adam, engine=engine, check=False
    ) as loop:  # fmt: skip
        patched.setattr(bilevel.Step, "pull", pull)
        loop.run(30, *batch, outer=batch)
        return states, loop.hypergrad(lam), loop.plan


def test_every_state_comes_out_and_a_step_takes_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, grad, plan = states_of(bilevel.Reverse("reversible"), monkeypatch)
    theirs, expected, _ = states_of(bilevel.Reverse(), monkeypatch)
    assert len(mine) == len(theirs) == 30
    for a, b in zip(mine, theirs, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert torch.equal(grad, expected)
    assert (plan.steps, plan.states, plan.reruns) == (30, 1, 59)
    assert "30 steps: the last state is kept, and 0.0 MB of what rounding loses; 59 steps" in str(plan)
    state = sum(x.nbytes for x in mine[0].values())
    assert 0 < plan.differences < 29 * 0.15 * state  # two bits and a bit, and the heads of small blocks


def test_outer_losses_on_the_way() -> None:
    found: list[Tensor] = []
    for engine in (bilevel.Reverse("reversible"), bilevel.Reverse()):
        model, lam, h, g, batch = problem()
        with bilevel.inner(model, h, g, solver="gd", optimizer=AdamW(model.parameters(), 0.01), engine=engine) as loop:
            for k in range(9):
                loop.step(*batch)
                if k in (2, 5):  # none at the end: the sweep gets there by running backwards alone
                    loop.add_outer_loss(outer=batch)
            found.append(loop.hypergrad(lam))
    assert torch.equal(*found)


def test_a_gradient_with_other_bits_is_an_error_and_never_another_number() -> None:
    model, lam, h, g, batch = problem()
    loud = [0.0]

    def noisy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = h(model, x, y)
        return loss + loud[0] * (loss - loss.detach())  # only the gradient differs, as with atomic additions

    with bilevel.inner(
        model, noisy, g, solver="gd", optimizer=AdamW(model.parameters(), 0.01), engine=bilevel.Reverse("reversible"),
        check=False,
    ) as loop:  # fmt: skip
        loop.run(5, *batch, outer=batch)
        loud[0] = 1e-6
        with pytest.raises(RuntimeError, match=r"step k = 5 can't be run backwards.*'0.weight' and 3 more.*checkpoint"):
            loop.hypergrad(lam)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.1}, "a plain step.*checkpoint='sqrt'"),
        ({"optimizer": lambda p: SGD(p, 0.1)}, "the rule 'sgd': without momentum"),
        ({"optimizer": lambda p: RMSprop(p, 0.1)}, "the rule 'rmsprop': without momentum"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, 0.1)}, "the rule 'adagrad': it has no inverse"),
    ],
)  # fmt: skip
def test_what_can_not_be_inverted_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    model, _, h, g, batch = problem()
    options = {n: x if n == "lr" else x(model.parameters()) for n, x in options.items()}
    engine = bilevel.Reverse("reversible")
    with (
        pytest.raises(ValueError, match=words),
        bilevel.inner(model, h, g, solver="gd", engine=engine, **options) as loop,
    ):
        loop.run(2, *batch, outer=batch)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="compile= runs the step as a whole"):
        bilevel.Reverse("reversible", compile=True)
    with pytest.raises(ValueError, match="leave out checkpoint= or memory="):
        bilevel.Reverse("reversible", memory="1GiB")
    with pytest.raises(ValueError, match="checkpoint must be 'sqrt', 'reversible' or at least 1"):
        bilevel.Reverse("backwards")  # pyright: ignore[reportArgumentType]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    steps=st.integers(1, 12),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    width=st.integers(1, 9),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 30.0]),
    clip=st.none() | st.just(0.01),
    truncate=st.none() | st.integers(1, 12),
)
def test_any_loop(
    seed: int, steps: int, name: str, dtype: torch.dtype, width: int, scale: float, clip: float | None,
    truncate: int | None,
) -> None:  # fmt: skip
    """Also with gradients that are next to nothing or large, and weights that start at 0."""
    found: list[list[Tensor]] = []
    for engine in (bilevel.Reverse("reversible", truncate=truncate), bilevel.Reverse(truncate=truncate)):
        model, lam, h, g, (x, y) = problem(seed, width=width)
        model, x = model.to(dtype), x.to(dtype)
        nn.init.zeros_(model[0].bias)  # pyright: ignore
        scaled = lambda model, x, y, h=h: scale * h(model, x, y)
        options = {"optimizer": OPTIMIZERS[name](model.parameters()), "engine": engine, "clip": clip, "check": False}
        with bilevel.inner(model, scaled, g, solver="gd", **options) as loop:
            for k in range(steps):
                loop.step(x.roll(k, 0), y)
            found.append([loop.hypergrad(lam, outer=(x, y)), *(w.detach() for w in loop.weights.values())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def both(take: Any, make: Any = None, optimizer: Any = None, **options: Any) -> None:
    """`take` runs a loop on a batch; its hypergradient is the same from all states and from the last."""
    found: list[Tensor] = []
    for engine in (bilevel.Reverse("reversible"), bilevel.Reverse()):
        model, lam, h, g, batch = problem()
        model = make(model) if make else model
        with bilevel.inner(
            model, h, g, solver="gd", optimizer=(optimizer or OPTIMIZERS["adamw"])(model.parameters()), engine=engine,
            check=False, **options,
        ) as loop:  # fmt: skip
            found.append(take(loop, lam, *batch))
    assert torch.equal(*found)


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for k in range(6):
            if k in (0, 3):
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    loop.step(x[:, :2], y)
            loop.step(x.roll(k, 0), y)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loop.step(x[:, :2], y)
        return loop.hypergrad(lam, outer=(x, y))

    both(take)


def test_open_steps_with_hooks_losses_between_batches_and_a_batch_that_failed() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        found: list[Tensor] = []
        for k in range(6):
            loop.accumulate(x.roll(k, 0), y)
            if k in (2, 5):
                loop.add_outer_loss(outer=(x, y))
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                loop.accumulate(x[:, :2], y)
            loop.accumulate(x, y.roll(k, 0))
            if k > 2:
                found.append(loop.hypergrad(lam))  # while the step is open
            loop.step()
        return torch.stack([*found, loop.hypergrad(lam)])

    def hooked(model: nn.Module) -> nn.Module:
        model[0].weight.register_hook(lambda d: d.tanh())  # pyright: ignore
        return model

    both(take)
    both(take, hooked, clip=0.05)


def test_a_gradient_that_depends_on_the_weights_before_the_step() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loop.run(6, x, y, outer=(x, y))
        return loop.hypergrad(lam)

    both(take, direction=lambda d, w: {n: v + 0.1 * w[n].sin() * torch.rand_like(v) for n, v in d.items()}, clip=0.1)


def test_values_computed_from_the_weights() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(6):
            target = loop.compute(lambda model: (lam.sigmoid().mean() * model(x)).softmax(1))
            loop.step(x, target, h=lambda model, x, y: F.cross_entropy(model(x), y))
        return loop.hypergrad(lam, outer=(x, y))

    both(take)


def test_tasks() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x, y = torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
        loop.run(6, x, y, outer=(x, y))
        return loop.hypergrad(lam)

    both(take, tasks=2)


def test_parts_of_a_batch_and_batches_that_are_fetched() -> None:
    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        h = lambda model, x, y: F.cross_entropy(model(x), y) * lam.sigmoid().mean()
        for _ in range(5):
            loop.step(x, y, h=h, micro=3, outer=(x, y))
            loop.step(fetch=lambda: (x, y))
        return loop.hypergrad(lam)

    both(take)


def test_several_optimizers_and_a_layout_of_ones_own() -> None:
    def make(model: nn.Module) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last),
            nn.Conv2d(4, 3, (1, 1)).to(memory_format=torch.channels_last), nn.Flatten(),
        )  # fmt: skip

    def take(loop: Any, lam: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loop.run(6, x, y, outer=(x, y))
        return loop.hypergrad(lam)

    def two(p: Any) -> list[torch.optim.Optimizer]:
        first, *rest = p
        return [SGD([first], 0.1, momentum=0.8), AdamW(rest, 0.01)]

    both(take, make, two)
