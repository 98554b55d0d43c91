"""What is left of the plain loop in a block, and does nothing there; and what looks like it, and is fine."""

import types
import warnings

import pytest
import torch
from promise import RATE, each, error, indexed, mlp, rows, start, weighted

import bilevel_plugin as bilevel

ALL = "reverse unroll forward"


def leftover(variant, after=lambda model, optimizer, loss: None, before=None, prepare=None, make=torch.optim.SGD):
    """What is said of a block with such code in it: the text of an error of ours, or of the warnings; else ''."""
    torch.manual_seed(0)
    model, lam = mlp(), start().requires_grad_()
    batch = indexed()
    optimizer = make(model.parameters(), RATE)
    if prepare is not None:
        prepare(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with bilevel.inner(model, weighted(lam), error, solver="gd", optimizer=optimizer, engine=variant,
                               check=False) as loop:  # fmt: skip
                for _ in range(3):
                    if before is not None:
                        before(model, optimizer, batch, lam)
                    losses = loop.step(*batch, outer=rows(5))
                    after(model, optimizer, losses)
                loop.hypergrad(lam)
        except Exception as refusal:
            if not str(refusal).startswith("bilevel."):
                pytest.fail(f"a bare {type(refusal).__name__}: {refusal}")
            return str(refusal)
    return " | ".join(str(w.message) for w in caught if str(w.message).startswith("bilevel."))


@each(ALL)
def test_optimizer_step(variant):
    assert "optimizer.step" in leftover(variant, lambda m, o, losses: o.step())


@each(ALL)
def test_optimizer_step_that_has_gradients(variant):
    """Left from before the block: the weights move, and that is noticed by their values."""

    def before(m, o, batch, lam):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        o.step()

    assert leftover(variant, before=before)


@each(ALL)
def test_loss_backward(variant):
    """A loss of the plain loop, whose gradients nobody takes."""

    def before(m, o, batch, lam):
        weighted(lam)(m, *batch).backward()

    assert "backward" in leftover(variant, before=before)


@each(ALL)
def test_a_step_that_was_replaced_on_the_object(variant):
    """A step of the user's own, by assignment: it would never run."""

    def prepare(optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad.sign(), alpha=-group["lr"])

        optimizer.step = types.MethodType(step, optimizer)

    assert "step" in leftover(variant, prepare=prepare)


@each(ALL)
def test_a_step_that_was_wrapped_on_the_object(variant):
    """A projection after the step, by a wrapper on the instance."""

    def prepare(optimizer):
        step = optimizer.step

        def projected(*args, **kwargs):
            out = step(*args, **kwargs)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.clamp_(-0.1, 0.1)
            return out

        optimizer.step = projected

    assert "step" in leftover(variant, prepare=prepare)


@each(ALL)
def test_a_subclass_whose_step_is_another(variant):
    class Projected(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.clamp_(-0.1, 0.1)

    assert "Projected" in leftover(variant, make=Projected)


@each(ALL)
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_on_the_step(variant, kind):
    def prepare(optimizer):
        hook = lambda optimizer, args, kwargs: None
        (optimizer.register_step_pre_hook if kind == "pre" else optimizer.register_step_post_hook)(hook)

    assert "hook" in leftover(variant, prepare=prepare)


FINE = {
    "zero_grad": lambda m, o, losses: o.zero_grad(),
    "zero_grad to zeros": lambda m, o, losses: m.zero_grad(set_to_none=True),
    "a value": lambda m, o, losses: losses.h.item(),
    "the rate": lambda m, o, losses: o.param_groups[0]["lr"],
    "state_dict": lambda m, o, losses: m.state_dict(),
}


@each(ALL)
@pytest.mark.parametrize("code", FINE)
def test_what_does_no_harm_is_let_be(variant, code):
    assert leftover(variant, FINE[code]) == ""


@each(ALL)
def test_a_scheduler_is_let_be(variant):
    """It wraps `optimizer.step` on the object to count its calls."""
    made = []

    def prepare(optimizer):
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own: a scheduler's step before the optimizer's
        assert leftover(variant, lambda m, o, losses: made[0].step(), prepare=prepare) == ""


@each(ALL)
def test_a_copy_of_an_optimizer_with_a_scheduler_moves_no_weights(variant):
    """The wrapper is bound to the first object: a copied `__dict__` would step the user's own weights."""
    import copy

    torch.manual_seed(0)
    model = mlp()
    first = torch.optim.SGD(model.parameters(), RATE)
    torch.optim.lr_scheduler.StepLR(first, 2, 0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def make(parameters, rate):
        optimizer = torch.optim.SGD(parameters, rate)
        optimizer.__dict__["step"] = copy.copy(first.__dict__.get("step", first.step))
        return optimizer

    leftover(variant, make=make)
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n])
