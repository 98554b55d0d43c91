"""Optimizers that are wrapped, hooked, stepped or changed while a block is open."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from handle import HALVES, adamw, both, draw, momentum, two_halves, weighted_samples
from plain_loop import (
    RATE,
    assert_same,
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

    noticed = ("and would move the weights",) if how == "its own" else ("was changed by hand after step k = 1",)
    with refused(*noticed, r"optimizer\.step"):
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


# --- optimizer.step() and optimizer.state_dict() in the block ---


def test_gradients_from_before_the_block_do_not_move_weights_in_it():
    """optimizer.step() is refused before it moves anything, and the advice works."""
    model = nn.Linear(3, 2)
    loss = lambda m: m(torch.ones(3)).square().sum()
    loss(model).backward()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with bilevel.inner(model, loss, solver="gd", optimizer=optimizer) as loop:
        loop.step()
        held = tensors(model)
        with refused("would move the weights", "optimizer.zero_grad()"):
            optimizer.step()
        assert_same(tensors(model), held)
        optimizer.zero_grad()
        optimizer.step()
        loop.step()


def test_steps_of_the_optimizer_without_steps_of_the_loop():
    """As where loop.accumulate took the place of .backward(), and optimizer.step() was left as it was."""
    model = nn.Linear(3, 2)
    loss = lambda m: m(torch.ones(3)).square().sum()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with bilevel.inner(model, loss, solver="gd", optimizer=optimizer) as loop:
        for _ in range(3):  # as a trainer calls it
            loop.step()
            optimizer.step()
        loop.accumulate()
        with pytest.warns(UserWarning, match=r"optimizer.step\(\).*moves nothing.*loop.step is what trains"):
            optimizer.step()
        optimizer.step()  # once is enough
    optimizer.step()


def test_one_optimizer_in_two_open_blocks():
    """The hooks of a block, which may be abandoned, are none of the user's."""
    model = nn.Linear(3, 2)
    loss = lambda m: m(torch.ones(3)).square().sum()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
    outer = bilevel.inner(model, loss, solver="gd", optimizer=optimizer)
    with outer as first:
        first.step()
        with bilevel.inner(model, loss, solver="gd", optimizer=optimizer) as second:
            second.step()
            second.step()
        first.step()
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (2, 3)
    assert not optimizer.state_dict()["state"]
    assert not optimizer._optimizer_step_pre_hooks


def test_a_step_that_was_replaced_on_the_object():
    """By name; under a scheduler, which replaces it too, as well."""
    loss = lambda m: m.weight.square().sum()

    def made(scheduled, replaced):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        if replaced == "before":
            bound(optimizer)
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if replaced == "after":
            wrapped(optimizer)
        return bilevel.inner(model, loss, solver="gd", optimizer=optimizer), optimizer

    def mine(self, closure=None):
        return type(self).step(self, closure)

    def bound(optimizer):
        optimizer.step = types.MethodType(mine, optimizer)

    def wrapped(optimizer):
        inner = optimizer.step
        optimizer.step = functools.wraps(inner)(lambda *args: inner(*args))

    for scheduled in (False, True):
        made(scheduled, "")
        for replaced in ("before", "after"):
            with refused("was replaced on the object", "del optimizer.step", "direction="):
                made(scheduled, replaced)
    block, optimizer = made(True, "")
    with block as loop:
        loop.step()
        wrapped(optimizer)
        with refused("was replaced on the object"):
            loop.step()


CHECKPOINTED = {"momentum": momentum, "adamw": adamw, "two": both}


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_in_the_block_has_the_state_of_the_block(name, engine):
    """A plain loop that goes on from it ends where one without a block does."""
    case = weighted_samples(two_halves, optimizer=CHECKPOINTED[name])
    i = HALVES[0]

    def plainly(model, optimizers, steps):
        for _ in range(steps):
            for o in optimizers:
                o.zero_grad()
            case.h(model, x, i).backward(inputs=list(model.parameters()))
            for o in optimizers:
                o.step()

    def listed(made):
        return made if isinstance(made, list) else [made]

    torch.manual_seed(0)
    x = draw(i)
    for m in case.model.modules():
        m.p = 0.0 if isinstance(m, nn.Dropout) else None
    model = copy.deepcopy(case.model)
    optimizers = listed(case.optimizer(model))
    with bilevel.inner(model, case.h, solver="gd", optimizer=optimizers, engine=engine) as loop:
        before = [copy.deepcopy(o.state_dict()) for o in optimizers]
        for _ in range(3):
            loop.step(x, i)
        saved = copy.deepcopy((loop.state_dict(), [o.state_dict() for o in optimizers]))
        loop.step(x, i)
    assert str([o.state_dict() for o in optimizers]) == str(before)  # the optimizers themselves were not touched
    resumed = copy.deepcopy(case.model)
    resumed.load_state_dict(saved[0])
    theirs = listed(case.optimizer(resumed))
    for o, state in zip(theirs, saved[1], strict=True):
        o.load_state_dict(state)
    plainly(resumed, theirs, 3)
    straight = copy.deepcopy(case.model)
    plainly(straight, listed(case.optimizer(straight)), 6)
    assert_same(tensors(resumed), tensors(straight), bits=False)


def test_the_state_of_tasks_is_that_of_no_optimizer():
    model = nn.Linear(3, 1)
    h = lambda m, x: m(x).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
    with bilevel.inner(model, h, solver="gd", optimizer=optimizer, tasks=2) as loop:
        loop.step(torch.randn(2, 4, 3))
        with refused("the state of the optimizer is that of 2 tasks"):
            optimizer.state_dict()
    assert not optimizer.state_dict()["state"]
