"""The solver, the engine and the update of docs/extending.md meet the contract that the built-in ones meet."""

import re
from pathlib import Path

import contract
import pytest
import torch
from problems import Ridge, differences, relative, weighted
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.engine import ENGINES
from bilevel_plugin.update.solvers import SOLVERS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """What the page defines; its classes are in the tables under names of their own."""
    found = {}
    for block in BLOCKS:
        alone = {"__name__": "extending"}  # every block runs by itself
        exec(block, alone)
        found |= alone
    monkeypatch.setitem(SOLVERS, "fade out", found["FadeOut"])
    monkeypatch.setitem(ENGINES, "rerun", found["Rerun"])
    return found


def test_each_is_under_thirty_lines():
    assert len(BLOCKS) == 4
    assert all(len([line for line in block.splitlines() if line.strip()]) < 30 for block in BLOCKS)


def test_names_from_the_top_are_enough():
    imports = re.findall(r"^ *(?:import|from) +([\w.]+)", "\n".join(BLOCKS), re.MULTILINE)
    assert set(imports) == {"bilevel_plugin", "dataclasses", "torch"}
    used = set(re.findall(r"\bbilevel\.(\w+)", "\n".join(BLOCKS)))
    assert {"StepRule", "Engine", "Tape", "Gradients"} <= used <= set(bilevel.__all__)


@pytest.mark.parametrize("engine", [*ENGINES, "rerun"])
def test_the_solver_under_every_engine(engine):
    contract.differentiates("fade out", engine)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_engine_under_every_solver(solver):
    contract.differentiates(solver, "rerun")


def test_the_engine_takes_the_same_steps():
    contract.takes_the_same_steps("rerun")


def test_the_engine_passes_gradients_to_tensors_of_the_batch():
    contract.passes_gradients_to_tensors_of_the_batch("rerun")


def test_the_engine_gets_back_to_the_initial_weights():
    ridge = Ridge.random()
    model = ridge.model()
    grads = []
    for how in ("rerun", "unroll"):
        with bilevel.inner(model, ridge.h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(4)
            grads.append(loop.hypergrad(model)["w"])
    assert relative(*grads) < 1e-12


def test_the_engine_refuses_what_it_does_not_have():
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, lr=0.2, engine="rerun") as loop:
        loop.run(2)
        with pytest.raises(ValueError, match="create_graph=True"):
            loop.hypergrad(ridge.lam, create_graph=True)


def test_the_solver_fades_out(names):
    assert names["FadeOut"](0.2, n=4).weights(1) == pytest.approx((0.2, 0.15))
    assert names["FadeOut"](0.2, n=4).weights(9) == (0.2, 0.0)


@pytest.mark.parametrize("optimizer", [None, "SGD", "Adam"])
def test_the_engine_under_every_optimizer(optimizer):
    """With momentum, second moments and running statistics in the state, and random numbers in the steps."""
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)
    model, lam = nn.Sequential(*layers).double(), torch.zeros(8, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    h, g = weighted(lam)
    grads = []
    for how in ("rerun", "unroll"):
        torch.manual_seed(1)
        options = {"SGD": {"momentum": 0.9}, "Adam": {}}
        update = {"lr": 0.2}
        if optimizer:
            update = {"optimizer": getattr(torch.optim, optimizer)(model.parameters(), 0.05, **options[optimizer])}
        with bilevel.inner(model, h, g, engine=how, **update) as loop:
            loop.run(4, x, y, outer=(x, y))
            grads.append(loop.hypergrad(lam))
    assert relative(*grads) < 1e-10


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", "rerun", bilevel.Reverse(memory="1MiB")])
def test_the_update_under_every_engine(engine, names):
    """Against central differences of the plain loop, with an optimizer that has momentum."""
    ridge, most = Ridge.random(), 1.0
    clip = names["clip_each"](most)

    def plain():
        model = ridge.model()
        optimizer, norms = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5), []
        for _ in range(8):
            grad = torch.autograd.grad(ridge.h(model), model.w)[0]
            norms.append(float(grad.norm()))
            model.w.grad = grad * min(1.0, most / (norms[-1] + 1e-6))
            optimizer.step()
        assert min(norms) < most < max(norms)  # some steps are clipped, some are not
        return float(ridge.g(model).detach())

    model = ridge.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.5)
    with bilevel.inner(
        model, ridge.h, ridge.g, solver="gd", optimizer=optimizer, direction=clip, engine=engine
    ) as loop:
        loop.run(8)
        assert float(loop.value) == pytest.approx(plain(), rel=1e-12)
        grad = float(loop.hypergrad(ridge.lam))
    assert grad == pytest.approx(differences(plain, ridge.lam, torch.ones_like(ridge.lam)), rel=1e-8)


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", "rerun", bilevel.Reverse(checkpoint=3)])
def test_the_optimizer_under_every_engine(engine, names):
    """Against central differences of its own steps, written out."""
    ridge, (lr, decay) = Ridge.random(), (0.05, 0.1)

    def plain():
        model = ridge.model()
        w, v = model.w.detach().clone(), torch.zeros_like(model.w)
        for _ in range(6):
            model.w.data = w
            d = torch.autograd.grad(ridge.h(model), model.w)[0]
            v = 0.9 * v + d
            w = (1 - lr * decay) * w - lr * v
        model.w.data = w
        return float(ridge.g(model).detach())

    model = ridge.model()
    optimizer = names["SGDW"](model.parameters(), lr=lr, weight_decay=decay)
    with bilevel.inner(model, ridge.h, ridge.g, solver="gd", optimizer=optimizer, engine=engine) as loop:
        loop.run(6)
        assert float(loop.value) == pytest.approx(plain(), rel=1e-12)
        grad = float(loop.hypergrad(ridge.lam))
    assert grad == pytest.approx(differences(plain, ridge.lam, torch.ones_like(ridge.lam)), rel=1e-6)
