"""Random problems, solvers, schedules, optimizers and lengths against central differences and against each other.

`make fuzz` runs these with 2,000 examples for each engine and logs every error to $FUZZ_LOG.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note
from hypothesis import strategies as st
from problems import Ridge, differences, hypergrad, relative, value
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

DOUBLE = torch.float64


class Tied(nn.Module):
    """One matrix used twice, one submodule under two names, a frozen bias and a weight that no loss touches."""

    def __init__(self, d: int):
        super().__init__()
        self.a = self.b = nn.Linear(d, d)
        self.c = nn.Linear(d, d, bias=False)
        self.c.weight = self.a.weight
        self.out = nn.Linear(d, 2)
        self.out.bias.requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


class Attention(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(0).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[0])


class Recurrent(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.cell, self.out = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x.unsqueeze(-1))[0][:, -1])


class Checkpointed(nn.Module):
    """Activation checkpointing around the first layers, unless it is switched off."""

    def __init__(self, d: int):
        super().__init__()
        self.first, self.out = nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 2)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(checkpoint(self.first, x, use_reentrant=False) if self.on else self.first(x)))


MODELS = {
    "linear": lambda d: nn.Linear(d, 2),
    "mlp": lambda d: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)),
    "batchnorm, dropout": lambda d: nn.Sequential(
        nn.Linear(d, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Dropout(0.4), nn.Linear(4, 2)
    ),
    "conv": lambda d: nn.Sequential(
        nn.Unflatten(1, (1, d)), nn.Conv1d(1, 2, 1), nn.Softplus(), nn.Flatten(), nn.Linear(2 * d, 2)
    ),
    "tied": Tied,
    "attention": Attention,
    "gru": Recurrent,
    "checkpointed": Checkpointed,
}
BY_TORCH = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RAdam)


@dataclass
class Case:
    """A problem: model, losses, outer variables, and how it is solved."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    outer: tuple[Tensor, ...]
    lam: dict[str, Tensor]
    options: dict[str, Any]
    steps: int
    what: str
    seed: int
    eval_mode: bool = False  # h in training mode, g in eval mode

    def h(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.eval_mode:
            model.train()
        loss = F.cross_entropy(model(x), y, reduction="none")
        decay = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        return (torch.sigmoid(self.lam["sample"]) * loss).mean() + self.lam["decay"].exp() * decay

    def g(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.eval_mode:
            model.eval()
        return F.cross_entropy(self.lam["temperature"].exp() * model(x), y)

    @property
    def problem(self) -> tuple[Any, ...]:
        return self.model, self.h, self.g

    def value(self) -> float:
        return value(*self.problem, self.batch, self.outer, self.steps, self.seed, **self.options)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = DOUBLE, steps: int = 6) -> Case:
    seed = draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    d, n = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    kind = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[kind](d).to(dtype)
    batch = torch.randn(n, d, dtype=dtype), torch.randint(2, (n,))
    outer = torch.randn(n, d, dtype=dtype), torch.randint(2, (n,))
    lam = {
        "sample": torch.randn(n, dtype=dtype),
        "decay": torch.tensor(-3.0, dtype=dtype),
        "temperature": torch.tensor(0.3, dtype=dtype),
    }

    def rate(name: str, low: float, high: float, schedule: Any = None) -> Any:
        """A float, a tensor to differentiate for, or a function of k."""
        form = draw(st.sampled_from(["float", "tensor", "function"]))
        start = draw(st.floats(low, high))
        if form == "float":
            return start
        if form == "function":
            return schedule or (lambda k: start / k**0.5)
        lam[name] = torch.tensor(start, dtype=dtype)
        return lam[name]

    alpha = draw(st.sampled_from([bilevel.power(), bilevel.convergent(), bilevel.constant(0.3), lambda k: 1 / (1 + k)]))
    solver = draw(st.sampled_from(["gd", "bigsam", "bda", "penalty"]))
    optimizer = draw(st.sampled_from(["none", "sgd", "adam", "by torch"]))
    eval_mode = draw(st.booleans())
    t = rate("t", 0.01, 0.3)
    rule = {
        "gd": lambda: bilevel.GD(t),
        "bigsam": lambda: bilevel.BiGSAM(
            t, rate("s", 0.01, 0.3), rate("alpha", 0.1, 0.9, alpha), draw(st.integers(1, 3))
        ),
        "bda": lambda: bilevel.BDA(t, rate("s", 0.01, 0.3), rate("alpha", 0.1, 0.9, alpha)),
        "penalty": lambda: bilevel.Penalty(t, rate("c", 0.05, 1.0)),
    }[solver]()
    options: dict[str, Any] = {"solver": rule}
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[:1], "lr": 0.5}, {"params": trainable[1:]}]
    decay = draw(st.sampled_from([0.0, 0.1]))
    if optimizer == "sgd":
        momentum = draw(st.sampled_from([0.0, 0.8]))
        nesterov = momentum > 0 and draw(st.booleans())
        dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3]))
        options["optimizer"] = torch.optim.SGD(
            groups, lr=1.0, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=decay
        )
    if optimizer == "adam":
        kind_of_adam = draw(st.sampled_from([torch.optim.Adam, torch.optim.AdamW]))
        # with a small eps the step is a sign function, which no difference quotient can follow
        options["optimizer"] = kind_of_adam(groups, lr=0.3, eps=0.3, weight_decay=decay)
    if optimizer == "by torch":
        options["optimizer"] = draw(st.sampled_from(BY_TORCH))(groups, lr=0.3, eps=0.3, weight_decay=decay)
    if optimizer != "none":
        options["clip"] = draw(
            st.sampled_from([None, 0.3, bilevel.clip_norm(0.05), lambda d: {n: x.tanh() for n, x in d.items()}])
        )
    for x in lam.values():
        x.requires_grad_()
    steps = draw(st.integers(0, steps))
    what = f"{kind}, {'g in eval mode, ' if eval_mode else ''}{rule}, {options}, K={steps}"
    return Case(model, batch, outer, lam, options, steps, what, seed, eval_mode)


def log(engine: str, error: float) -> None:
    if path := os.environ.get("FUZZ_LOG"):
        with open(path, "a") as file:
            file.write(f"{engine},{error:.3e}\n")


def _reverse(checkpoint):
    return bilevel.Reverse(memory="1GiB") if checkpoint is None else bilevel.Reverse(checkpoint=checkpoint)


@st.composite
def blocks(draw: st.DrawFn, model: nn.Module) -> bilevel.Engine:
    """Any of the modules as blocks, those inside of one another as well, and the model itself."""
    chosen = draw(st.lists(st.sampled_from(list(model.modules())), min_size=1, unique_by=id))
    return bilevel.Reverse(checkpoint=draw(st.sampled_from([1, "sqrt"])), blocks=chosen)


ENGINES = {
    "reverse": lambda model: st.sampled_from([1, 2, 3, "sqrt", None]).map(_reverse),
    "blocks": blocks,
    "unroll": lambda model: st.just(bilevel.Unroll()),
    "forward": lambda model: st.just(bilevel.Forward()),
}


@pytest.mark.filterwarnings("ignore:.*blocks= is off:UserWarning")  # a GRU has no forward mode
@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
def test_engines_agree_with_differences_and_with_unroll(engine, data):
    case = data.draw(cases())
    note(case.what)
    lam = list(case.lam.values())

    def run(how: bilevel.Engine) -> Tensor:
        torch.manual_seed(case.seed)
        case.model.on = not how.keeps_graphs  # checkpointing is refused where graphs are kept
        check = False if how.spares_memory else "first"  # which would look at one sample, and λ has all of them
        with bilevel.inner(*case.problem, engine=how, check=check, **case.options) as loop:
            if case.steps:
                loop.run(case.steps, *case.batch, outer=case.outer)
            grads = loop.hypergrad(lam, outer=case.outer, allow_unused=True)  # s is not used before its first step
        return torch.cat([g.flatten() for g in grads])

    got = run(data.draw(ENGINES[engine](case.model)))
    assert relative(got, run(bilevel.Unroll())) <= 1e-10

    # all outer variables as one vector, moved along two random directions
    here = torch.cat([x.detach().flatten() for x in lam])

    def f() -> float:
        with torch.no_grad():
            for x, part in zip(lam, here.split([x.numel() for x in lam]), strict=True):
                x.copy_(part.reshape(x.shape))
        return case.value()

    directions = torch.randn(2, got.numel(), generator=torch.Generator().manual_seed(case.seed), dtype=DOUBLE)
    size = max(float(got.norm()), 1e-6)  # below that, differences of g = O(1) in float64 resolve nothing
    error = math.inf
    # BatchNorm of two samples, or Adam's |d| near 0, bend so sharply that only a smaller ε sees the slope. A wrong
    # gradient agrees with none of them.
    for eps in (2e-4, 2e-5, 2e-6):
        expected = torch.tensor([differences(f, here, v, eps) for v in directions], dtype=DOUBLE)
        error = min(error, float((directions @ got - expected).norm()) / size)
        if error <= 1e-6:
            break
    log(engine, error)
    assert error <= 1e-6


@pytest.mark.filterwarnings("ignore:.*blocks= is off:UserWarning")  # a GRU has no forward mode
@given(data=st.data())
def test_outer_losses_on_the_way_are_those_of_shorter_loops(data):
    """∇ Σ_k c_k·g(w_k) by any engine: the sum of c_k times the hypergradients of loops of k steps."""
    case = data.draw(cases(steps=4))
    how = data.draw(st.sampled_from(sorted(ENGINES)).flatmap(lambda name: ENGINES[name](case.model)))
    c = data.draw(st.lists(st.floats(-2, 2), min_size=case.steps + 1, max_size=case.steps + 1))
    note(f"{case.what}, {how}, {c}")
    lam = list(case.lam.values())

    def run(how: str | bilevel.Engine, steps: int, on_the_way: bool) -> Tensor:
        torch.manual_seed(case.seed)
        with bilevel.inner(*case.problem, engine=how, check=False, **case.options) as loop:
            for k in range(steps + 1):
                if k > 0:
                    loop.step(*case.batch, outer=case.outer)
                if on_the_way:
                    loop.add_outer_loss(weight=c[k], outer=case.outer)
            grads = loop.hypergrad(lam, outer=None if on_the_way else case.outer, allow_unused=True)
        return torch.cat([grad.flatten() for grad in grads])

    case.model.on = not how.keeps_graphs
    together, apart = run(how, case.steps, True), [run("reverse", k, False) for k in range(case.steps + 1)]
    size = sum(abs(x) * float(grad.norm()) for x, grad in zip(c, apart, strict=True))
    assert float((together - sum(x * grad for x, grad in zip(c, apart, strict=True))).norm()) <= 1e-10 * size


@given(cases())
def test_forward_is_the_adjoint_of_reverse(case):
    """⟨J·v, u⟩ by forward mode, ⟨v, Jᵀ·u⟩ by reverse mode, J = ∂w_K/∂λ."""
    note(case.what)
    assume(case.steps > 0)
    lam = list(case.lam.values())
    dots = []
    for engine in ("forward", "reverse"):
        torch.manual_seed(case.seed)
        with bilevel.inner(*case.problem, engine=engine, **case.options) as loop:
            loop.run(case.steps, *case.batch, outer=case.outer)
            generator = torch.Generator().manual_seed(1)
            u = [torch.randn(w.shape, generator=generator, dtype=DOUBLE) for w in loop.weights.values()]
            loss = sum((a * w).sum() for a, w in zip(u, loop.weights.values(), strict=True))
            grads = loop.hypergrad(lam, loss=loss, allow_unused=True)
        v = [torch.randn(x.shape, generator=generator, dtype=DOUBLE) for x in lam]
        dots.append(sum(float((a * b).sum()) for a, b in zip(grads, v, strict=True)))
    assert dots[0] == pytest.approx(dots[1], rel=1e-9, abs=1e-12)


@given(st.data())
def test_alpha_one_is_gd_bit_for_bit(data):
    case = data.draw(cases())
    lr = data.draw(st.floats(0.01, 0.3))
    results = []
    for solver in (bilevel.GD(lr), bilevel.BiGSAM(lr, 0.7, alpha=1.0), bilevel.BDA(lr, 0.7, alpha=0.0)):
        torch.manual_seed(case.seed)
        with bilevel.inner(case.model, case.h, case.g, solver=solver) as loop:
            loop.run(3, *case.batch, outer=case.outer)
            results.append([*loop.weights.values(), loop.hypergrad(case.lam["sample"])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@given(st.data())
def test_float32_agrees_with_float64(data):
    """The same problem in single precision: equal to rounding."""
    case = data.draw(cases(torch.float32, steps=4))
    note(case.what)
    case.model.eval()  # dropout draws other numbers in another precision
    names = ("sample", "decay", "temperature") if case.steps else ("temperature",)
    results = []
    for dtype in (torch.float32, torch.float64):
        case.model.to(dtype)
        batch, outer = ((x.to(dtype), y) for x, y in (case.batch, case.outer))
        lam = {n: case.lam[n].detach().to(dtype).requires_grad_() for n in case.lam}
        same = Case(case.model, batch, outer, lam, {"solver": "bigsam", "lr": 0.1}, case.steps, "", case.seed)
        grads = hypergrad(*same.problem, [lam[n] for n in names], batch, outer, case.steps, **same.options)
        assert all(g.dtype == dtype for g in grads)
        results.append(torch.cat([g.flatten().double() for g in grads]))
    assert relative(*results) <= 1e-4


@pytest.mark.parametrize("engine", ["cg", "neumann"])
@given(data=st.data())
def test_implicit_engines_agree_with_the_closed_form(engine, data):
    """A strongly convex problem solved to the end: ridge regression with a penalty of g in the step."""
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    ridge = Ridge.random(data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4)))
    with torch.no_grad():
        ridge.lam.fill_(data.draw(st.floats(-1.5, 1.0)))
    # rates that contract whatever the data: 1/L
    bound = float(torch.linalg.eigvalsh(ridge.hessian(1.0)).max())
    t = 1 / bound
    alpha = data.draw(st.floats(0.3, 1.0))
    form = data.draw(
        st.sampled_from(["gd", "bigsam", "penalty", "sgd", *(["momentum"] if engine == "neumann" else [])])
    )
    options, c = {
        "gd": lambda: ({"solver": bilevel.GD(t)}, 0.0),
        "bigsam": lambda: ({"solver": bilevel.BiGSAM(t, t, alpha=bilevel.constant(alpha))}, (1 - alpha) / alpha),
        "penalty": lambda: ({"solver": bilevel.Penalty(t, c=alpha)}, alpha),
        "sgd": lambda: ({"solver": "gd", "optimizer": "sgd"}, 0.0),
        "momentum": lambda: ({"solver": "gd", "optimizer": "momentum"}, 0.0),
    }[form]()
    model = ridge.model()
    if "optimizer" in options:
        momentum = 0.5 if options["optimizer"] == "momentum" else 0.0
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=t, momentum=momentum)
    how = (bilevel.CG if engine == "cg" else bilevel.Neumann)(iterations=20000, tol=1e-12)
    rate = float(torch.linalg.eigvalsh(ridge.hessian(c)).min()) * t
    assume(rate > 0.02)
    with torch.no_grad():  # start at the solution: what is tested is the derivative, not the way there
        model.w.copy_(ridge.solution(c))
    got = hypergrad(model, ridge.h, ridge.g, ridge.lam, steps=2, engine=how, **options)
    expected = ridge.hypergradient(c)
    error = abs(float(got - expected)) / max(abs(float(expected)), 1e-6)
    log(engine, error)
    assert error <= 1e-6


@given(st.data())
def test_tasks_agree_with_a_loop_over_them(data):
    seed = data.draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    kind = data.draw(st.sampled_from(["linear", "mlp", "conv", "tied", "attention"]))
    n, d, tasks, steps = (data.draw(st.integers(1, 4)) for _ in range(4))
    n += 1
    model = MODELS[kind](d).double()
    x, y = torch.randn(tasks, n, d, dtype=DOUBLE), torch.randint(2, (tasks, n))
    xv, yv = torch.randn(tasks, n, d, dtype=DOUBLE, requires_grad=True), torch.randint(2, (tasks, n))
    lam = torch.randn(n, dtype=DOUBLE, requires_grad=True)
    each = torch.randn(tasks, dtype=DOUBLE, requires_grad=True)

    def h(model, x, y, e):
        return e.exp() * (torch.sigmoid(lam) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model, x, y):
        return F.cross_entropy(model(x), y)

    options = {
        "none": lambda: {"solver": "bigsam", "lr": 0.2},
        "adam": lambda: {"solver": "bigsam", "optimizer": torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)},
        "momentum": lambda: {"solver": "gd", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)},
    }[data.draw(st.sampled_from(["none", "adam", "momentum"]))]()
    engine = data.draw(st.sampled_from(["reverse", "unroll"]))
    with bilevel.inner(model, h, g, tasks=tasks, engine=engine, **options) as loop:
        loop.run(steps, x, y, each, outer=(xv, yv))
        together = loop.hypergrad([lam, xv, each], retain_graph=True)
        start = loop.hypergrad(model, allow_unused=True)
        total, weights = loop.value, loop.weights
    apart, starts, values = [], [], []
    for i in range(tasks):
        with bilevel.inner(model, h, g, engine=engine, **options) as loop:
            loop.run(steps, x[i], y[i], each[i], outer=(xv[i], yv[i]))
            apart.append(loop.hypergrad([lam, xv, each], retain_graph=True))
            starts.append(loop.hypergrad(model, allow_unused=True))
            values.append(loop.value)
            for name, w in loop.weights.items():
                torch.testing.assert_close(weights[name][i], w, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(total, sum(values), rtol=1e-10, atol=1e-12)
    for a, b in zip(together, (sum(parts) for parts in zip(*apart, strict=True)), strict=True):
        assert relative(a, b) <= 1e-10
    for name in start:
        assert relative(start[name], sum(s[name] for s in starts)) <= 1e-10
