"""Optimizers that are wrapped, hooked, stepped or changed while a block is open."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loop import (
    RATE,
    attempt,
    data,
    exact,
    losses,
    mlp,
    right_or_refused,
    sgd,
    start,
    tensors,
)
from problems import refused, weighted
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


# --- wrapped and stepped optimizers, hooks ---


@pytest.mark.usefixtures("single")
def test_a_wrapped_optimizer_is_to_be_unwrapped():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = nn.Linear(2, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TypeError, match=r"Give the wrapped one: optimizer.optimizer"):
        bilevel.inner(model, lambda m: m.weight.sum(), lambda m: m.weight.sum(), optimizer=wrapped)


def clip_values(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def project(optimizer, *_):
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


@pytest.mark.parametrize("when", ["before", "after", "before, everywhere", "after, everywhere"])
def test_hooks_of_optimizers(when, engine):
    """Clipping before a step, a projection after it."""
    hook = clip_values if when.startswith("before") else project
    handles = []

    def hooked(model):
        optimizer = sgd(model)
        if when == "before":
            optimizer.register_step_pre_hook(hook)
        elif when == "after":
            optimizer.register_step_post_hook(hook)
        return optimizer

    if when == "before, everywhere":
        handles.append(register_optimizer_step_pre_hook(hook))
    elif when == "after, everywhere":
        handles.append(register_optimizer_step_post_hook(hook))
    try:
        assert not right_or_refused(losses(mlp), engine, "hook", optimizer=hooked)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("how", ["its own", "another one"])
def test_optimizer_step_in_the_block(how, engine):
    """It was left where the plain loop had it: two steps in one."""
    lam, batch, outer = start(), data(), data(5)
    h, g = weighted(lam)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    other = torch.optim.SGD(model.parameters(), RATE) if how == "another one" else optimizer

    def between(k):
        h(model, *batch).backward(inputs=list(model.parameters()))
        other.step()

    with refused("was changed by hand after step k = 1", r"optimizer\.step"):
        options = {"optimizer": optimizer, "lr": None, "engine": engine}
        attempt(model, h, g, lam, batch, outer, between=between, but="grad", **options)
    held = tensors(model)
    h(model, *batch).backward()
    optimizer.step()  # after the block it is the user's again
    assert not torch.equal(model[0].weight, held["0.weight"])


def test_optimizer_step_in_the_block_without_gradients(engine):
    """It does nothing, in torch as well."""
    exact(losses(mlp), engine, between=lambda k, m, o: idle(m, o))


def idle(model, optimizer):
    held = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    for p, grad in zip(model.parameters(), held, strict=True):
        p.grad = grad


def test_the_step_of_the_outer_optimizer_in_the_block_is_none_of_our_business():
    """λ moves after each inner step, and the gradient goes back one step."""
    lam, (x, y), outer = start(), data(), data(5)
    adam, model = torch.optim.Adam([lam], 0.1), mlp()
    held = lam.detach().clone()
    engine = bilevel.Reverse(truncate=1)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, engine=engine, check=False) as loop:
        for _ in range(3):
            loop.step(x, y, outer=outer)
            adam.zero_grad()
            loop.backward()
            adam.step()
    assert bool((lam != held).all())


# --- options that change ---


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
def test_an_optimizer_whose_options_change_after_the_steps(engine, lr):
    """A scheduler's last call, between the last step and hypergrad: recorded, or noticed."""
    rate = copy.copy(lr)

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr.clone() if isinstance(lr, Tensor) else lr, momentum=0.5)

    def between(k, m, o):
        if isinstance(lr, Tensor):
            o.param_groups[0]["lr"].mul_(0.5)
        else:
            o.param_groups[0]["lr"] *= 0.5
        o.param_groups[0]["momentum"] = 0.5 - 0.1 * k

    assert right_or_refused(
        losses(lambda: nn.Linear(3, 2, bias=False)), engine, "changed", optimizer=optimizer, between=between
    )
    assert float(rate) == float(lr)


@pytest.mark.parametrize("how", ["load_state_dict", "replaced", "cleared", "zeroed", "one entry"])
def test_a_state_of_an_optimizer_that_changes_in_the_block(how):
    """A plain loop would go on from the new state, and the block has its own."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    loss = lambda m: m.weight.square().sum()
    loss(model).backward()
    optimizer.step()
    held = optimizer.state[model.weight]
    change = {
        "load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "replaced": lambda: setattr(optimizer, "state", copy.copy(optimizer.state)),
        "cleared": optimizer.state.clear,
        "zeroed": lambda: held["momentum_buffer"].zero_(),
        "one entry": lambda: held.update(momentum_buffer=torch.zeros(2, 3)),
    }[how]
    with bilevel.inner(model, loss, loss, solver="gd", optimizer=optimizer) as loop:
        loop.step()
        loop.commit_(optimizer=True)  # which is no change by hand
        loop.step()
        change()
        with refused("the state of the optimizer has changed in the block", r"commit_\(\)"):
            loop.step()


@pytest.mark.parametrize("held", [True, False], ids=["with momentum", "empty"])
def test_a_state_that_is_loaded_anew(held):
    """Before the first step, as accelerate does, it is the same state; after a step it would undo what the step did."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    loss = lambda m: m.weight.square().sum()
    if held:
        loss(model).backward()
        optimizer.step()
    anew = lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with bilevel.inner(model, loss, loss, solver="gd", optimizer=optimizer) as loop:
        anew()
        loop.step()
        anew()
        with refused("the state of the optimizer has changed in the block"):
            loop.step()
    with bilevel.inner(model, loss, loss, solver="gd", optimizer=optimizer) as loop:
        optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 3)
        with refused("the state of the optimizer has changed in the block"):
            loop.step()
