"""Loops in two threads at once, loops within loops, under no_grad, and in a Lightning step."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import Vector, differences, relative, weighted
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_plugin.engine import ENGINES


@pytest.fixture
def restless():
    """Threads that take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own, all begun at the same moment; what they return, or the first error."""
    start = threading.Barrier(len(work))

    def begun(f: Callable[[], Any]) -> Any:
        start.wait()
        return f()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(timeout=600) for future in [pool.submit(begun, f) for f in work]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(0).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
    "linear": lambda: nn.Linear(4, 2),
    "attention": Attention,
}


def problem(kind: str, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = MODELS[kind]().double()
    return model, torch.randn(6, 4).double(), torch.randint(2, (6,)), torch.randn(6).double().requires_grad_()


def solve(model: nn.Module, x: Tensor, y: Tensor, lam: Tensor, engine: Any = "reverse", steps: int = 15) -> Tensor:
    h, g = weighted(lam)
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        loop.run(steps, x, y, outer=(x, y))
        return loop.hypergrad(lam)


def sdpa_flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("kind", ["mlp", "attention"])
@pytest.mark.usefixtures("restless")
def test_two_threads_with_a_model_each_get_what_one_gets(kind: str) -> None:
    problems = [problem(kind, seed) for seed in (1, 2)]
    alone, flags = [solve(*p) for p in problems], sdpa_flags()
    for _ in range(3):
        together = at_once(*(lambda p=p: solve(*p) for p in problems))
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert sdpa_flags() == flags  # which are the process's, not the thread's


@pytest.mark.parametrize("engine", [*ENGINES, "tasks"])
@pytest.mark.usefixtures("restless")
def test_the_second_thread_with_one_model_is_refused(engine: str) -> None:
    """There is one set of weights in a model. The first block goes on as if nothing had happened."""
    model, x, y, lam = problem("linear", 1)
    before = copy.deepcopy(model.state_dict())
    how = ENGINES["reverse" if engine == "tasks" else engine]
    options = {"settled": 1e9, "tol": None, "iterations": 4} if engine in ("cg", "neumann") else {}
    h, g = weighted(lam)
    solver = bilevel.Penalty(0.1) if engine in ("cg", "neumann") else bilevel.BiGSAM(0.1)
    decayed = lambda m, x, y: h(m, x, y) + sum(p.square().sum() for p in m.parameters())
    tasks = 2 if engine == "tasks" else None
    if tasks:
        x, y = x.expand(tasks, *x.shape), y.expand(tasks, *y.shape)
    entered, refused = threading.Event(), threading.Event()

    def block() -> Any:
        return bilevel.inner(model, decayed, g, solver=solver, engine=how(**options), tasks=tasks)

    def first(interrupted: bool = True) -> Tensor:
        with block() as loop:
            loop.run(4, x, y, outer=(x, y))
            if interrupted:
                entered.set()
                assert refused.wait(60)
            loop.run(4, x, y, outer=(x, y))
            return loop.hypergrad(lam)

    def second() -> None:
        assert entered.wait(60)
        try:
            for _ in range(3):  # to be refused once does not open the door
                with pytest.raises(RuntimeError, match=r"another thread has a block open on this model.*deepcopy"):
                    with block():
                        pytest.fail("the second block was opened")
        finally:
            refused.set()

    alone = first(interrupted=False)
    together, _ = at_once(first, second)
    assert torch.equal(alone, together)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(at_once(lambda: first(interrupted=False))[0], alone)  # now the model is free, in any thread


def test_a_shared_part_is_enough_to_be_refused() -> None:
    """Two models that share a layer share its weights."""
    shared = nn.Linear(4, 2).double()
    one, other = nn.Sequential(shared), nn.Sequential(nn.Linear(4, 4).double(), shared)
    x, y = torch.randn(6, 4).double(), torch.randint(2, (6,))
    h = lambda m: F.cross_entropy(m(x), y)

    def second() -> None:
        with pytest.raises(RuntimeError, match="another thread has a block open on this model"):
            with bilevel.inner(other, h, h, lr=0.1):
                pytest.fail("the second block was opened")

    with bilevel.inner(one, h, h, lr=0.1) as loop:
        loop.step()
        at_once(second)
        loop.step()


class Masks(nn.Module):
    """Dropout that remembers its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append((torch.rand_like(x) > 0.5).to(x.dtype))
        return 2 * x * self.drawn[-1]


@pytest.mark.usefixtures("restless")
def test_random_numbers_of_a_step_are_not_mixed_with_another_threads() -> None:
    """The generator is the process's: what each thread draws depends on their order, but each step repeats its own."""
    steps = 15

    def masks(linear: nn.Module, x: Tensor, y: Tensor, lam: Tensor) -> list[Tensor]:
        model = nn.Sequential(linear, Masks())
        h, g = weighted(lam)
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:
            loop.run(steps, x, y, outer=(x, y))
            loop.hypergrad(lam)
        return model[1].drawn

    problems = [problem("linear", seed) for seed in (1, 2)]  # which seeds the generator of both threads
    for _ in range(3):
        for drawn in at_once(*(lambda p=p: masks(*p) for p in problems)):
            assert len(drawn) == 2 * steps + 1  # the steps, g, and the steps again, the last one first
            assert len({tuple(mask.flatten().tolist()) for mask in drawn[:steps]}) > steps / 2
            assert all(torch.equal(a, b) for a, b in zip(drawn[:steps], drawn[:steps:-1], strict=True))


@pytest.mark.usefixtures("restless")
def test_decorated_functions_in_two_threads_with_a_model_each() -> None:
    """Each call has a block of its own, and closes that one."""
    problems = [problem("mlp", 1), problem("mlp", 2)]

    def decorated(model: nn.Module, x: Tensor, y: Tensor, lam: Tensor) -> Callable[[int], Tensor]:
        h, g = weighted(lam)

        @bilevel.inner(model, h, g, lr=0.1)
        def train(loop: bilevel.Loop, steps: int) -> Tensor:
            for _ in range(steps):
                loop.step(x, y, outer=(x, y))
            return loop.hypergrad(lam)

        return train

    one, other = (decorated(*p) for p in problems)
    alone = [one(20), other(5)]
    for _ in range(3):
        together = at_once(lambda: one(20), lambda: other(5))
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_one_decorated_function_in_two_threads_is_refused_by_name() -> None:
    """Its model has one set of weights: the second call is refused, and the first one's block stays open."""
    model, x, y, lam = problem("mlp", 1)
    h, g = weighted(lam)
    entered, refused = threading.Event(), threading.Event()

    @bilevel.inner(model, h, g, lr=0.1)
    def train(loop: bilevel.Loop, interrupted: bool) -> Tensor:
        loop.run(3, x, y, outer=(x, y))
        if interrupted:
            entered.set()
            assert refused.wait(60)
        loop.run(3, x, y, outer=(x, y))
        return loop.hypergrad(lam)

    def second() -> None:
        assert entered.wait(60)
        try:
            with pytest.raises(RuntimeError, match="another thread has a block open on this model"):
                train(False)
        finally:
            refused.set()

    alone = train(False)
    assert torch.equal(at_once(lambda: train(True), second)[0], alone)
    assert torch.equal(train(False), alone)


# --- nesting ---------------------------------------------------------------------------------------------------


class Levels:
    """Three levels in float64: u(w, λ) after 3 steps, w(λ) after 3 steps whose loss is taken at u, and g at w and u.

    With smooth losses that are no quadratics, so that third derivatives matter.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        f = {"dtype": torch.float64}
        self.lam = torch.randn(3, **f).requires_grad_()
        self.u, self.w = Vector(torch.randn(3, **f)), Vector(torch.randn(3, **f))
        self.c = torch.randn(3, **f)

    def lowest(self, w: Tensor) -> Callable[[nn.Module], Tensor]:
        return lambda model: (model.w * w).sin().sum() + (model.w - self.lam).square().sum()

    def solve_u(self, w: Tensor) -> Tensor:
        """The loop inside the loss: its result has a graph, through w, to λ."""
        h = self.lowest(w)
        with bilevel.inner(self.u, h, h, solver="gd", lr=0.2, engine="unroll") as loop:
            loop.run(3)
            return loop.weights["w"]

    def h(self, model: nn.Module) -> Tensor:
        return (self.solve_u(model.w) * model.w).tanh().sum() + (model.w - self.lam.exp()).square().sum() / 4

    def g(self, model: nn.Module) -> Tensor:
        return (self.solve_u(model.w) - self.c).square().sum() + model.w.cos().sum()

    def value(self) -> float:
        with bilevel.inner(self.w, self.h, self.g, lr=0.2) as loop:
            loop.run(3)
            return float(loop.value)

    def by_hand(self) -> Tensor:
        """The same as plain autograd over plain loops."""

        def descend(w: Tensor, loss: Callable[[Tensor], Tensor], rate: float) -> Tensor:
            return w - rate * torch.autograd.grad(loss(w), w, create_graph=True)[0]

        def solve_u(w: Tensor) -> Tensor:
            u = self.u.w.clone()  # of its own: from the second step on, w depends on the parameter too
            for _ in range(3):
                u = descend(u, lambda u: (u * w).sin().sum() + (u - self.lam).square().sum(), 0.2)
            return u

        h = lambda w: (solve_u(w) * w).tanh().sum() + (w - self.lam.exp()).square().sum() / 4
        g = lambda w: (solve_u(w) - self.c).square().sum() + w.cos().sum()
        w: Tensor = self.w.w
        for k in (1, 2, 3):
            alpha = k**-0.25
            w = descend(w, lambda w, a=alpha: a * h(w) + (1 - a) * g(w), 0.2)
        return torch.autograd.grad(g(w), self.lam)[0]


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", bilevel.Reverse(memory="1MiB")])
def test_three_levels(engine: Any) -> None:
    levels = Levels()
    before = [levels.u.w.detach().clone(), levels.w.w.detach().clone()]
    with bilevel.inner(levels.w, levels.h, levels.g, lr=0.2, engine=engine) as loop:
        loop.run(3)
        grad = loop.hypergrad(levels.lam)
    assert relative(grad, levels.by_hand()) < 1e-12
    v = torch.randn_like(grad)
    slope = differences(levels.value, levels.lam, v)
    assert abs(slope - float(grad @ v)) < 1e-8 * abs(slope)
    assert torch.equal(levels.u.w, before[0])
    assert torch.equal(levels.w.w, before[1])


@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", bilevel.Reverse(memory="1MiB")])
def test_a_loop_inside_a_loss_on_the_same_module(engine: Any, reads_before: bool) -> None:
    """The inner block starts from the weights that are in the module at that moment, attached to them."""
    model, lam = Vector(torch.ones(2, dtype=torch.float64)), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    task = lambda m: (m.w - lam).square().sum()

    def after_two(m: nn.Module) -> Tensor:
        before = m.w.pow(4).sum() if reads_before else 0.0
        with bilevel.inner(m, task, task, solver="gd", lr=0.1, engine="unroll") as loop:
            loop.run(2)
            return (loop.weights["w"] ** 3).sum() + before

    def value() -> float:
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        for _ in range(3):
            u = w
            for _ in range(2):
                u = u - 0.2 * (u - lam)
            loss = u.pow(3).sum() + (w.pow(4).sum() if reads_before else 0.0)
            w = (w - 0.1 * torch.autograd.grad(loss, w)[0]).detach().requires_grad_()
        return float((w - lam).square().sum().detach())

    with bilevel.inner(model, after_two, task, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(3)
        assert float(loop.value) == pytest.approx(value(), rel=1e-12)
        grad = loop.hypergrad(lam)
    assert torch.equal(model.w, torch.ones(2, dtype=torch.float64))
    assert float(grad) == pytest.approx(differences(value, lam, torch.ones_like(lam)), rel=1e-9)


@pytest.mark.parametrize("second", ["reverse", "unroll", "forward", bilevel.Reverse(memory="1MiB")])
@pytest.mark.parametrize("first", ["reverse", "unroll", "forward", bilevel.Reverse(memory="1MiB")])
def test_a_block_between_two_steps_on_the_same_module(first: Any, second: Any) -> None:
    """It starts from the current weights, and leaves no trace: the block around it goes on as without it."""
    model, x, y, lam = problem("mlp", 1)
    before = copy.deepcopy(model.state_dict())
    h, g = weighted(lam)
    results = []
    for nested in (False, True):
        with bilevel.inner(model, h, g, lr=0.1, engine=first) as loop:
            loop.run(3, x, y, outer=(x, y))
            if nested:
                here = {n: w.detach().clone() for n, w in loop.weights.items()}
                with bilevel.inner(model, h, g, lr=0.3, engine=second) as inside:
                    assert all(torch.equal(w, here[n]) for n, w in inside.weights.items())
                    inside.run(2, x, y, outer=(x, y))
                    assert not torch.equal(next(model.parameters()), next(iter(here.values())))
                    with pytest.raises(RuntimeError, match="still open on the same model"):
                        loop.step(x, y)
                    inside.hypergrad(lam)
                assert all(torch.equal(p, here[n]) for n, p in model.named_parameters())
            loop.run(3, x, y, outer=(x, y))
            results.append(loop.hypergrad(lam))
    assert torch.equal(*results)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("engine", ["reverse", "forward", "cg"])
def test_a_loop_inside_a_loss_needs_a_graph(engine: str) -> None:
    """An engine that keeps none would cut the loss off from the weights, in silence."""
    levels = Levels()

    def h(model: nn.Module) -> Tensor:
        lowest = levels.lowest(model.w)
        with bilevel.inner(levels.u, lowest, lowest, solver="gd", lr=0.2, engine=engine) as loop:
            loop.run(3)
            return (loop.weights["w"] * model.w).sum()

    with bilevel.inner(levels.w, h, levels.g, lr=0.2) as loop:
        with pytest.raises(RuntimeError, match=r"inside of a loss has engine=.*Use engine='unroll' for it"):
            loop.step()


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_under_no_grad_as_without(engine: str) -> None:
    p = problem("mlp", 1)
    plain = solve(*p, engine)
    with torch.no_grad():
        assert torch.equal(solve(*p, engine), plain)
        assert not torch.is_grad_enabled()


# --- Lightning -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of Lightning's own making: workers, loggers, sanity checks
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_a_manual_step_of_lightning(precision: Any, tmp_path: Any) -> None:
    """Three outer steps under its Trainer give the weights of three outer steps without it."""
    L = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            self.lam = nn.Parameter(torch.zeros(12))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([self.lam], 0.1)

        def outer_step(self, adam: Any, x: Tensor, y: Tensor, i: Tensor) -> None:
            def h(model: nn.Module) -> Tensor:
                return (torch.sigmoid(self.lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()

            adam.zero_grad()
            with bilevel.inner(self.net, h, lambda m: F.cross_entropy(m(x), y), lr=0.5) as loop:
                loop.run(4)
                loop.backward()
            adam.step()

        def training_step(self, batch: Any, index: int) -> None:
            self.outer_step(self.optimizers(), *batch)

    x, y, i = torch.randn(12, 4), torch.randint(2, (12,)), torch.arange(12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y, i), batch_size=4)
    plain, module = Module(), Module()
    adam = plain.configure_optimizers()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        for batch in loader:
            plain.outer_step(adam, *batch)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, precision=precision, default_root_dir=tmp_path,
                        num_sanity_val_steps=0, **quiet)  # fmt: skip
    trainer.fit(module, loader)
    assert module.lam.abs().max() > 0.1
    assert torch.equal(plain.lam, module.lam)
    assert all(torch.equal(a, b) for a, b in zip(plain.net.parameters(), module.net.parameters(), strict=True))
