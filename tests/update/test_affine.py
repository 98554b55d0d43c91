"""The derivative of SGD's update by its coefficients is the one that autograd computes from its formula."""

import itertools

import pytest
import torch

from bilevel_plugin.update.optimizer import FormulaStep, Group
from bilevel_plugin.update.registry import RULES
from bilevel_plugin.update.update import Update

VARIANTS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: " ".join(f"{n}={x}" for n, x in o.items()))
@pytest.mark.parametrize("begun", [True, False], ids=["later step", "first step"])
def test_coefficients_give_the_derivative_of_autograd(options, begun):
    torch.manual_seed(0)
    draw = lambda: torch.randn(3, 2, dtype=torch.float64)
    names = ["a", "b", "c"]
    z = {n: draw() for n in names}
    z |= {f"{n}@momentum_buffer": draw() for n in names if begun}
    d = {"a": draw(), "b": draw()}  # the third weight is left alone
    update = FormulaStep([Group(names, {"lr": 0.1, **options}, RULES[torch.optim.SGD])], {}, lambda f: f)
    adjoint = {n: draw() for n in update(z, d) if n != "b"}  # and the loss does not depend on the second weight itself
    mine, autograd = update.pull(z, d, adjoint, []), Update.pull(update, z, d, adjoint, [])
    for a, b in ((mine.adjoint, autograd.adjoint), (mine.cotangent, autograd.cotangent), (mine.to, autograd.to)):
        for n in a.keys() | b.keys():
            zero = torch.zeros(3, 2, dtype=torch.float64)
            torch.testing.assert_close(a.get(n, zero), b.get(n, zero), rtol=1e-15, atol=1e-15)
    assert mine.cotangent
