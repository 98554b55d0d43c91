"""Losses that take derivatives themselves: gradient penalties, physics-informed losses. Nothing is wrong with them."""

import pytest
import torch
from promise import Loop, constructs, each, indexed, is_right, mlp, opened, rows, squares, start, weighted

import bilevel_plugin as bilevel

ALL = "reverse sqrt memory blocks unroll forward"


def slope(m, x):
    """dm/dx at points that are made a leaf inside of the loss."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]


def slope_of_given(m, x):
    """The same of the user's own points, which are asked to require grad inside of the loss."""
    x.requires_grad_()
    return torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]


def slope_detached(m, x):
    x = x.detach().requires_grad_(True)
    return torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]


def slope_of_new(m, x):
    """Points that are drawn in the loss, as WGAN-GP has it."""
    u = torch.rand(len(x), 1, dtype=x.dtype)
    between = (u * x + (1 - u) * x.flip(0)).requires_grad_()
    return torch.autograd.grad(m(between).sum(), between, create_graph=True)[0]


def slope_of_parameter(m, x):
    x = torch.nn.Parameter(x.clone())
    return torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]


def curvature(m, x):
    x = x.clone().requires_grad_()
    d = torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]
    return torch.autograd.grad(d.sum(), x, create_graph=True)[0]


def penalised(of, in_g=False):
    """λ weighs samples; the penalty is on ‖∇_x m‖. With `in_g` the outer loss takes derivatives as well."""

    def build(lam):
        def h(m, x, y, i):
            return weighted(lam)(m, x, y, i) + 0.1 * (of(m, x).norm(dim=1) - 1).square().mean()

        def g(m, x, y):
            loss = squares(m, x, y).mean()
            return loss + 0.1 * of(m, x).square().mean() if in_g else loss

        return Loop(mlp(), h, g, indexed(), rows(5))

    return build


def equation(points):
    """A physics-informed loss: u' + σ(λ)·u = 0 at points that are made a leaf once (`points`), or in each loss."""

    def build(lam):
        m, grid = mlp(), torch.linspace(0, 1, 18, dtype=torch.float64).view(6, 3)
        if points:
            grid.requires_grad_()

        def h(m, i):
            x = grid if points else grid.clone().requires_grad_()
            u = m(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0][:, :1]
            return (du + torch.sigmoid(lam[i])[:, None] * u).square().mean() + (m(grid[:1]) - 1).square().mean()

        def g(m, x, y):
            return squares(m, x, y).mean()

        loop = Loop(m, h, g, (torch.arange(6),), rows(5))
        loop.points = grid
        return loop

    return build


def by_func(m, x):
    """The same by torch.func."""
    return torch.func.vmap(torch.func.grad(lambda one: m(one).sum()))(x)


def by_jvp(m, x):
    """Directional derivatives by forward mode."""
    return torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]


def by_autograd_functional(m, x):
    return torch.autograd.functional.jvp(m, x, torch.ones_like(x), create_graph=True)[1]


PENALTIES = {
    "a leaf made in h": penalised(slope),
    "detached and made a leaf in h": penalised(slope_detached),
    "the user's points made a leaf in h": penalised(slope_of_given),
    "drawn in h": penalised(slope_of_new),
    "a parameter made in h": penalised(slope_of_parameter),
    "second derivatives in h": penalised(curvature),
    "a leaf made in h and in g": penalised(slope, in_g=True),
    "torch.func in h": penalised(by_func),
    "jvp in h": penalised(by_jvp),
    "autograd.functional in h": penalised(by_autograd_functional),
    "an equation, a leaf made in h": equation(False),
    "an equation, a leaf made before": equation(True),
}


@constructs(PENALTIES, ALL)
def test_a_loss_that_takes_derivatives_is_right(construct, variant):
    is_right(construct, variant)


@each(ALL)
@pytest.mark.parametrize("name", ["a leaf made in h", "drawn in h", "an equation, a leaf made in h"])
def test_backward_gives_gradients_to_the_outer_variable_alone(variant, name):
    def use(block, loop, lam):
        block.backward()
        return lam.grad, [x.grad for x in (*loop.batch, *loop.outer)]

    lam_grad, of_batch = opened(PENALTIES[name], variant, use)
    assert lam_grad is not None
    assert of_batch == [None] * len(of_batch)


@each(ALL)
def test_points_that_a_loss_asks_to_require_grad_get_no_gradient(variant):
    """h calls requires_grad_() on the user's own tensor, for its own derivative; nobody asked for an outer variable."""

    def build(lam):
        m, grid = mlp(), torch.linspace(0, 1, 18, dtype=torch.float64).view(6, 3)

        def h(m, i):
            return (torch.sigmoid(lam[i])[:, None] * slope_of_given(m, grid)).square().mean()

        loop = Loop(m, h, lambda m, x, y: squares(m, x, y).mean(), (torch.arange(6),), rows(5))
        loop.points = grid
        return loop

    def use(block, loop, lam):
        block.backward()
        return lam.grad, loop.points.grad

    lam_grad, of_points = opened(build, variant, use)
    assert lam_grad is not None
    assert of_points is None


@each(ALL)
def test_forward_has_as_many_directions_as_there_are_outer_variables(variant):
    """A batch of many points, each made a leaf in h, is not 300 outer variables."""

    def build(lam):
        x, y = rows(300)

        def h(m, x, y):
            return torch.sigmoid(lam).mean() * squares(m, x, y).mean() + 0.1 * slope(m, x).square().mean()

        return Loop(mlp(), h, lambda m, x, y: squares(m, x, y).mean(), (x, y), rows(5))

    is_right(build, variant)


@each(ALL)
@pytest.mark.parametrize("ask", ["value", "hypergrad"])
def test_a_g_that_takes_a_derivative(variant, ask):
    build = penalised(slope, in_g=True)
    if ask == "value":
        assert float(opened(build, variant, lambda block, loop, lam: block.value)) > 0
    else:
        assert float(opened(build, variant, lambda block, loop, lam: block.hypergrad(lam)).norm()) > 0


@each(ALL)
def test_a_g_that_takes_a_derivative_under_no_grad(variant):
    """The user's own code around the block is in no_grad, as evaluation loops are."""

    def use(block, loop, lam):
        with torch.no_grad():
            return block.value, block.hypergrad(lam)

    value, grad = opened(penalised(slope, in_g=True), variant, use)
    assert float(value) > 0
    assert float(grad.norm()) > 0


def test_gradcheck_of_a_g_that_takes_a_derivative():
    torch.manual_seed(0)
    lam = start().requires_grad_()
    loop = penalised(slope, in_g=True)(lam)
    try:
        report = bilevel.gradcheck(
            loop.model, loop.h, loop.g, lam, *loop.batch, outer=loop.outer, solver="gd", lr=0.3, check=False
        )
    except RuntimeError as why:
        pytest.fail(f"{type(why).__name__}: {why}")
    assert report, str(report)
