"""The solver and the engine of docs/extending.md meet the contract that the built-in ones meet."""

import re
from pathlib import Path

import pytest
import test_engines as contract
from problems import Ridge, relative

import bilevel_plugin as bilevel
from bilevel_plugin.hypergrad import ENGINES
from bilevel_plugin.solvers import SOLVERS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """The page's classes, in the tables under names of their own."""
    found = {"__name__": "extending"}
    for block in BLOCKS:
        exec(block, found)
    monkeypatch.setitem(SOLVERS, "fade out", found["FadeOut"])
    monkeypatch.setitem(ENGINES, "again", found["Again"])
    return found


def test_each_is_under_thirty_lines():
    assert len(BLOCKS) == 2
    assert all(len([line for line in block.splitlines() if line.strip()]) < 30 for block in BLOCKS)


@pytest.mark.parametrize("engine", [*ENGINES, "again"])
def test_the_solver_under_every_engine(engine):
    contract.test_every_engine_differentiates_every_solver("fade out", engine)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_engine_under_every_solver(solver):
    contract.test_every_engine_differentiates_every_solver(solver, "again")


def test_the_engine_takes_the_same_steps():
    contract.test_every_engine_takes_the_same_steps("again")


def test_the_engine_gets_back_to_the_initial_weights():
    ridge = Ridge.random()
    model = ridge.model()
    grads = []
    for how in ("again", "unroll"):
        with bilevel.inner(model, ridge.h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(4)
            grads.append(loop.hypergrad(model)["w"])
    assert relative(*grads) < 1e-12


def test_the_solver_fades_out(names):
    assert names["FadeOut"](0.2, n=4).weights(1) == pytest.approx((0.2, 0.15))
    assert names["FadeOut"](0.2, n=4).weights(9) == (0.2, 0.0)
