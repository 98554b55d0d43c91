"""bilevel.stop_gradient: a constant in a step's gradient, and none in the hypergradient.

The judge is the plain loop with .detach(), and central differences of it: they see how w_K depends on what it detaches.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from contract import ENGINES, OWN
from problems import differences, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")

STEPS, RATE, TOLERANCE = 4, 0.3, 1e-7

Stop = Callable[[Any], Any]  # .detach() in the plain loop, bilevel.stop_gradient in the block
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def detach(x: Tensor) -> Tensor:
    return x.detach()


class Case(NamedTuple):
    """What a user has, with the way to stop a gradient left open."""

    model: nn.Module
    h: Callable[[Stop], Callable[..., Tensor]]
    g: Callable[[Stop], Callable[..., Tensor]]
    lam: Tensor
    batch: tuple[Tensor, ...] = ()


def decay(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters()) / 2


class Value(nn.Module):
    """A value function of two layers."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(3, 5), nn.Sequential(*more, nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x)).squeeze(1)


def temporal_differences(*more: nn.Module) -> Case:
    """TD(0): λ holds the discount, the weights of two rewards, and that of a decay, which no stop is between."""
    torch.manual_seed(0)
    model, lam = Value(*more), torch.tensor([0.7, 1.0, -0.5, -2.0], requires_grad=True)
    x, following, rewards, held_out, returns = (torch.randn(8, n) for n in (3, 3, 2, 3, 1))

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
            target = rewards @ lam[1:3] + lam[0].sigmoid() * model(following)
            return (model(x) - stop(target)).square().mean() + lam[3].exp() * decay(model)

        return loss

    def g(stop: Stop) -> Callable[..., Tensor]:
        return lambda model: (model(held_out) - returns[:, 0]).square().mean()

    return Case(model, h, g, lam, (x, rewards, following))


def plain(
    case: Case,
    optimizer: Optimizer | None = None,
    clip: float | None = None,
    steps: int = STEPS,
    descend: Callable[[int], tuple[float, float]] = lambda k: (1.0, 0.0),
) -> tuple[nn.Module, float]:
    """The loop as it stood in the user's file; `descend` weighs h and g in step k."""
    model = copy.deepcopy(case.model)
    stepper = torch.optim.SGD(model.parameters(), RATE) if optimizer is None else optimizer(model)
    h, g = case.h(detach), case.g(detach)
    torch.manual_seed(1)
    for k in range(1, steps + 1):
        stepper.zero_grad()
        a, b = descend(k)
        (a * h(model, *case.batch) + (b * g(model) if b else 0.0)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return model, float(g(model).detach())


def block(
    case: Case,
    engine: Any,
    optimizer: Optimizer | None = None,
    stop: Stop | None = None,
    steps: int = STEPS,
    **options: Any,
) -> tuple[nn.Module, Tensor]:
    """The same loop in a block: its end point, and its hypergradient."""
    model = copy.deepcopy(case.model)
    stepper = torch.optim.SGD(model.parameters(), RATE) if optimizer is None else optimizer(model)
    update = {} if isinstance(options.get("solver"), bilevel.StepRule) else {"optimizer": stepper}
    stop = stop or bilevel.stop_gradient
    options = {"solver": "gd", "check": False, **update, **options}
    torch.manual_seed(1)
    with bilevel.inner(model, case.h(stop), case.g(stop), engine=engine, **options) as loop:
        loop.run(steps, *case.batch)
        grad = loop.hypergrad(case.lam)
        loop.commit_()
    return model, grad


def assert_same_end(model: nn.Module, expected: nn.Module) -> None:
    for (n, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda m, n=n: f"{n}: {m}")


def by_differences(case: Case, **how: Any) -> Tensor:
    """dg/dλ of the plain loop."""
    flat = case.lam.detach().flatten()
    along = torch.eye(len(flat)).unbind()
    slopes = [differences(lambda: plain(case, **how)[1], case.lam, v.view(case.lam.shape)) for v in along]
    return torch.tensor(slopes).view(case.lam.shape)


def exact(case: Case, engine: Any, tolerance: float = TOLERANCE, **how: Any) -> Tensor:
    """The block's end point and hypergradient are those of the plain loop."""
    model, grad = block(case, engine, **how)
    how = {n: x for n, x in how.items() if n in ("optimizer", "clip", "steps")}
    assert_same_end(model, plain(case, **how)[0])
    expected = by_differences(case, **how)
    assert float(expected.norm()) > 1e-4
    assert relative(grad, expected) < tolerance
    return grad


# --- engines and updates ---

UPDATES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"optimizer": lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=0.9, nesterov=True)},
    "adam": {"optimizer": lambda m: torch.optim.Adam(m.parameters(), 0.05)},
    "clip": {"clip": 0.2},
    "adamw, clip": {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), 0.05), "clip": 0.2},
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_as_differences_of_the_plain_loop(engine, update):
    exact(temporal_differences(), engine, **update)


def test_a_plain_detach_has_another_gradient(engine):
    """What the tests here would find if stop_gradient were x.detach() inside of a block."""
    case = temporal_differences()
    model, grad = block(case, engine, stop=detach)
    assert_same_end(model, plain(case)[0])
    assert relative(grad, by_differences(case)) > 0.1


@pytest.mark.parametrize("name", ["cg", "neumann"])
def test_at_a_fixed_point(name):
    """∂Φ/∂w has no symmetry then. Conjugate gradients know their residual, and give up."""
    case = temporal_differences()
    case = case._replace(model=nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))
    if name == "cg":
        with pytest.raises(RuntimeError, match=r"^bilevel\.CG: the relative residual is .* use engine='reverse'"):
            block(case, bilevel.CG(tol=1e-10), steps=300)
        return
    model, grad = block(case, bilevel.Neumann(tol=1e-10), steps=300)
    assert_same_end(model, plain(case, steps=300)[0])
    assert relative(grad, by_differences(case, steps=300)) < TOLERANCE


@pytest.mark.parametrize("engine", [*ENGINES.values(), "neumann"], ids=[*ENGINES, "neumann"])
def test_tasks(engine):
    """N inner problems at once give the sum over a block for each."""
    case = temporal_differences()
    steps = 400 if engine == "neumann" else STEPS
    if engine == "neumann":
        case = case._replace(model=nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))
    batch = tuple(torch.randn(3, *x.shape) for x in case.batch)
    h, g = case.h(bilevel.stop_gradient), case.g(bilevel.stop_gradient)
    with bilevel.inner(case.model, h, g, solver="gd", lr=RATE, engine=engine, tasks=3, check=False) as loop:
        loop.run(steps, *batch)
        together = loop.hypergrad(case.lam)
    each = [case._replace(batch=tuple(x[i] for x in batch)) for i in range(3)]
    assert relative(together, sum(by_differences(c, steps=steps) for c in each)) < (
        1e-5 if engine == "neumann" else TOLERANCE
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has some of its own
@pytest.mark.parametrize("update", ["sgd", "adam"])
def test_compiled(update, compiler):
    """Compiled, or run eagerly with a warning that says why; never another gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="bilevel.Reverse")
        exact(temporal_differences(), bilevel.Reverse(compile=True), **UPDATES[update])


# --- where it stands ---


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_beside_batch_norm_and_dropout(engine, mode):
    """The stopped branch updates running statistics and draws random numbers like the other; g may read them."""
    case = temporal_differences(nn.BatchNorm1d(5), nn.Dropout(0.3))

    def h(stop: Stop) -> Callable[..., Tensor]:
        loss = case.h(stop)
        return lambda model, *batch: loss(model.train(), *batch)

    def g(stop: Stop) -> Callable[..., Tensor]:
        loss = case.g(stop)

        def judged(model: nn.Module) -> Tensor:
            model.train(mode == "train")
            torch.manual_seed(3)
            return loss(model)

        return judged

    plain_too = case._replace(h=h, g=g)
    _, grad = block(plain_too, engine)
    assert relative(grad, by_differences(plain_too)) < TOLERANCE


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", OWN.values(), ids=OWN)
def test_activation_checkpointing(engine, reentrant, where):
    """What is run again in the backward pass must stop there as well."""
    case = temporal_differences()

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
            inside = stop if where == "inside" else lambda x: x

            def target(y: Tensor) -> Tensor:
                return inside(rewards @ case.lam[1:3] + case.lam[0].sigmoid() * model(y)) * y[:, 0].cos()

            following = following.clone().requires_grad_()  # the reentrant kind wants an input that requires grad
            wanted = checkpoint(target, following, use_reentrant=reentrant)
            wanted = stop(wanted) if where == "around" else wanted
            fit = checkpoint(lambda x: (model(x) - wanted).square().mean(), x.requires_grad_(), use_reentrant=reentrant)
            return fit + case.lam[3].exp() * decay(model)

        return lambda model, x, *more: loss(model, x.clone(), *more)

    exact(case._replace(h=h), engine)


@pytest.mark.parametrize("solver", ["bigsam", "penalty"])
def test_in_g_of_a_step(engine, solver):
    """A step that descends g stops in it. At the end g is differentiated in full, as differences see it."""
    case = temporal_differences()
    x, _, following = case.batch

    def g(stop: Stop) -> Callable[..., Tensor]:
        return lambda model: (model(x) - stop(0.3 + 0.9 * model(following))).square().mean()

    case = case._replace(g=g)
    rule = bilevel.BiGSAM(RATE, RATE / 2) if solver == "bigsam" else bilevel.Penalty(RATE, 0.2)
    _, grad = block(case, engine, solver=rule)

    def descend(k: int) -> tuple[float, float]:
        c_h, c_g = rule.weights(k)
        return c_h / RATE, c_g / RATE

    assert relative(grad, by_differences(case, descend=descend)) < TOLERANCE


def test_nested(engine):
    """Stopped twice is stopped, and so is what is computed from something stopped and something that is not."""
    case = temporal_differences()

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
            value = stop(model(following)) * case.lam[0] + model(x)
            target = stop(stop(value.tanh()) + rewards @ case.lam[1:3] * stop(stop(value)))
            return (model(x) - target).square().mean() + case.lam[3].exp() * (decay(model) * stop(decay(model)))

        return loss

    exact(case._replace(h=h), engine)


def test_random_numbers_in_the_stopped_branch(engine):
    case = temporal_differences()

    def h(stop: Stop) -> Callable[..., Tensor]:
        loss = case.h(lambda target: stop(target * (1 + 0.3 * torch.randn(len(target)))))
        return lambda model, x, *more: loss(model, x + 0.1 * torch.randn_like(x), *more)

    exact(case._replace(h=h), engine)


def test_a_weight_that_only_the_stopped_branch_reads(engine):
    """The plain loop leaves it without .grad: no decay, no momentum."""
    case = temporal_differences()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moved, self.left = Value(), Value(nn.LayerNorm(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.moved(x)

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
            target = stop(rewards @ case.lam[1:3] + case.lam[0].sigmoid() * model.left(following))
            return (model(x) - target).square().mean() + case.lam[3].exp() * decay(model.moved)

        return loss

    case = case._replace(h=h, model=Two())
    before = copy.deepcopy(case.model.left.state_dict())
    optimizer = lambda m: torch.optim.AdamW(m.parameters(), 0.05, weight_decay=0.3)
    exact(case, engine, optimizer=optimizer)
    model, _ = block(case, engine, optimizer)
    assert all(torch.equal(x, before[n]) for n, x in model.left.state_dict().items())


def test_a_gradient_that_h_takes_itself(engine):
    """A gradient penalty: torch.autograd.grad in h does not go through what is stopped, as with .detach()."""
    case = temporal_differences()

    def h(stop: Stop) -> Callable[..., Tensor]:
        loss = case.h(stop)

        def penalised(model: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            score = (model(x) * stop(model(2 * x)) * case.lam[0]).sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return loss(model, x, *more) + 0.1 * slope.square().mean()

        return penalised

    exact(case._replace(h=h), engine)


def test_on_the_way_from_an_outer_network(engine):
    """What is stopped may come from a batch with a graph of its own: its derivative goes on to what made it."""
    case = temporal_differences()
    x, rewards, following = case.batch

    def through(lam: Tensor) -> Tensor:
        return following * lam[:3].cos()

    def h(stop: Stop) -> Callable[..., Tensor]:
        loss = case.h(stop)
        return lambda model, x, rewards: loss(model, x, rewards, through(case.lam))

    expected = by_differences(case._replace(h=h, batch=(x, rewards)))
    model = copy.deepcopy(case.model)
    losses = case.h(bilevel.stop_gradient), case.g(bilevel.stop_gradient)
    with bilevel.inner(model, *losses, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        loop.run(STEPS, x, rewards, through(case.lam))
        assert relative(loop.hypergrad(case.lam), expected) < TOLERANCE


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_block_inside_of_a_loss(engine):
    """The inner block's steps stop. The step around it takes the inner block's derivative, which goes through."""
    case = temporal_differences()
    (x, rewards, following), lam = case.batch, case.lam
    outer = nn.Linear(2, 1, bias=False)
    call = torch.func.functional_call
    State = dict[str, Tensor]

    def semi(stop: Stop, values: Tensor, later: Tensor, weights: Tensor) -> Tensor:
        return (values - stop(rewards @ weights + 0.5 * later)).square().mean()

    def judged(w: State, weights: Tensor) -> Tensor:
        return (call(case.model, w, (2 * x,)) - lam[0] * weights.sum()).square().mean()

    def h(model: nn.Module, weights: Tensor) -> Tensor:
        return semi(bilevel.stop_gradient, model(x), model(following), weights)

    def h_outer(outer: nn.Module) -> Tensor:
        with bilevel.inner(case.model, h, solver="gd", lr=RATE, engine="unroll", check=False) as loop:
            loop.run(2, outer.weight[0])
            return judged(loop.weights, outer.weight[0])

    def h_by_hand(weights: Tensor) -> Tensor:
        w = dict(case.model.named_parameters())
        for _ in range(2):
            alias = {
                n: p.view_as(p) for n, p in w.items()
            }  # the step's gradient is for these; the target has the others
            loss = semi(lambda x: x, call(case.model, alias, (x,)), call(case.model, w, (following,)), weights)
            d = torch.autograd.grad(loss, list(alias.values()), create_graph=True)
            w = {n: p - RATE * q for (n, p), q in zip(w.items(), d, strict=True)}
        return judged(w, weights)

    theta = outer.weight[0]
    for _ in range(2):
        theta = theta - RATE * torch.autograd.grad(h_by_hand(theta), theta, create_graph=True)[0]
    (expected,) = torch.autograd.grad((theta - 1).square().sum(), lam)
    g_outer = lambda outer: (outer.weight - 1).square().sum()
    with bilevel.inner(outer, h_outer, g_outer, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        loop.run(2)
        torch.testing.assert_close(loop.weights["weight"][0].detach(), theta.detach(), rtol=1e-12, atol=0)
        assert relative(loop.hypergrad(lam), expected) < 1e-10


def test_second_order_hypergradients():
    """With unroll, the hypergradient itself can be differentiated."""
    case = temporal_differences()

    def hypergrad(create_graph: bool) -> Tensor:
        h, g = case.h(bilevel.stop_gradient), case.g(bilevel.stop_gradient)
        with bilevel.inner(case.model, h, g, solver="gd", lr=RATE, engine="unroll", check=False) as loop:
            loop.run(2, *case.batch)
            return loop.hypergrad(case.lam, create_graph=create_graph)

    v, u = torch.randn(2, 4)
    (grad,) = torch.autograd.grad((hypergrad(True) * u).sum(), case.lam)
    expected = differences(lambda: float((hypergrad(False) * u).sum()), case.lam, v)
    assert float((grad * v).sum()) == pytest.approx(expected, rel=TOLERANCE)


# --- players: steps on one part of the model, another loss, micro-batches ---


def test_two_players(engine):
    """A critic that sees what the generator makes as a constant, and the other way round."""
    torch.manual_seed(0)
    lam, z, real = torch.tensor([0.3, -0.2], requires_grad=True), torch.randn(6, 2), torch.randn(6, 2)
    model = nn.ModuleDict({
        "generator": nn.Linear(2, 2),
        "critic": nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)),
    })  # fmt: skip

    def losses(stop: Stop) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        def critic(m: nn.ModuleDict) -> Tensor:
            return (m["critic"](stop(m["generator"](z))) - m["critic"](real + lam)).mean() + 0.1 * decay(m["critic"])

        return critic, lambda m: -m["critic"](m["generator"](z)).mean() + lam.exp().sum() * decay(m["generator"])

    def optimizers(m: nn.ModuleDict) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.Adam(m["critic"].parameters(), 0.05), torch.optim.SGD(m["generator"].parameters(), RATE)

    def g(m: nn.ModuleDict) -> Tensor:
        return (m["generator"](z) - real).square().mean()

    def by_hand() -> tuple[nn.ModuleDict, float]:
        m = copy.deepcopy(model)
        turns = tuple(zip(losses(detach), optimizers(m), strict=True))
        for _ in range(3):
            for loss, optimizer in turns:
                optimizer.zero_grad()
                loss(m).backward()
                optimizer.step()
        return m, float(g(m).detach())

    m = copy.deepcopy(model)
    (critic, generator), (a, b) = losses(bilevel.stop_gradient), optimizers(m)
    with bilevel.inner(m, critic, g, solver="gd", optimizer=[a, b], engine=engine, check=False) as loop:
        for _ in range(3):
            loop.step(only=a)
            loop.step(h=generator, only=b)
        grad = loop.hypergrad(lam)
        loop.commit_()
    assert_same_end(m, by_hand()[0])
    expected = torch.tensor([differences(lambda: by_hand()[1], lam, v) for v in torch.eye(2)])
    assert relative(grad, expected) < TOLERANCE


def test_accumulated_gradients(engine):
    """Two micro-batches to a step: each stops as it would alone."""
    case = temporal_differences()
    halves = [tuple(x[i] for x in case.batch) for i in (slice(0, 4), slice(4, 8))]
    expected = by_differences(case)  # the loss is a mean over samples: half of each half's
    model, loss = copy.deepcopy(case.model), case.h(bilevel.stop_gradient)
    half = lambda m, *batch: loss(m, *batch) / 2
    with bilevel.inner(model, half, case.g(detach), solver="gd", lr=RATE, engine=engine, check=False) as loop:
        for _ in range(STEPS):
            for batch in halves:
                loop.accumulate(*batch)
            loop.step()
        grad = loop.hypergrad(case.lam)
        loop.commit_()
    assert_same_end(model, plain(case)[0])
    assert relative(grad, expected) < TOLERANCE


# --- buffers: what one step leaves for the next ---


class Cell(nn.Linear):
    """An RNN's, in operations that have a vmap."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return super().forward(torch.cat([x, hidden], 1)).tanh()


class Recurrent(nn.Module):
    """A hidden state that goes from step to step, and a moving average of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = Cell(7, 4), nn.Linear(4, 1)
        self.register_buffer("hidden", torch.zeros(8, 4))
        self.register_buffer("average", self.readout.weight.detach().clone())


def recurrent() -> Case:
    torch.manual_seed(0)
    model, lam = Recurrent(), torch.tensor([-1.0, 0.5], requires_grad=True)
    x, y, held_out = torch.randn(8, 3), torch.randn(8, 1), torch.randn(8, 3)

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: Recurrent) -> Tensor:
            first = model.cell(x, model.hidden)
            second = model.cell(x.flip(0), first)
            model.hidden = stop(second)
            model.average = stop(model.average.lerp(model.readout.weight, 0.4))
            return (model.readout(second) - lam[1] * y).square().mean() + lam[0].exp() * first.square().mean()

        return loss

    def g(stop: Stop) -> Callable[..., Tensor]:
        def judged(model: Recurrent) -> Tensor:
            scores = torch.nn.functional.linear(model.cell(held_out, model.hidden), model.average)
            return (scores - y).square().mean() + model.readout.bias.square().sum()

        return judged

    return Case(model, h, g, lam)


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_a_buffer_that_is_left_stopped_is_state(engine, update):
    """Truncated backpropagation through time, an average of weights: constant in the next step, and followed."""
    exact(recurrent(), engine, **update)


def test_written_in_place(engine):
    """An average that is updated in place, as most are, has a graph to what it was: refused, with a way that works."""
    case = recurrent()

    def h(stop: Stop) -> Callable[..., Tensor]:
        loss = case.h(stop)

        def averaged(model: Recurrent) -> Tensor:
            kept = model.average
            value = loss(model)
            model.average = kept
            model.average.lerp_(stop(model.readout.weight), 0.4)
            return value

        return averaged

    with pytest.raises(ValueError, match=r"a loss leaves the buffer 'average' .* with a graph.*stop_gradient"):
        block(case._replace(h=h), engine)


@pytest.mark.parametrize("renewed", [(2, 4), (1, 2, 3), (3,)])
def test_a_target_network_that_is_renewed_now_and_then(engine, renewed):
    """Between its renewals it stays as it is; what a step does not write, it hands on."""
    case = recurrent()
    x, following, y = torch.randn(3, 8, 4)

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: Recurrent, renew: bool) -> Tensor:
            target = y[:, :1] * case.lam[1] + 0.8 * torch.nn.functional.linear(following, model.average)
            if renew:
                model.average = stop(0.5 * model.average + 0.5 * model.readout.weight)
            return (model.readout(x) - stop(target)).square().mean() + case.lam[0].exp() * decay(model.readout)

        return loss

    def g(model: Recurrent) -> Tensor:
        return (torch.nn.functional.linear(following, model.average) + model.readout(x) - y[:, :1]).square().mean()

    def by_hand() -> tuple[Recurrent, float]:
        model = copy.deepcopy(case.model)
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
        for k in range(1, 6):
            optimizer.zero_grad()
            h(detach)(model, k in renewed).backward()
            optimizer.step()
        return model, float(g(model).detach())

    expected, _ = by_hand()
    slopes = torch.tensor([differences(lambda: by_hand()[1], case.lam, v) for v in torch.eye(2)])
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
    loss = h(bilevel.stop_gradient)
    with bilevel.inner(model, loss, g, solver="gd", optimizer=optimizer, engine=engine, check=False) as loop:
        for k in range(1, 6):
            loop.step(k in renewed)
            if k == 3:
                loop.hypergrad(case.lam)  # a look in between changes nothing
        assert relative(loop.hypergrad(case.lam), slopes) < TOLERANCE
        assert relative(loop.hypergrad(case.lam), slopes) < TOLERANCE  # nor does the first use anything up
        loop.commit_()
    assert_same_end(model, expected)


def test_buffers_of_tasks(engine):
    """A hidden state for each task."""
    case = recurrent()
    batch = torch.randn(3, 8, 3)

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: Recurrent, x: Tensor) -> Tensor:
            hidden = model.cell(x, model.hidden)
            model.hidden = stop(hidden)
            return (model.readout(hidden) - case.lam[1]).square().mean() + case.lam[0].exp() * hidden.square().mean()

        return loss

    def g(stop: Stop) -> Callable[..., Tensor]:
        return lambda model: model.readout(model.hidden).square().mean()

    each = [case._replace(h=h, g=g, batch=(x,)) for x in batch]
    losses = h(bilevel.stop_gradient), g(bilevel.stop_gradient)
    with bilevel.inner(case.model, *losses, solver="gd", lr=RATE, engine=engine, tasks=3, check=False) as loop:
        loop.run(STEPS, batch)
        together = loop.hypergrad(case.lam)
    assert relative(together, sum(by_differences(c) for c in each)) < TOLERANCE


def test_a_buffer_that_is_left_with_a_graph():
    case = recurrent()
    with pytest.raises(ValueError, match="stop_gradient"):
        block(case, "reverse", stop=lambda x: x)


def test_the_buffers_come_back(engine):
    case = recurrent()
    before, expected = copy.deepcopy(case.model.state_dict()), plain(case)[0]
    h, g = case.h(bilevel.stop_gradient), case.g(bilevel.stop_gradient)
    with bilevel.inner(case.model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        loop.run(STEPS)
        torch.testing.assert_close(case.model.hidden, expected.hidden, rtol=1e-12, atol=1e-13)
        loop.hypergrad(case.lam)
        torch.testing.assert_close(case.model.hidden, expected.hidden, rtol=1e-12, atol=1e-13)
        assert not case.model.hidden.requires_grad
    assert all(torch.equal(x, before[n]) for n, x in case.model.state_dict().items())


def test_a_hidden_state_that_goes_through_the_batch(engine):
    """What h returns beside its loss has no derivative from step to step: refused, with the way that has one."""
    case = recurrent()
    x = torch.randn(8, 3)

    def h(model: Recurrent, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.cell(x, hidden)
        return (model.readout(hidden) - case.lam[1]).square().mean() + case.lam[0].exp() * decay(model), hidden

    g = case.g(bilevel.stop_gradient)
    with bilevel.inner(case.model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
        hidden = loop.step(torch.zeros(8, 4)).aux
        assert float(hidden.square().sum()) > 0
        with pytest.raises(ValueError, match="stop_gradient"):
            loop.step(hidden)
        loop.step(hidden.detach().clone())  # whoever says so means a constant


# --- outside of a block, and what the sentinel says ---


def test_outside_of_a_block_it_detaches():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    for stopped in (bilevel.stop_gradient(x), bilevel.stop_gradient(y)):
        assert not stopped.requires_grad
        assert stopped.is_leaf
    assert bilevel.stop_gradient(y).data_ptr() == y.data_ptr()
    case = temporal_differences()
    model, value = plain(case._replace(h=lambda _: case.h(bilevel.stop_gradient)))
    expected, number = plain(case)
    assert value == number
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_takes_a_tree(inside):
    """Tuples, lists and dicts, as recurrent layers return them; what is no tensor, or has no gradient, stays."""
    lam, seen = torch.ones(2, requires_grad=True), []

    def h(model: nn.Module) -> Tensor:
        w, numbers = model.weight, torch.arange(3)
        seen.append(bilevel.stop_gradient({"a": (w * 2, [w.sum(), "text", None]), "b": numbers, "c": 3.0}))
        assert seen[-1]["b"] is numbers or torch.equal(seen[-1]["b"], numbers)
        return (w * lam).sum() + seen[-1]["a"][0].sum() * w.sum()

    model = nn.Linear(2, 1, bias=False)
    if inside:
        with bilevel.inner(model, h, lambda m: m.weight.square().sum(), solver="gd", lr=RATE, check=False) as loop:
            loop.step()
            loop.hypergrad(lam)
    else:
        h(model)
    for tree in seen:
        assert list(tree) == ["a", "b", "c"]
        (one, (two, *rest)), number = tree["a"], tree["c"]
        assert isinstance(tree["a"], tuple)
        assert (one.shape, two.shape, rest, number) == ((1, 2), (), ["text", None], 3.0)
        assert inside or not (one.requires_grad or two.requires_grad)


def test_after_a_block_it_detaches_again():
    """Also after a block that failed in the midst of a loss."""
    x = torch.ones(2, requires_grad=True) * 2
    model = nn.Linear(2, 1)

    def h(model: nn.Module) -> Tensor:
        raise KeyError("in the loss")

    with pytest.raises(KeyError, match="in the loss"), bilevel.inner(model, h, h, solver="gd", lr=RATE) as loop:
        loop.step()
    assert not bilevel.stop_gradient(x).requires_grad


def test_under_no_grad():
    """A look at the loss without a graph, in the block."""
    case = temporal_differences()
    h = case.h(bilevel.stop_gradient)
    with bilevel.inner(case.model, h, case.g(detach), solver="gd", lr=RATE, check=False) as loop:
        loop.run(2, *case.batch)
        with torch.no_grad():
            assert not h(case.model, *case.batch).requires_grad
        with torch.no_grad():
            assert float(loop.step(*case.batch).h) > 0
        got = loop.hypergrad(case.lam)
    torch.testing.assert_close(got, block(case, "reverse", steps=3)[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [temporal_differences, recurrent])
def test_the_sentinel_has_nothing_to_say(engine, make):
    block(make(), engine, check="always")  # a warning would be an error here


def test_the_sentinel_names_it_for_a_plain_detach():
    with pytest.warns(bilevel.DerivativeWarning, match=r"bilevel\.stop_gradient"):
        block(temporal_differences(), "reverse", stop=detach, check="always")


@pytest.mark.parametrize("check", ["first", "always"])
def test_the_sentinel_looks_at_the_loss_of_every_player(check):
    """The .detach() stands in the loss of a step that is not the last."""
    lam, z = torch.tensor([0.3, -0.2], requires_grad=True), torch.randn(6, 2)
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Sequential(nn.Linear(2, 4), nn.Tanh())})
    a, b = (torch.optim.SGD(model[name].parameters(), RATE) for name in ("critic", "generator"))

    def critic(m: nn.ModuleDict) -> Tensor:
        return (m["critic"](m["generator"](z).detach() + lam) - 1).square().mean()

    def generator(m: nn.ModuleDict) -> Tensor:
        return m["critic"](m["generator"](z)).square().mean()

    def g(m: nn.ModuleDict) -> Tensor:
        return m["generator"](z).square().mean()

    with bilevel.inner(model, critic, g, solver="gd", optimizer=[a, b], check=check) as loop:
        for _ in range(2):
            loop.step(only=a)
            loop.step(h=generator, only=b)
        with pytest.warns(bilevel.DerivativeWarning, match=r"bilevel\.stop_gradient"):
            loop.hypergrad(lam)


def test_a_buffer_that_is_left_detached():
    """Its path is left out, and the warning says what would keep it."""
    with pytest.warns(bilevel.DerivativeWarning, match=r"buffer .* bilevel\.stop_gradient"):
        block(recurrent(), "reverse", stop=detach, check="first")


def test_gradcheck():
    """It judges by loops of its own, in the block's way: stopped in the steps, whole in the derivative."""
    case = temporal_differences()
    h, g = case.h(bilevel.stop_gradient), case.g(bilevel.stop_gradient)
    report = bilevel.gradcheck(case.model, h, g, case.lam, *case.batch, solver="gd", lr=RATE)
    assert report, report
    wrong = bilevel.gradcheck(case.model, case.h(detach), g, case.lam, *case.batch, solver="gd", lr=RATE)
    assert not wrong


def test_in_float32_under_autocast(monkeypatch):
    """The type of what is stopped is kept, and the step is that of the plain loop."""
    case = temporal_differences()
    model = copy.deepcopy(case.model).float()
    types: list[torch.dtype] = []
    batch = tuple(x.float() for x in case.batch)
    lam = case.lam.detach().float().requires_grad_()

    def h(stop: Stop) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                target = stop(lam[0] * model(following))
                types.append(target.dtype)
                return (model(x) - target).float().square().mean() + (rewards @ lam[1:3]).mean() * model(
                    x
                ).float().mean()

        return loss

    one, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), RATE)
    for _ in range(2):
        optimizer.zero_grad()
        h(detach)(other, *batch).backward()
        optimizer.step()
    g = lambda m: m(batch[0]).square().mean()
    with bilevel.inner(one, h(bilevel.stop_gradient), g, solver="gd", lr=RATE, check=False) as loop:
        loop.run(2, *batch)
        grad = loop.hypergrad(lam)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert set(types) == {torch.bfloat16}
    with monkeypatch.context() as patched:
        patched.setattr(torch, "autocast", lambda *_: contextlib.nullcontext())
        with bilevel.inner(one, h(bilevel.stop_gradient), g, solver="gd", lr=RATE, check=False) as loop:
            loop.run(2, *batch)
            exact = loop.hypergrad(lam)
    assert types[-1] == torch.float32
    assert 0 < relative(grad, exact) < 0.03
