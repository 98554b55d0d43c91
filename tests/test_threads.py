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
from bilevel_plugin.hypergrad import ENGINES


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
        return [future.result(timeout=120) for future in [pool.submit(begun, f) for f in work]]


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
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)),
}


def problem(kind: str, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = MODELS[kind]().double()
    return model, torch.randn(6, 4).double(), torch.randint(2, (6,)), torch.randn(6).double().requires_grad_()


def solve(model: nn.Module, x: Tensor, y: Tensor, lam: Tensor, engine: Any = "reverse", steps: int = 15) -> Tensor:
    h, g = weighted(lam)
    with bilevel.inner(model, h, g, lr=0.1, hypergrad=engine) as loop:
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("restless")
def test_two_threads_with_one_model_get_what_one_gets(engine: str) -> None:
    """The weights of both are swapped into the same module, in turns."""
    model, x, y, lam = problem("linear", 1)
    before = copy.deepcopy(model.state_dict())
    how = ENGINES[engine](**({"settled": 1e9, "tol": None, "iterations": 4} if engine in ("cg", "neumann") else {}))
    h, g = weighted(lam)
    solver = bilevel.Penalty(0.1) if engine in ("cg", "neumann") else bilevel.BiGSAM(0.1)
    decayed = lambda m, x, y: h(m, x, y) + sum(p.square().sum() for p in m.parameters())

    def one(x: Tensor) -> Tensor:
        with bilevel.inner(model, decayed, g, solver=solver, hypergrad=how) as loop:
            loop.run(8, x, y, outer=(x, y))
            return loop.hypergrad(lam)

    alone = [one(x), one(2 * x)]
    for _ in range(3):
        together = at_once(lambda: one(x), lambda: one(2 * x))
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.usefixtures("restless")
def test_random_numbers_of_a_step_are_not_mixed_with_another_threads() -> None:
    """The generator is the process's: what each thread draws depends on their order, but each step repeats its own."""
    problems = [problem("dropout", seed) for seed in (1, 2)]
    for _ in range(3):
        at_once(*(lambda p=p: solve(*p) for p in problems))  # a step that ended elsewhere would raise


@pytest.mark.usefixtures("restless")
def test_one_decorated_function_in_two_threads() -> None:
    """Each call has a block of its own, and closes that one."""
    model, x, y, lam = problem("mlp", 1)
    h, g = weighted(lam)

    @bilevel.inner(model, h, g, lr=0.1)
    def train(loop: bilevel.Loop, steps: int) -> Tensor:
        for _ in range(steps):
            loop.step(x, y, outer=(x, y))
        return loop.hypergrad(lam)

    alone = [train(20), train(5)]
    for _ in range(3):
        together = at_once(lambda: train(20), lambda: train(5))
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
