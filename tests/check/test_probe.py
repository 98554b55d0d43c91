"""The probe on losses in closed form, and what it leaves as it was."""

import pytest
import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.check.compared import WEIGHTS
from bilevel_plugin.check.differences import NotChecked
from bilevel_plugin.check.probe import Losses, Probe, guarded
from bilevel_plugin.model.model import Model
from bilevel_plugin.step.conditions import Conditions
from bilevel_plugin.step.piece import Term


@pytest.fixture
def probe():
    model = nn.ParameterDict({"a": torch.tensor([0.5, -1.0]), "b": torch.tensor([2.0])})
    bound = Model(model, dict(model.named_parameters()))
    z = {n: p.detach().clone() for n, p in bound.parameters.items()}
    bound.open()
    yield Probe(bound, Conditions(bound), z, {})
    bound.close()


LAM = torch.tensor(0.7, requires_grad=True)


def outer(model):
    return model["a"].square().sum() + LAM * model["b"].sum()


def inner(model):
    return LAM.exp() * (model["a"].prod() * model["b"]).sum().square()


def test_parts_of_the_first_derivative(probe):
    parts = probe.first_derivative(Term("g", outer, ()))
    assert [p.what for p in parts] == [WEIGHTS, "the outer variable of shape ()"]
    assert all(p.difference.verdict == "ok" and p.says_something for p in parts)
    assert torch.equal(probe.cotangent["a"], torch.tensor([1.0, -2.0]))
    assert torch.equal(probe.cotangent["b"], torch.tensor([0.7]))
    assert probe.cotangent["a"].dtype == torch.float32


def test_parts_of_the_second_derivative(probe):
    for _ in range(2):  # with the gradient of the step for u, and with that of g
        parts = probe.second_derivative(Losses([Term("h", inner, (), 2.0)]))
        assert [p.what for p in parts] == [WEIGHTS, "the outer variable of shape ()"]
        assert all(p.difference.verdict == "ok" and p.says_something for p in parts)
        probe.first_derivative(Term("g", outer, ()))


def test_weights_that_nothing_trains_stay(probe):
    """A loss that hides b from autograd is right as long as b rests."""
    hidden = Losses([Term("h", lambda m: m["a"].square().sum() * m["b"].detach().sum(), ())])
    probe.first_derivative(Term("g", outer, ()))
    assert [p.difference.verdict for p in probe.second_derivative(hidden)] == ["ok"]
    assert [p.difference.verdict for p in probe.second_derivative(hidden, {"a"})] == ["ok"]
    assert [p.difference.verdict for p in probe.second_derivative(hidden, {"a", "b"})] == ["WRONG"]


def test_the_gradient_of_a_step_in_closed_form(probe):
    losses = Losses([Term("h", lambda m: m["a"].square().sum() + m["b"].sum(), (), 3.0)], {"a"})
    found = probe.gradient_of(losses)
    assert found.keys() == {"a"}
    assert torch.equal(found["a"], torch.tensor([3.0, -6.0]))


def test_stop_gradient_is_a_constant_in_the_step_and_not_in_its_derivative(probe):
    def td(model):
        return (model["a"] - 0.9 * bilevel.stop_gradient(model["a"]).roll(1)).square().sum()

    assert all(p.difference.verdict == "ok" for p in probe.second_derivative(Losses([Term("h", td, (), 1.0)])))


def test_gradients_by_what_they_are(probe):
    found = probe.gradients(Losses([Term("h", outer, (), 1.0)]))
    assert float(found["its value"]) == pytest.approx(1.25 + 1.4)
    assert float(found["the gradient with respect to the outer variable 0 of shape ()"]) == 2.0
    assert torch.equal(found["the gradient with respect to the weight 'a'"], torch.tensor([1.0, -2.0]).double())


def test_errors_of_losses_are_reasons_and_errors_of_the_library_its_own():
    with pytest.raises(NotChecked, match="in float64 the losses raise ZeroDivisionError: division"), guarded():
        _ = 1 / 0
    with pytest.raises(ValueError, match=r"bilevel.inner: h"), guarded():
        raise ValueError("bilevel.inner: h is wrong")
