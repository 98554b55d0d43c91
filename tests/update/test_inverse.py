"""The inverses of optimizers: from the state after a step, the weight and the state before it, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bilevel_plugin.update.formulas import adam, nadam, radam, rmsprop, sgd
from bilevel_plugin.update.inverse import INVERSES, numbers

OF_ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
OF_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": False, "maximize": True}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (sgd, OF_SGD),
    (adam, {**OF_ADAM, "amsgrad": False}),
    (adam, {**OF_ADAM, "amsgrad": True, "decoupled_weight_decay": True}),
    (nadam, {**OF_ADAM, "momentum_decay": 4e-3, "decoupled_weight_decay": True}),
    (radam, {**OF_ADAM, "decoupled_weight_decay": False}),
    (rmsprop, {**OF_SGD, "alpha": 0.9, "eps": 1e-8, "centered": True}),
]


@pytest.mark.parametrize(("formula", "options"), CASES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("count", [3, 9])  # RAdam takes other steps at first
def test_the_inverse_undoes_the_rule(formula: Any, options: dict[str, Any], count: int) -> None:
    torch.manual_seed(0)
    draw = lambda: torch.randn(50, dtype=torch.float64)
    w, state = draw(), {}
    for k in range(1, count + 1):
        before, d = (w, state), draw()
        w, state = formula(w, d, state, count=k, **options)
    inverse, options = INVERSES[formula], {**numbers(options), "count": count}
    assert not inverse.lacks(options)
    tolerance = {"rtol": 1e-12, "atol": 1e-14}
    if formula is not nadam:  # which uses d for the weight
        torch.testing.assert_close(inverse.weight(w, state, options), before[0], **tolerance)
    found = inverse.state(state, before[0], d, options)
    before[1].pop("mu_product", None)  # a number for each weight, which is stored as it is
    for key, x in before[1].items():
        if key == "max_exp_avg_sq":  # what the maximum was before is lost
            assert torch.equal(found[key], state[key])
        else:
            torch.testing.assert_close(found[key], x, **tolerance)


def test_without_momentum_there_is_none() -> None:
    assert "without momentum" in INVERSES[sgd].lacks({"momentum": 0})


def test_options_are_numbers_without_graphs() -> None:
    lr = torch.tensor(0.5, requires_grad=True)
    assert numbers({"lr": lr, "betas": (lr, 0.9)}) == {"lr": 0.5, "betas": (0.5, 0.9)}
