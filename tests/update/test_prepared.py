"""What comes before Υ in one step: the same function whenever the step is run again, and its pullback."""

import pytest
import torch

from bilevel_plugin.update.direction import checked_direction
from bilevel_plugin.update.prepared import Call, Preparation
from bilevel_plugin.update.update import Descent

pytestmark = pytest.mark.usefixtures("double")


def states():
    return {"a": torch.randn(3), "b": torch.randn(2, 2)}, {"a": torch.randn(3), "b": torch.randn(2, 2)}


def mixed(d, w):
    return {"a": d["a"] * w["a"].sin() + d["b"].sum(), "b": d["b"] * w["a"].norm()}


def prepared(**options):
    parameters = dict.fromkeys("ab", torch.zeros(()).requires_grad_())
    made = Preparation(parameters, lambda f, d: f(d), [checked_direction(mixed)], **options)
    return made(Descent(0.3), 3)


def test_the_pullback_is_that_of_autograd():
    """Along a random adjoint, with respect to the weights and to the direction."""
    z, d = ({n: x.requires_grad_() for n, x in s.items()} for s in states())
    a, _ = states()
    new = prepared()(z, d)
    expected = torch.autograd.grad(list(new.values()), [*z.values(), *d.values()], list(a.values()))
    pulled = prepared().pull(z, d, a, [])
    for got, true in zip([*pulled.adjoint.values(), *pulled.cotangent.values()], expected, strict=True):
        torch.testing.assert_close(got, true)
    for n in new:
        torch.testing.assert_close(pulled.to[n], new[n].detach())


def test_noise_is_that_of_the_first_call_and_later_calls_leave_the_generator_alone():
    call = Call(
        checked_direction(lambda d: {n: x * torch.rand_like(x) for n, x in d.items()}), lambda f, d: f(d), 1, True
    )
    d, _ = states()
    torch.manual_seed(3)
    first = call(d, {})
    torch.manual_seed(3)
    for x in d.values():
        torch.rand_like(x)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    again = Call(call.function, lambda f, d: f(d), 1, True)
    assert all(torch.equal(first[n], x) for n, x in again(d, {}).items())
    assert torch.equal(torch.get_rng_state(), drawn)  # the generator moves as in the plain loop
    torch.manual_seed(5)
    held = torch.get_rng_state()
    assert all(torch.equal(first[n], x) for n, x in call(d, {}).items())
    assert torch.equal(torch.get_rng_state(), held)


def test_zeros_for_weights_that_had_a_gradient_before():
    parameters = {n: torch.zeros(3).requires_grad_() for n in "abc"}
    z, d = {n: torch.ones(3) for n in "abc"}, {"a": torch.ones(3)}
    made = Preparation(parameters, lambda f, d: f(d), [], zeros=True)
    assert set(made(Descent(0.5), 1).moves(z, d)) == {"a"}
    made.count(["b"])
    update = made(Descent(0.5), 2)
    assert set(update.moves(z, d)) == {"a", "b"}
    assert update(z, d)["b"].tolist() == [1, 1, 1]
    assert set(update.pull(z, d, z, []).cotangent) == {"a"}
    assert set(made(Descent(0.5), 2, frozenset("a")).moves(z, d)) == {"a"}
