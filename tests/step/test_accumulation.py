"""loop.accumulate: gradients of several calls that one step takes, judged by the plain loop and differences of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract import every_plan
from handle import (
    HALVES,
    LR,
    SAMPLES,
    UPDATES,
    Case,
    Plain,
    adamw,
    agree,
    agree_on_tasks,
    bent,
    clip_norm,
    draw,
    momentum,
    samples,
    tasks_case,
    tasks_data,
    two_halves,
    weighted_samples,
)
from problems import refused, relative
from torch import Tensor, nn

import bilevel_plugin as bilevel
from benchmarks.measure import live

pytestmark = pytest.mark.usefixtures("double")


# --- accumulate ---


@every_plan
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_accumulated_gradients(engine, update):
    agree(weighted_samples(two_halves, **update), engine)


@pytest.mark.parametrize("optimizer", [None, momentum, adamw], ids=["lr", "momentum", "adamw"])
def test_mixed_with_ordinary_steps(engine, optimizer):
    def body(loop: Any, model: Any, optimizer: Any) -> None:
        i = torch.arange(5)
        loop.step(draw(i), i)
        two_halves(loop, steps=1)
        loop.step(draw(i), i)
        loop.accumulate(draw(i), i)
        loop.step()

    agree(weighted_samples(body, optimizer=optimizer), engine)


def test_truncation_counts_steps_and_not_micro_batches():
    case = weighted_samples(two_halves, optimizer=momentum)
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


def test_hooks_on_parameters_fire_for_each_micro_batch(engine):
    """tanh(a) + tanh(b) is not tanh(a + b); and the order is hooks, sum, direction, clip."""
    counts = []

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        model[1].weight.register_hook(lambda d: counts.append(1) or (4 * d).tanh())
        model[0][0].weight.register_hook(lambda d: d.clamp(-0.05, 0.05))
        return momentum(model)

    case = weighted_samples(two_halves, optimizer=hooked, options={"direction": bent, "clip": 0.2})
    case.by_hand = clip_norm(0.2)["by_hand"]
    case.alone()
    assert len(counts) == 6
    agree(case, engine)
    # the same without the parts that come after
    agree(weighted_samples(two_halves, optimizer=hooked), engine)


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

    agree(weighted_samples(body, optimizer=optimizer), engine)


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
        return -case.outer["mu"].exp() * model(samples()[0]).softmax(1).var()

    case = weighted_samples(body, optimizer=adamw)
    agree(case, engine)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
@pytest.mark.parametrize("what", ["accumulate", "only="])
def test_refused_at_a_fixed_point(engine, what):
    case = weighted_samples(two_halves)
    i = HALVES[0]
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR, engine=engine) as loop:
        with refused(what, "reverse"):
            if what == "accumulate":
                loop.accumulate(draw(i), i)
            else:
                loop.step(draw(i), i, only=case.model[1])


def test_a_batch_or_loss_for_a_step_that_is_gathered_is_refused(engine):
    def body(loop: Any, model: Any, optimizer: Any) -> None:
        x, i = draw(HALVES[0]), HALVES[0]
        loop.accumulate(x, i)
        if not isinstance(loop, Plain):
            for wrong in (lambda: loop.step(x, i), lambda: loop.step(x=x, i=i), lambda: loop.step(h=lambda m: m.sum())):
                with refused("accumulate", "without a batch"):
                    wrong()
        loop.step()

    agree(weighted_samples(body), engine)


@every_plan
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

    case = weighted_samples(body, optimizer=adamw)
    case.model[0][1] = nn.LayerNorm(4)  # running statistics would move with each micro-batch
    agree(case, engine)
    for value, grad in found[1:]:
        assert value == found[0][0]
        torch.testing.assert_close(grad, found[0][1], rtol=1e-10, atol=1e-13)


@every_plan
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_left_over_at_the_end_moves_the_statistics_only(engine, steps):
    """As in the plain loop, where a last .backward() without a step has moved the running statistics that g reads."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        two_halves(loop, steps=steps)
        loop.accumulate(draw(HALVES[0]), HALVES[0])
        loop.accumulate(draw(HALVES[1]), HALVES[1])

    agree(weighted_samples(body, optimizer=momentum), engine)


@pytest.mark.parametrize("last", [1, 2])
def test_what_is_left_over_does_not_count_as_a_step_of_a_truncation(last):
    """The hypergradient goes back over as many steps as without it."""
    found = []
    for left in (False, True):

        def body(loop: Any, model: Any, optimizer: Any, left: bool = left) -> None:
            two_halves(loop)
            if left:
                loop.accumulate(samples()[0], torch.arange(SAMPLES))

        case = weighted_samples(body, optimizer=momentum)
        case.model[0][1] = nn.LayerNorm(4)
        *_, grad = case.block(bilevel.Reverse(truncate=last))
        found.append(grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


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
                    with pytest.raises(KeyError, match="a bad sample"):
                        loop.accumulate(100 * samples()[0], h=fails)
                loop.accumulate(draw(i), i)
            if where == "between" and not isinstance(loop, Plain):
                with refused("without a batch"):
                    loop.step(samples()[0])
            loop.step()

    case = weighted_samples(body, optimizer=adamw)
    case.model[0][3] = nn.Identity()  # what the failing loss drew is gone in a plain loop too
    agree(case, engine)


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["lr", "adamw"])
def test_a_gathered_step_of_one_part(engine, optimizer):
    """accumulate(only=a), step(only=a): a GAN with accumulation."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            for part in model:
                for i in HALVES:
                    loop.accumulate(draw(i), i, only=part)
                loop.step(only=part)

    agree(weighted_samples(body, optimizer=optimizer), engine)


def test_a_part_of_what_was_gathered_is_refused(engine):
    """In a plain loop the rest would stay in .grad, or be lost: it is not said which."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        loop.accumulate(draw(HALVES[0]), HALVES[0])
        loop.accumulate(draw(HALVES[1]), HALVES[1], only=model[1])
        if not isinstance(loop, Plain):
            with refused("accumulate", "only="):
                loop.step(only=model[1])
        loop.step()

    agree(weighted_samples(body, optimizer=momentum), engine)


@pytest.mark.parametrize("check", ["first", "always"])
def test_the_sentinel_has_nothing_to_say_of_right_loops(check):
    """Warnings are errors here."""

    def body(loop: Any, model: Any, optimizer: Any) -> None:
        two_halves(loop, steps=2)
        loop.step(draw(HALVES[0]), HALVES[0], only=model[0])
        loop.step(h=lambda m: m[1].weight.square().sum(), only=model[1])
        loop.accumulate(draw(HALVES[1]), HALVES[1])

    agree(weighted_samples(body, optimizer=adamw, options={"direction": bent}), "reverse", check=check)


def test_the_sentinel_sees_a_detach_in_a_micro_batch():
    case = weighted_samples(two_halves)
    loss = case.h
    case.h = lambda model, x, i: loss(model, x, i) * (1 + model[1].weight.square().sum().detach())
    with pytest.warns(bilevel.DerivativeWarning, match="the second derivative of h is not the derivative of the loss"):
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


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_tasks(engine, update):
    agree_on_tasks(tasks_case(None, **update), in_tasks, engine, tasks_data())
