"""cg and neumann: a loop that has not reached its fixed point is refused by both."""

import pytest
import torch
from promise import refuses, squares
from torch import nn

import bilevel_plugin as bilevel

NAMES = "fixed point|settled|not reached|converged|residual"


def far(engine, lr, steps, momentum=None):
    """A least-squares problem whose gradient is still large after these steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    lam = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def h(m, x, y):
        return squares(m, x, y).mean() + 0.1 * lam.exp() * sum(p.square().sum() for p in m.parameters())

    def g(m, x, y):
        return squares(m, x, y).mean()

    with bilevel.inner(model, h, g, solver="gd", lr=lr, engine=engine, check=False) as loop:
        for _ in range(steps):
            loop.step(x, y, outer=(x + 0.5, y))
        grads = torch.autograd.grad(h(model, x, y), list(model.parameters()))
        assert float(torch.cat([d.flatten() for d in grads]).norm()) > 0.1, "the problem is not far from its end"
        loop.hypergrad(lam, outer=(x + 0.5, y))


@pytest.mark.parametrize("engine", ["cg", "neumann"])
@pytest.mark.parametrize(("lr", "steps"), [(1e-1, 1), (1e-2, 5), (1e-3, 5), (1e-4, 5), (1e-6, 5), (1e-9, 1)])
def test_a_loop_far_from_its_fixed_point(engine, lr, steps):
    refuses(lambda: far(engine, lr, steps), NAMES)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
def test_no_step_at_all(engine):
    refuses(lambda: far(engine, 1e-3, 0), NAMES + "|step")


@pytest.mark.parametrize("engine", ["cg", "neumann"])
def test_a_rate_that_goes_to_zero(engine):
    """The last steps move nothing, for their rate is nothing; the fixed point is as far as before."""
    refuses(lambda: far(engine, lambda k: 0.1 * 10.0 ** (-4 * k), 4), NAMES + "|rate|curvature")
