"""Reverse(memory=...): the plan is the best there is, it is kept to, and it changes no bit of the result."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from problems import weighted
from torch import Tensor, nn

import bilevel_plugin as bilevel
from benchmarks.measure import live
from bilevel_plugin.hypergrad.plan import Budget, Keep, cost, free, parse, schedule


@functools.cache
def fewest(steps: int, states: int) -> int:
    """By trying everything: the least number of steps to run, to reach each from the first, going backwards."""
    if steps == 1:
        return 0
    if states == 1:
        return steps * (steps - 1) // 2
    return min(j + fewest(steps - j, states - 1) + fewest(j, states) for j in range(1, steps))


@given(steps=st.integers(1, 60), states=st.integers(1, 9))
def test_checkpoints_are_optimal(steps: int, states: int) -> None:
    assert cost(steps, states) == fewest(steps, states)
    actions = list(schedule([0], steps, lambda _, held: (1, states - held)))
    assert sum(a.at - a.begin for a in actions) == fewest(steps, states)


@given(
    steps=st.integers(1, 80),
    saved=st.sets(st.integers(1, 79)),
    graph=st.integers(1, 50),
    state=st.integers(1, 20),
    memory=st.integers(0, 2000),
)
def test_every_step_is_gone_over_once_and_what_is_held_fits(
    steps: int, saved: set[int], graph: int, state: int, memory: int
) -> None:
    start = sorted({0, *(k for k in saved if k < steps)})
    budget = Budget(memory, graph, state)
    held, gone = set(start), list[int]()
    for action in schedule(start, steps, budget.room):
        assert action.begin in held
        if isinstance(action, Keep):
            held.add(action.at)
            assert budget.fits(0, len(held))
        else:
            count = action.end - action.at
            assert count == 1 or budget.fits(count, len(held))
            gone += reversed(range(action.at, action.end))
            held -= {k for k in held - set(start) if k >= action.at}
    assert gone == list(reversed(range(steps)))


def problem(samples: int = 40) -> tuple[nn.Module, Tensor, tuple[Tensor, Tensor], bilevel.inner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    lam = torch.zeros(samples, dtype=torch.float64, requires_grad=True)
    batch = torch.randn(samples, 6, dtype=torch.float64), torch.randint(3, (samples,))

    h, g = weighted(lam)
    return model, lam, batch, functools.partial(bilevel.inner, model, h, g, lr=0.3)  # pyright: ignore


@functools.cache
def sizes() -> tuple[int, int]:
    _, _, batch, inner = problem()
    with inner(engine=bilevel.Reverse(memory="1GiB")) as loop:
        loop.run(2, *batch, outer=batch)
        return loop.plan.graph, loop.plan.state


@given(
    steps=st.integers(1, 30),
    graphs=st.integers(1, 12),
    states=st.integers(2, 12),
    truncate=st.none() | st.integers(1, 30),
    momentum=st.sampled_from([0.0, 0.9]),
)
@example(steps=10, graphs=2, states=2, truncate=13, momentum=0.9)  # step 8 was lost: no state from which to get there
def test_the_plan_changes_nothing_but_rounding(
    steps: int, graphs: int, states: int, truncate: int | None, momentum: float
) -> None:
    graph, state = sizes()
    memory = (
        3 * (graph * (graphs + 2) + state * (states + 4)) if momentum else graph * (graphs + 2) + state * (states + 4)
    )
    model, lam, batch, inner = problem()

    def run(engine: bilevel.Reverse) -> list[Tensor]:
        options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)} if momentum else {}
        with inner(engine=engine, **options, **({"lr": None} if momentum else {})) as loop:
            grads = list[Tensor]()
            for _ in range(2):  # again after the first sweep, and on from there
                loop.run(steps, *batch, outer=batch)
                grads += [loop.hypergrad(lam), loop.hypergrad(lam)]
            return grads

    planned = run(bilevel.Reverse(memory=memory, truncate=truncate))
    for mine, plain in zip(planned, run(bilevel.Reverse(truncate=truncate)), strict=True):
        # a step that is run again alone is differentiated without its value, and rounds otherwise
        torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("last", range(1, 20, 2))
def test_no_step_of_a_truncated_loop_is_lost(last: int) -> None:
    graph, state = sizes()
    model, lam, batch, inner = problem()

    def run(engine: bilevel.Reverse) -> list[Tensor]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        with inner(engine=engine, lr=None, optimizer=sgd) as loop:
            loop.run(10, *batch, outer=batch)
            first = loop.hypergrad(lam)
            loop.run(10, *batch)
            return [first, loop.hypergrad(lam)]

    expected = run(bilevel.Reverse(truncate=last))
    small = [3 * (graph * n + state * m) for n in (3, 4, 5) for m in (6, 7, 8)]
    engines = [bilevel.Reverse(memory=m, truncate=last) for m in small]
    for engine in (*(bilevel.Reverse(c, truncate=last) for c in (2, 5, "sqrt")), *engines):
        for mine, plain in zip(run(engine), expected, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("share", [2, 0.6, 0.35])
def test_memory_is_as_planned(share: float) -> None:
    _, lam, batch, inner = problem(samples=2000)

    def run(engine: bilevel.Reverse | str) -> object:
        with inner(engine=engine) as loop:
            loop.run(40, *batch, outer=batch)
            plan = loop.plan
            loop.hypergrad(lam)
        return plan

    everything = live(lambda: run("unroll"))
    allowed = int(share * everything)
    plans = list[object]()
    used = live(lambda: plans.append(run(bilevel.Reverse(memory=allowed))))
    assert used <= 1.2 * allowed
    assert used >= 0.6 * min(allowed, everything)  # what is there is made use of


def test_with_room_for_all_nothing_is_run_again() -> None:
    _, _, batch, inner = problem()
    with inner(engine=bilevel.Reverse(memory="auto")) as loop:
        loop.run(5, *batch, outer=batch)
        assert (loop.plan.graphs, loop.plan.states, loop.plan.reruns) == (5, 0, 0)
        assert "5 graphs and 0 states are kept" in str(loop.plan)
    with inner(engine="reverse") as loop:
        loop.run(5, *batch, outer=batch)
        assert (loop.plan.graphs, loop.plan.states, loop.plan.reruns) == (0, 5, 5)
    with inner(engine="unroll") as loop:
        assert loop.plan is None


def test_sizes_as_people_write_them() -> None:
    assert [parse(x) for x in ("2GiB", "500 MB", "1.5k", 10, "7b")] == [2**31, 500_000_000, 1500, 10, 7]
    assert parse("auto") is None
    assert 0 < free(torch.device("cpu")) < 2**50
    for wrong in ("2 cows", "-1", 0, "GiB", ""):
        with pytest.raises(ValueError, match="number of bytes, a size like"):
            bilevel.Reverse(memory=wrong)
    with pytest.raises(ValueError, match="leave out checkpoint= or memory="):
        bilevel.Reverse(memory="1GiB", checkpoint="sqrt")


def test_too_little_memory_is_an_error_that_says_how_much_it_takes() -> None:
    _, _, batch, inner = problem()
    with pytest.raises(ValueError, match="it takes at least"), inner(engine=bilevel.Reverse(memory="1k")) as loop:
        loop.step(*batch, outer=batch)


def test_offload_is_nothing_on_the_cpu() -> None:
    _, lam, batch, inner = problem()

    def run(engine: bilevel.Reverse) -> Tensor:
        with inner(engine=engine) as loop:
            loop.run(7, *batch, outer=batch)
            return loop.hypergrad(lam)

    assert torch.equal(run(bilevel.Reverse(offload=True)), run(bilevel.Reverse()))
