"""direction= and clip=: functions of the gradient before the update, with outer variables of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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
    judge,
    momentum,
    two_halves,
    weighted_samples,
)
from plain_loop import RATE, data, exact, losses, mlp
from problems import differences, refused
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


# --- functions of the direction and of the weights ---


def by_hand(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """What the plain loop does to each gradient between backward() and step()."""

    def apply(weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p in weights:
                p.grad = change(p).detach()

    return {"direction": None, "clip": apply}


def decayed(strength: torch.Tensor) -> Case:
    """`p.grad += decay * p`."""

    def direction(d: Grads, w: Grads) -> Grads:
        for n in d:
            d[n] += strength.exp() * w[n]
        return d

    case = weighted_samples(two_halves, optimizer=momentum, options={"direction": direction})
    case.by_hand = by_hand(lambda p: p.grad + float(strength.detach().exp()) * p)
    case.outer["strength"] = strength
    return case


@every_plan
def test_weight_decay_in_the_gradient(engine):
    agree(decayed(torch.tensor(-2.0, requires_grad=True)), engine)


def agc(p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Adaptive gradient clipping (Brock et al. 2021), by the norm of the whole weight."""
    return d * (0.05 * p.norm().clamp(min=1e-3) / d.norm().clamp(min=1e-6)).clamp(max=1.0)


@pytest.mark.parametrize("optimizer", [momentum, adamw], ids=["momentum", "adamw"])
def test_adaptive_gradient_clipping(engine, optimizer):
    direction = lambda d, w: {n: agc(w[n], x) for n, x in d.items()}
    case = weighted_samples(two_halves, optimizer=optimizer, options={"direction": direction})
    case.by_hand = by_hand(lambda p: agc(p, p.grad))
    agree(case, engine)


@pytest.mark.parametrize("function", [lambda d, scale=0.5: scaled(d, scale), partial(lambda s, d: scaled(d, s), 0.5)])
def test_an_argument_that_is_given_is_not_taken_for_the_weights(function):
    case = weighted_samples(two_halves, options={"direction": function})
    case.by_hand = {"direction": lambda d: scaled(d, 0.5)}
    agree(case, "reverse")


def scaled(d: Grads, by: float) -> Grads:
    return {n: by * x for n, x in d.items()}


def test_weights_of_tasks_in_the_direction():
    """Each task sees its own weights."""
    lam = torch.tensor(0.3, requires_grad=True)
    model = nn.Linear(3, 1)
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5, 1)
    h = lambda m, x, y: (lam * (m(x) - y).square()).mean()
    direction = lambda d, w: {n: x + 0.3 * w[n] * w[n].norm() for n, x in d.items()}
    options = {"solver": "gd", "lr": LR, "direction": direction}
    with bilevel.inner(model, h, h, tasks=2, **options) as loop:
        loop.run(3, x, y, outer=(x, y))
        together = loop.hypergrad(lam)
    apart = []
    for i in range(2):
        with bilevel.inner(model, h, h, **options) as loop:
            loop.run(3, x[i], y[i], outer=(x[i], y[i]))
            apart.append(loop.hypergrad(lam))
    torch.testing.assert_close(together, sum(apart))


# --- clip= over which weights ---


class Parts(nn.Module):
    """An encoder that the optimizer does not hold, and a head that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).tanh())


def head_alone(m: Parts) -> torch.optim.Optimizer:
    return torch.optim.SGD(m.head.parameters(), RATE, momentum=0.5)


OVER = {
    "model": (lambda m: m, lambda m: m.parameters()),
    "optimizer": (lambda m: head_alone(m), lambda m: m.head.parameters()),
    "one weight": (lambda m: [m.head.weight], lambda m: [m.head.weight]),
    "encoder and bias": (lambda m: [*m.encoder.parameters(), m.head.bias],) * 2,
}


@pytest.mark.parametrize("over", OVER)
def test_clipping_over_some_weights(over, engine):
    """The plain loop clips before it steps; weights that no optimizer holds count, and stay."""
    given, clipped = OVER[over]
    most = 0.03

    lam = torch.linspace(-1, 1, 6).requires_grad_()
    found = []

    def run(block: bool) -> float:
        torch.manual_seed(0)
        model, x, y = Parts(), torch.randn(6, 3), torch.randint(2, (6,))
        h = lambda m, x, y: (lam.exp() * nn.functional.cross_entropy(m(x), y, reduction="none")).mean()
        g = lambda m, x, y: nn.functional.cross_entropy(m(x), y)
        optimizer = head_alone(model)
        if block:
            clip = bilevel.clip_norm(most, over=given(model))
            options = {"solver": "gd", "optimizer": optimizer, "clip": clip, "engine": engine}
            with bilevel.inner(model, h, g, **options) as loop:
                loop.run(4, x, y, outer=(x[:3], y[:3]))
                found.append(loop.hypergrad(lam))
                return float(loop.value)
        for _ in range(4):
            model.zero_grad()
            h(model, x, y).backward(inputs=list(model.parameters()))
            nn.utils.clip_grad_norm_(clipped(model), most)
            optimizer.step()
        return float(g(model, x[:3], y[:3]).detach())

    assert run(True) == pytest.approx(run(False), rel=1e-12)
    v = torch.randn(6)
    assert float(found[0] @ v) == pytest.approx(differences(lambda: run(False), lam, v), rel=1e-6)


def test_a_norm_over_a_part_of_the_model_has_to_be_named():
    model = Parts()
    loss = lambda m: m.head.weight.square().sum()
    for clip in (0.1, bilevel.clip_norm(0.1)):
        with pytest.raises(ValueError, match=r"clip= \(0.1\).*'encoder.weight' and 1 more.*over=model.*over=optimizer"):
            bilevel.inner(model, loss, solver="gd", optimizer=head_alone(model), clip=clip)
    for clip in (bilevel.clip_norm(0.1, over=model), bilevel.clip_norm(0.1, over=model.head), bilevel.clip_value(0.1)):
        bilevel.inner(model, loss, solver="gd", optimizer=head_alone(model), clip=clip)
    model.encoder.requires_grad_(False)  # then there is nothing else to clip
    bilevel.inner(model, loss, solver="gd", optimizer=head_alone(model), clip=0.1)
    with pytest.raises(TypeError, match=r"clip_norm: over= takes"):
        bilevel.clip_norm(0.1, over=["encoder"])
    with pytest.raises(TypeError, match=r"over=.*Give clip_norm\(..., over=...\) as clip="):
        bilevel.clip_norm(0.1, over=model)({"head.weight": model.head.weight})


def test_the_hypergradient_of_what_the_norm_counts():
    """The encoder stays as it is, so its hypergradient is that of the weights at the start."""
    lam, (x, y) = torch.zeros(3, requires_grad=True), data(6)

    def run(block: bool) -> Any:
        torch.manual_seed(0)
        model = Parts()
        model.encoder.weight.data += lam.detach()
        loss = lambda m, x, y: nn.functional.cross_entropy(m(x), y)
        optimizer = head_alone(model)
        if block:
            clip = bilevel.clip_norm(0.03, over=model)
            with bilevel.inner(model, loss, loss, solver="gd", optimizer=optimizer, clip=clip) as loop:
                loop.run(3, x, y, outer=(x[:3], y[:3]))
                return loop.hypergrad(model.encoder)["weight"].sum(0)
        for _ in range(3):
            model.zero_grad()
            loss(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.03)
            optimizer.step()
        return float(loss(model, x[:3], y[:3]).detach())

    v = torch.randn(3)
    assert float(run(True) @ v) == pytest.approx(differences(lambda: run(False), lam, v), rel=1e-6)


# --- weights that a step does not use ---


class Turns(nn.Module):
    """Two parts that take turns: each step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.a(x) * self.b(x) if k == 2 else (self.b if k % 2 else self.a)(x)


TURNS = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.05, eps=0.1),
    "decay": lambda m: torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.3),
}


@pytest.mark.parametrize("before", [False, True], ids=["no gradients", "gradients before the block"])
@pytest.mark.parametrize("unused", ["skip", "zero"])
@pytest.mark.parametrize("optimizer", TURNS)
def test_weights_that_a_step_does_not_use(optimizer, unused, before, engine):
    lam, x = torch.linspace(-1, 1, 6).requires_grad_(), torch.randn(6, 3)
    found = []

    def run(block: bool) -> float:
        torch.manual_seed(0)
        model = Turns()
        h = lambda m, k: (lam.exp() * (m(x, k)[:, 0] - 1).square()).mean()
        g = lambda m: m(x[:3], 2).square().sum() + sum(p.square().sum() for p in m.never.parameters())
        made = TURNS[optimizer](model)
        if before:
            model.a(x).sum().backward()
        if block:
            options = {"solver": "gd", "optimizer": made, "unused": unused, "engine": engine}
            with bilevel.inner(model, h, g, **options) as loop:
                for k in range(5):
                    loop.step(k)
                found.append(loop.hypergrad(lam))
                return float(loop.value)
        for k in range(5):
            made.zero_grad(set_to_none=unused == "skip")
            h(model, k).backward(inputs=list(model.parameters()))
            made.step()
        return float(g(model).detach())

    assert run(True) == pytest.approx(run(False), rel=1e-12)
    v = torch.randn(6)
    assert float(found[0] @ v) == pytest.approx(differences(lambda: run(False), lam, v), rel=1e-6)


def test_zeros_are_for_the_weights_of_the_step():
    """A part that only= leaves alone is left alone: its optimizer is not stepped in the plain loop."""
    model = Turns()
    x, parts = torch.randn(6, 3), [torch.optim.SGD(p.parameters(), 0.1, weight_decay=0.3) for p in (model.a, model.b)]
    h = lambda m, k: m(x, k).square().mean()
    with bilevel.inner(model, h, solver="gd", optimizer=parts, unused="zero") as loop:
        loop.step(2)
        held = loop.state_dict()
        loop.step(0, only=parts[0])
        assert torch.equal(loop.weights["b.weight"], held["b.weight"])
        loop.step(0)
        assert not torch.equal(loop.weights["b.weight"], held["b.weight"])


def test_what_is_no_way_with_unused_weights():
    with pytest.raises(ValueError, match=r"unused= takes 'skip' or 'zero', got 'zeros'"):
        block_with(unused="zeros")


# --- functions whose derivative is not their own, with a state, and with noise ---


class Momentum:
    """A state of its own in direction=."""

    def __init__(self) -> None:
        self.held: Grads = {}

    def __call__(self, d: Grads) -> Grads:
        self.held = {n: 0.9 * self.held.get(n, torch.zeros_like(x)).detach() + x for n, x in d.items()}
        return dict(self.held)


class Counter:
    """A warm-up by a counter of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, d: Grads) -> Grads:
        self.count += 1
        return {n: min(1.0, self.count / 7) * x for n, x in d.items()}


@every_plan
@pytest.mark.parametrize("kind", [Momentum, Counter])
def test_a_state_of_its_own_is_refused(kind, engine):
    case = weighted_samples(two_halves, options={"direction": kind()})
    with refused("direction=", "a state of its own", "optimizer=rule"):
        case.block(engine)


def test_a_momentum_as_the_error_advises(engine):
    """The way round that the error names."""

    def rule(w: Any, d: Any, state: Any, *, lr: Any, count: int) -> Any:
        v = 0.9 * state["v"] + d if state else d
        return w - lr * v, {"v": v}

    case = weighted_samples(two_halves, options={"optimizer": rule, "lr": LR})
    _, got, grad = case.block(engine)
    case.optimizer, case.options = (lambda m: torch.optim.SGD(m.parameters(), LR, momentum=0.9)), {}
    assert got == pytest.approx(case.alone()[1], rel=1e-12)
    judge(case, grad)


def norm_of(d: Grads) -> torch.Tensor:
    return torch.stack([x.norm() for x in d.values()]).norm()


WITHOUT_DERIVATIVE: dict[str, Callable[..., Grads]] = {
    "item": lambda d: {n: x / norm_of(d).item() for n, x in d.items()},
    "float": lambda d: {n: x * float(x.mean()) for n, x in d.items()},
    "detach": lambda d: {n: x / norm_of(d).detach() for n, x in d.items()},
    "no_grad": lambda d: {n: x * torch.no_grad()(norm_of)(d) for n, x in d.items()},
    "the weights": lambda d, w: {n: x + 0.1 * w[n].detach() for n, x in d.items()},
    "straight through": lambda d: {n: x + (x.round(decimals=1) - x).detach() for n, x in d.items()},
    "everything": lambda d: {n: x.detach().clone() for n, x in d.items()},
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
def test_a_direction_without_its_derivative_is_warned_of(name, engine, dtype):
    model, x = nn.Linear(3, 2, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    lam = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    loss = lambda m: (lam * m(x).square()).mean()
    options = {"solver": "gd", "lr": LR, "direction": WITHOUT_DERIVATIVE[name], "engine": engine}
    with pytest.warns(bilevel.DerivativeWarning, match=r"derivative of direction= is not.*k = 1: .*\.item\(\)"):
        with bilevel.inner(model, loss, loss, **options) as loop:
            loop.step()
    with bilevel.inner(model, loss, loss, check=False, **options) as loop:
        loop.step()


def test_a_branch_that_begins_later_is_found_in_a_later_step():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    loss = lambda m: m(x).square().mean()
    clip = lambda d: d if norm_of(d) < 0.3 else {n: 0.3 * x / norm_of(d).item() for n, x in d.items()}
    with bilevel.inner(model, lambda m, c: c * loss(m), solver="gd", lr=1e-3, direction=clip) as loop:
        for c in (0.01, 0.01, 0.01):
            loop.step(c)
        with pytest.warns(bilevel.DerivativeWarning, match=r"direction= .*k = 4"):
            loop.step(10.0)


RIGHT_DIRECTIONS: dict[str, Callable[..., Grads]] = {
    "sign": lambda d: {n: x.sign() for n, x in d.items()},
    "relu": lambda d: {n: x.relu() for n, x in d.items()},
    "clamp": lambda d: {n: x.clamp(-0.01, 0.01) for n, x in d.items()},
    "largest": lambda d: {n: x / x.abs().max() for n, x in d.items()},
    "zeros": lambda d: {n: 0 * x for n, x in d.items()},
    "tiny": lambda d: {n: 1e-12 * x for n, x in d.items()},
    "centred": lambda d: {n: x - x.mean() for n, x in d.items()},
    "identity": lambda d: d,
    "orthogonal to the weights": lambda d, w: {
        n: x - (x * w[n]).sum() / w[n].square().sum() * w[n] for n, x in d.items()
    },
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT_DIRECTIONS)
def test_no_false_alarm(name, dtype):
    """Warnings are errors here. One input is 0, so that some entries of the gradient are."""
    model, x = nn.Linear(3, 2, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    x[:, 0] = 0
    loss = lambda m: m(x).square().mean()
    with bilevel.inner(model, loss, loss, solver="gd", lr=LR, direction=RIGHT_DIRECTIONS[name]) as loop:
        loop.run(4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_network_of_float32_in_the_direction(dtype):
    """It does not take float64, and is compared in float32."""
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).float()
    model, x = nn.Linear(3, 2, dtype=torch.float32), torch.randn(5, 3, dtype=torch.float32)
    loss = lambda m: m(x).square().mean()
    learned = lambda d: {n: net(x.reshape(-1, 1)).view_as(x) for n, x in d.items()}
    with bilevel.inner(model, loss, loss, solver="gd", lr=LR, direction=learned) as loop:
        loop.run(2)
    detached = lambda d: {n: x * net(x.reshape(-1, 1)).view_as(x).detach() for n, x in d.items()}
    with pytest.warns(bilevel.DerivativeWarning, match=r"direction="):
        with bilevel.inner(model, loss, loss, solver="gd", lr=LR, direction=detached) as loop:
            loop.step()


def noisy(d: Grads) -> Grads:
    return {n: x * (1 + 0.3 * torch.randn_like(x)) for n, x in d.items()}


@every_plan
def test_noise_in_the_direction(engine):
    """Beside dropout in the loss; the numbers are those of the plain loop."""
    agree(weighted_samples(two_halves, optimizer=adamw, options={"direction": noisy}), engine)


def test_noise_of_numpy_is_refused(engine):
    numpy = pytest.importorskip("numpy")
    noise = lambda d: {n: x * float(numpy.random.rand()) for n, x in d.items()}
    case = weighted_samples(two_halves, options={"direction": noise})
    with refused("direction=", "Draw with torch"):
        case.block(engine)


# --- under every way to differentiate a step ---


class Stack(nn.Module):
    """Blocks in a ModuleList, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


FUNCTIONS: dict[str, Callable[..., Grads]] = {
    "noise": noisy,
    "weights": lambda d, w: {n: x + 0.3 * w[n] * w[n].norm() for n, x in d.items()},
    "clipped": lambda d: bilevel.clip_norm(0.05)(d),
}


@pytest.mark.parametrize("how", [{"blocks": "auto"}, {"blocks": "auto", "store": "./here"}, {"checkpoint": "sqrt"}])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_under_blocks(name, how, tmp_path):
    """Against the graphs of all steps; the dropout and the noise are the same."""
    if "store" in how:
        how = {**how, "store": tmp_path}
    lam, x = torch.linspace(-1, 1, 6).requires_grad_(), torch.randn(6, 4)
    h = lambda m: (lam.exp() * m(x)[:, 0].square()).mean()
    found = []
    for engine in ("unroll", bilevel.Reverse(**how)):
        torch.manual_seed(0)
        model = Stack()
        options = {"solver": "gd", "optimizer": adamw_of(model), "direction": FUNCTIONS[name], "engine": engine}
        with bilevel.inner(model, h, h, **options) as loop:
            loop.run(4)
            torch.manual_seed(1)
            found.append(loop.hypergrad(lam))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert found[0].norm() > 1e-4


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05, eps=0.1)


@pytest.mark.parametrize("kind", [Momentum, Counter])
def test_a_state_of_its_own_is_refused_under_blocks(kind):
    model, x = Stack(), torch.randn(6, 4)
    h = lambda m: m(x).square().mean()
    with refused("direction=", "a state of its own"):
        with bilevel.inner(
            model, h, h, solver="gd", lr=0.1, direction=kind(), engine=bilevel.Reverse(blocks="auto")
        ) as loop:
            loop.run(3)
