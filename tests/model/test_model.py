"""The ways in for weights give the same numbers: the model's own parameters, our swap, torch.func.functional_call."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, IMPLICIT, OWN, SWAPPED
from plain_loop import (
    MODELS,
    RATE,
    SAMPLES,
    STEPS,
    Case,
    assert_same,
    attempt,
    block,
    data,
    everything,
    exact,
    losses,
    mlp,
    orthogonal,
    plain,
    right_or_refused,
    sgd,
    slope,
    start,
    tensors,
    train_and_eval,
    unchanged,
)
from problems import refused, refused_if, weighted
from real_models import ARCHITECTURES, problem
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bilevel_plugin as bilevel
from bilevel_plugin.guards.opening import inner_parameters
from bilevel_plugin.kernels.replace import replaced
from bilevel_plugin.model.model import Model
from bilevel_plugin.step.piece import value_of

pytestmark = pytest.mark.usefixtures("double")


class Host(nn.Module):
    """Calls a loss with the model as a child, so that functional_call reaches whatever the loss does with it."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch):
        return self.loss(self.model, *batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_ways_in_for_weights(name):
    """A loss and its gradient at other weights, bit for bit, on every kind of model of the tests."""
    model, h, _, _, batch, _ = problem(name)
    torch.manual_seed(3)
    found = []
    w = {n: (p.detach() + 0.1 * torch.randn_like(p)) for n, p in model.named_parameters() if p.requires_grad}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for way in ("own parameters", "swapped", "functional_call by hand"):
        twin = copy.deepcopy(model)
        state = {n: x.clone().requires_grad_() for n, x in w.items()}
        torch.manual_seed(5)
        bound = Model(twin, inner_parameters(twin, ()), graphs_are_kept=way == "swapped")
        if way == "functional_call by hand":
            named = {f"model.{n}": x for n, x in {**state, **{n: b.clone() for n, b in buffers.items()}}.items()}
            with replaced():
                loss = functional_call(Host(twin, h), named, batch)
                leaves = list(state.values())
                grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        else:

            def differentiated(at, bound=bound):
                loss = value_of(bound, "h", h, at, batch)
                return loss, torch.autograd.grad(loss, list(at.weights.values()), allow_unused=True)

            loss, grads = bound.at({**state, **buffers}, buffers, differentiated, twice=True)
        found.append([loss.detach(), *grads])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


# --- the model holds the current weights ---


@pytest.mark.parametrize("engine", [*ENGINES, *IMPLICIT])
def test_the_model_holds_the_weights_of_each_step(engine):
    build, lam, probe = losses(mlp), start(), torch.randn(2, 3)
    outputs: list[Tensor] = []
    plain(build, lam, between=lambda k, m, _: outputs.append(m(probe).detach()))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before, parameters = everything(model), list(model.parameters())
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine={**ENGINES, **IMPLICIT}[engine], check=False) as loop:
        for expected in outputs:
            loop.step(*batch, outer=outer)
            torch.testing.assert_close(model(probe), expected, rtol=1e-12, atol=1e-14)
            assert torch.equal(model(probe), loop(probe))
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            for n, t in model.state_dict().items():
                assert torch.equal(t, loop.weights[n])
            assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    unchanged(model, before)


def test_with_tasks_the_model_keeps_its_weights():
    model, x = mlp(), torch.randn(2, 5, 3)
    before, loss = everything(model), lambda m, x: m(x).square().mean()
    with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, tasks=2, check=False) as loop:
        for _ in range(3):
            loop.step(x, outer=x)
            unchanged(model, before)
            assert loop(x).shape == (2, 5, 2)
            assert not torch.allclose(loop(x)[0], model(x[0]))
            unchanged(model, before)
    unchanged(model, before)


def test_averages_targets_and_evaluations_in_the_block(engine):
    """EMA, a copy of the best, a target network and the user's evaluate(model), each after each step."""
    probe = torch.randn(4, 3)

    def bystanders():
        seen: dict[str, list[Any]] = {"ema": [], "target": [], "loss": [], "copy": [], "saved": []}
        kept: dict[str, Any] = {}

        @torch.no_grad()
        def evaluate(model):
            model.eval()
            loss = float(model(probe).square().mean())
            model.train()
            return loss

        def between(k, model, _):
            if not kept:
                kept["target"] = copy.deepcopy(model)
                kept["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            kept["ema"].update_parameters(model)
            if k % 2:
                kept["target"].load_state_dict(model.state_dict())
            seen["loss"].append(evaluate(model))
            seen["ema"].append(nn.utils.parameters_to_vector(kept["ema"].parameters()).detach())
            seen["target"].append(kept["target"].eval()(probe).detach())
            seen["copy"].append(copy.deepcopy(model).eval()(probe).detach())
            seen["saved"].append(torch.cat([t.flatten().double() for t in model.state_dict().values()]))

        return seen, between

    build = losses(MODELS["batchnorm and dropout"], train_and_eval)
    lam = start()
    expected, between = bystanders()
    reference = plain(build, lam, between=between)
    seen, between = bystanders()
    found = block(build, lam, engine, between=between)
    for name in expected:
        for a, b in zip(seen[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")
    assert_same(found.state, reference.state, engine == "reverse")
    v = torch.ones(SAMPLES)
    how = {"between": lambda k, m, _: bystanders()[1](k, m, None)}
    assert abs(float(found.grad @ v) - slope(build, lam, v, **how)) < 1e-6 * float(found.grad.norm())


def test_a_target_network_that_h_reads_trains_as_in_the_plain_loop_and_is_noticed():
    """h reads a copy of w_k that is renewed in the block: another path to λ, of which no engine knows."""
    targets: dict[int, nn.Module] = {}

    def wrap(h, g, model):
        target = targets[id(model)] = copy.deepcopy(model).requires_grad_(False)
        return (lambda m, x, y: h(m, x, y) + (m(x) - target(x)).square().mean()), g

    build, lam = losses(mlp, wrap), start()
    renew = lambda k, m, _: targets[id(m)].load_state_dict(m.state_dict())
    expected = plain(build, lam, between=renew)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), check=False) as loop:
        for k in range(STEPS):
            loop.step(*batch, outer=outer)
            renew(k, model, None)
        assert_same(tensors(model), expected.state)
        with refused("step k = 4, run again for the hypergradient"):
            loop.hypergrad(lam)


def test_a_loss_of_the_model_itself_in_the_block(engine):
    """hypergrad(loss=) of what model(x) gave: as from loop(x), or refused where the model is not what has the graph."""
    build, lam = losses(mlp), start()
    model, h, g, batch, (xv, yv) = build(lam)
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        loop.run(STEPS, *batch, outer=(xv, yv))
        expected = loop.hypergrad(lam, loss=F.cross_entropy(loop(xv), yv))
        torch.testing.assert_close(expected, loop.hypergrad(lam))
        swapped = engine in SWAPPED.values()
        with refused_if(swapped, "loss= uses the parameter", "engine='reverse'"):
            got = loop.hypergrad(lam, loss=F.cross_entropy(model(xv), yv))
        if not swapped:
            torch.testing.assert_close(got, expected)


# --- weights that are changed or looked at by hand ---


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB"), "unroll"])
@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_weights_changed_by_hand(parts, at, data, engine):
    """A projection, say: w_k is no longer what step k gave, and its derivative is not known."""
    model, h, g, lam, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        if at:
            loop.run(at, x, y, outer=(x, y))
        weight = loop.weights["0.weight"]
        with torch.no_grad():
            (weight.data if data else weight).clamp_(-0.1, 0.1)
        with pytest.raises(RuntimeError, match=rf"the weight '0.weight' was changed by hand after step k = {at}"):
            loop.hypergrad(lam, outer=(x, y)) if at == 5 else loop.step(x, y, outer=(x, y))


def test_weights_that_are_looked_at(parts):
    model, h, g, lam, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        for _ in range(3):
            loop.step(x, y, outer=(x, y))
            assert all(w.isfinite().all() for w in loop.weights.values())
        loop.hypergrad(lam)


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
    exact(ALIASES["views"], OWN[engine], bits=False)


@pytest.mark.parametrize("engine", SWAPPED)
@pytest.mark.parametrize("name", ALIASES)
def test_engines_that_swap_weights_refuse_what_is_read_past_the_model(name, engine):
    assert not right_or_refused(ALIASES[name], SWAPPED[engine], "uses the parameter .* by a reference", "reverse")


@pytest.mark.parametrize("name", ["a list", "a list, in g", "a module's list"])
def test_tasks_refuse_what_is_read_past_the_model(name):
    lam = start()
    model, h, g, batch, _ = ALIASES[name](lam)
    batch = [torch.stack([b, b]) for b in batch]
    with refused("uses the parameter .* by a reference", "tasks"):
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


@pytest.mark.parametrize("name", [n for n in HOOKS if n not in FIRES_TWICE])
def test_hooks_of_parameters_and_modules(name, engine):
    right = right_or_refused(losses(mlp, HOOKS[name]), engine, "hook|run again")
    assert right == (name not in ("after accumulation", "counting"))  # a hook with a state of its own is refused


@pytest.mark.parametrize("name", FIRES_TWICE)
def test_hooks_on_the_way_back_are_refused_or_warned_of(name, engine):
    """They fire in the second derivative too, where they have no business: wrong in any double backward of torch."""
    assert not right_or_refused(losses(mlp, HOOKS[name]), engine, "hook|run again", check="first")


def test_forward_hooks_are_part_of_the_loss(engine):
    exact(losses(mlp, HOOKS["forward"]), engine)


# --- λ in a buffer, parametrizations ---


def in_a_buffer(function):
    def build(lam):
        model, _, g, batch, outer = losses(mlp)(lam)
        model.register_buffer("weight_of_samples", function(lam))
        weigh = lambda m, x, y: (m.weight_of_samples * F.cross_entropy(m(x), y, reduction="none")).mean()
        return Case(model, weigh, g, batch, outer)

    return build


@pytest.mark.parametrize(
    ("function", "right"), [(lambda lam: lam, True), (torch.sigmoid, False)], ids=["a leaf", "with a graph"]
)
def test_an_outer_variable_in_a_buffer(function, right, engine):
    assert right_or_refused(in_a_buffer(function), engine, "buffer") == right


def test_cached_parametrizations_around_the_block(engine):
    """The layer's weight is computed once, at w_0, and kept."""
    with refused("cached"), parametrize.cached():
        block(losses(orthogonal), start(), engine)


def test_cached_parametrizations_inside_h(engine):
    def wrap(h, g):
        def cached(m, x, y):
            with parametrize.cached():
                return h(m, x, y) + m(2 * x).square().mean()

        return cached, g

    exact(losses(orthogonal, wrap), engine, bits=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_a_sparse_buffer(layout, engine):
    """The adjacency of a graph network; a change of it in the block is noticed."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
            adjacency = torch.eye(4) + torch.eye(4).roll(1, 0)
            self.register_buffer("adjacency", adjacency.to_sparse(layout=layout))

        def forward(self, x):
            return self.out((self.adjacency @ self.first(x).tanh().T).T)

    exact(losses(Graph), engine, bits=False)
    model = Graph()
    loss = lambda m: (m(torch.ones(2, 3)).square().sum(), m.out.weight)
    with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, engine=engine) as loop:
        loop.step()
        model.adjacency.values().mul_(2) if layout != torch.sparse_coo else model.adjacency._values().mul_(2)
        with refused("the buffer 'adjacency' was changed in the block"):
            loop.step()


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


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_trained_changes_in_the_loop(name, engine):
    make, optimizer, between = CHANGES[name]
    groups = name in ("add_param_group, trainable", "a group removed", "a parameter removed", "groups swapped")
    words = "param_groups of the optimizer have changed" if groups else "requires_grad was set"
    assert not right_or_refused(losses(make), engine, words, optimizer=optimizer, between=between)


@pytest.mark.parametrize("name", ["frozen", "unfrozen"])
def test_what_is_trained_changes_in_the_loop_of_a_rate(name, engine):
    make, _, between = CHANGES[name]
    assert not right_or_refused(losses(make), engine, "requires_grad was set", optimizer=None, between=between)


# --- the model is changed in the block ---


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


@pytest.mark.parametrize(("change", "at"), [*((change, 1) for change in BY_HAND), (by_no_grad, STEPS - 1)])
def test_weights_that_are_changed_by_hand_in_the_block(change, at, engine):
    """Its derivative is not known, and a replay would not have it."""
    lam, model = start(), mlp()
    between = lambda k: change(model) if k == at else None
    but = "memory" if change in (by_other_memory, by_vector) else ""
    with refused(rf"the weight .* was changed by hand after step k = {at + 1}"):
        attempt(model, *weighted(lam), lam, data(), data(5), engine=engine, between=between, but=but)


def by_half(m):
    m.half()


def by_float(m):
    m.to(torch.float32)


@pytest.mark.parametrize("change", [by_half, by_float])
def test_a_model_of_another_type_in_the_block(change, engine):
    lam, model = start(), mlp()
    between = lambda k: change(model) if k == 1 else None
    with refused("the weight .* was changed by hand after step k = 2"):
        attempt(model, *weighted(lam), lam, data(), data(5), engine=engine, between=between, but="memory")


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
    with refused(rf"in the block, after step k = {at + 1}", "replaced"):
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
            for k in range(STEPS):
                loop.step(*batch, outer=outer)
                if k == at:
                    change(model)
            loop.hypergrad(lam)


# --- hooks of modules that observe ---


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
