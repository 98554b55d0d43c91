"""The same numbers as `higher` on what it can do: plain SGD, momentum and Adam inner loops."""

import warnings

import pytest
import torch
from problems import relative, weighted
from torch import nn

import bilevel_plugin as bilevel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports are of 2021
    import higher


@pytest.mark.filterwarnings("ignore")  # higher itself warns of torch's newer ways
@pytest.mark.parametrize(
    "engine", ["reverse", bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB")], ids=["reverse", "sqrt", "planned"]
)
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov", "adam"])
def test_higher(rule, engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    xv, yv = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    lam = torch.randn(8, dtype=torch.float64, requires_grad=True)
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.3),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        # higher has the rule of an older torch, which adds ε before the bias correction of √v: the same where ε = 0
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.05, eps=0.0),
    }[rule]()

    h, g = weighted(lam)
    with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fast, differentiable):
        for _ in range(7):
            differentiable.step(h(fast, x, y))
        theirs = torch.autograd.grad(g(fast, xv, yv), [lam, *model.parameters()])
    with bilevel.inner(model, h, g, solver="gd", optimizer=optimizer, engine=engine) as loop:
        loop.run(7, x, y, outer=(xv, yv))
        ours = loop.hypergrad([lam, *model.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) <= 1e-10
