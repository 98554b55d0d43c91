"""What a step leaves for the next besides the weights: running statistics are state, other buffers are told of."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, IMPLICIT
from plain_loop import (
    RATE,
    SAMPLES,
    STEPS,
    Case,
    attempt,
    data,
    everything,
    exact,
    losses,
    mlp,
    plain,
    right_or_refused,
    sgd,
    slope,
    start,
    train_and_eval,
    unchanged,
)
from problems import differences, hypergrad, refused, relative, weighted
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


# --- buffers are state ---


def normed(norm: Callable[[], nn.Module], *rest: int) -> Callable[[], nn.Module]:
    """A model with the layer on (batch, 4, *rest), whose running statistics have a history."""

    def make() -> nn.Module:
        width = 4 * int(torch.tensor(rest or (1,)).prod())
        layer = norm()
        model = nn.Sequential(
            nn.Linear(3, width), nn.Unflatten(1, (4, *rest)), layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2)
        )
        for _ in range(3):
            model(torch.randn(4, 3))
        return model

    return make


NORMS = {
    "1d": normed(lambda: nn.BatchNorm1d(4)),
    "1d, momentum 0.5": normed(lambda: nn.BatchNorm1d(4, momentum=0.5)),
    "1d, momentum 1": normed(lambda: nn.BatchNorm1d(4, momentum=1.0)),
    "1d, no momentum": normed(lambda: nn.BatchNorm1d(4, momentum=None)),
    "1d, not affine": normed(lambda: nn.BatchNorm1d(4, momentum=0.5, affine=False)),
    "1d over time": normed(lambda: nn.BatchNorm1d(4, momentum=0.5), 3),
    "2d": normed(lambda: nn.BatchNorm2d(4), 2, 2),
    "2d, no momentum, not affine": normed(lambda: nn.BatchNorm2d(4, momentum=None, affine=False), 1, 2),
    "3d, momentum 0.5": normed(lambda: nn.BatchNorm3d(4, momentum=0.5), 1, 2, 2),
    "3d, no momentum": normed(lambda: nn.BatchNorm3d(4, momentum=None), 2, 1, 2),
    "no statistics": normed(lambda: nn.BatchNorm1d(4, track_running_stats=False)),
    "sync": normed(lambda: nn.SyncBatchNorm(4, momentum=0.5)),
    "instance 1d": normed(lambda: nn.InstanceNorm1d(4, momentum=0.5, track_running_stats=True), 3),
    "instance 2d, affine": normed(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 2, 2),
    "instance 3d": normed(lambda: nn.InstanceNorm3d(4, momentum=0.5, track_running_stats=True), 1, 2, 2),
    "two layers": lambda: mlp(nn.BatchNorm1d(4, momentum=0.5), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "own class": normed(lambda: type("Mine", (nn.BatchNorm1d,), {})(4, momentum=0.5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_state(name, engine):
    """h in training and g in eval mode: λ moves the statistics, and g reads them."""
    exact(losses(NORMS[name], train_and_eval), engine)


def test_running_statistics_matter():
    """What would be missed: with one step, all of the first layer's influence on them."""
    found = exact(losses(NORMS["1d, momentum 0.5"], train_and_eval), steps=2)
    frozen = exact(losses(NORMS["1d, momentum 0.5"], lambda h, g: (h, lambda m, *b: g(m.train(), *b))), steps=2)
    assert relative(found.grad, frozen.grad) > 0.05


BATCHNORM = NORMS["1d, momentum 0.5"]


def two_calls(h, g):
    return train_and_eval(lambda m, x, y: h(m, x, y) + h(m, 2 * x + 1, y) / 2, g)


def one_call_in_eval(h, g):
    return train_and_eval(lambda m, x, y: h(m, x, y) + h(m.eval(), x + 1, y), g)


def shared_by_h_and_g(h, g):
    return (lambda m, *b: h(m.train(), *b)), lambda m, *b: g(m.eval(), *b) + 0 * m.train()(b[0]).sum()


@pytest.mark.parametrize("wrap", [two_calls, one_call_in_eval, shared_by_h_and_g])
def test_running_statistics_in_losses_of_several_calls(wrap, engine):
    exact(losses(BATCHNORM, wrap), engine)


def test_a_model_that_is_in_eval_mode_throughout(engine):
    """Frozen statistics: they enter as they are, and stay."""
    build = losses(lambda: BATCHNORM().eval())
    found = exact(build, engine)
    torch.manual_seed(0)
    model = build(start()).model
    assert torch.equal(found.state["2.running_mean"], model[2].running_mean)
    assert int(found.state["2.num_batches_tracked"]) == 3


def test_steps_in_both_modes(engine):
    """Every other step is in eval mode and reads what the one before wrote: statistics in the middle of the loop."""
    modes = lambda k, m, _: m.train(k % 2 == 1)
    exact(losses(BATCHNORM, lambda h, g: (h, lambda m, *b: g(m.eval(), *b))), engine, between=modes)


@pytest.mark.parametrize("how", ["closed over", "in the batch"])
def test_learned_data_reach_g_through_the_statistics(how, engine):
    """λ is the data of h: after one step of rate 0, g depends on them by the statistics alone."""
    lam = torch.randn(SAMPLES, 3, requires_grad=True)

    def build(x):
        model, y, outer = BATCHNORM(), torch.randint(2, (SAMPLES,)), data(5)
        h = lambda m, x, y: F.cross_entropy(m.train()(x), y)
        g = lambda m, x, y: F.cross_entropy(m.eval()(x), y)
        if how == "closed over":
            return Case(model, lambda m, y: h(m, x, y), g, (y,), outer)
        return Case(model, h, g, (x, y), outer)

    exact(build, engine, lam=lam, steps=2)
    found = exact(build, engine, lam=lam, steps=1, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0))
    assert float(found.grad.norm()) > 1e-3


@pytest.mark.parametrize("engine", ["reverse", "sqrt", "memory", "unroll"])
def test_initial_weights_reach_g_through_the_statistics(engine):
    """Of w_0, after a step: the first layer's output is what the statistics are of."""
    build = losses(BATCHNORM, train_and_eval)
    model, h, g, batch, outer = build(start())
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
        loop.run(2, *batch, outer=outer)
        grads = loop.hypergrad(model)

    def value() -> float:
        other = copy.deepcopy(model)
        stepper = sgd(other)
        for _ in range(2):
            stepper.zero_grad()
            h(other, *batch).backward()
            stepper.step()
        return float(g(other, *outer).detach())

    for name in ("0.weight", "2.weight", "5.bias"):
        v = torch.randn_like(grads[name])
        expected = differences(value, model.get_parameter(name), v)
        assert abs(float((grads[name] * v).sum()) - expected) < 1e-6 * float(grads[name].norm())


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll"])
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_running_statistics_under_other_optimizers(rule, engine):
    rules = {
        "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
        "adam": lambda m: torch.optim.Adam(m.parameters(), 0.05, eps=1e-3),
    }
    exact(losses(BATCHNORM, train_and_eval), ENGINES[engine], bits=False, optimizer=rules[rule])


def test_running_statistics_under_bigsam(engine):
    """g in eval mode in every step, with a toggle of its own: statistics are read and written in turns."""
    lam = start()

    def toggled(model, x, y):
        model.eval()
        try:
            return F.cross_entropy(model(x), y)
        finally:
            model.train()

    build = losses(BATCHNORM, lambda h, g: (h, toggled))

    def by_hand() -> float:
        torch.manual_seed(0)
        model, h, g, batch, outer = build(lam.detach())
        for k in (1, 2, 3):
            alpha = k**-0.25
            loss = RATE * alpha * h(model, *batch)
            loss = loss if k == 1 else loss + RATE * (1 - alpha) * g(model, *outer)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), grads, strict=True):
                    p -= d
        with torch.no_grad():
            return float(g(model, *outer))

    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(model, h, g, solver="bigsam", lr=RATE, engine=engine, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        assert float(loop.value) == pytest.approx(by_hand(), rel=1e-12)
        grad = loop.hypergrad(lam)
    v = torch.randn(SAMPLES)
    assert abs(float(grad @ v) - differences(by_hand, lam, v)) < 1e-6 * float(grad.norm())


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
@pytest.mark.parametrize("name", ["1d, momentum 0.5", "1d, no momentum", "instance 1d"])
def test_running_statistics_of_tasks(name, engine):
    """Each task has its own: the sum of plain loops, one for each."""
    torch.manual_seed(0)
    model, lam = NORMS[name](), torch.tensor(0.3, requires_grad=True)
    before = everything(model)
    h = lambda m, x, y: lam.exp() * F.cross_entropy(m.train()(x), y)
    g = lambda m, x, y: F.cross_entropy(m.eval()(x), y)
    (x, y), (xv, yv) = ((torch.stack(parts) for parts in zip(data(), data(), strict=True)) for _ in range(2))
    x[1] += 2

    def by_hand() -> float:
        total = 0.0
        for i in range(2):
            one = copy.deepcopy(model)
            stepper = sgd(one)
            for _ in range(3):
                stepper.zero_grad()
                h(one, x[i], y[i]).backward(inputs=list(one.parameters()))
                stepper.step()
            total += float(g(one, xv[i], yv[i]).detach())
        return total

    with bilevel.inner(model, h, g, solver="gd", lr=RATE, tasks=2, engine=ENGINES[engine], check=False) as loop:
        loop.run(3, x, y, outer=(xv, yv))
        value, grad = float(loop.value), loop.hypergrad(lam)
    unchanged(model, before)
    assert value == pytest.approx(by_hand(), rel=1e-12)
    assert float(grad) == pytest.approx(differences(by_hand, lam, torch.ones(())), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "words", "right"),
    [
        (lambda k, m, _: setattr(m[2], "momentum", 0.5 / (k + 2)), "run again", ("forward", "memory", "unroll")),
        (
            lambda k, m, _: m[2].reset_running_stats() if k == 1 else None,
            "the buffer .*running.* was changed in the block",
            (),
        ),
        (
            lambda k, m, _: m[2].running_mean.mul_(0.5) if k == 1 else None,
            "the buffer .*running.* was changed in the block",
            (),
        ),
        (lambda k, m, _: m[2].requires_grad_(k % 2 == 1), "requires_grad was set", ()),
    ],
    ids=["a schedule of its momentum", "reset", "by hand", "frozen in turns"],
)
def test_a_layer_that_is_changed_between_the_steps(change, words, right, engine):
    """As the plain loop does, or refused: a step that is run again would take another momentum."""
    found = right_or_refused(losses(BATCHNORM, train_and_eval), engine, words, between=change)
    assert found == (engine in [ENGINES[name] for name in right])


def test_statistics_that_the_body_moves(engine):
    """model(x) in training mode between the steps, for precise statistics: refused."""

    def forward(k, m, _):
        with torch.no_grad():
            m.train()(torch.ones(4, 3) * torch.arange(4.0)[:, None])

    build = losses(BATCHNORM, train_and_eval)
    assert not right_or_refused(build, engine, "the buffer .*running.* was changed in the block", between=forward)


class Centred(nn.Module):
    """A running mean of one's own: a buffer that is no layer's of torch."""

    def __init__(self, replaced: bool = False, dtype: torch.dtype | None = None):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=dtype))
        self.replaced = replaced

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                new = (0.5 * self.centre + 0.5 * x.mean(0)).to(self.centre.dtype)
                if self.replaced:
                    self.centre = new
                else:
                    self.centre.copy_(new)
        return self.read(x)

    def read(self, x):
        return x - self.centre


class Levelled(Centred):
    """One number, which no counter is."""

    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(())

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.centre.copy_(0.5 * self.centre + 0.5 * x.mean())
        return self.read(x)


class Counted(Centred):
    """A buffer that is written and never read again."""

    def read(self, x):
        return x


@pytest.mark.parametrize(
    "layer", [Centred, lambda: Centred(replaced=True), Levelled], ids=["in place", "replaced", "one number"]
)
@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
def test_another_buffer_that_h_changes_and_g_reads_is_warned_of(engine, layer):
    build, lam = losses(lambda: mlp(layer()), train_and_eval), start()
    model, h, g, batch, outer = build(lam)
    with pytest.warns(bilevel.DerivativeWarning) as told:  # the sentinel has its say as well: h has a stop-gradient
        hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1, engine=ENGINES[engine])
    assert any("buffer '1.centre'" in str(w.message) for w in told)


class Annealed(nn.Module):
    """A counter in floating point, which h and g read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.count += 1
        return x / self.count


@pytest.mark.parametrize(
    "layer", [Counted, lambda: Centred(dtype=torch.int64), Annealed], ids=["not read", "whole numbers", "a counter"]
)
def test_other_buffers_are_not_warned_of(layer):
    """pytest makes errors of warnings. What counts has no derivative to miss."""
    build, lam = losses(lambda: mlp(layer()), train_and_eval), start()
    model, h, g, batch, outer = build(lam)
    assert float(hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1).norm()) > 0


def test_another_buffer_that_the_next_h_reads_is_warned_of():
    """g need not read it: the path through the next step is missed as well."""
    build, lam = losses(lambda: mlp(Centred()), lambda h, g: (h, lambda m, x, y: m[0].weight.square().sum())), start()
    model, h, g, batch, outer = build(lam)
    with pytest.warns(bilevel.DerivativeWarning) as told:
        hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1)
    assert any("buffer '1.centre'" in str(w.message) for w in told)


@pytest.mark.parametrize("engine", IMPLICIT)
def test_implicit_engines_and_running_statistics(engine):
    """At a fixed point of weights and statistics they are right."""
    decay = lambda h, g: train_and_eval(lambda m, *b: h(m, *b) + sum(p.square().sum() for p in m.parameters()), g)
    build = losses(BATCHNORM, decay)
    exact(build, engine, bits=False, steps=150, tolerance=1e-5)


# --- buffers with a graph, or made on the way ---


class Carry(nn.Module):
    """A hidden state that is handed on with its graph, for want of a .detach()."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state = (x.mean(0) + self.state).tanh()
        return x + self.state


def test_a_buffer_with_a_graph(engine):
    """The plain loop can't go back twice through it; a block would cut it, each engine elsewhere."""
    lam = start()
    with refused("the buffer '1.state' .* with a graph", r"stop_gradient\(", r"\.detach\(\)"):
        attempt(mlp(Carry()), *weighted(lam), lam, data(), data(5), engine=engine)


class Remembering(nn.Module):
    """Makes a buffer, a plain tensor and a table in its first call, as positional encodings are made."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, x.shape[1]))
            self.plain = torch.linspace(1, 2, x.shape[1])
        return x * self.plain + self.table


def test_a_buffer_that_is_made_in_the_first_call(engine):
    lam = start()
    build = losses(lambda: mlp(Remembering()))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        loop.run(STEPS, *batch, outer=outer)
        value, grad = float(loop.value), loop.hypergrad(lam)
    assert value == pytest.approx(plain(build, lam).value, rel=1e-12)
    v = torch.randn(SAMPLES)
    assert abs(float(grad @ v) - slope(build, lam, v)) < 1e-6 * float(grad.norm())
