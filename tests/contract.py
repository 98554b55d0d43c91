"""The contract that every engine, solver and pullback meets, and the names of them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Ridge, relative

import bilevel_plugin as bilevel
from bilevel_plugin import engine as engines
from bilevel_plugin.engine.implicit import CG, Neumann
from bilevel_plugin.pullback import PULLBACKS
from bilevel_plugin.update.solvers import SOLVERS

# The model's own parameters are the leaves, or the weights are tensors of their own.
OWN: dict[str, Any] = {"reverse": "reverse", "sqrt": bilevel.Reverse("sqrt"), "forward": "forward"}
SWAPPED: dict[str, Any] = {"memory": bilevel.Reverse(memory="1GiB"), "unroll": "unroll"}
ENGINES = {**OWN, **SWAPPED}  # exact after any number of steps: the fixture `engine` has one after the other
# memory= of a loop that fits: Linux tells how much is free, and elsewhere "auto" is refused
ROOM = "auto" if Path("/proc/meminfo").exists() else "1GiB"
IMPLICIT = {"cg": "cg", "neumann": "neumann"}  # at a fixed point
PLANS = {  # which states are kept, in loops of few steps
    **ENGINES,
    "every third": bilevel.Reverse(3),
    "little memory": bilevel.Reverse(memory="24kB"),
    "truncate": bilevel.Reverse(truncate=4),  # as many as there are steps: exact
}
every_plan = pytest.mark.parametrize("engine", PLANS.values(), ids=PLANS)
EVERY_PULLBACK = (*PULLBACKS, "compiled")


def with_fixed_point(solver: str) -> Any:
    """The solver of that name, but with weights that stay from step to step."""
    made = SOLVERS[solver](0.3)
    return type(made)(**{**vars(made), "alpha": bilevel.constant(0.6)}) if hasattr(made, "alpha") else made


def differentiates(solver: str, engine: str) -> None:
    """As unroll does: after as many steps as it takes to settle, or before that if the engine does not need it."""
    ridge = Ridge.random()
    implicit = issubclass(engines.ENGINES[engine], CG | Neumann)
    results = []
    for how in (engine, "unroll"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=with_fixed_point(solver), engine=how) as loop:
            loop.run(400 if implicit else 5)
            results.append(loop.hypergrad(ridge.lam))
            ridge.lam.grad = None
            loop.backward()
            torch.testing.assert_close(ridge.lam.grad, results[-1])
    assert relative(*results) < (1e-5 if implicit else 1e-12)


def takes_the_same_steps(engine: str) -> None:
    ridge = Ridge.random()
    weights = []
    for how in (engine, "unroll"):
        solver = bilevel.BiGSAM(0.2, alpha=0.5)
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=solver, engine=how) as loop:
            loop.run(7)
            weights.append(loop.weights["w"].detach())
    assert torch.equal(*weights)


def passes_gradients_to_tensors_of_the_batch(engine: str) -> None:
    ridge = Ridge.random()
    raw = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    h = lambda m, scale: ridge.h(m) * scale + m.w.sum() * scale**2
    grads = []
    for how in (engine, "unroll"):
        raw.grad = None
        scale = raw.exp()
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.2, engine=how) as loop:
            loop.run(400, scale)
            grads.append(loop.hypergrad(raw, retain_graph=True))
            loop.backward()
            torch.testing.assert_close(raw.grad, grads[-1])
    assert relative(*grads) < 1e-5
