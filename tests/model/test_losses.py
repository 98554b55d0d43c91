"""Losses as a user writes them: their arguments, what they return and what they may do."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handle import (
    HALVES,
    LR,
    Case,
    Plain,
    agree,
    draw,
    momentum,
    two_halves,
    weighted_samples,
)
from plain_loop import attempt, data, exact, losses, mlp, right_or_refused, start
from problems import refused, weighted
from torch import Tensor, nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def step_with(model, h, g, x, y, **options):
    with bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5), **options) as loop:
        loop.step(x, y, outer=(x, y))


# --- what a loss returns ---


@pytest.mark.parametrize("which", ["h", "g"])
@pytest.mark.parametrize(
    ("returns", "error", "message"),
    [
        (lambda m, x: m(x), ValueError, r"{} must return a scalar, got a tensor of shape \(6, 2\).*\.mean\(\)"),
        (lambda m, x: m(x).sum().item(), TypeError, r"{} must return a scalar tensor, got float.*loss\.item\(\)"),
        (lambda m, x: (m(x).sum(), 1, 2), TypeError, r"{} must return a scalar tensor, got tuple"),
        (lambda m, x: (1.0, m(x)), TypeError, r"{} must return a scalar tensor, got float"),
        (lambda m, x: None, TypeError, r"{} must return a scalar tensor, got NoneType"),
        (lambda m, x: m(x).argmax(), TypeError, r"{} must return a real floating-point loss, got torch.int64"),
        (lambda m, x: m(x).sum().detach(), ValueError, r"{} does not depend on the weights"),
        (lambda m, x: x.sum().requires_grad_(), ValueError, r"{} does not depend on the weights"),
    ],
)
def test_what_a_loss_returns(parts, which, returns, error, message):
    model, h, g, _, x, y = parts
    bad = lambda m, x, y: returns(m, x)
    with pytest.raises(error, match=r"bilevel.inner: " + message.format(which)):
        step_with(model, *((bad, g) if which == "h" else (h, bad)), x, y)
    with (
        pytest.raises(error, match=r"bilevel.inner: " + message.format("g")),
        bilevel.inner(model, h, bad, solver="gd", lr=0.1) as loop,
    ):
        loop.step(x, y, outer=(x, y))
        loop.backward()


def test_a_loss_that_is_no_function(parts):
    model, h, _, _, _, _ = parts
    with pytest.raises(TypeError, match=r"g must be a function of \(model, \*batch\), got Tensor"):
        bilevel.inner(model, h, torch.zeros(()))


def test_a_loss_with_other_arguments_than_its_batch(parts):
    model, h, g, _, x, y = parts
    with bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5)) as loop:
        with pytest.raises(TypeError, match=r"h\(model, \*batch\) was called with a batch of 1.*loop\.step"):
            loop.step(x, outer=(x, y))
        with pytest.raises(TypeError, match=r"g\(model, \*batch\) was called with a batch of 0.*outer=\(\.\.\.\)"):
            loop.step(x, y, outer=())
        with pytest.raises(TypeError, match=r"a batch of 1: .*The batch is a tuple: unpack it, loop.step\(\*batch\)"):
            loop.step((x, y), outer=(x, y))
    with (
        pytest.raises(TypeError, match=r"a batch of 2: .*a function such as lambda model, x, y: h\(model\(x\), y\)"),
        bilevel.inner(model, nn.CrossEntropyLoss(), g, lr=0.1) as loop,
    ):
        loop.step(x, y, outer=(x, y))
    with pytest.raises(TypeError, match=r"from the loss itself"), bilevel.inner(model, h, g, lr=0.1) as loop:

        def raises(model, x, y):
            raise TypeError("from the loss itself")

        step_with(model, raises, g, x, y)


# --- what losses may do ---


def functional(h, g):
    call = torch.func.functional_call
    return (lambda m, x, y: h(lambda x: call(m, {"0.weight": 2 * m[0].weight.tanh()}, (x,)), x, y)), g


def all_functional(h, g):
    call = torch.func.functional_call
    return (lambda m, x, y: h(lambda x: call(m, {n: p.sin() for n, p in m.named_parameters()}, (x,)), x, y)), g


def gradient_penalty(h, g):
    def penalised(m, x, y):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return h(m, x, y) + slope.square().mean()

    return penalised, g


def step_inside(h, g):
    """MAML by hand: a step on the weights inside of the loss."""

    def adapted(m, x, y):
        w = dict(m.named_parameters())
        grads = torch.autograd.grad(m(x).square().mean(), list(w.values()), create_graph=True)
        moved = {n: p - 0.1 * d for (n, p), d in zip(w.items(), grads, strict=True)}
        return h(lambda x: torch.func.functional_call(m, moved, (x,)), x, y)

    return adapted, g


def seeded(h, g):
    def noisy(m, x, y):
        torch.manual_seed(3)
        return h(m, x + 0.1 * torch.randn_like(x), y)

    return noisy, g


def saved_elsewhere(h, g):
    def saving(m, x, y):
        with torch.autograd.graph.save_on_cpu():
            return h(m, x, y)

    return saving, g


def in_place(h, g):
    return (lambda m, x, y: h(lambda x: m[2](m[0](x).mul_(2).tanh_()), x, y)), g


def captured(h, g, model):
    """Features by a forward hook, as most feature extractors have them."""
    features: list[Tensor] = []
    model[1].register_forward_hook(lambda m, args, out: features.append(out))

    def both(m, x, y):
        features.clear()
        return h(m, x, y) + features[0].square().mean()

    return both, g


def frozen_for_a_while(h, g):
    def partly(m, x, y):
        m[0].requires_grad_(False)
        try:
            return h(m, x, y)
        finally:
            m[0].requires_grad_(True)

    return partly, g


def grad_of_func(h, g):
    def sensitive(m, x, y):
        w = dict(m.named_parameters())
        energy = lambda x: torch.func.functional_call(m, w, (x,)).square().mean()
        return h(m, x, y) + torch.func.grad(energy)(x).square().sum()

    return sensitive, g


FREE = [functional, all_functional, gradient_penalty, step_inside, seeded, saved_elsewhere, in_place, captured]


@pytest.mark.parametrize("wrap", FREE)
def test_what_a_loss_may_do(wrap, engine):
    exact(losses(mlp, wrap), engine)


@pytest.mark.parametrize("wrap", [grad_of_func, frozen_for_a_while])
def test_what_a_loss_may_do_or_is_told_that_it_may_not(wrap, engine):
    right = right_or_refused(losses(mlp, wrap), engine, "h treats the weights as leaves", "requires_grad_")
    assert right == ((wrap, engine) != (frozen_for_a_while, "unroll"))


def test_a_copy_of_the_model_made_inside_h(engine):
    """The copy has weights of its own: h does not depend on those of the loop."""
    lam = start()
    h, g = weighted(lam)
    with refused(
        "h treats the weights as leaves .copy.deepcopy" if engine == "unroll" else "does not depend on the weights"
    ):
        attempt(mlp(), lambda m, x, y: h(copy.deepcopy(m), x, y), g, lam, data(), data(5), engine=engine)


# --- which losses are the same code ---


class Switched:
    """A loss with a flag, as an object and as a method of one."""

    def __init__(self, semi: Any) -> None:
        self.semi = semi

    def __call__(self, model: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
        return switched(model, x, scale, semi=self.semi)

    def h(self, model: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
        return self(model, x, scale)


def switched(model: nn.Module, x: Tensor, scale: Tensor, semi: Any) -> Tensor:
    """A semi-gradient, if it is switched on."""
    target = 2 * model(x)
    target = target.detach() if semi is True or semi == "on" else target
    return scale.exp() * (model(x) - target).square().mean()


SWITCHES: dict[str, Callable[[bool], Callable[..., Tensor]]] = {
    "a closure": lambda semi: lambda m, x, scale: switched(m, x, scale, semi),
    "a word in a closure": lambda semi: (lambda flag: lambda m, x, s: switched(m, x, s, flag))("on" if semi else "off"),
    "a default": lambda semi: lambda m, x, scale, semi=semi: switched(m, x, scale, semi),
    "a partial function": lambda semi: functools.partial(switched, semi=semi),
    "an object": Switched,
    "a method": lambda semi: Switched(semi).h,
}


@pytest.mark.parametrize("how", SWITCHES)
def test_a_loss_with_another_flag_is_another_loss(how):
    """check="first" looks at each once: also at that which differs by a flag from one that was looked at."""

    def told(h: Callable[..., Tensor]) -> bool:
        model, scale = nn.Linear(3, 1), torch.tensor(0.1, requires_grad=True)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with bilevel.inner(model, h, lambda m, x: m(x).mean(), solver="gd", lr=0.1, check="first") as loop:
                loop.run(2, torch.ones(4, 3), scale, outer=(torch.ones(4, 3),))
                loop.hypergrad(scale)
        return any(issubclass(w.category, bilevel.DerivativeWarning) for w in found)

    honest, semi = SWITCHES[how](False), SWITCHES[how](True)
    assert not told(honest)
    assert told(semi)
    assert not told(semi)  # it was looked at


# --- arguments by name ---


def test_arguments_by_name(engine):
    """loop.step(**batch) with a dict as Hugging Face has it, by position, and mixed."""
    case = weighted_samples(lambda *_: None, optimizer=momentum)
    i = HALVES[1]
    calls = {
        "by position": lambda loop, x: loop.step(x, i),
        "by name": lambda loop, x: loop.step(i=i, x=x),
        "mixed": lambda loop, x: loop.step(x, i=i),
        "gathered": lambda loop, x: (loop.accumulate(i=i, x=x), loop.step()),
    }
    found = []
    for call in calls.values():
        case.body = lambda loop, model, made, call=call: [call(loop, draw(i)) for _ in range(3)]
        found.append(agree(case, engine))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-15)


class Encoder(nn.Module):
    """As models of transformers are called: keywords in, an object with .loss and .logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = (self.embed(input_ids).tanh() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.out(hidden)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels, reduction="none"), logits=logits)


def test_a_batch_as_hugging_face_has_it(engine):
    torch.manual_seed(0)
    lam = torch.zeros(2, requires_grad=True)
    batch = {"input_ids": torch.randint(7, (6, 5)), "attention_mask": torch.ones(6, 5, dtype=torch.long)}
    batch["attention_mask"][:3, 3:] = 0
    batch["labels"] = torch.randint(2, (6,))
    kept: dict[type, Any] = {}

    def h(model: nn.Module, **batch: Tensor) -> Any:
        found = model(**batch)
        return (lam.sigmoid()[batch["labels"]] * found.loss).mean(), found.logits

    def g(model: nn.Module) -> Tensor:
        return model(**{**batch, "labels": 1 - batch["labels"]}).loss.mean()

    def body(loop: Any, model: Any, made: Any) -> None:
        found = [loop.step(**batch).aux for _ in range(3)]
        kept.setdefault(type(loop), found)  # the first of each, before λ is moved

    agree(Case(Encoder(), h, g, {"lam": lam}, body, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.1)), engine)
    for got, expected in zip(kept.pop(bilevel.Loop), kept.pop(Plain), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-14)
        assert not got.requires_grad


@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_a_wrong_keyword_is_named(call):
    case = weighted_samples(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR) as loop:
        take, x, i = getattr(loop, call), draw(HALVES[0]), HALVES[0]
        with refused("index by name"):
            take(x, index=i)
        with refused("multiple values", "'x'"):
            take(x, i, x=x)
        with refused("missing", "'i'"):
            take(x=x)
        take(x, i)


# --- losses that return something beside ---


@pytest.mark.parametrize(
    "wrong",
    [
        lambda v: (v, 1, 2),
        lambda v: [v, 1],
        lambda v: (1, v),
        lambda v: (v.item(), 1),
        lambda v: (v[None], 1),
        lambda v: (),
    ],
)
def test_what_is_no_loss(wrong):
    case = weighted_samples(two_halves)
    loss = case.h
    with bilevel.inner(case.model, lambda *a: wrong(loss(*a)), case.g, solver="gd", lr=LR) as loop:
        with refused("must return a scalar"):
            loop.step(draw(HALVES[0]), HALVES[0])
