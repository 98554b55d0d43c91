"""Updates with functions of the user: right ones, and what `.item()` and `.detach()` hide in them."""

import pytest
import torch

from bilevel_plugin.check.updates import compare_update
from bilevel_plugin.update.direction import of_direction
from bilevel_plugin.update.prepared import Call, Prepared
from bilevel_plugin.update.update import Descent

Z = {"w": torch.tensor([1.0, -2.0, 0.5]), "w@step": torch.tensor(3), "b": torch.tensor(0.0)}
D = {"w": torch.tensor([0.3, 0.0, -1.0]), "b": torch.tensor(0.2)}
SCALE = torch.tensor(0.5, requires_grad=True)


def update(function):
    call = Call(of_direction(function, "direction="), lambda f, x: f(x), 3, checks=False)
    return Prepared([call], Descent(0.1))


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda d: d, []),
        (lambda d: {n: x / (1 + x.square().sum()) for n, x in d.items()}, []),
        (lambda d: {n: SCALE * x for n, x in d.items()}, []),
        (lambda d: {n: x.sign() for n, x in d.items()}, []),
        (lambda d: {n: x / (1 + x.norm().item()) for n, x in d.items()}, ["the direction"]),
        (lambda d: {n: x * x.detach() for n, x in d.items()}, ["the direction"]),
        (lambda d: {n: SCALE.detach() * SCALE * x for n, x in d.items()}, ["the outer variable of shape ()"]),
    ],
)
def test_what_is_wrong_is_named(function, wrong):
    found = compare_update(update(function), Z, D)
    assert [x.what for x in found if x.difference.verdict == "WRONG"] == wrong
    assert any(x.says_something for x in found)


def test_a_rule_that_hides_the_weights():
    class Rule(Descent):
        def __call__(self, z, d):
            return {**z, "w": z["w"] - d["w"] * z["w"].detach().norm()}

    assert [x.difference.verdict for x in compare_update(Rule(), Z, D)] == ["WRONG", "ok"]
