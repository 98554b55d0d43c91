"""cg and neumann: a fixed point that is not there is refused, and a solve that fails says so."""

from __future__ import annotations

import pytest
import torch
from contract import IMPLICIT
from problems import Ridge, Vector, refused, relative

import bilevel_plugin as bilevel


def test_implicit_engines_refuse_what_has_no_fixed_point(parts):
    model, h, g, _, _, _ = parts
    with pytest.raises(ValueError, match=r"CG needs a fixed point of the step, and every=3 alternates"):
        bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5, every=3), engine="cg")
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"Neumann needs a fixed point of the step, and Adam divides by a root"):
        bilevel.inner(model, h, g, optimizer=adam, engine="neumann")
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(
        ValueError, match=r"CG needs a step with a symmetric Jacobian, and with momentum.*'neumann' takes it"
    ):
        bilevel.inner(model, h, g, optimizer=momentum, engine="cg")
    groups = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.2)
    with pytest.raises(ValueError, match=r"with a rate for each group"):
        bilevel.inner(model, h, g, optimizer=groups, engine="cg")


def test_implicit_engines_refuse_a_loop_that_has_not_settled():
    ridge = Ridge.random()
    for engine in ("cg", "neumann"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.2, engine=engine) as loop:
            loop.run(2)
            with pytest.raises(
                RuntimeError, match=r"has not reached it: after (one more|a Newton) step the gradient would change by"
            ):
                loop.hypergrad(ridge.lam)
            loop.run(200)
            assert relative(loop.hypergrad(ridge.lam), ridge.hypergradient()) < 1e-5


def test_implicit_engines_say_when_they_fail():
    line = Ridge.random()
    flat = lambda m: (m.w.sum() - line.lam).square()  # a line of minimisers: no derivative of w(λ)
    with bilevel.inner(line.model(), flat, line.g, solver="gd", lr=0.1, engine="cg") as loop:
        loop.run(100)
        with pytest.raises(RuntimeError, match=r"bilevel.CG: found a direction of curvature"):
            loop.hypergrad(line.lam)
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.1, engine=bilevel.Neumann(3)) as loop:
        loop.run(300)
        with pytest.raises(RuntimeError, match=r"bilevel.Neumann: the relative residual is .* after 3 iterations"):
            loop.hypergrad(ridge.lam)
    bent = lambda m: (m.w.square() * ridge.lam).sum() / 2
    with bilevel.inner(ridge.model(), bent, ridge.g, solver="gd", lr=10.0, engine="neumann") as loop:
        with torch.no_grad():
            ridge.lam.fill_(1.0)
        loop.run(2)  # from 0, where it stays, at a rate that does not contract
        with pytest.raises(RuntimeError, match=r"the Neumann series diverges"):
            loop.hypergrad(ridge.lam)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", IMPLICIT)
@pytest.mark.parametrize("shift", [0.0, 1e4, "to 0"])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_whether_a_loop_has_settled_does_not_depend_on_the_level_of_g(shift, scale, engine):
    ridge = Ridge.random()
    level = -float(ridge.g(Vector(ridge.solution())).detach()) if shift == "to 0" else shift
    g = lambda m: scale * (ridge.g(m) + level)
    with bilevel.inner(ridge.model(), ridge.h, g, solver="gd", lr=0.3, engine=engine, check=False) as loop:
        for steps in (1, 4):
            loop.run(steps)
            with refused("the loop has not reached it", "settled"):
                loop.hypergrad(ridge.lam)
        loop.run(400)
        assert relative(loop.hypergrad(ridge.lam), scale * ridge.hypergradient()) < 1e-5


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", IMPLICIT)
def test_a_loop_that_has_not_settled_where_g_is_flat(engine):
    """g does not change along the way that is left, and its gradient does: the hypergradient is 2.5 times too large."""
    lam = torch.tensor([1.0, 1.0], requires_grad=True)
    h = lambda m: (torch.tensor([1.0, 0.1]) * (m.w - lam).square()).sum() / 2
    model = Vector(torch.tensor([1.0, 3.0]))
    g = lambda m: (m.w[0] - 1) * m.w[1]
    with bilevel.inner(model, h, g, solver="gd", lr=0.5, engine=engine, check=False) as loop:
        loop.run(5)
        with refused("the loop has not reached it", "settled"):
            loop.hypergrad(lam)
        loop.run(500)
        torch.testing.assert_close(loop.hypergrad(lam), torch.tensor([1.0, 0.0]), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("tol", [1e-2, 1e-6])
@pytest.mark.parametrize("kind", [bilevel.CG, bilevel.Neumann])
def test_a_solve_ends_where_its_tolerance_is_reached(kind, tol):
    """v − v·M = a for a symmetric M that contracts: the residual is at most tol·‖a‖, and not much less."""
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    matrix = basis @ torch.diag(torch.linspace(0.1, 0.95, 40, dtype=torch.float64)) @ basis.T
    a = torch.randn(40, dtype=torch.float64)
    v = kind(tol=tol).solve(lambda v: {"w": v["w"] @ matrix}, {"w": a})["w"]
    assert tol / 20 < float((v - v @ matrix - a).norm() / a.norm()) <= tol
