"""Several optimizers in one block, and the state that a block leaves in an optimizer."""

import copy

import pytest
import torch
from optimizers import (
    ENGINES,
    OPTIONS,
    SAMPLES,
    STEPS,
    Case,
    Net,
    Problem,
    differences_along,
    distance,
    same_state,
)
from problems import relative

import bilevel_plugin as bilevel

# The optimizer's state after the block


@pytest.mark.parametrize("setting", ["", "stepped before", "no gradient", "groups"])
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("name", OPTIONS)
def test_commit_with_the_optimizer(name, engine, setting):
    """The state is that of the plain loop, so that the optimizer goes on as if it had taken the steps itself."""
    problem = Problem(Case(name, setting=setting))
    with problem.block(engine) as (model, loop, optimizer):
        loop.commit_(optimizer=True)
    plain, theirs = problem.plain()
    same_state(optimizer, theirs)
    for k in range(STEPS, STEPS + 3):
        problem.plain_step(model, optimizer, k)
        problem.plain_step(plain, theirs, k)
    same_state(optimizer, theirs)
    assert distance(model.state_dict(), plain.state_dict()) < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
def test_without_it_the_optimizer_is_what_it_was(name):
    problem = Problem(Case(name, setting="stepped before"))
    before = problem.optimizer(copy.deepcopy(problem.model)).state_dict()
    with problem.block() as (_, loop, optimizer):
        loop.hypergrad(problem.lam)
        loop.commit_()
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(after["state"][i][key]), torch.as_tensor(value)), key


# Several optimizers


def two(model):
    """One for each part of the model; the side layer belongs to none."""
    return [
        torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam([model.last.weight], lr=0.05),
    ]


def plain_of_two(problem, only=None):
    """Whose turn it is in step k is only(k), or that of both; returns the model, which is a copy."""
    model = copy.deepcopy(problem.model)
    optimizers = two(model)
    for k in range(STEPS):
        turn = optimizers if only is None else [optimizers[only(k)]]
        held = [p for o in turn for g in o.param_groups for p in g["params"]]
        for o in turn:
            o.zero_grad()
        problem.h(model, *problem.batch(k)).backward(inputs=held)
        for o in turn:
            o.step()
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_several_optimizers(engine):
    problem = Problem(Case("SGD", setting="no gradient"))
    value = lambda: float(problem.g(plain_of_two(problem)).detach())
    model = copy.deepcopy(problem.model)
    given = {"solver": "gd", "engine": ENGINES[engine], "check": False}
    with bilevel.inner(model, problem.h, problem.g, optimizer=two(model), **given) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k))
        assert distance(model.state_dict(), plain_of_two(problem).state_dict()) < 1e-12
        assert torch.equal(model.side.weight, problem.model.side.weight)
        assert torch.equal(model.last.bias, problem.model.last.bias)
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
    assert relative(along, differences_along(value, problem.lam, problem.directions(SAMPLES))) < 1e-6


def test_the_state_of_several_optimizers_is_committed():
    problem = Problem(Case("SGD"))
    model = copy.deepcopy(problem.model)
    optimizers = two(model)
    with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=optimizers, check=False) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k))
        loop.commit_(optimizer=True)
    assert {int(s["step"]) for s in optimizers[1].state.values()} == {STEPS}
    assert all(s["momentum_buffer"] is not None for s in optimizers[0].state.values())
    with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=optimizers, check=False) as loop:
        for k in range(STEPS, 2 * STEPS):
            loop.step(*problem.batch(k))
        loop.commit_()
    plain = copy.deepcopy(problem.model)
    theirs = two(plain)
    for k in range(2 * STEPS):
        plain.zero_grad()
        problem.h(plain, *problem.batch(k)).backward(inputs=list(plain.parameters()))
        for o in theirs:
            o.step()
    assert distance(model.state_dict(), plain.state_dict()) < 1e-12


def whole(model, optimizers, i):
    return optimizers[i]


def module(model, optimizers, i):
    """The bias of the last layer belongs to no optimizer, and stays what it is."""
    return [model.first, model.last][i]


def parameters(model, optimizers, i):
    return optimizers[i].param_groups[0]["params"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("which", [whole, module, parameters])
def test_steps_of_one_optimizer(which, engine):
    problem = Problem(Case("SGD"))
    turn = lambda k: int(k % 3 == 1)
    value = lambda: float(problem.g(plain_of_two(problem, turn)).detach())
    model = copy.deepcopy(problem.model)
    optimizers = two(model)
    given = {"solver": "gd", "engine": ENGINES[engine], "check": False, "optimizer": optimizers}
    with bilevel.inner(model, problem.h, problem.g, **given) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k), only=which(model, optimizers, turn(k)))
        assert distance(model.state_dict(), plain_of_two(problem, turn).state_dict()) < 1e-12
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
    assert relative(along, differences_along(value, problem.lam, problem.directions(SAMPLES))) < 1e-6


def test_only_what_is_not_in_the_block_is_refused():
    problem = Problem(Case("SGD"))
    stranger = Net().double()
    model = copy.deepcopy(problem.model)
    with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=two(model), check=False) as loop:
        for only in (stranger.first, two(stranger)[0], [stranger.first.weight], model.side):
            with pytest.raises((ValueError, TypeError), match=r"^bilevel\..*only"):
                loop.step(*problem.batch(0), only=only)
        loop.step(*problem.batch(0))


def test_parts_that_overlap_are_refused():
    problem = Problem(Case("SGD"))
    model = problem.model
    pair = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.last.parameters())]
    with pytest.raises(ValueError, match=r"^bilevel\.(.|\n)*last\.weight"):
        with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=pair):
            pass
    one = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^bilevel\."):
        with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=[one, one]):
            pass
    with pytest.raises((ValueError, TypeError), match=r"^bilevel\."):
        with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=[]):
            pass
