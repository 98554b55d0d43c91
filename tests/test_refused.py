"""Where the block can't be the user's loop it says so: right, or refused by name, and never another loop in silence.

Row by row: functions that hide a derivative, graphs, hooks, aliases, options, what changes on the way, processes,
crashes; at the end what an enemy thought of besides.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import Ridge, Vector, differences, relative, weighted
from test_errors import Once
from test_own_loop import (
    ENGINES,
    IMPLICIT,
    OWN,
    RATE,
    REFUSALS,
    SAMPLES,
    STEPS,
    SWAPPED,
    Case,
    Found,
    Mine,
    Rows,
    block,
    data,
    everything,
    exact,
    judge,
    losses,
    mlp,
    plain,
    refused,
    right_or_refused,
    says,
    sgd,
    slope,
    start,
    tensors,
    unchanged,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")
SOME = {n: ENGINES[n] for n in ("reverse", "memory", "unroll", "forward")}
COMPILER = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*runs eagerly", "ignore::UserWarning:torch"
)


def attempt(model, h, g, lam, batch=(), outer=(), steps=STEPS, between=lambda k: None, but="", **options) -> Tensor:
    """The hypergradient of a block, wherever on the way it may be refused; the model is put back (`but`: unchanged)."""
    before = everything(model)
    try:
        with bilevel.inner(model, h, g, check=False, **{"solver": "gd", "lr": RATE, **options}) as loop:
            for k in range(steps):
                loop.step(*batch, outer=outer)
                between(k)
            return loop.hypergrad(lam)
    finally:
        unchanged(model, before, but)


# --- once_differentiable ---


@pytest.mark.parametrize("engine", SOME)
def test_once_differentiable_in_g_of_a_step(engine):
    """h comes first and is honest: each loss has to be looked at."""
    lam = start()
    h, _ = weighted(lam)
    g = lambda m, x, y: F.cross_entropy(Once.apply(m(x)), y)
    solver = bilevel.BiGSAM(0.1, alpha=0.5)
    with refused("once_differentiable"):
        attempt(mlp(), h, g, lam, data(), data(5), solver=solver, lr=None, engine=ENGINES[engine])


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("which", ["h", "g"])
def test_once_differentiable_with_a_constant_incoming_gradient(which, engine):
    """What comes in has no graph, so that autograd puts no Error node behind what comes out."""
    model, lam = Vector(torch.tensor([0.3, 1.0])), torch.ones(2, requires_grad=True)
    honest = lambda m: (lam * (m.w - 1).square()).sum()
    marked = lambda m: honest(m) + Once.apply(m.w).sum()
    losses = (marked, honest) if which == "h" else (honest, marked)
    solver = bilevel.BiGSAM(0.1, alpha=0.5)
    with refused("once_differentiable"):
        attempt(model, *losses, lam, solver=solver, lr=None, engine=ENGINES[engine])


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("where", ["g, which no step takes", "a function of λ alone"])
def test_once_differentiable_where_one_derivative_is_enough(where, engine):
    if where.startswith("g"):
        build = losses(mlp, lambda h, g: (h, lambda m, x, y: F.cross_entropy(Once.apply(m(x)), y)))
    else:
        build = lambda lam: losses(mlp)(Once.apply(lam))
    assert right_or_refused(build, ENGINES[engine], "once_differentiable") == where.startswith("g")


# --- torch.compile'd functions ---


@COMPILER
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize("where", ["h", "a function inside h", "g of a step"])
def test_compiled_functions_in_a_loss(where, engine):
    """Their backward has no derivative; what is left of the gradient looks like one."""
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    mine, outer_loss = weighted(lam)
    squashed = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    h, g = {
        "h": (torch.compile(mine, backend="aot_eager"), outer_loss),
        "a function inside h": ((lambda m, x, y: mine(m, x, y) + squashed(m(x)).square().mean()), outer_loss),
        "g of a step": (mine, lambda m, x, y: squashed(m(x)).square().mean()),
    }[where]
    with refused("compile"):
        attempt(model, h, g, lam, batch, outer, solver=bilevel.BiGSAM(0.1, alpha=0.5), lr=None, engine=engine)


# --- a graph back to the weights ---

EXTRAS = {
    "loop(x)": (lambda loop, m, x: loop(x), lambda m, x: m(x)),
    "model(x)": (lambda loop, m, x: m(x), lambda m, x: m(x)),
    "log-probabilities": (lambda loop, m, x: loop(x).log_softmax(-1)[:, 0], lambda m, x: m(x).log_softmax(-1)[:, 0]),
    "loop.weights": (lambda loop, m, x: loop.weights["2.weight"], lambda m, x: m[2].weight),
    "a parameter": (lambda loop, m, x: m[2].weight, lambda m, x: m[2].weight),
    "a view of one": (lambda loop, m, x: m[2].weight.view(-1), lambda m, x: m[2].weight.view(-1)),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        *itertools.product(EXTRAS, ["batch", "closure"]),
        ("loop(x)", "dict"),
        ("loop(x)", "closure alone"),
        ("a parameter", "closure alone"),
    ],
)
def test_a_graph_back_to_the_weights(name, carrier, engine):
    """In the plain loop the gradient goes through it."""
    get, inside = EXTRAS[name]
    alone = carrier == "closure alone"
    term = lambda m, x, e: e.square().mean() * (1.0 if alone else m(x).square().mean())
    build = losses(mlp, lambda h, g: ((lambda m, x, y: h(m, x, y) + term(m, x, inside(m, x))), g))
    lam, box = start(), []
    torch.manual_seed(0)
    model, _, g, (x, y), outer = build(lam)
    weigh, _ = weighted(lam)
    h = {
        "batch": lambda m, x, y, e: weigh(m, x, y) + term(m, x, e),
        "dict": lambda m, x, y, e: weigh(m, x, y) + term(m, x, e["extra"][0]),
    }.get(carrier, lambda m, x, y: weigh(m, x, y) + term(m, x, box[-1]))
    before = everything(model)
    try:
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
            for _ in range(STEPS):
                box.append(get(loop, model, x))
                more = {"batch": (box[-1],), "dict": ({"extra": [box[-1]]},)}.get(carrier, ())
                loop.step(x, y, *more, outer=outer)
            found = Found(tensors(model), float(loop.value), loop.hypergrad(lam))
    except REFUSALS as error:
        says(error, ("inside (h|the loss)",))
    else:
        judge(found, build, lam, bits=False)
    unchanged(model, before)


@pytest.mark.parametrize("engine", SOME)
def test_a_rollout_whose_loss_is_made_from_its_log_probabilities_alone(engine):
    """REINFORCE as it is often written: h does not call the model at all."""
    lam, rewards = start(), torch.randn(SAMPLES)
    build = losses(mlp, lambda h, g: ((lambda m, x, y: h_of(m(x).log_softmax(-1)[:, 0])), g))
    h_of = lambda logp: -(logp * rewards * scale.exp()).mean()
    torch.manual_seed(0)
    scale = torch.tensor(0.1, requires_grad=True)
    model, _, g, (x, _), outer = build(lam)
    with refused("inside (h|the loss)"):
        with bilevel.inner(model, lambda m, p: h_of(p), g, solver="gd", lr=RATE, engine=ENGINES[engine]) as loop:
            for _ in range(3):
                loop.step(loop(x).log_softmax(-1)[:, 0], outer=outer)
            loop.hypergrad(scale)


@pytest.mark.parametrize("engine", [*OWN, "memory"])
@pytest.mark.parametrize("name", EXTRAS)
def test_a_graph_back_to_the_weights_in_the_batch_of_g(name, engine):
    get, _ = EXTRAS[name]
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    h, g = weighted(lam)
    both = lambda m, x, y, e: g(m, x, y) + e.square().mean()
    with refused("inside (g|the loss|h)"):
        solver = bilevel.BiGSAM(0.1, alpha=0.5)
        with bilevel.inner(model, h, both, solver=solver, engine=ENGINES[engine], check=False) as loop:
            for _ in range(3):
                loop.step(*batch, outer=(*outer, get(loop, model, outer[0])))
            loop.hypergrad(lam)


class Carry(nn.Module):
    """A hidden state that is handed on with its graph, for want of a .detach()."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state = (x.mean(0) + self.state).tanh()
        return x + self.state


@pytest.mark.parametrize("engine", SOME)
def test_a_buffer_with_a_graph(engine):
    """The plain loop can't go back twice through it; a block would cut it, each engine elsewhere."""
    lam = start()
    with refused("buffer|state", "detach|graph"):
        attempt(mlp(Carry()), *weighted(lam), lam, data(), data(5), engine=ENGINES[engine])


@pytest.mark.parametrize("outside", ["reverse", "unroll"])
@pytest.mark.parametrize("within", ["reverse", "sqrt", "memory", "forward"])
def test_a_loop_within_a_loss_that_has_no_graph(within, outside):
    """Only an unrolled loop hands on what it depends on; of any other the result looks like a constant."""
    mu = torch.tensor(0.7, requires_grad=True)
    a, b = Vector(torch.tensor([0.3])), Vector(torch.tensor([0.5]))
    near = lambda m, w: mu * (m.w - w).square().sum()

    def h(model):
        with bilevel.inner(b, near, near, solver="gd", lr=0.1, engine=ENGINES[within], check=False) as loop:
            loop.run(3, model.w)
            return (loop.weights["w"] - 2).square().sum() + model.w.square().sum()

    with refused("unroll"):
        attempt(a, h, lambda m: (m.w - 1).square().sum(), mu, engine=outside)


# --- weights that are read past the model ---


def listed(h, g, model):
    mine = list(model.parameters())
    return (lambda m, x, y: h(m, x, y) + 0.1 * sum(p.square().sum() for p in mine)), g


def listed_in_g(h, g, model):
    mine = list(model.parameters())
    return h, (lambda m, x, y: g(m, x, y) + 0.1 * sum(p.square().sum() for p in mine))


def kept_vars(h, g, model):
    mine = model.state_dict(keep_vars=True)
    return (lambda m, x, y: h(m, x, y) + mine["0.weight"].pow(4).sum()), g


def viewed(h, g, model):
    flat = model[0].weight.view(-1)
    return (lambda m, x, y: h(m, x, y) + flat.pow(4).sum()), g


def of_an_optimizer(h, g, model):
    groups = torch.optim.SGD(model.parameters(), 1.0).param_groups
    return (lambda m, x, y: h(m, x, y) + 0.1 * sum(p.square().sum() for p in groups[0]["params"])), g


class Hoarder(nn.Module):
    """A module that keeps a list of its weights, and reads them from there."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
        self.mine = [(m.weight, m.bias) for m in (self.one, self.two)]

    def forward(self, x):
        for w, b in self.mine:
            x = F.linear(x.tanh(), w, b)
        return x


ALIASES = {
    "a list": losses(mlp, listed),
    "a list, in g": losses(mlp, listed_in_g),
    "a state_dict": losses(mlp, kept_vars),
    "views": losses(mlp, viewed),
    "an optimizer's groups": losses(mlp, of_an_optimizer),
    "a module's list": losses(Hoarder),
    "a module's list and a list": losses(Hoarder, listed),
}


@pytest.mark.parametrize("engine", OWN)
@pytest.mark.parametrize("name", [n for n in ALIASES if n != "views"])
def test_weights_that_are_read_past_the_model(name, engine):
    exact(ALIASES[name], OWN[engine])


@pytest.mark.parametrize("engine", OWN)
def test_views_of_weights_made_before_the_block(engine):
    assert right_or_refused(ALIASES["views"], OWN[engine], "view|parameter|inside h")


@pytest.mark.parametrize("engine", SWAPPED)
@pytest.mark.parametrize("name", ALIASES)
def test_engines_that_swap_weights_refuse_what_is_read_past_the_model(name, engine):
    assert not right_or_refused(ALIASES[name], SWAPPED[engine], "parameter|weight", "reverse")


@pytest.mark.parametrize("name", ["a list", "a list, in g", "a module's list"])
def test_tasks_refuse_what_is_read_past_the_model(name):
    lam = start()
    model, h, g, batch, _ = ALIASES[name](lam)
    batch = [torch.stack([b, b]) for b in batch]
    with refused("parameter|weight", "tasks"):
        attempt(model, h, g, lam, batch, batch, tasks=2)


@pytest.mark.parametrize("engine", IMPLICIT)
@pytest.mark.parametrize("name", ["a list", "a module's list and a list"])
def test_fixed_points_of_losses_that_read_weights_past_the_model(name, engine):
    how = {"steps": 300, "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.5)}
    exact(ALIASES[name], engine, bits=False, tolerance=1e-5, **how)


# --- hooks ---


def on_parameters(hook):
    def wrap(h, g, model):
        for p in model.parameters():
            p.register_hook(hook())
        return h, g

    return wrap


def after_accumulation(h, g, model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    return h, g


def on_the_way_back(h, g, model):
    model[1].register_full_backward_hook(lambda m, gi, go: (0.5 * gi[0],))
    return h, g


def before_the_way_back(h, g, model):
    model[1].register_full_backward_pre_hook(lambda m, go: (go[0].tanh(),))
    return h, g


def on_the_way_there(h, g, model):
    model[1].register_forward_hook(lambda m, args, out: out.sin())
    model[2].register_forward_pre_hook(lambda m, args: (2 * args[0],))
    return h, g


def on_a_tensor(h, g):
    def hooked(m, x, y):
        out = m[:2](x)
        out.register_hook(lambda d: 0.5 * d)
        return (m[2](out) - F.one_hot(y, 2)).square().mean() + h(m, x, y)

    return hooked, g


def counting():
    calls = itertools.count(1)
    return lambda d: d / next(calls)


HOOKS = {
    "scaling": on_parameters(lambda: lambda d: 0.5 * d),
    "bending": on_parameters(lambda: lambda d: (5 * d).tanh() / 5),
    "normalising": on_parameters(lambda: lambda d: d / (d.norm() + 0.1)),
    "counting": on_parameters(counting),
    "after accumulation": after_accumulation,
    "backward": on_the_way_back,
    "backward, before": before_the_way_back,
    "forward": on_the_way_there,
    "on a tensor of h": on_a_tensor,
}
FIRES_TWICE = ["backward", "backward, before", "on a tensor of h"]


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", [n for n in HOOKS if n not in FIRES_TWICE])
def test_hooks_of_parameters_and_modules(name, engine):
    right = right_or_refused(losses(mlp, HOOKS[name]), ENGINES[engine], "hook|run again")
    assert right == (name != "after accumulation" and (name, engine) != ("counting", "reverse"))


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", FIRES_TWICE)
def test_hooks_on_the_way_back_are_refused_or_warned_of(name, engine):
    """They fire in the second derivative too, where they have no business: wrong in any double backward of torch."""
    assert not right_or_refused(losses(mlp, HOOKS[name]), ENGINES[engine], "hook|run again", check="first")


@pytest.mark.parametrize("engine", SOME)
def test_forward_hooks_are_part_of_the_loss(engine):
    exact(losses(mlp, HOOKS["forward"]), ENGINES[engine])


def clip_values(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def project(optimizer, *_):
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)


@pytest.mark.parametrize("engine", SOME)
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
        assert not right_or_refused(losses(mlp), ENGINES[engine], "hook", optimizer=hooked)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("engine", SOME)
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

    with refused(r"optimizer\.step|\.step\(\)|by hand"):
        options = {"optimizer": optimizer, "lr": None, "engine": ENGINES[engine]}
        attempt(model, h, g, lam, batch, outer, between=between, but="grad", **options)
    held = tensors(model)
    h(model, *batch).backward()
    optimizer.step()  # after the block it is the user's again
    assert not torch.equal(model[0].weight, held["0.weight"])


@pytest.mark.parametrize("engine", SOME)
def test_optimizer_step_in_the_block_without_gradients(engine):
    """It does nothing, in torch as well."""
    exact(losses(mlp), ENGINES[engine], between=lambda k, m, o: idle(m, o))


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


# --- λ in a buffer, weights under two names ---


def in_a_buffer(function):
    def build(lam):
        model, _, g, batch, outer = losses(mlp)(lam)
        model.register_buffer("weight_of_samples", function(lam))
        weigh = lambda m, x, y: (m.weight_of_samples * F.cross_entropy(m(x), y, reduction="none")).mean()
        return Case(model, weigh, g, batch, outer)

    return build


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize(
    ("function", "right"), [(lambda lam: lam, True), (torch.sigmoid, False)], ids=["a leaf", "with a graph"]
)
def test_an_outer_variable_in_a_buffer(function, right, engine):
    assert right_or_refused(in_a_buffer(function), ENGINES[engine], "buffer") == right


class Twins(nn.Module):
    """Two layers, of which the second holds the first one's memory in some way."""

    def __init__(self, tie):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        tie(self)

    def forward(self, x):
        x = self.b(self.a(x).tanh()).tanh()
        return self.out(F.linear(x, 4 * self.copy) if hasattr(self, "copy") else x)


class Overlapping(nn.Module):
    """Weights that are views of one tensor: `shift` elements apart."""

    def __init__(self, shift):
        super().__init__()
        self.flat = torch.randn(12 + 2)
        self.a, self.b = (nn.Parameter(self.flat[i : i + 6].view(3, 2)) for i in (0, shift))
        del self.flat

    def forward(self, x):
        return (x @ self.a).tanh() + (x @ self.b).sin()


def by_data(m):
    m.b.weight.data = m.a.weight.data


def by_a_buffer(m):
    m.register_buffer("copy", m.a.weight.data)


def by_a_frozen_parameter(m):
    m.b.weight = nn.Parameter(m.a.weight.data, requires_grad=False)


def by_an_attribute(m):
    m.copy = m.a.weight.detach()


def by_a_transposed_buffer(m):
    m.register_buffer("copy", m.a.weight.data.t())


TIES = [by_data, by_a_buffer, by_a_frozen_parameter, by_an_attribute, by_a_transposed_buffer]


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("tie", [*TIES, "overlapping"], ids=lambda t: getattr(t, "__name__", t))
def test_weights_that_share_memory(tie, engine):
    make = (lambda: Overlapping(3)) if tie == "overlapping" else (lambda: Twins(tie))
    check = "first" if tie is by_an_attribute else False  # of a plain attribute the sentinel may be the first to know
    assert not right_or_refused(losses(make), ENGINES[engine], r"tied|shares?\b.*\b(memory|storage)", check=check)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("shift", [6, 8])
def test_weights_side_by_side_in_one_tensor_share_nothing(shift, engine):
    exact(losses(lambda: Overlapping(shift)), ENGINES[engine])


def orthogonal() -> nn.Module:
    return mlp(parametrizations.orthogonal(nn.Linear(4, 4)))


@pytest.mark.parametrize("engine", SOME)
def test_cached_parametrizations_around_the_block(engine):
    """The layer's weight is computed once, at w_0, and kept."""
    with refused("cached"), parametrize.cached():
        block(losses(orthogonal), start(), ENGINES[engine])


@pytest.mark.parametrize("engine", SOME)
def test_cached_parametrizations_inside_h(engine):
    def wrap(h, g):
        def cached(m, x, y):
            with parametrize.cached():
                return h(m, x, y) + m(2 * x).square().mean()

        return cached, g

    exact(losses(orthogonal, wrap), ENGINES[engine], bits=False)


# --- what is trained changes in the loop ---


def frozen_first() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def second_layer(model):
    return torch.optim.SGD(model[2].parameters(), RATE)


def two_groups(model):
    return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], RATE, momentum=0.5)


def unfreeze_and_add(k, m, o):
    if k == 1:
        m[0].requires_grad_(True)
        o.add_param_group({"params": list(m[0].parameters()), "lr": 0.1})


CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "frozen": (mlp, sgd, lambda k, m, o: m[0].requires_grad_(False) if k == 1 else None),
    "frozen for one step": (mlp, sgd, lambda k, m, o: m[0].weight.requires_grad_(k != 1)),
    "frozen, with momentum": (mlp, two_groups, lambda k, m, o: m[0].requires_grad_(k != 1)),
    "frozen at the end": (mlp, sgd, lambda k, m, o: m.requires_grad_(False) if k == STEPS - 1 else None),
    "unfrozen": (frozen_first, sgd, lambda k, m, o: m[0].requires_grad_(True) if k == 1 else None),
    "add_param_group": (frozen_first, second_layer, unfreeze_and_add),
    "add_param_group, trainable": (
        mlp,
        second_layer,
        lambda k, m, o: o.add_param_group({"params": list(m[0].parameters())}) if k == 1 else None,
    ),
    "a group removed": (mlp, two_groups, lambda k, m, o: o.param_groups.pop(0) if k == 1 else None),
    "a parameter removed": (mlp, sgd, lambda k, m, o: o.param_groups[0]["params"].pop(0) if k == 1 else None),
    "groups swapped": (mlp, two_groups, lambda k, m, o: o.param_groups.reverse() if k == 1 else None),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_trained_changes_in_the_loop(name, engine):
    make, optimizer, between = CHANGES[name]
    words = r"requires_grad|frozen|param_groups?|optimizer"
    assert not right_or_refused(losses(make), ENGINES[engine], words, optimizer=optimizer, between=between)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", ["frozen", "unfrozen"])
def test_what_is_trained_changes_in_the_loop_of_a_rate(name, engine):
    make, _, between = CHANGES[name]
    assert not right_or_refused(losses(make), ENGINES[engine], "requires_grad|frozen", optimizer=None, between=between)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("first", [False, True], ids=["set late", "off for a while"])
def test_an_outer_variable_that_requires_grad_late(first, engine):
    lam = start().detach().requires_grad_(first)

    def between(k, m, o):
        lam.requires_grad_(k >= STEPS - 2)

    try:
        found = block(losses(mlp), lam, ENGINES[engine], between=between)
    except REFUSALS as error:
        says(error, ("requires?.grad",))
    else:
        judge(found, losses(mlp), lam, bits=False)


# --- options of value 0 ---

ZEROS = {
    "SGD": {"weight_decay": {}, "momentum": {}, "dampening": {"momentum": 0.9}, "lr": {}},
    "Adam": {"weight_decay": {"eps": 0.1}, "lr": {"eps": 0.1}},
    "AdamW": {"weight_decay": {"eps": 0.1}, "lr": {"eps": 0.1}},
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize(("kind", "option"), [(k, o) for k, options in ZEROS.items() for o in options])
def test_optimizer_options_that_are_tensors_of_value_0(kind, option, engine):
    """`if group["weight_decay"]:` is false, and yet the derivative is not 0."""
    more = {"lr": 0.1, **({} if kind == "SGD" else {"weight_decay": 0.0}), **ZEROS[kind][option]}
    make = lambda m, value: getattr(torch.optim, kind)(m.parameters(), **{**more, option: value})

    def by_number(model):
        optimizer = make(model, 0.0)
        optimizer.param_groups[0][option] = float(zero.detach())  # its constructor refuses what is below 0
        return optimizer

    build = lambda _: losses(mlp)(start().detach())
    zero = torch.zeros((), requires_grad=True)
    found = block(build, zero, ENGINES[engine], optimizer=lambda m: make(m, zero))
    judge(found, build, zero, bits=False, optimizer=by_number)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("rule", ["penalty", "bigsam", "gd"])
def test_rates_that_are_tensors_of_value_0(rule, engine):
    zero, lam = torch.zeros((), requires_grad=True), start().detach()
    solver = {
        "penalty": lambda: bilevel.Penalty(RATE, zero),
        "bigsam": lambda: bilevel.BiGSAM(RATE, s=zero, alpha=0.5),
        "gd": lambda: bilevel.GD(zero),
    }[rule]()
    torch.manual_seed(0)
    model, h, g, batch, outer = losses(mlp)(lam)

    def by_hand() -> float:
        z, one = float(zero.detach()), copy.deepcopy(model)
        c_h, c_g = {"penalty": (RATE, RATE * z), "bigsam": (RATE / 2, z / 2), "gd": (z, 0.0)}[rule]
        for _ in range(3):
            grads = torch.autograd.grad(c_h * h(one, *batch) + c_g * g(one, *outer), list(one.parameters()))
            with torch.no_grad():
                for p, d in zip(one.parameters(), grads, strict=True):
                    p -= d
        return float(g(one, *outer).detach())

    got = attempt(model, h, g, zero, batch, outer, 3, solver=solver, lr=None, engine=ENGINES[engine])
    assert abs(float(got)) > 1e-6
    assert float(got) == pytest.approx(differences(by_hand, zero, torch.ones(())), rel=1e-6)


# --- what changed between a step and its replay ---


class Box:
    """What losses and rates close over."""

    def __init__(self):
        self.number, self.tensor, self.rate = 1.0, torch.ones(SAMPLES, 1), torch.tensor(RATE)
        self.lr = RATE
        self.list = [1.0]


MOVES: dict[str, Any] = {
    "a number in h": lambda box, by: setattr(box, "number", by),
    "a list in h": lambda box, by: box.list.__setitem__(0, by),
    "a tensor in h, by .data": lambda box, by: box.tensor.data.mul_(by),
    "a tensor in h, by NumPy": lambda box, by: box.tensor.numpy().__imul__(by),
    "a tensor in h": lambda box, by: box.tensor.mul_(by),
    "a rate that is a function": lambda box, by: setattr(box, "lr", box.lr * by),
    "a rate that is a tensor": lambda box, by: box.rate.mul_(by),
    "a rate that is a tensor, by .data": lambda box, by: box.rate.data.mul_(by),
    "a number in g": lambda box, by: None,  # by `changed_g`
}


def drifting(box, lam, what):
    h, g = weighted(lam)
    mine = lambda m, x, y: box.number * box.list[0] * h(m, box.tensor * x, y)
    scaled = lambda m, x, y: box.number * g(m, x, y) if what == "a number in g" else g(m, x, y)
    rate = (lambda k: box.lr) if what == "a rate that is a function" else box.rate if "rate" in what else RATE
    solver = bilevel.BiGSAM(rate, alpha=0.5) if what == "a number in g" else bilevel.GD(rate)
    return (h if what == "a number in g" else mine), scaled, solver


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", MOVES)
def test_what_changed_since_a_step_is_noticed(what, engine):
    """A linear layer without a bias: no weight whose gradient is read for nothing else."""
    lam, batch, outer, by = start(), data(), data(5), 1.0001
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)

    def run(change):
        box = Box()
        h, g, solver = drifting(box, lam, what)
        with bilevel.inner(model, h, g, solver=solver, engine=ENGINES[engine], check=False) as loop:
            loop.run(STEPS, *batch, outer=outer)
            if change and what == "a number in g":
                box.number = by
                return loop.hypergrad(lam) / by  # of the outer loss as it is now: for a step it has changed
            if change:
                MOVES[what](box, by)
            return loop.hypergrad(lam)

    expected = run(False)
    try:
        got = run(True)
    except REFUSALS as error:
        says(error, ("changed|run again|another loss",))
    else:
        assert relative(got, expected) < 1e-9


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
@pytest.mark.parametrize("engine", SOME)
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
        losses(lambda: nn.Linear(3, 2, bias=False)), ENGINES[engine], "changed", optimizer=optimizer, between=between
    )
    assert float(rate) == float(lr)


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("by", [1.05, 0.97])
def test_what_changed_is_noticed_under_autocast(engine, by):
    """bf16 has a unit of 0.8 %: its root, as a tolerance, lets 8 % pass."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model, lam, (x, y), (xv, yv) = nn.Linear(3, 2, bias=False), start(), data(), data(5)
    h, g = weighted(lam)
    scale = [1.0]

    def run(by):
        scale[0] = 1.0
        loss = lambda m, x, y: scale[0] * h(m, x, y)
        with bilevel.inner(model, loss, g, solver="gd", lr=0.5, engine=ENGINES[engine], check=False) as loop:
            with torch.autocast("cpu", torch.bfloat16):
                loop.run(STEPS, x, y, outer=(xv, yv))
            scale[0] = by
            return loop.hypergrad(lam)

    assert relative(run(1.0), run(1.0)) < 1e-6
    with refused("changed|run again|another loss"):
        run(by)


# --- written inside a loss, refilled outside ---


class Words(nn.Module):
    """Tokens (here: the signs of a sample) through an embedding."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.out = nn.Embedding(2, 4, **options), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.embed((x > 0).long()).mean(1).tanh())


def projecting(write):
    def wrap(h, g):
        def projected(m, x, y):
            with torch.no_grad():
                write(m)
            return h(m, x, y)

        return projected, g

    return wrap


WRITES = {
    "max_norm": losses(lambda: Words(max_norm=0.5)),
    "max_norm that is not reached": losses(lambda: Words(max_norm=1e3)),
    "a projection": losses(mlp, projecting(lambda m: m[0].weight.clamp_(-0.2, 0.2))),
    "a projection by .data": losses(mlp, projecting(lambda m: m[0].weight.data.mul_(0.9))),
    "a projection by NumPy": losses(mlp, projecting(lambda m: m[0].weight.detach().numpy().__imul__(0.9))),
    "other memory": losses(mlp, projecting(lambda m: setattr(m[0].weight, "data", m[0].weight.data * 0.9))),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", WRITES)
def test_weights_that_are_written_inside_h(name, engine):
    words, but = "max_norm|written|wrote|in place|changed|by hand|run again", "memory" if name == "other memory" else ""
    assert not right_or_refused(WRITES[name], ENGINES[engine], words, but=but)


@pytest.mark.parametrize("engine", SOME)
def test_weights_that_are_written_inside_g(engine):
    """After the loop, in value and hypergrad: the next step must not start from them."""
    write = projecting(lambda m: m[0].weight.data.mul_(0.5))
    build = losses(mlp, lambda h, g: (h, write(g, None)[0]))
    assert not right_or_refused(build, ENGINES[engine], "written|wrote|in place|changed|by hand")


@pytest.mark.parametrize("engine", SOME)
def test_an_outer_variable_that_is_written_inside_h(engine):
    def build(lam):
        model, h, g, batch, outer = losses(mlp)(lam)

        def decaying(m, x, y):
            with torch.no_grad():
                lam.mul_(0.9)
            return h(m, x, y)

        return Case(model, decaying, g, batch, outer)

    with refused("changed|written|wrote|in place|run again"):
        block(build, start(), ENGINES[engine])


REFILLS = {
    "NumPy": lambda buffer, x: buffer.numpy().__setitem__(slice(None), x.numpy()),
    ".data": lambda buffer, x: buffer.data.copy_(x),
    "copy_": lambda buffer, x: buffer.copy_(x),
    "other memory": lambda buffer, x: setattr(buffer, "data", x.clone()),
    "inside h": None,
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("how", REFILLS)
def test_a_batch_that_is_refilled(how, engine):
    """One buffer for all batches, as a loader with pinned memory has it; or augmented in place by h."""
    torch.manual_seed(0)
    lam, model, (x, y), outer = start(), mlp(), data(), data(5)
    h, g = weighted(lam)
    batches = [x + k for k in range(3)]
    buffer = x.clone()

    def augmenting(m, x, y):
        x.data.add_(float(m[0].weight.numel() > 0))
        return h(m, x, y)

    def by_hand() -> float:
        one = copy.deepcopy(model)
        stepper = sgd(one)
        for k, xb in enumerate(batches):
            stepper.zero_grad()
            h(one, batches[k] + 1 if how == "inside h" else xb, y).backward(inputs=list(one.parameters()))
            stepper.step()
        return float(g(one, *outer).detach())

    try:
        loss = augmenting if how == "inside h" else h
        with bilevel.inner(model, loss, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
            for xb in batches:
                if how != "inside h":
                    REFILLS[how](buffer, xb)
                loop.step(buffer, y, outer=outer)
            value, grad = float(loop.value), loop.hypergrad(lam)
    except REFUSALS as error:
        says(error, ("changed|refilled|run again|in place",))
    else:
        assert value == pytest.approx(by_hand(), rel=1e-12)
        v = torch.randn(SAMPLES)
        assert abs(float(grad @ v) - differences(by_hand, lam, v)) < 1e-6 * float(grad.norm())


# --- second derivatives that torch has not, or has wrong ---


@pytest.mark.parametrize("engine", SOME)
def test_an_embedding_whose_gradient_is_scaled_by_frequency(engine):
    build = losses(lambda: Words(scale_grad_by_freq=True))
    assert not right_or_refused(build, ENGINES[engine], "scale_grad_by_freq")


@COMPILER
def test_weight_norm_under_compile(compiler):
    build = losses(lambda: mlp(parametrizations.weight_norm(nn.Linear(4, 4))))
    assert right_or_refused(build, bilevel.Reverse(compile=True), "weight_norm|compile", optimizer=None)


def scored(score):
    """h and g of class scores that are made from the model in some way."""

    def wrap(h, g):
        mine = lambda m, x, y: h(lambda x: score(m, x), x, y)
        return mine, lambda m, x, y: g(lambda x: score(m, x), x, y)

    return wrap


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(2, 4, mode=mode), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.bag((x > 0).long()).tanh())


class Flash(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Linear(1, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.lift(x[:, None, :, None])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.out(F.scaled_dot_product_attention(x, x, x)[:, 0, 0])


def ctc(model, x):
    """The loss of two alignments, as scores."""
    frames = model(x).unsqueeze(0).expand(3, -1, -1).log_softmax(-1)
    sizes = torch.full((len(x),), 3), torch.ones(len(x), dtype=torch.long)
    one = nn.CTCLoss(reduction="none")(frames, torch.ones(len(x), 1, dtype=torch.long), *sizes)
    return torch.stack([one, frames[0, :, 0]], 1)


CENTRES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
NO_SECOND = {
    "EmbeddingBag, mean": (losses(lambda: Bags("mean")), "EmbeddingBag"),
    "EmbeddingBag, max": (losses(lambda: Bags("max")), "EmbeddingBag"),
    "CTCLoss": (losses(mlp, scored(ctc)), "CTC"),
    "cdist": (losses(mlp, scored(lambda m, x: -torch.cdist(m(x), CENTRES))), "cdist"),
    "cdist, p = 3": (losses(mlp, scored(lambda m, x: -torch.cdist(m(x), CENTRES, p=3))), "cdist"),
    "flash attention": (losses(Flash), "flash|attention"),
    "pdist": (losses(mlp, scored(lambda m, x: m(x) + F.pdist(m(x)).mean())), "pdist"),
    "multi_margin_loss": (
        losses(mlp, lambda h, g: ((lambda m, x, y: h(m, x, y) + F.multi_margin_loss(m(x).sin(), y)), g)),
        "multi_?margin",
    ),
    "segment_reduce": (
        losses(mlp, scored(lambda m, x: m(x) + torch.segment_reduce(m(x), "sum", lengths=torch.tensor([len(x)])))),
        "segment_reduce",
    ),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", NO_SECOND)
def test_what_has_no_second_derivative_is_named(name, engine):
    """Not by torch's bare "derivative for aten::_ctc_loss_backward is not implemented"."""
    build, word = NO_SECOND[name]
    assert not right_or_refused(build, ENGINES[engine], word)


# --- implicit engines ---


@pytest.mark.parametrize("engine", IMPLICIT)
@pytest.mark.parametrize("shift", [0.0, 1e4, "to 0"])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_whether_a_loop_has_settled_does_not_depend_on_the_level_of_g(shift, scale, engine):
    ridge = Ridge.random()
    level = -float(ridge.g(Vector(ridge.solution())).detach()) if shift == "to 0" else shift
    g = lambda m: scale * (ridge.g(m) + level)
    with bilevel.inner(ridge.model(), ridge.h, g, solver="gd", lr=0.3, engine=engine, check=False) as loop:
        for steps in (1, 4):
            loop.run(steps)
            with refused("settled|not come to|fixed point"):
                loop.hypergrad(ridge.lam)
        loop.run(400)
        assert relative(loop.hypergrad(ridge.lam), scale * ridge.hypergradient()) < 1e-5


@pytest.mark.parametrize("engine", IMPLICIT)
def test_a_loop_that_has_not_settled_where_g_is_flat(engine):
    """g does not change along the way that is left, and its gradient does: the hypergradient is 2.5 times too large."""
    lam = torch.tensor([1.0, 1.0], requires_grad=True)
    h = lambda m: (torch.tensor([1.0, 0.1]) * (m.w - lam).square()).sum() / 2
    model = Vector(torch.tensor([1.0, 3.0]))
    g = lambda m: (m.w[0] - 1) * m.w[1]
    with bilevel.inner(model, h, g, solver="gd", lr=0.5, engine=engine, check=False) as loop:
        loop.run(5)
        with refused("settled|not come to|fixed point"):
            loop.hypergrad(lam)
        loop.run(500)
        torch.testing.assert_close(loop.hypergrad(lam), torch.tensor([1.0, 0.0]), rtol=1e-5, atol=1e-8)


# --- processes ---


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a world of one
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part of it"])
@pytest.mark.parametrize("wrap", [ddp, fsdp, fully_sharded])
def test_parallel_models_without_a_group(wrap, part, engine):
    """Their reduction hangs on .backward(), which no block calls: each rank would go its own way."""
    lam = start()
    model = nn.Sequential(nn.Linear(3, 3), wrap(mlp())) if part else wrap(mlp())
    with refused("group=", "Distributed|DDP" if wrap is ddp else "FSDP|Sharded|fully_shard"):
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, engine=engine, check=False) as loop:
            loop.run(2, *data(), outer=data(5))
            loop.hypergrad(lam)


RANKS = """
import datetime, json, sys, torch, torch.distributed as dist, bilevel_plugin as bilevel
from torch import nn
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

def start(roll=0, shape=(3, 2)):
    model = nn.Linear(*shape)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).roll(i + roll).view_as(p))
    return model

def run(model=None, steps=2, rate=0.1, **options):
    model = model or start()
    lam = torch.zeros((), requires_grad=True)
    mean = lambda m, x: lam.exp() * m(x).square().mean()
    options = {"solver": "gd", "lr": rate, **options}
    with bilevel.inner(model, mean, mean, group=dist.group.WORLD, check=False, **options) as loop:
        for _ in range(steps):
            loop.step(torch.ones(4, 3), outer=torch.ones(4, 3))
        loop.hypergrad(lam)

def sgd(lr, **options):
    model = start()
    run(model, lr=None, optimizer=torch.optim.SGD(model.parameters(), lr, **options))

CASES = {
    "nothing": lambda: run(),
    "permuted weights": lambda: run(start(roll=rank)),
    "other rates": lambda: run(rate=0.1 * (1 + rank)),
    "other rates of an optimizer": lambda: sgd(0.1 * (1 + rank)),
    "other momentum": lambda: sgd(0.1, momentum=0.5 * (1 + rank) / 2),
    "other solvers": lambda: run(solver="gd" if rank else "penalty"),
    "one step more": lambda: run(steps=2 + rank),
    "one step less": lambda: run(steps=3 - rank),
    "other engines": lambda: run(engine="unroll" if rank else "reverse"),
}
for i, name in enumerate(list(CASES)[int(sys.argv[3]):]):
    dist.init_process_group("gloo", f"file://{folder}/{sys.argv[3]}.{i}", datetime.timedelta(seconds=10), 2, rank)
    try:
        CASES[name]()
        found = "nothing was wrong"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}.jsonl", "a") as file:
        print(json.dumps([name, found]), file=file)
    dist.destroy_process_group()
"""


DIFFER = {
    "permuted weights": "different weights",
    "other rates": "rate|different",
    "other rates of an optimizer": "rate|different|lr",
    "other momentum": "momentum|different",
    "other solvers": "solver|rate|different|weights",
    "one step more": "out of step|steps",
    "one step less": "out of step|steps",
    "other engines": "engine|out of step|different",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks was told. If one dies in a case, two others go on with the next."""
    folder, found = tmp_path_factory.mktemp("ranks"), [{}, {}]
    cases = ["nothing", *DIFFER]
    while any(len(rank) < len(cases) for rank in found):
        done = min(map(len, found))
        command = [sys.executable, "-W", "error", "-c", RANKS]
        where = {"stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[1]}
        both = [subprocess.Popen([*command, str(r), str(folder), str(done)], **where) for r in range(2)]
        errors = []
        for process in both:
            try:
                errors.append(process.communicate(timeout=60)[1])
            except subprocess.TimeoutExpired:
                process.kill()
                errors.append("it hung")
        for r, rank in enumerate(found):
            lines = (folder / f"{r}.jsonl").read_text().splitlines() if (folder / f"{r}.jsonl").exists() else []
            rank.update(json.loads(line) for line in lines)
        died = cases[min(map(len, found))] if any(len(rank) < len(cases) for rank in found) else None
        for rank, error in zip(found, errors, strict=True):
            if died is not None:
                rank.setdefault(died, f"the process died: {error}")
    return found


@pytest.mark.parametrize("case", DIFFER)
def test_ranks_that_differ_are_told_so_on_both(ranks, case):
    for rank in ranks:
        assert rank["nothing"] == "nothing was wrong"
        kind, _, message = rank[case].partition(": ")
        assert kind in ("RuntimeError", "ValueError"), rank[case]
        says(RuntimeError(message), (DIFFER[case],))


# --- gradcheck on honest problems ---


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.stack([x, x.sin(), x.cos(), x.tanh()], -1)
        return self.out(self.inside(x, x, x, need_weights=False)[0].mean(1))


HONEST = {
    "attention": Attention,
    "transformer": lambda: Rows(
        nn.Sequential(nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True))
    ),
    "weight norm": lambda: mlp(parametrizations.weight_norm(nn.Linear(4, 4))),
    "lstm": lambda: Rows(nn.LSTM(1, 4, batch_first=True)),
    "gru": lambda: Rows(nn.GRU(1, 4, batch_first=True)),
    "rnn": lambda: Rows(nn.RNN(1, 4, batch_first=True)),
    "orthogonal": orthogonal,
}


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("name", HONEST)
def test_gradcheck_of_what_is_right(name, rule):
    model, lam, batch, outer = HONEST[name](), start(), data(), data(5)
    how: dict[str, Any] = {"lr": RATE}
    if rule == "adam":
        how = {"optimizer": torch.optim.Adam(model.parameters(), 0.01)}
    before = everything(model)
    report = bilevel.gradcheck(model, *weighted(lam), lam, *batch, outer=outer, solver="gd", **how)
    assert report, str(report)
    unchanged(model, before)


def test_gradcheck_of_adam_in_float32():
    torch.set_default_dtype(torch.float32)
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    adam = torch.optim.Adam(model.parameters(), 0.01)
    report = bilevel.gradcheck(model, *weighted(lam), lam, *batch, outer=outer, solver="gd", optimizer=adam)
    assert "WRONG" not in str(report), str(report)  # undecided, for the rounding, it may be


# --- sparse gradients and batches ---


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_embedding_with_sparse_gradients(engine, momentum):
    optimizer = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=momentum)
    exact(losses(lambda: Words(sparse=True)), ENGINES[engine], bits=False, optimizer=optimizer)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_batches(layout, engine):
    def build(lam):
        model, _, _, (x, y), outer = losses(mlp)(lam)
        x = x * (x > 0)
        x = x.to_sparse() if layout == "coo" else x.to_sparse_csr()
        score = lambda m, x: m[1:]((x @ m[0].weight.t()) + m[0].bias)
        h = lambda m, x, y: (lam.sigmoid() * F.cross_entropy(score(m, x), y, reduction="none")).mean()
        return Case(model, h, lambda m, x, y: F.cross_entropy(m(x), y), (x, y), outer)

    exact(build, ENGINES[engine], bits=False)


# --- crashes, swallowed errors, riddles ---


@COMPILER
def test_the_ninth_compiled_model(compiler):
    """torch's compiler gives up after eight: that is caught, and the numbers stay right."""
    torch._dynamo.reset()
    for width in range(3, 12):
        lam, batch, outer = start(), data(), data(5)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        h, g = weighted(lam)
        got = attempt(model, h, g, lam, batch, outer, 2, engine=bilevel.Reverse(compile=True))
        assert relative(got, attempt(model, h, g, lam, batch, outer, 2)) < 1e-10


class Fragile(torch.autograd.Function):
    """A backward that fails where it is to be differentiated."""

    error: type[BaseException] = Mine

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise Fragile.error("in the second derivative")
        return grad * 2


@pytest.mark.parametrize("engine", ["reverse", "sqrt", "memory", "unroll"])
@pytest.mark.parametrize("error", [Mine, MemoryError, torch.OutOfMemoryError, KeyError, TypeError])
def test_errors_in_a_pullback_are_the_users_own(engine, error, monkeypatch):
    monkeypatch.setattr(Fragile, "error", error)
    model, lam = mlp(), start()
    h, g = weighted(lam)
    fragile = lambda m, x, y: h(m, x, y) + Fragile.apply(m(x)).square().mean()
    with pytest.raises(error, match=r"^'?in the second derivative"):
        attempt(model, fragile, g, lam, data(), data(5), engine=ENGINES[engine])


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError, ValueError, KeyboardInterrupt])
def test_errors_of_h_in_a_replay_are_the_users_own(engine, error):
    model, lam, calls = mlp(), start(), itertools.count(1)
    h, g = weighted(lam)

    def failing(m, x, y):
        if next(calls) > STEPS:
            raise error("as the user wrote it")
        return h(m, x, y)

    with pytest.raises(error, match=r"^as the user wrote it"):
        attempt(model, failing, g, lam, data(), data(5), engine=ENGINES[engine])


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit's own
def test_torch_jit(how, engine):
    make = lambda: torch.jit.trace(mlp(), torch.randn(2, 3)) if how == "trace" else torch.jit.script(mlp())
    assert not right_or_refused(losses(make), ENGINES[engine], "jit|script|trace")


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("of", ["lr=", "a solver", "an optimizer"])
def test_a_rate_of_shape_1(of, engine):
    """Right, with a gradient of that shape; or a sentence."""
    build = lambda _: losses(mlp)(start().detach())
    rate = torch.tensor([RATE], requires_grad=True)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(None)
    how: dict[str, Any] = {
        "lr=": {"lr": rate},
        "a solver": {"solver": bilevel.GD(rate), "lr": None},
        "an optimizer": {"optimizer": torch.optim.SGD(model.parameters(), rate), "lr": None},
    }[of]
    by_number = lambda: (
        plain(build, rate, optimizer=lambda m: torch.optim.SGD(m.parameters(), float(rate.detach()))).value
    )
    try:
        got = attempt(model, h, g, rate, batch, outer, engine=ENGINES[engine], **how)
    except REFUSALS as error:
        says(error, ("scalar|shape",))
    else:
        assert got.shape == (1,)
        assert float(got) == pytest.approx(differences(by_number, rate, torch.ones(1)), rel=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_under_tasks(kind):
    """Right, or a sentence; what torch.vmap has to say of them is none."""
    torch.manual_seed(0)
    model, lam = Rows(kind(1, 4, batch_first=True)), torch.tensor(0.3, requires_grad=True)
    h = lambda m, x, y: lam.exp() * F.cross_entropy(m(x), y)
    g = lambda m, x, y: F.cross_entropy(m(x), y)
    x, y = (torch.stack(parts) for parts in zip(data(), data(), strict=True))
    try:
        got = attempt(model, h, g, lam, (x, y), (x, y), 2, tasks=2)
    except REFUSALS as error:
        says(error, ("LSTM|GRU|RNN|recurrent", "tasks"))
    else:
        apart = [attempt(model, h, g, lam, (x[i], y[i]), (x[i], y[i]), 2) for i in range(2)]
        torch.testing.assert_close(got, apart[0] + apart[1])


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("retain", [False, True])
def test_backward_inside_h(engine, retain):
    """The line above `return loss` in the plain loop: there is nothing left to go back through."""
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    h, g = weighted(lam)

    def stepping(m, x, y):
        loss = h(m, x, y)
        loss.backward(retain_graph=retain)
        return loss

    try:
        got = attempt(model, stepping, g, lam, batch, outer, engine=ENGINES[engine], but="grad")
    except REFUSALS as error:
        says(error, (r"backward",))
    else:
        assert retain
        torch.testing.assert_close(got, attempt(model, h, g, lam, batch, outer), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "options", [{"lr": "0.5"}, {"solver": ("GD", "0.5")}, {"lr": [0.5]}, {"lr": None, "clip": "1"}]
)
def test_options_of_the_wrong_kind(options):
    lam = start()
    with refused("number|float|rate|clip"):
        if "solver" in options:
            options = {"solver": getattr(bilevel, options["solver"][0])(options["solver"][1]), "lr": None}
        attempt(mlp(), *weighted(lam), lam, data(), data(5), 1, **options)


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


# --- not in the table: the model is changed in the block ---


def by_load_state_dict(m):
    m.load_state_dict({n: 0.9 * t for n, t in m.state_dict().items()})


def by_vector(m):
    nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(m.parameters()).detach(), m.parameters())


def by_other_memory(m):
    m[0].weight.data = m[0].weight.data * 0.9


def by_numpy(m):
    m[0].weight.detach().numpy()[:] *= 0.9


def by_no_grad(m):
    with torch.no_grad():
        m[0].weight.mul_(0.9)


def by_init(m):
    m.apply(lambda layer: layer.reset_parameters() if isinstance(layer, nn.Linear) else None)


def by_one_number(m):
    m[2].bias.data[0] += 1e-3


BY_HAND = [by_load_state_dict, by_vector, by_other_memory, by_numpy, by_no_grad, by_init, by_one_number]


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize(("change", "at"), [*((change, 1) for change in BY_HAND), (by_no_grad, STEPS - 1)])
def test_weights_that_are_changed_by_hand_in_the_block(change, at, engine):
    """Its derivative is not known, and a replay would not have it."""
    lam, model = start(), mlp()
    between = lambda k: change(model) if k == at else None
    but = "memory" if change in (by_other_memory, by_vector) else ""
    with refused("by hand|changed"):
        attempt(model, *weighted(lam), lam, data(), data(5), engine=ENGINES[engine], between=between, but=but)


def by_half(m):
    m.half()


def by_float(m):
    m.to(torch.float32)


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("change", [by_half, by_float])
def test_a_model_of_another_type_in_the_block(change, engine):
    lam, model = start(), mlp()
    between = lambda k: change(model) if k == 1 else None
    with refused("dtype|type|torch.float|by hand|changed"):
        attempt(model, *weighted(lam), lam, data(), data(5), engine=ENGINES[engine], between=between, but="memory")


def replace_layer(m):
    m[2] = nn.Linear(4, 2)


def replace_parameter(m):
    m[2].weight = nn.Parameter(m[2].weight.detach().clone())


def add_parametrization(m):
    parametrizations.orthogonal(m[2])


def drop_bias(m):
    m[2].bias = None


def add_layer(m):
    m.append(nn.Linear(2, 2))


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize(
    ("change", "at"),
    [
        (replace_layer, 1),
        (replace_parameter, 1),
        (add_parametrization, 1),
        (drop_bias, 1),
        (add_layer, 1),
        (replace_layer, STEPS - 1),
    ],
)
def test_other_parameters_in_the_block(change, at, engine):
    lam = start()
    model, h, g, batch, outer = losses(mlp)(lam)
    with refused("replaced|parameters|changed|structure"):
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
            for k in range(STEPS):
                loop.step(*batch, outer=outer)
                if k == at:
                    change(model)
            loop.hypergrad(lam)


@torch.no_grad()
def evaluate_the_average(k, model, _):
    """As timm and diffusers do: the average into the model, a look at it, and the weights back."""
    stored = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.9)
    model(torch.ones(2, 3))
    for p, w in zip(model.parameters(), stored, strict=True):
        p.copy_(w)


DOES = {
    "to": lambda k, m, o: m.to(torch.float64).double().train().requires_grad_(True),
    "zero_grad": lambda k, m, o: (m.zero_grad(), o.zero_grad()),
    "backward": lambda k, m, o: m(torch.ones(2, 3)).sum().backward(),
    "deepcopy": lambda k, m, o: copy.deepcopy(m)(torch.ones(2, 3)).sum().backward(),
    "an average": evaluate_the_average,
    "look": lambda k, m, o: (m.state_dict(keep_vars=True), list(m.parameters()), o.state_dict()),
    "seed": lambda k, m, o: torch.manual_seed(k),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", DOES)
def test_what_the_body_may_do(name, engine):
    """None of it changes the loop."""
    exact(losses(mlp), ENGINES[engine], between=DOES[name], but="grad" if name == "backward" else "")


# --- not in the table: what losses may do ---


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


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("wrap", FREE)
def test_what_a_loss_may_do(wrap, engine):
    exact(losses(mlp, wrap), ENGINES[engine])


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("wrap", [grad_of_func, frozen_for_a_while])
def test_what_a_loss_may_do_or_is_told_that_it_may_not(wrap, engine):
    right = right_or_refused(losses(mlp, wrap), ENGINES[engine], "torch.func|requires_grad|frozen")
    assert right == ((wrap, engine) != (frozen_for_a_while, "unroll"))


@pytest.mark.parametrize("engine", SOME)
def test_a_copy_of_the_model_made_inside_h(engine):
    """The copy has weights of its own: h does not depend on those of the loop."""
    lam = start()
    h, g = weighted(lam)
    with refused("deepcopy|copy|does not depend on the weights"):
        attempt(mlp(), lambda m, x, y: h(copy.deepcopy(m), x, y), g, lam, data(), data(5), engine=ENGINES[engine])


def counted(h, g):
    calls = itertools.count(1)
    return (lambda m, x, y: h(m, x, y) / next(calls)), g


class Warm(nn.Module):
    """A temperature that a plain attribute counts up, in training mode."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.1 * self.calls)


def generated(h, g):
    source = torch.Generator().manual_seed(0)
    return (lambda m, x, y: h(m, x + torch.randn(x.shape, generator=source), y)), g


STATEFUL: dict[str, Any] = {
    "a counter": losses(mlp, counted),
    "a counter in the model": losses(lambda: mlp(Warm()), lambda h, g: (h, lambda m, *b: g(m.eval(), *b))),
    "a generator of its own": losses(mlp, generated),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", STATEFUL)
def test_losses_with_a_state_of_their_own(name, engine):
    right = right_or_refused(STATEFUL[name], ENGINES[engine], "changed|run again|counter")
    assert right == (engine != "reverse")  # which runs each step again


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("lazy", [lambda x: iter([x]), lambda x: (x for _ in range(1)), lambda x: map(torch.sin, [x])])
def test_a_batch_that_can_be_read_once(lazy, engine):
    """A generator in the batch is empty in a replay. StopIteration would be a riddle."""
    torch.manual_seed(0)
    model, lam, (x, y), outer = mlp(), start(), data(), data(5)
    h, g = weighted(lam)
    loss = lambda m, it, y: h(m, next(it), y)
    expected = attempt(model, h, g, lam, (next(lazy(x)), y), outer)
    try:
        with bilevel.inner(model, loss, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
            for _ in range(STEPS):
                loop.step(lazy(x), y, outer=outer)
            got = loop.hypergrad(lam)
    except REFUSALS as error:
        says(error, ("generator|iterator|run again|once",))
    else:
        torch.testing.assert_close(got, expected)


SCHEDULES = {
    "dropout": (lambda: mlp(nn.Dropout(0.5)), lambda k, m, o: setattr(m[1], "p", 0.5 / (k + 1))),
    "another activation": (mlp, lambda k, m, o: m.__setitem__(1, nn.Softplus() if k % 2 else nn.Tanh())),
    "an attribute": (lambda: mlp(nn.CELU()), lambda k, m, o: setattr(m[1], "alpha", 1.0 + k)),
    "a method": (mlp, lambda k, m, o: setattr(m[1], "forward", torch.sin if k % 2 else torch.tanh)),
}


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_something_in_the_model(name, engine):
    """As the plain loop does, or noticed where a step is run again. (What the user changed is not undone.)"""
    make, change = SCHEDULES[name]
    build, between = (
        losses(make, lambda h, g: (h, lambda m, *b: g(m.eval(), *b))),
        lambda k, m, o: change(k, m.train(), o),
    )
    try:
        found = block(
            build,
            lam := start(),
            ENGINES[engine],
            between=between,
            but="modules" if name == "another activation" else "",
        )
    except REFUSALS as error:
        says(error, ("changed|run again",))
    else:
        judge(found, build, lam, bits=False, between=between)


@pytest.mark.parametrize(
    "lazy", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(3, 2))]
)
def test_lazy_modules(lazy):
    """They have no weights yet; their first call makes them."""
    model, lam = lazy(), start()
    with refused("[Ll]azy|uninitialized|first"):
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, check=False) as loop:
            loop.step(*data(), outer=data(5))
    model(data()[0])
    attempt(model, *weighted(lam), lam, data(), data(5))


class Remembering(nn.Module):
    """Makes a buffer, a plain tensor and a table in its first call, as positional encodings are made."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, x.shape[1]))
            self.plain = torch.linspace(1, 2, x.shape[1])
        return x * self.plain + self.table


@pytest.mark.parametrize("engine", SOME)
def test_a_buffer_that_is_made_in_the_first_call(engine):
    lam = start()
    build = losses(lambda: mlp(Remembering()))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    try:
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
            loop.run(STEPS, *batch, outer=outer)
            value, grad = float(loop.value), loop.hypergrad(lam)
    except REFUSALS as error:
        says(error, ("buffer",))
    else:
        assert value == pytest.approx(plain(build, lam).value, rel=1e-12)
        v = torch.randn(SAMPLES)
        assert abs(float(grad @ v) - slope(build, lam, v)) < 1e-6 * float(grad.norm())


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("how", ["of h and g", "twice", "expanded", "a view"])
def test_batches_that_share_memory(how, engine):
    def build(lam):
        model, h, g, (x, y), outer = losses(mlp)(lam)
        two = lambda m, x, z, y: h(m, x + z, y)
        rows = torch.randn(1, 3).expand(SAMPLES, 3)
        many = torch.randn(2 * SAMPLES, 3)
        return {
            "of h and g": Case(model, h, g, (x, y), (x, y)),
            "twice": Case(model, two, g, (x, x, y), outer),
            "expanded": Case(model, two, g, (x, rows, y), outer),
            "a view": Case(model, two, g, (many[::2], many[1::2], y), (many, torch.cat([y, y]))),
        }[how]

    exact(build, ENGINES[engine])


@contextlib.contextmanager
def keeping(model):
    before = everything(model)
    yield
    unchanged(model, before)


@pytest.mark.parametrize("name", ["state_dict", "forward"])
def test_hooks_of_a_module_are_called_as_in_the_plain_loop(name):
    """By the user's own calls in the block, with w_k in the model; a replay calls forward hooks again, and no other."""
    model, lam, seen = mlp(), start(), []
    first = model[2].bias.detach().clone()
    if name == "state_dict":
        model.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.append(state["2.bias"].clone()))
    else:
        model[2].register_forward_hook(lambda m, args, out: seen.append(m.bias.detach().clone()))
    with keeping(model), bilevel.inner(model, *weighted(lam), solver="gd", lr=RATE, check=False) as loop:
        loop.run(2, *data(), outer=data(5))
        seen.clear()
        _ = model.state_dict() if name == "state_dict" else model(torch.ones(1, 3))
        assert len(seen) == 1
        assert torch.equal(seen[0], loop.weights["2.bias"])
        assert not torch.equal(seen[0], first)
        loop.hypergrad(lam)
