"""The same numbers as higher, TorchOpt, Betty, learn2learn and hypertorch, on problems like those of their examples.

All in float64, to 1e-10. Where a peer is off, or means something else, a test says why, and central differences of the
plain loop, or a closed form, are the judge. What is not installed is skipped.

    python tests/test_peers.py       prints the errors as a table
"""

from __future__ import annotations

import copy
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import differences, relative, weighted
from torch import Tensor, nn
from torch.optim import SGD, Adam

import bilevel_plugin as bilevel
from benchmarks.runners import importable, quietly

# the peers warn of torch's newer ways; what we warn of stays an error
pytestmark = [
    pytest.mark.filterwarnings("ignore", "error::bilevel_plugin.DerivativeWarning"),
    pytest.mark.usefixtures("double"),
]
ENGINES = {"reverse": "reverse", "sqrt": bilevel.Reverse("sqrt"), "planned": bilevel.Reverse(memory="1GiB")}


def peer(name: str) -> Any:
    """The module, or a skip with the reason."""
    if (why := importable(name)) is not True:
        pytest.skip(f"{name} is not installed: {why}")
    return quietly(name)


def agree(who: str, what: str, ours: Any, theirs: Any, within: float = 1e-10) -> None:
    error = max(relative(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
    if log := os.environ.get("PEERS_LOG"):
        with open(log, "a", newline="") as file:
            csv.writer(file).writerow([who, what, error])
    assert error <= within


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


class Data:
    """Training and validation samples, and a weight λ for each of the former."""

    def __init__(self, classes: int = 2, n: int = 8) -> None:
        (self.x, xv), (self.y, yv) = torch.randn(2, n, 3), torch.randint(classes, (2, n))
        self.val = (xv, yv)
        self.lam = torch.randn(n, requires_grad=True)
        self.h, self.g = weighted(self.lam)

    def ours(self, model: nn.Module, steps: int, g: Any = None, **options: Any) -> tuple[Tensor, ...]:
        """For λ and the initial weights."""
        with bilevel.inner(model, self.h, g or self.g, solver="gd", **options) as loop:
            loop.run(steps, self.x, self.y, outer=self.val)
            return loop.hypergrad([self.lam, *model.parameters()])

    def plain(self, model: nn.Module, steps: int, kind: Any = SGD, g: Any = None, **options: Any) -> float:
        """g after the loop as people write it, on a copy."""
        model = copy.deepcopy(model)
        optimizer = kind(model.parameters(), **options)
        for _ in range(steps):
            optimizer.zero_grad()
            self.h(model, self.x, self.y).backward()
            optimizer.step()
        return float((g or self.g)(model, *self.val).detach())

    def judge(self, grad: Tensor, *arguments: Any, **options: Any) -> float:
        """How far a gradient for λ is from differences of the plain loop."""
        v = torch.randn_like(grad)
        slope = differences(lambda: self.plain(*arguments, **options), self.lam, v, eps=5e-5)
        return abs(float((grad * v).sum()) - slope) / abs(slope)


# --- higher: MAML with SGD and Adam, learnable rates ------------------------------------------------------------


def with_higher(data: Data, model: nn.Module, optimizer: Any, steps: int, g: Any = None, **more: Any) -> list[Any]:
    inputs = [data.lam, *model.parameters(), *chain(*more.get("override", {}).values())]
    with peer("higher").innerloop_ctx(model, optimizer, copy_initial_weights=False, **more) as (fast, differentiable):
        for _ in range(steps):
            differentiable.step(data.h(fast, data.x, data.y))
        return list(torch.autograd.grad((g or data.g)(fast, *data.val), inputs))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov", "adam"])
def test_higher(rule: str, engine: str) -> None:
    model, data = mlp(), Data()
    optimizer = {
        "sgd": lambda: SGD(model.parameters(), lr=0.3),
        "momentum": lambda: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        "adam": lambda: Adam(model.parameters(), lr=0.05, eps=0.0),  # see the test of its ε below
    }[rule]()
    theirs = with_higher(data, model, optimizer, 7)
    agree("higher", f"data weights, {rule}", data.ours(model, 7, optimizer=optimizer, engine=ENGINES[engine]), theirs)


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
def test_higher_maml(rule: str) -> None:
    """Its Omniglot example: convolutions with BatchNorm, tasks one after the other; ours takes them at once."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3, track_running_stats=False), nn.Softplus(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip
    x, xv, y, yv = (
        torch.randn(4, 6, 1, 6, 6),
        torch.randn(4, 9, 1, 6, 6),
        *(torch.arange(3).repeat(4, n) for n in (2, 3)),
    )

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    options = {"lr": 0.1} if rule == "SGD" else {"lr": 0.02, "eps": 0.0}
    optimizer = getattr(torch.optim, rule)(model.parameters(), **options)
    total = []
    for task in range(4):
        with peer("higher").innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fast, differentiable):
            for _ in range(5):
                differentiable.step(loss(fast, x[task], y[task]))
            total.append(torch.autograd.grad(loss(fast, xv[task], yv[task]), list(model.parameters())))
    theirs = [sum(parts) for parts in zip(*total, strict=True)]
    with bilevel.inner(model, loss, loss, solver="gd", optimizer=optimizer, tasks=4) as loop:
        loop.run(5, x, y, outer=(xv, yv))
        agree("higher", f"MAML, {rule}, 4 tasks", loop.hypergrad(list(model.parameters())), theirs)


def test_higher_learns_rates() -> None:
    """A rate and a momentum for each group, as `override` has them; ours are in the groups themselves."""
    model, data = mlp(), Data()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = SGD(groups, lr=0.1, momentum=0.5)
    rates = {n: [torch.rand(()).requires_grad_() for _ in groups] for n in ("lr", "momentum")}
    theirs = with_higher(data, model, optimizer, 5, override=rates)
    for k, group in enumerate(optimizer.param_groups):
        group.update({n: both[k] for n, both in rates.items()})
    with bilevel.inner(model, data.h, data.g, solver="gd", optimizer=optimizer) as loop:
        loop.run(5, data.x, data.y, outer=data.val)
        ours = loop.hypergrad([data.lam, *model.parameters(), *rates["lr"], *rates["momentum"]])
    agree("higher", "learned rates and momenta", ours, theirs)


def test_higher_has_the_adam_of_an_older_torch() -> None:
    """It adds ε to √v before the bias correction, torch after it: as if ε were 32 times as large in the first step. One
    gradient of 3e-5 is enough for torch's default ε to show."""
    model, data = mlp(), Data()
    theirs = with_higher(data, model, Adam(model.parameters(), lr=0.05), 5)
    ours = data.ours(model, 5, optimizer=Adam(model.parameters(), lr=0.05))
    assert data.judge(ours[0], model, 5, Adam, lr=0.05) <= 1e-7
    assert relative(ours[0], theirs[0]) > 1e-3


# --- TorchOpt: its meta-optimizers, learning to reweight --------------------------------------------------------

META = {
    "SGD": ("MetaSGD", SGD, {"lr": 0.3}),
    "SGD with momentum": ("MetaSGD", SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, nesterov": ("MetaSGD", SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": ("MetaAdam", Adam, {"lr": 0.05, "weight_decay": 0.01}),
    "AdamW": ("MetaAdamW", torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "RMSprop": ("MetaRMSProp", torch.optim.RMSprop, {"lr": 0.02}),
    "RMSprop, centred": ("MetaRMSProp", torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.5, "centered": True}),
    "Adagrad": ("MetaAdaGrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    "Adadelta": ("MetaAdaDelta", torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": ("MetaAdaMax", torch.optim.Adamax, {"lr": 0.05}),
    "RAdam": ("MetaRAdam", torch.optim.RAdam, {"lr": 0.05, "betas": (0.9, 0.99)}),  # rectified from the sixth step on
}


def with_torchopt(data: Data, model: nn.Module, steps: int, kind: str, g: Any = None, **options: Any) -> list[Tensor]:
    library = peer("torchopt")
    start = list(model.parameters())
    reference = library.extract_state_dict(model, by="reference")
    optimizer = getattr(library, kind)(model, **options)
    for _ in range(steps):
        optimizer.step(data.h(model, data.x, data.y))
    grads = torch.autograd.grad((g or data.g)(model, *data.val), [data.lam, *start])
    library.recover_state_dict(model, reference)
    return list(grads)


@pytest.mark.parametrize("rule", META)
def test_torchopt(rule: str) -> None:
    model, data = mlp(), Data()
    theirs_kind, kind, options = META[rule]
    theirs = with_torchopt(data, model, 8, theirs_kind, **options)
    agree(
        "TorchOpt", f"data weights, {rule}", data.ours(model, 8, optimizer=kind(model.parameters(), **options)), theirs
    )


def test_torchopt_learning_to_reweight() -> None:
    """Its example of Ren et al.: one step from weights ε = 0, then max(−∂g/∂ε, 0), so that good samples count."""
    model, data = mlp(), Data(n=40)
    start = torch.zeros(40, requires_grad=True)

    def h(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (start * F.cross_entropy(model(x), y, reduction="none")).sum()

    def weights(grad: Tensor) -> Tensor:
        found = (-grad).clamp_min(0)
        return found / found.sum()

    data.h, data.lam = h, start
    theirs = weights(with_torchopt(data, model, 1, "MetaSGD", lr=0.1)[0])
    ours = weights(data.ours(model, 1, lr=0.1)[0])
    assert 0 < (ours > 0).sum() < 40
    agree("TorchOpt", "learning to reweight, one step", [ours], [theirs])


# --- Betty: hyperparameters of logistic regression, data reweighting by a network -------------------------------


class Logistic:
    """h = logistic loss + Σ e^λ_i·w_i²/40, g = logistic loss on other samples. λ is in a module, as Betty wants it."""

    def __init__(self) -> None:
        (self.x, xv), direction = torch.randn(2, 40, 4), torch.randn(4)
        self.y, yv = ((x @ direction + torch.randn(40) > 0).double() for x in (self.x, xv))
        self.val, self.outer = (xv, yv), nn.ParameterList([torch.randn(4)])
        self.lam = self.outer[0]

    def h(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        w = next(iter(model.parameters()))
        return self.g(model, x, y) + (self.lam.exp() * w.square()).sum() / 40

    def g(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)

    def model(self) -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    def ours(self, model: nn.Module, steps: int, **options: Any) -> Tensor:
        with bilevel.inner(model, self.h, self.g, solver="gd", **options) as loop:
            loop.run(steps, self.x, self.y, outer=self.val)
            return loop.hypergrad(self.lam)

    def implicit(self, inverse: Callable[[Tensor, Tensor], Tensor] = torch.linalg.solve) -> Tensor:
        """−∂²h/∂λ∂w·(∂²h/∂w²)⁻¹·∇g at the minimum of h, which Newton's method finds; `inverse` solves the system."""
        model = self.model()
        w = model.weight
        for _ in range(20):
            d = torch.autograd.grad(self.h(model, self.x, self.y), w, create_graph=True)[0][0]
            hessian = torch.stack([torch.autograd.grad(x, w, retain_graph=True)[0][0] for x in d])
            with torch.no_grad():
                w.sub_(torch.linalg.solve(hessian, d))
        d = torch.autograd.grad(self.h(model, self.x, self.y), w, create_graph=True)[0][0]
        v = inverse(hessian, torch.autograd.grad(self.g(model, *self.val), w)[0][0])
        return -torch.autograd.grad(d, self.lam, v)[0]


def with_betty(
    p: Any, model: nn.Module, steps: int, optimizer: Callable[..., Any], kind: str = "IterativeProblem", **config: Any
) -> list[Tensor]:
    """For the parameters of p.outer. An IterativeProblem is differentiated step by step, an ImplicitProblem is not."""
    peer("betty")
    engines, configs, problems = (quietly(f"betty.{name}") for name in ("engine", "configs", "problems"))
    exact, found = kind == "IterativeProblem", list[Tensor]()

    class Inner(getattr(problems, kind)):
        def forward(self, *args: Any) -> Any:
            return self.fmodule(self.params, self.buffers, *args) if exact else self.module(*args)

        def training_step(self, batch: Any) -> Tensor:
            return p.h(self, *batch)

    class Outer(problems.ImplicitProblem):
        def training_step(self, batch: Any) -> Tensor:
            return p.g(self.inner, *batch)

        def optimizer_step(self, *_: Any, **__: Any) -> None:
            found[:] = [x.grad.clone() for x in self.trainable_parameters()]

    model = copy.deepcopy(model)
    config = configs.Config(unroll_steps=steps, retain_graph=exact, **config)
    inner = Inner("inner", config, model, optimizer(model.parameters()), None, [(p.x, p.y)], device="cpu")
    idle, config = SGD(p.outer.parameters(), lr=0.0), configs.Config(first_order=not exact)
    outer = Outer("outer", config, p.outer, idle, None, [p.val], device="cpu")
    order = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
    engines.Engine([outer, inner], configs.EngineConfig(train_iters=steps), order).run()
    for x in p.outer.parameters():
        x.grad = None
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_betty_logistic_regression(momentum: float) -> None:
    p = Logistic()
    model = p.model()

    def optimizer(params: Any) -> SGD:
        return SGD(params, lr=0.3, momentum=momentum)

    theirs = with_betty(p, model, 10, optimizer)
    ours = p.ours(model, 10, optimizer=optimizer(model.parameters()))
    agree("Betty", f"l2 weights of logistic regression, SGD, momentum {momentum}", [ours], theirs)


class Reweighting(Data):
    """Meta-Weight-Net: a small network gives each sample its weight, from the sample's loss."""

    def __init__(self, stop: Callable[[Tensor], Tensor]) -> None:
        super().__init__(n=20)
        self.stop, self.h = stop, self.reweighted
        self.outer = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1), nn.Sigmoid())
        self.lam = self.outer[0].weight

    def reweighted(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (self.outer(self.stop(losses).unsqueeze(1)).squeeze(1) * losses).mean()

    def for_network(self, model: nn.Module, steps: int, **options: Any) -> tuple[Tensor, ...]:
        with bilevel.inner(model, self.h, self.g, solver="gd", **options) as loop:
            loop.run(steps, self.x, self.y, outer=self.val)
            return loop.hypergrad(list(self.outer.parameters()))


def test_betty_data_reweighting() -> None:
    p, model = Reweighting(stop=lambda x: x), mlp()
    theirs = with_betty(p, model, 6, lambda params: SGD(params, lr=0.5))
    agree("Betty", "data reweighting by a network", p.for_network(model, 6, lr=0.5), theirs)


def test_betty_detached_losses() -> None:
    """Its example detaches the losses that the network sees. That drops how w_K depends on them, in Betty as here."""
    p, model = Reweighting(stop=Tensor.detach), mlp()
    theirs = with_betty(p, model, 6, lambda params: SGD(params, lr=0.5))
    with pytest.warns(bilevel.DerivativeWarning, match="the second derivative of h is not the derivative of the loss"):
        ours = p.for_network(model, 6, lr=0.5, check="always")  # its code was seen above, without the detach
    agree("Betty", "data reweighting, losses detached", ours, theirs)

    p.stop = bilevel.stop_gradient
    exact = p.for_network(model, 6, lr=0.5, check="always")
    p.stop = Tensor.detach
    assert p.judge(exact[0], model, 6, lr=0.5) <= 1e-7
    assert relative(exact[0], theirs[0]) > 1e-2


def test_betty_implicit() -> None:
    """Neumann's series is the same; see the next test for its `cg`."""
    p = Logistic()
    model, exact = p.model(), p.implicit()
    options = {"type": "neumann", "neumann_iterations": 1000, "neumann_alpha": 0.5}
    theirs = with_betty(p, model, 400, lambda params: SGD(params, lr=1.0), "ImplicitProblem", **options)
    for engine in (bilevel.Neumann(tol=1e-12), bilevel.CG(tol=1e-12)):
        ours = p.ours(model, 400, lr=1.0, engine=engine)
        agree(
            "Betty",
            f"implicit gradient of logistic regression, neumann and our {type(engine).__name__}",
            [ours],
            theirs,
        )
        assert relative(ours, exact) <= 1e-10


def test_betty_cg_is_not_conjugate_gradients() -> None:
    """betty-ml 0.1.1 makes its next direction from the residual *before* the step, so that 4 iterations in 4 dimensions
    do not solve the system, as they should."""
    p = Logistic()
    model, exact = p.model(), p.implicit()
    options = {"type": "cg", "cg_iterations": 4}
    theirs = with_betty(p, model, 400, lambda params: SGD(params, lr=1.0), "ImplicitProblem", **options)

    def as_written(hessian: Tensor, v: Tensor) -> Tensor:
        x, r, d = torch.zeros_like(v), v, v
        for _ in range(4):
            alpha = (r @ r) / (d @ hessian @ d)
            after = r - alpha * (hessian @ d)
            x, d, r = x + alpha * d, r + (after @ after) / (r @ r) * d, after
        return x

    assert relative(theirs[0], p.implicit(as_written)) <= 1e-10
    assert relative(theirs[0], exact) > 1e-3
    assert relative(p.ours(model, 400, lr=1.0, engine=bilevel.CG(tol=1e-12)), exact) <= 1e-10


def test_betty_default_is_another_gradient() -> None:
    """`Config(type="darts")` takes the identity for the inverse Hessian, and a difference for the mixed derivative."""
    p = Logistic()
    model = p.model()
    theirs = with_betty(p, model, 400, lambda params: SGD(params, lr=1.0), "ImplicitProblem", type="darts")
    assert relative(theirs[0], p.implicit(lambda hessian, v: v)) <= 1e-3
    assert relative(theirs[0], p.implicit()) > 0.1


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_betty_takes_a_step_to_set_up(kind: Any) -> None:
    """To make the optimizer's state it steps once with gradients of 0: weight decay moves w_0, and Adam counts from 2.
    (Its AdamW returns no weights at all: `p.update` goes to a tensor that is thrown away.)"""
    p, model = Logistic(), Logistic().model()
    options = {"lr": 0.1, "weight_decay": 0.1} if kind is SGD else {"lr": 0.1}
    theirs = with_betty(p, model, 5, lambda params: kind(params, **options))
    assert relative(p.ours(model, 5, optimizer=kind(model.parameters(), **options)), theirs[0]) > 1e-3

    optimizer = kind(model.parameters(), **options)  # the same set-up here
    before = copy.deepcopy(model.state_dict())
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    optimizer.step()
    assert (kind is SGD) != torch.equal(before["weight"], model.weight)
    agree("Betty", f"l2 weights, {kind.__name__}, after its set-up", [p.ours(model, 5, optimizer=optimizer)], theirs)


# --- learn2learn: MAML, FOMAML, Meta-SGD, ANIL ------------------------------------------------------------------


def with_learn2learn(data: Data, learner: Any, steps: int, inputs: Sequence[Tensor], g: Any = None) -> list[Any]:
    clone = learner.clone()
    for _ in range(steps):
        clone.adapt(data.h(clone, data.x, data.y))
    return list(torch.autograd.grad((g or data.g)(clone, *data.val), inputs, allow_unused=True))


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_learn2learn_maml(engine: str) -> None:
    model, data = mlp(), Data()
    maml = peer("learn2learn").algorithms.MAML(model, lr=0.5)
    theirs = with_learn2learn(data, maml, 5, [data.lam, *model.parameters()])
    agree("learn2learn", "MAML and data weights", data.ours(model, 5, lr=0.5, engine=engine), theirs)


def test_learn2learn_fomaml() -> None:
    """`first_order=True` takes ∂w_K/∂w_0 for the identity, and no path is left to λ: ours is ∇g at w_K, by hand."""
    model, data = mlp(), Data()
    maml = peer("learn2learn").algorithms.MAML(model, lr=0.5, first_order=True)
    of_lam, *theirs = with_learn2learn(data, maml, 5, [data.lam, *model.parameters()])
    assert of_lam is None
    with bilevel.inner(model, data.h, solver="gd", lr=0.5) as loop:
        loop.run(5, data.x, data.y)
        ours = torch.autograd.grad(data.g(model, *data.val), list(model.parameters()))
    agree("learn2learn", "FOMAML", ours, theirs)


def test_learn2learn_meta_sgd() -> None:
    """A rate for each single weight: a group for each parameter, whose rate has the parameter's shape."""
    model, data = mlp(), Data()
    meta = peer("learn2learn").algorithms.MetaSGD(model, lr=0.5)
    with torch.no_grad():
        for rate in meta.lrs:
            rate.mul_(torch.rand_like(rate))
    theirs = with_learn2learn(data, meta, 5, [data.lam, *model.parameters(), *meta.lrs])
    optimizer = SGD([{"params": [x]} for x in model.parameters()], lr=1.0)
    for group, rate in zip(optimizer.param_groups, meta.lrs, strict=True):
        group["lr"] = rate
    with bilevel.inner(model, data.h, data.g, solver="gd", optimizer=optimizer) as loop:
        loop.run(5, data.x, data.y, outer=data.val)
        ours = loop.hypergrad([data.lam, *model.parameters(), *meta.lrs])
    agree("learn2learn", "Meta-SGD", ours, theirs)


def test_learn2learn_anil() -> None:
    """The body is an outer variable like any other, and the head alone adapts."""
    body, head, data = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 2), Data()

    def loss(head: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(body(x)), y)

    data.h = data.g = loss
    outer = [*body.parameters(), *head.parameters()]
    theirs = with_learn2learn(data, peer("learn2learn").algorithms.MAML(head, lr=0.5), 5, outer)
    with bilevel.inner(head, loss, loss, solver="gd", lr=0.5) as loop:
        loop.run(5, data.x, data.y, outer=data.val)
        agree("learn2learn", "ANIL", loop.hypergrad(outer), theirs)


# --- hypertorch: everything is a map Φ(w, λ) --------------------------------------------------------------------

Map = Callable[[list[Tensor], Tensor], list[Tensor]]


def reverse(phi: Map, g: Callable[[list[Tensor]], Tensor], w: list[Tensor], lam: Tensor, steps: int) -> Tensor:
    """From stored iterates: a ← a·∂Φ/∂w and G ← G + a·∂Φ/∂λ, from the last step to the first."""
    path = [w]
    for _ in range(steps):
        path.append([x.detach().requires_grad_() for x in phi(path[-1], lam)])
    a, total = torch.autograd.grad(g(path[-1]), path[-1], materialize_grads=True), torch.zeros_like(lam)
    for w in reversed(path[:-1]):
        *a, more = torch.autograd.grad(phi(w, lam), [*w, lam], a)
        total += more
    return total


def fixed_point(phi: Map, g: Callable[[list[Tensor]], Tensor], w: list[Tensor], lam: Tensor, steps: int) -> Tensor:
    """The same sweep at the last iterate alone, which Φ maps to itself."""
    w = [x.detach().requires_grad_() for x in w]
    image = phi(w, lam)
    a = start = torch.autograd.grad(g(w), w, materialize_grads=True)
    for _ in range(steps):
        pulled = torch.autograd.grad(image, w, a, retain_graph=True)
        a = [x + y for x, y in zip(pulled, start, strict=True)]
    return torch.autograd.grad(image, lam, a)[0]


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_hypertorch(momentum: float) -> None:
    """Logistic regression with an l2 weight for each input; the state of the heavy ball is (w, v)."""
    p = Logistic()
    model = p.model()

    def at(w: Tensor) -> Any:
        class At:
            def parameters(self) -> list[Tensor]:
                return [w]

            def __call__(self, x: Tensor) -> Tensor:
                return x @ w.mT

        return At()

    def phi(state: list[Tensor], lam: Tensor) -> list[Tensor]:
        w, v = state
        v = momentum * v + torch.autograd.grad(p.h(at(w), p.x, p.y), w, create_graph=True)[0]
        return [w - 0.5 * v, v]

    def g(state: list[Tensor]) -> Tensor:
        return p.g(at(state[0]), *p.val)

    start = [model.weight.detach().clone().requires_grad_(), torch.zeros_like(model.weight).requires_grad_()]
    options = {"optimizer": SGD(model.parameters(), lr=0.5, momentum=momentum)}
    name = f"logistic regression, momentum {momentum}"
    theirs = reverse(phi, g, start, p.lam, 30)
    for engine in ("reverse", "unroll", "forward"):
        agree("hypertorch", f"reverse, {name}", [p.ours(model, 30, engine=engine, **options)], [theirs])

    for _ in range(400):
        start = [x.detach().requires_grad_() for x in phi(start, p.lam)]
    theirs = fixed_point(phi, g, start, p.lam, 400)
    assert relative(theirs, p.implicit()) <= 1e-10
    agree(
        "hypertorch",
        f"fixed point, {name}",
        [p.ours(model, 400, engine=bilevel.Neumann(tol=1e-12), **options)],
        [theirs],
    )


# --- what several of them leave out -----------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.between(torch.tanh(self.second(self.between(torch.tanh(self.first(x))))))


def by(name: str, data: Data, model: nn.Module, steps: int, lr: float, g: Any = None) -> list[Tensor]:
    if name == "higher":
        return with_higher(data, model, SGD(model.parameters(), lr=lr), steps, g)
    if name == "torchopt":
        return with_torchopt(data, model, steps, "MetaSGD", g, lr=lr)
    maml = peer(name).algorithms.MAML(model, lr=lr)
    return with_learn2learn(data, maml, steps, [data.lam, *model.parameters()], g)


@pytest.mark.parametrize("name", ["higher", "torchopt", "learn2learn"])
def test_running_statistics(name: str) -> None:
    """Where g is taken in eval mode, w_0, …, w_K−1 and λ act through BatchNorm's running statistics too. The peers take
    these for constants; learn2learn's clone also shares them with the user's model, and changes them there."""
    model, data = Normed(), Data(n=12)

    def g(model: Any, x: Tensor, y: Tensor) -> Tensor:
        norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
        norm.eval()
        value = data.g(model, x, y)
        norm.train()
        return value

    before = model.norm.running_mean.clone()
    ours = data.ours(model, 4, g, lr=0.3)
    assert data.judge(ours[0], model, 4, g=g, lr=0.3) <= 1e-6
    assert torch.equal(model.norm.running_mean, before)
    theirs = by(name, data, copy.deepcopy(model), 4, 0.3, g)
    assert relative(ours[0], theirs[0]) > 1e-2
    if name == "learn2learn":
        by(name, data, model, 4, 0.3, g)
        assert not torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("name", ["higher", "torchopt", "learn2learn"])
def test_tied_weights(name: str) -> None:
    """TorchOpt steps each place of a tied weight by itself, so that they are tied no longer: another training run.
    (learn2learn's MAML is right; its MetaSGD fails in the second step.)"""
    model, data = Tied(), Data(3, n=12)
    ours, theirs = data.ours(model, 4, lr=0.3), by(name, data, copy.deepcopy(model), 4, 0.3)
    assert data.judge(ours[0], model, 4, lr=0.3) <= 1e-7
    if name == "torchopt":
        assert relative(ours[0], theirs[0]) > 1e-2
    else:
        agree(name, "tied weights", ours, theirs)


def main() -> None:
    """Run the tests with a log, and print the largest error of each problem."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "errors.csv")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__]
        done = subprocess.run(command, env={**os.environ, "PEERS_LOG": str(log)}, capture_output=True, text=True)
        if done.returncode or not log.is_file():
            sys.exit(done.stdout + done.stderr)
        errors: dict[tuple[str, str], float] = {}
        for who, what, error in csv.reader(log.open(newline="")):
            errors[who, what] = max(float(error), errors.get((who, what), 0.0))
    print("| peer | problem | largest relative error |\n| --- | --- | --- |")
    for (who, what), error in errors.items():
        print(f"| {who} | {what} | {error:.0e} |")


if __name__ == "__main__":
    main()
