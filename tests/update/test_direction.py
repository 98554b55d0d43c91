"""direction= and clip=: functions of the gradient before the update, with outer variables of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import ENGINES, every_plan
from handle import (
    HALVES,
    LR,
    Case,
    Grads,
    adamw,
    agree,
    both,
    clip_norm,
    draw,
    halved,
    momentum,
    two_halves,
    weighted_samples,
)
from plain_loop import RATE, exact, losses, mlp
from problems import refused
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


# --- clip= ---


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
@pytest.mark.parametrize(
    "clip",
    [
        (0.05, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)),
        (1e6, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6)),
        (bilevel.clip_norm(0.05, 1.0), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, 1.0)),
        (bilevel.clip_norm(0.05, math.inf), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, math.inf)),
        (bilevel.clip_value(0.05), lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.05)),
        (lambda d: {n: x.tanh() for n, x in d.items()}, lambda m: [p.grad.tanh_() for p in m.parameters()]),
    ],
    ids=["norm", "norm that is not reached", "1-norm", "largest entry", "values", "function"],
)
def test_clipping(clip, engine):
    momentum = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=0.9, weight_decay=0.1)
    exact(losses(mlp), ENGINES[engine], bits=False, clip=clip, optimizer=momentum)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: bilevel.clip_norm(0.0), ValueError, r"clip_norm: max_norm must be positive, got 0.0"),
        (lambda: bilevel.clip_value(-1.0), ValueError, r"clip_value: value must be positive, got -1.0"),
        (lambda: bilevel.clip_value(math.nan), ValueError, r"clip_value: value must be positive, got nan"),
        (lambda: block_with(clip=True), TypeError, r"clip= takes the largest norm as a number.*got bool"),
        (lambda: block_with(clip="1"), TypeError, r"clip= takes the largest norm as a number.*got str"),
        (lambda: block_with(clip=-1), ValueError, r"max_norm must be positive, got -1"),
        (lambda: block_with(direction=1.0), TypeError, r"direction= takes a function of the direction.*got float"),
    ],
)
def test_what_is_no_clipping_and_no_direction(make, error, words):
    with pytest.raises(error, match=words):
        make()


def block_with(**options: Any) -> None:
    case = weighted_samples(two_halves)
    bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR, **options)


# --- hooks on parameters ---


def test_several_hooks_on_one_parameter(engine):
    """Each is given what the one before returned; one that only looks returns None, and changes nothing."""
    seen = []

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        for hook in (lambda d: (4 * d).tanh(), lambda d: seen.append(d.detach().clone()), lambda d: d - 0.1 * d**3):
            model[1].weight.register_hook(hook)
        return momentum(model)

    case = weighted_samples(two_halves, optimizer=hooked)
    agree(case, engine)
    assert all(float(d.abs().max()) < 1 for d in seen)


# --- direction= ---


def meta_sgd(body: Callable[..., None] = two_halves, **more: Any) -> Case:
    """A learnable rate for each weight, which only direction= knows of."""
    case = weighted_samples(body, **more)
    rates = {n: torch.full_like(p, 0.7).requires_grad_() for n, p in case.model.named_parameters()}
    case.outer |= {f"rate of {n}": r for n, r in rates.items()}
    case.options = {**case.options, "direction": lambda d: {n: rates[n] * x for n, x in d.items()}}
    return case


@every_plan
@pytest.mark.parametrize("optimizer", [None, momentum, adamw], ids=["lr", "momentum", "adamw"])
def test_outer_variables_of_the_direction(engine, optimizer):
    agree(meta_sgd(optimizer=optimizer), engine)


def test_outer_variables_of_the_direction_with_clipping_and_parts(engine):
    def body(loop: Any, model: Any, made: Any) -> None:
        two_halves(loop, steps=1)
        for part in model:
            loop.step(draw(HALVES[0]), HALVES[0], only=part)

    case = meta_sgd(body, optimizer=both, **clip_norm(0.1))
    agree(case, engine)


def test_a_network_in_the_direction(engine):
    """A learned optimizer: what closes over may be a module's parameters, and mix the weights."""
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

    def learned(d: Grads) -> Grads:
        scale = torch.stack([x.square().mean() for x in d.values()]).sum().add(1e-3).rsqrt()
        return {n: net(scale * x.reshape(-1, 1)).view_as(x) for n, x in d.items()}

    case = weighted_samples(two_halves, options={"direction": learned})
    case.outer |= dict(net.named_parameters())
    agree(case, engine)


@pytest.mark.parametrize("solver", ["gd", "bigsam"])
def test_the_threshold_of_clipping_is_an_outer_variable(engine, solver):
    most = torch.tensor(0.1, requires_grad=True)
    case = weighted_samples(two_halves, optimizer=momentum, options={"clip": bilevel.clip_norm(most), "solver": solver})
    case.by_hand = {"clip": lambda w: nn.utils.clip_grad_norm_(w, float(most.detach()))}
    case.outer["most"] = most
    agree(case, engine)


WRONG_DIRECTIONS: dict[str, Callable[[Grads], Any]] = {
    "one is missing": lambda d: dict(list(d.items())[1:]),
    "one too many": lambda d: {**d, "another": torch.zeros(())},
    "another name": lambda d: {f"model.{n}": x for n, x in d.items()},
    "another shape": lambda d: {n: x.sum() for n, x in d.items()},
    "transposed": lambda d: {n: x.t() if x.dim() == 2 else x for n, x in d.items()},
    "numbers": lambda d: dict.fromkeys(d, 0.0),
    "nothing": lambda d: None,
    "a list": lambda d: list(d.values()),
    "a tensor": lambda d: torch.cat([x.flatten() for x in d.values()]),
}


@pytest.mark.parametrize("option", ["direction", "clip"])
@pytest.mark.parametrize("wrong", WRONG_DIRECTIONS.values(), ids=WRONG_DIRECTIONS)
def test_wrong_directions(wrong, option):
    case = weighted_samples(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR, **{option: wrong}) as loop:
        with refused(f"{option}="):
            loop.step(draw(HALVES[0]), HALVES[0])


def test_a_direction_that_is_written_in_place(engine):
    """p.grad.mul_(0.5) is what plain loops have."""
    agree(weighted_samples(two_halves, optimizer=momentum, options={"direction": halved}), engine)
