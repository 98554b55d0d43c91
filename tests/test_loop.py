"""The handle: steps, losses, arguments by name, only=, h=, inputs, state; and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, IMPLICIT
from handle import (
    HALVES,
    LR,
    UPDATES,
    Plain,
    adamw,
    agree,
    both,
    clip_norm,
    draw,
    momentum,
    samples,
    tasks_case,
    two_halves,
    weighted_samples,
)
from plain_loop import RATE, STEPS, attempt, block, data, judge, losses, mlp, start
from problems import Vector, refused, refused_if, weighted
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


# --- losses ---


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_a_loss_that_is_not_finite_names_its_step(parts, engine):
    model, h, g, _, x, y = parts
    count = 0

    def breaks(model, x, y):
        nonlocal count
        count += 1
        return h(model, x, y) * (math.nan if count == 3 else 1.0)

    with bilevel.inner(model, breaks, g, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(2, x, y)
        with pytest.raises(FloatingPointError, match=r"h is nan at step k = 3. A smaller rate may help"):
            loop.step(x, y)


@pytest.mark.usefixtures("single")
def test_weights_that_are_not_finite_name_the_step_that_made_them():
    """In float32 the weight overflows in step 1, which the loss of step 2 tells; or the loss alone does, in step 3."""
    model = Vector(torch.ones(1))
    steep = lambda m: 1e30 * m.w.square().sum()
    with bilevel.inner(model, steep, steep, solver="gd", lr=1e10) as loop:
        loop.step()
        words = r"h is inf at step k = 2\. The weight 'w' is not finite after the step before\. A smaller rate may help"
        with pytest.raises(FloatingPointError, match=words):
            loop.step()
    grow = lambda m: m.w.pow(4).sum()
    with bilevel.inner(model, grow, grow, solver="gd", lr=1e4) as loop:
        with pytest.raises(FloatingPointError, match=r"h is inf at step k = 3\. A smaller rate may help"):
            loop.run(50)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("engine", ["reverse", "unroll", bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB")])
def test_an_adjoint_that_is_not_finite_names_its_step(engine):
    """√ at 0 in step 2 of 4: the loss and its gradient are finite, the second derivative is not."""
    model = Vector(torch.zeros(2, dtype=torch.float64))
    lam = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def h(m, k):
        return (lam * (m.w + 1).square()).sum() if k != 2 else (m.w.sum() + (lam * (m.w - m.w.detach())).pow(1.5).sum())

    with bilevel.inner(model, h, lambda m: m.w.square().sum(), solver="gd", lr=0.1, engine=engine) as loop:
        for k in range(1, 5):
            loop.step(k)
        with pytest.raises(FloatingPointError, match=r"not finite: it stops being so at step k = 2"):
            loop.hypergrad(lam)


# --- inputs ---


def test_inputs_that_no_loss_reaches(parts):
    model, h, g, lam, x, y = parts
    stranger = torch.zeros(3, requires_grad=True)
    for engine in ("reverse", "unroll", "forward"):
        with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
            loop.run(2, x, y, outer=(x, y))
            with pytest.raises(
                ValueError, match=r"neither loss depends on input 1 \(shape \(3,\)\).*allow_unused=True"
            ):
                loop.hypergrad([lam, stranger])
            assert torch.equal(loop.hypergrad([lam, stranger], allow_unused=True)[1], torch.zeros(3))


def test_inputs_of_the_wrong_kind(parts):
    model, h, g, _, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.step(x, y, outer=(x, y))
        with pytest.raises(ValueError, match=r"does not require grad.*before the first step"):
            loop.hypergrad(x)
        with pytest.raises(ValueError, match=r"torch.int64.*only floating-point tensors"):
            loop.hypergrad(y)
        with pytest.raises(TypeError, match=r"must be tensors, got str"):
            loop.hypergrad(["lam"])
        with pytest.raises(ValueError, match=r"the inputs are empty"):
            loop.hypergrad([])


def test_backward_without_an_outer_variable(parts):
    model, _, g, _, x, y = parts
    with bilevel.inner(model, g, g, lr=0.1) as loop:
        loop.step(x, y, outer=(x, y))
        with pytest.raises(ValueError, match=r"found no outer variable"):
            loop.backward()


# --- modes, late outer variables ---


@pytest.mark.parametrize("tasks", [None, 2])
@pytest.mark.parametrize("added", [False, True])
def test_a_hook_sees_a_whole_gradient_once(engine, added, tasks):
    """The hook of a weight is for the steps, not for w_0; that of λ is for the sum over all steps."""
    model, lam, steps = Vector(torch.tensor([3.0, -1.0])), torch.tensor([1.0, 2.0], requires_grad=True), 3
    model.w.register_hook(lambda d: 0.5 * d)
    lam.register_hook(lambda d: d.square())
    h = lambda m, x: 0.5 * (m.w - x * lam).square().sum()
    g = lambda m: 0.5 * (m.w - 1).square().sum()
    x = torch.ones(tasks or ())
    forward = isinstance(engine, bilevel.Forward) or engine == "forward"
    inputs = [lam] if forward else [lam, model.w]
    with bilevel.inner(model, h, g, solver="gd", lr=0.4, engine=engine, tasks=tasks) as loop:
        loop.run(steps, x)
        if added:
            loop.add_outer_loss()
        found = loop.hypergrad(inputs)
        loop.backward(inputs)
        named = [p.grad for p in inputs]
        lam.grad = None
        loop.backward()
    rest = 0.8**steps
    end = rest * model.w.detach() + (1 - rest) * lam.detach()
    expected = [((tasks or 1) * (1 - rest) * (end - 1)).square(), (tasks or 1) * rest * (end - 1)]
    for a, b, c in zip(found, named, expected, strict=False):
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lam.grad, expected[0], rtol=1e-12, atol=1e-14)


def test_inference_mode(parts):
    model, h, g, _, x, y = parts
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode is on.*no_grad is fine"):
        with bilevel.inner(model, h, g):
            pass
    with bilevel.inner(model, h, g, lr=0.1) as loop, torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"inference_mode is on"):
            loop.step(x, y)
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"'weight' was made under torch.inference_mode"):
        bilevel.inner(model, h, g)


@pytest.mark.parametrize("first", [False, True], ids=["set late", "off for a while"])
def test_an_outer_variable_that_requires_grad_late(first, engine):
    lam = start().detach().requires_grad_(first)

    def between(k, m, o):
        lam.requires_grad_(k >= STEPS - 2)

    is_right = engine in (ENGINES["reverse"], ENGINES["sqrt"])  # which look at a step's outer variables afterwards
    with refused_if(not is_right, "requires?.grad"):
        found = block(losses(mlp), lam, engine, between=between)
    if is_right:
        judge(found, losses(mlp), lam, bits=False)


# --- backward() inside of h, and a hypergradient before any step ---


@pytest.mark.parametrize("retain", [False, True])
def test_backward_inside_h(engine, retain):
    """The line above `return loss` in the plain loop: there is nothing left to go back through."""
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    h, g = weighted(lam)

    def stepping(m, x, y):
        loss = h(m, x, y)
        loss.backward(retain_graph=retain)
        return loss

    with refused_if(not retain, r"\.backward\(\)"):
        got = attempt(model, stepping, g, lam, batch, outer, engine=engine, but="grad")
    if retain:
        torch.testing.assert_close(got, attempt(model, h, g, lam, batch, outer), rtol=1e-10, atol=0)


@pytest.mark.parametrize("engine", [*ENGINES, *IMPLICIT])
def test_a_hypergradient_before_any_step(engine):
    """λ is in h alone, and no step was taken: it is not that "neither loss depends on it"."""
    lam, outer = start(), data(5)
    model = mlp()
    how = {**ENGINES, **IMPLICIT}[engine]
    asks = {"step": lambda loop: loop.hypergrad(lam, outer=outer), "step|outer=": lambda loop: loop.hypergrad(lam)}
    for words, ask in asks.items():
        with refused(words):
            with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, engine=how, check=False) as loop:
                ask(loop)


# --- losses that return something beside ---


def test_aux(engine):
    """A tree of anything, of the values before the step, without a graph."""
    case = weighted_samples(lambda *_: None)
    loss = case.h
    kept: dict[type, Any] = {}

    def h(model: nn.Module, x: Tensor, i: Tensor) -> Any:
        value = loss(model, x, i)
        rest = {
            "weight": [model[1].weight * 1, (model[1].bias * 2,)],
            "name": "h",
            "none": None,
            "count": len(i),
            "i": i,
        }
        return value, rest

    def body(loop: Any, model: Any, made: Any) -> None:
        found = [loop.step(draw(HALVES[0]), HALVES[0]).aux, loop.accumulate(draw(HALVES[1]), HALVES[1]).aux]
        loop.step()
        if not isinstance(loop, Plain):
            assert not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(found))
        kept.setdefault(type(loop), [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(found)])

    case.h, case.body = h, body
    agree(case, engine)
    for a, b in zip(kept[bilevel.Loop], kept[Plain], strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        else:
            assert a == b


def test_a_weight_in_aux_is_that_of_before_the_step(engine):
    """It must not move with the steps that follow, nor be a way to write to the loop's weights."""
    model = nn.Linear(2, 1)
    h = lambda m: (m.weight.square().sum(), m.weight)
    with bilevel.inner(model, h, solver="gd", lr=0.1, engine=engine, check=False) as loop:
        start = model.weight.detach().clone()
        aux = [loop.step().aux for _ in range(3)]
        for k, w in enumerate(aux):
            torch.testing.assert_close(w, start * 0.8**k, rtol=1e-12, atol=1e-14)


def test_aux_in_a_later_batch_is_refused(engine):
    """Its dependence on λ would be lost: a hidden state belongs into a buffer."""
    case = weighted_samples(two_halves)
    h = lambda model, i, before=0.0: ((model(samples()[0][i]) - before).square().mean(), model(samples()[0][i]))
    with bilevel.inner(case.model, h, case.g, solver="gd", lr=LR, engine=engine) as loop:
        aux = loop.step(HALVES[0]).aux
        for wrong in (lambda: loop.step(HALVES[0], aux), lambda: loop.accumulate(HALVES[0], before=aux)):
            with refused("beside its value", "stop_gradient"):
                wrong()
        loop.step(HALVES[0])


def test_g_may_return_something_beside():
    case = weighted_samples(two_halves, options={"solver": "bigsam"})
    *_, expected = case.block("reverse")
    outer = case.g
    case.g = lambda model: (outer(model), "rest")
    *_, got = case.block("reverse")
    assert torch.equal(got, expected)


# --- the handle as a module ---


def test_modes_and_state(engine):
    """loop.train(), loop.eval() set the model's modes; loop.state_dict() is the plain loop's, and a copy."""
    case = weighted_samples(lambda *_: None, optimizer=adamw)
    before = {n: x.clone() for n, x in case.model.state_dict().items()}
    x, y, *_ = samples()
    kept: dict[type, Any] = {}

    def h(model: nn.Module, i: Tensor) -> Tensor:  # no mode of its own
        return (case.outer["lam"].sigmoid()[i] * F.cross_entropy(model(x[i]), y[i], reduction="none")).mean()

    def body(loop: Any, model: Any, made: Any) -> None:
        loop.train()
        loop.step(HALVES[0])
        loop.eval()
        assert not model.training
        assert not model[0][1].training
        loop.step(HALVES[1])
        loop.train()
        loop.step(HALVES[1])
        state = loop.model.state_dict() if isinstance(loop, Plain) else loop.state_dict()
        copied = {n: t.clone() for n, t in state.items()}
        kept.setdefault(type(loop), copied)
        if not isinstance(loop, Plain):
            assert not any(t.requires_grad for t in state.values())
            for t in state.values():
                t.zero_()  # a copy: nothing moves
            torch.testing.assert_close(loop.state_dict(), copied, rtol=0, atol=0)

    case.h, case.body = h, body
    del case.outer["mu"]
    agree(case, engine)
    got, expected = kept[bilevel.Loop], kept[Plain]
    assert list(got) == list(expected)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    case.model.load_state_dict(got)
    case.model.load_state_dict(before)


def test_modes_are_put_back():
    case = weighted_samples(two_halves)
    case.model.train()
    case.model[0][1].eval()
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR) as loop:
        assert loop.eval() is loop
        assert loop.train() is loop
        assert case.model[0][1].training
        assert loop.train(False) is loop
        assert not case.model.training
    assert case.model.training
    assert not case.model[0][1].training


def test_the_state_of_tasks_is_refused():
    case = tasks_case(None)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR, tasks=2) as loop:
        with refused("state_dict", "loop.weights"):
            loop.state_dict()


# --- only= and h= ---


ONLY: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda model, made: made[0],
    "module": lambda model, made: model[0],
    "parameter": lambda model, made: model[1].weight,
    "generator": lambda model, made: model[0].parameters(),
    "list": lambda model, made: [p for n, p in model.named_parameters() if n.endswith("weight")],
    "set": lambda model, made: {model[1].bias, model[0][0].weight},
    "whole": lambda model, made: model,
}


@pytest.mark.parametrize("only", ONLY.values(), ids=ONLY)
def test_only(engine, only):
    """What is left alone has no decay, momentum or count in that step either."""

    def body(loop: Any, model: Any, made: Any) -> None:
        i = HALVES[0]
        loop.step(draw(i), i)
        loop.step(draw(i), i, only=only(model, made))
        loop.step(draw(i), i, only=only(model, made), h=gentle)
        loop.step(draw(i), i)

    def gentle(model: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        model.eval()
        return (case.outer["lam"][i, None] * model(x)).tanh().mean()

    case = weighted_samples(body, optimizer=both)
    agree(case, engine)


@pytest.mark.parametrize("update", ["lr", "clip", "direction, clip", "bigsam, momentum, clip"])
def test_only_with_one_optimizer(engine, update):
    """The norm that is clipped is that of the part that moves."""

    def body(loop: Any, model: Any, made: Any) -> None:
        i = HALVES[0]
        for part in (model[0], model[1], model[0]):
            loop.step(draw(i), i, only=part)
        loop.step(draw(i), i)

    agree(weighted_samples(body, **UPDATES[update]), engine)


WRONG_ONLY: dict[str, Callable[[Any], Any]] = {
    "another module": lambda model: nn.Linear(2, 2),
    "no weights": lambda model: model[0][2],
    "a name": lambda model: "0.weight",
    "names": lambda model: ["0.0.weight"],
    "a dict": lambda model: dict(model.named_parameters()),
    "a number": lambda model: 3,
    "nothing": lambda model: [],
    "another tensor": lambda model: torch.zeros(2, requires_grad=True),
    "a copy": lambda model: model[1].weight.detach().clone(),
    "another optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "a frozen weight": lambda model: model[0][0].bias,
}


@pytest.mark.parametrize("call", ["step", "accumulate"])
@pytest.mark.parametrize("wrong", WRONG_ONLY.values(), ids=WRONG_ONLY)
def test_wrong_things_for_only(wrong, call):
    case = weighted_samples(two_halves)
    case.model[0][0].bias.requires_grad_(False)
    i = HALVES[0]
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR) as loop:
        with refused("only="):
            getattr(loop, call)(draw(i), i, only=wrong(case.model))
        loop.step(draw(i), i)


def test_a_loss_that_is_none():
    case = weighted_samples(two_halves)
    with bilevel.inner(case.model, case.h, case.g, solver="gd", lr=LR) as loop:
        with refused("h=", "got Tensor"):
            loop.step(h=torch.zeros(2))


# --- scaled losses ---


@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_a_scaler_is_refused_by_name(engine, call):
    case, i = weighted_samples(two_halves), HALVES[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = lambda model, x, i: scaler.scale(case.h(model, x, i))
    with bilevel.inner(case.model, scaled, case.g, solver="gd", lr=LR, engine=engine) as loop:
        with refused("GradScaler", "bfloat16", "direction="):
            getattr(loop, call)(draw(i), i)


def test_a_scaler_that_is_switched_off_does_nothing(engine):
    case = weighted_samples(two_halves, optimizer=momentum)
    loss, scaler = case.h, torch.amp.GradScaler("cpu", enabled=False)
    case.h = lambda model, x, i: scaler.scale(loss(model, x, i))
    agree(case, engine)


def test_a_loss_that_is_scaled_by_hand(engine):
    """h·S, and direction= divides by S: exact where S is a power of 2."""
    scale = 1024.0
    case = weighted_samples(two_halves, optimizer=adamw, **clip_norm(0.1))
    *_, expected = case.block(engine)
    loss = case.h
    case.h = lambda model, x, i: scale * loss(model, x, i)
    case.options["direction"] = lambda d: {n: x / scale for n, x in d.items()}
    torch.testing.assert_close(agree(case, engine), expected, rtol=1e-12, atol=1e-15)
