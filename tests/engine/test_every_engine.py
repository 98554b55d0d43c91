"""The contract that every solver and every engine of the tables meets, and what each engine holds."""

from __future__ import annotations

import gc

import contract
import pytest
import torch
from problems import Ridge
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.engine import ENGINES
from bilevel_plugin.update.solvers import SOLVERS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_engine_differentiates_every_solver(solver, engine):
    contract.differentiates(solver, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_takes_the_same_steps(engine):
    contract.takes_the_same_steps(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_passes_gradients_to_tensors_of_the_batch(engine):
    contract.passes_gradients_to_tensors_of_the_batch(engine)


def alive(size):
    """The number of vectors of this size that Python knows."""
    return sum(1 for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.shape == (size,))


def held(engine, steps):
    """How many iterates a tape holds after the loop; for engines that store none, how many live vectors it has made."""
    ridge = Ridge.random(d=3)
    model = nn.ParameterDict({"w": torch.zeros(1009, dtype=torch.float64)})  # a size that nothing else has
    h = lambda m: (m["w"][:3] - ridge.lam).square().sum() + m["w"].square().sum()
    gc.collect()
    before = alive(1009)
    with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(steps)
        gc.collect()
        return alive(1009) - before if loop.plan is None else loop.plan.states


def test_what_each_engine_holds():
    """Iterates held after K steps: all, every 10th, about √K, the last m, and a constant."""
    assert held("reverse", 100) == 100
    assert held(bilevel.Reverse(10), 100) == 10
    assert held(bilevel.Reverse("sqrt"), 100) <= 16
    assert held(bilevel.Reverse("sqrt"), 400) <= 32
    assert held(bilevel.Reverse(truncate=7), 100) == 7
    assert held("forward", 5) == held("forward", 100) <= 4
    assert held("neumann", 5) == held("neumann", 100) <= 3


def test_nothing_is_held_after_the_block():
    ridge = Ridge.random()
    model = nn.ParameterDict({"w": torch.zeros(1013, dtype=torch.float64)})
    h = lambda m: (m["w"][:3] - ridge.lam).square().sum() + m["w"].square().sum()
    gc.collect()
    gc.disable()  # what is left must go by reference counts alone, not when the collector comes round
    try:
        before = alive(1013)
        loops = []
        for engine in ENGINES:
            with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine) as loop:
                loop.run(30)
                loop.hypergrad(ridge.lam)
            loops.append(loop)  # even while the handle is kept
        assert alive(1013) == before
    finally:
        gc.enable()


def test_a_new_engine_and_a_new_solver_in_a_few_lines():
    """What the architecture promises: one class each, and the front takes them as they are."""
    from bilevel_plugin.update.solvers import StepRule

    class Alternate(StepRule):
        def weights(self, k):
            return (0.1, 0.0) if k % 2 else (0.0, 0.1)

    ridge = Ridge.random()
    grads = []
    for how in ("reverse", "unroll", "forward"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=Alternate(), engine=how) as loop:
            loop.run(6)
            grads.append(loop.hypergrad(ridge.lam))
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[1])
