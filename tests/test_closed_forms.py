"""The mathematics of design.md: closed forms, the two schedules, Theorem 2, and the paper's slips not copied."""

import pytest
import torch
from problems import Line, Ridge, Vector, hypergrad, relative

import bilevel_plugin as bilevel

PLANNED = bilevel.Reverse(memory="1GiB")


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", "cg", "neumann", bilevel.Reverse("sqrt"), PLANNED])
def test_ridge_reaches_its_closed_form(engine):
    ridge = Ridge.random()
    got = hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, steps=300, solver="gd", lr=0.5, engine=engine)
    assert relative(got, ridge.hypergradient()) < 1e-5


def test_inner_solution_of_ridge():
    ridge = Ridge.random()
    for solver, c in ((bilevel.GD(0.5), 0.0), (bilevel.Penalty(0.5, c=0.7), 0.7)):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=solver) as loop:
            loop.run(400)
            torch.testing.assert_close(loop.weights["w"].detach(), ridge.solution(c).detach(), atol=1e-8, rtol=0)


def one_step(w, lam, t, s, alpha, k, h, g):
    """The paper's Algorithm 1, written out."""
    w = w.detach().requires_grad_()
    a = alpha(k)
    return (w - t * a * torch.autograd.grad(h(w), w)[0] - s * (1 - a) * torch.autograd.grad(g(w), w)[0]).detach()


@pytest.mark.parametrize("every", [1, 3])
def test_bigsam_takes_the_steps_of_algorithm_1(every):
    ridge, alpha = Ridge.random(), bilevel.power(0.25)
    w = torch.zeros(3, dtype=torch.float64)
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=bilevel.BiGSAM(0.3, 0.2, alpha, every)) as loop:
        for k in range(1, 8):
            used = alpha if k % every == 0 else bilevel.constant(1.0)
            h, g = (lambda w, f=f: f(Vector_at(w)) for f in (ridge.h, ridge.g))
            w = one_step(w, ridge.lam, 0.3, 0.2, used, k, h, g)
            loop.step()
            torch.testing.assert_close(loop.weights["w"].detach(), w, rtol=1e-12, atol=1e-14)


class Vector_at:
    """A model whose weights are a given tensor."""

    def __init__(self, w):
        self.w = w


def test_bda_is_bigsam_with_the_roles_of_alpha_swapped():
    ridge = Ridge.random()
    results = []
    for solver in (
        bilevel.BDA(0.3, 0.2, alpha=bilevel.constant(0.4)),
        bilevel.BiGSAM(0.3, 0.2, alpha=bilevel.constant(0.6)),
    ):
        results.append(hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, steps=5, solver=solver))
    torch.testing.assert_close(*results)


def end(line: Line, solver, steps: int = 4000):
    with bilevel.inner(line.model(), line.h, line.g, solver=solver, engine=bilevel.Reverse(truncate=1)) as loop:
        loop.run(steps)
        return loop.weights["w"].detach(), float(loop.value)


def test_the_schedules_go_to_different_points_of_the_line():
    """Eq. 3 asks for the point of argmin h where g is least. The convergent schedule finds it, the paper's does not."""
    line = Line()
    eq3 = line.projection(line.c)
    convergent, g_convergent = end(line, bilevel.BiGSAM(0.4, 0.9, bilevel.convergent(p=1.0)))
    default, _ = end(line, bilevel.BiGSAM(0.4, 0.4, bilevel.convergent()))
    paper, _ = end(line, bilevel.BiGSAM(0.4, 0.4, bilevel.power(0.25)))
    gd, g_gd = end(line, bilevel.GD(0.4))
    start = line.model().w.detach()
    assert float((convergent - eq3).norm()) < 2e-3
    assert float((default - eq3).norm()) < 2e-2
    torch.testing.assert_close(gd, line.projection(start))  # GD keeps what it started with along the line
    # the paper's schedule follows argmin r·h + g, r = α_k/(1 − α_k) → 0: on its way to c = argmin g, off the line
    alpha = 4000**-0.25
    r = alpha / (1 - alpha)
    torch.testing.assert_close(paper, line.c - r * (line.c.sum() - line.lam.detach()) / (1 + 2 * r), atol=1e-3, rtol=0)
    assert float((paper - line.c).norm()) < 0.25 < 0.8 < float((paper - eq3).norm())
    # Theorem 2 at this λ, and the paper's point is no solution of the inner problem at all
    assert g_convergent <= g_gd
    assert float((paper.sum() - line.lam).detach().square() / 2) > 0.4


def test_the_convergent_schedule_differentiates_equation_3():
    """w(λ) = c + (λ − c₁ − c₂)/2, g = (λ − c₁ − c₂)²/4, so dg/dλ = (λ − c₁ − c₂)/2."""
    line = Line()
    solver = bilevel.BiGSAM(0.4, 0.9, bilevel.convergent(p=1.0))
    got = hypergrad(line.model(), line.h, line.g, line.lam, steps=2000, solver=solver, engine="forward")
    assert float(got) == pytest.approx(float((line.lam.detach() - line.c.sum()) / 2), abs=2e-3)


def test_the_sum_runs_over_all_steps():
    """The paper's reverse loop stops one step early; with one step, its gradient would be 0."""
    w = torch.tensor([2.0], dtype=torch.float64)
    lam = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    # w₁ = w₀ − t·λ, g = w₁²/2: dg/dλ = −t·w₁
    got = hypergrad(
        Vector(w), lambda m: lam * m.w.sum(), lambda m: m.w.square().sum() / 2, lam, steps=1, solver="gd", lr=0.1
    )
    assert float(got) == pytest.approx(-0.1 * (2 - 0.3))


def test_cg_on_a_multiple_of_the_identity():
    """h = w² − λ·w, A = 2I: the case where hypertorch's CG returns 0. w = λ/2, g = w²/2, dg/dλ = λ/4."""
    lam = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    got = hypergrad(
        Vector(torch.zeros(2, dtype=torch.float64)),
        lambda m: (m.w.square() - lam * m.w).sum(),
        lambda m: m.w.square().sum() / 2,
        lam,
        steps=60,
        solver="gd",
        lr=0.4,
        engine="cg",
    )
    torch.testing.assert_close(got, lam.detach() / 4)


def test_one_variable_problem_needs_no_outer_variable():
    """Eq. 1: the same loop without λ, as a solver of the simple bilevel problem."""
    c = torch.tensor([2.0, 0.5], dtype=torch.float64)
    model = Vector(torch.zeros(2, dtype=torch.float64))
    solver = bilevel.BiGSAM(0.3, 0.45, bilevel.convergent(p=1.0))
    with bilevel.inner(
        model, lambda m: (m.w.sum() - 1).square(), lambda m: (m.w - c).square().sum(), solver=solver
    ) as loop:
        loop.run(1000)
        torch.testing.assert_close(loop.weights["w"].detach(), c - 0.75, atol=5e-3, rtol=0)
        with pytest.raises(ValueError, match="no outer variable"):
            loop.backward()


def test_truncation_is_exact_when_it_covers_the_loop_and_biased_otherwise():
    ridge = Ridge.random()
    run = lambda m: hypergrad(ridge.model(), ridge.h, ridge.g, ridge.lam, steps=12, solver="gd", lr=0.5, engine=m)
    exact = run("unroll")
    assert relative(run(bilevel.Reverse(truncate=12)), exact) < 1e-12
    errors = [relative(run(bilevel.Reverse(truncate=m)), exact) for m in (1, 3, 6, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    for checkpoint in (2, 5, "sqrt"):  # truncation and checkpoints together give what truncation alone gives
        for m in (1, 3, 6, 9):
            both = run(bilevel.Reverse(checkpoint=checkpoint, truncate=m))
            assert relative(both, run(bilevel.Reverse(truncate=m))) < 1e-12
