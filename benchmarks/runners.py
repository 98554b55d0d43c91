"""Who takes part: our engines, the peers, and two references, each as its own users would write it.

A runner is a function of a problem; it returns a function that computes the hypergradient once, from the problem's
initial weights, and gives it as a list in the order of `problem.outer`. What is set up before the first call
(compilation, for JAX) is not timed; what a user has to do again for each hypergradient is. To add one: a function here,
and a line in RUNNERS.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bilevel_plugin as bilevel
from bilevel_recipes.vision import torchvision

from .problems import Problem

Run = Callable[[], list[Tensor]]
Build = Callable[[Problem], Run]


@dataclass(frozen=True)
class Runner:
    """`group`: ours, peer or reference. `package`: what has to be installed, by its name in the index."""

    name: str
    group: str
    build: Build
    package: str = ""
    module: str = ""
    only: str = ""  # the problems it is for, as a prefix; all but P8 if empty
    large: bool = False  # for P8 as well
    absent: str = ""  # why it is a row without figures
    part: tuple[str, str] = ("", "")  # a module that should load, and what it means if it does not
    too_long: tuple[str, str, str] = ("", "", "")  # a problem, its sizes, and why it takes too long there
    unable: tuple[str, str] = ("", "")  # how the names of problems end that it can't take, and why
    compiled: bool = False  # then operators can't be counted from outside, and the first run is no measure

    def takes(self, problem: str) -> bool:
        return problem.startswith(self.only) and (self.large or bool(self.only) or not problem.startswith("P8"))

    def missing(self, problem: str = "", size: str = "") -> str:
        """Why it can't run here, or nothing."""
        if problem and problem == self.too_long[0] and size in self.too_long[1].split():
            return self.too_long[2]
        if self.unable[0] and problem.endswith(self.unable[0]):
            return self.unable[1]
        found = importable(self.module)
        return self.absent or ("" if found is True else f"not installed: {found}")

    def remark(self) -> str:
        """What a reader of its row should know."""
        return self.part[1] if self.part[0] and importable(self.part[0]) is not True else ""

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package) if self.package else None
        except importlib.metadata.PackageNotFoundError:
            return None


def quietly(name: str) -> ModuleType:
    """Import a peer; most of them warn about their own age, or print."""
    with warnings.catch_warnings(), open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        warnings.simplefilter("ignore")
        if name.startswith("learn2learn"):
            torchvision("datasets")  # fails beside a CPU torch if imported without this
        return importlib.import_module(name)


@functools.cache
def importable(name: str) -> bool | str:
    """True, or why not."""
    try:
        return not name or bool(quietly(name))
    except Exception as error:  # old packages fail in many ways
        return f"{type(error).__name__}: {error}"


# --- ours -------------------------------------------------------------------------------------------------------


def ours(
    engine: Callable[[Problem], Any], tasks: bool = False, solver: str = "gd", step: dict[str, Any] | None = None
) -> Build:
    """`bilevel.inner` with that engine; with `tasks`, one head and `tasks=N` in place of a batched module.

    `step` are the options of every step.
    """

    def build(p: Problem) -> Run:
        model, h, g, number = p.single if tasks and p.single else (p.model, p.h, p.g, None)
        rule: dict[str, Any] = {"optimizer": p.optimizer()} if p.adamw else {"lr": p.lr}
        options: dict[str, Any] = {"solver": solver, "engine": engine(p), "tasks": number, **rule}

        def run() -> list[Tensor]:
            inner, outer = p.batches()
            with bilevel.inner(model, h, g, **options) as loop:
                for k in range(p.steps):
                    loop.step(*inner[k % len(inner)], outer=outer, **(step or {}))
                return list(loop.hypergrad(p.outer))

        return run

    return build


# --- references -------------------------------------------------------------------------------------------------


class Host(nn.Module):
    """Calls a loss on the model as functional_call wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[..., Tensor], batch: tuple[Any, ...]) -> Tensor:
        return loss(self.model, *batch)


def autograd(p: Problem) -> Run:
    """The loop that one writes by hand: gradients with create_graph=True, functional_call, one backward."""
    host = Host(p.model)

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        w: dict[str, Any] = dict(host.named_parameters())
        move = adamw_by_hand(p) if p.adamw else lambda n, x, grad, k: x - p.lr * grad
        for k in range(p.steps):
            loss = torch.func.functional_call(host, w, (p.h, inner[k % len(inner)]))
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {n: move(n, x, grad, k + 1) for (n, x), grad in zip(w.items(), grads, strict=True)}
        return list(torch.autograd.grad(torch.func.functional_call(host, w, (p.g, outer)), p.outer))

    return run


def adamw_by_hand(p: Problem) -> Callable[[str, Tensor, Tensor, int], Tensor]:
    """Its formula, with the options that p.optimizer() has: w − lr·(m̂ / (√v̂ + ε) + decay·w)."""
    options = p.optimizer().param_groups[0]
    (b1, b2), eps, decay = options["betas"], options["eps"], options["weight_decay"]
    moments: dict[str, tuple[Any, Any]] = {}

    def move(name: str, x: Tensor, grad: Tensor, k: int) -> Tensor:
        m, v = moments.get(name, (0.0, 0.0))
        m, v = moments[name] = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad.square()
        return x - p.lr * (m / (1 - b1**k) / ((v / (1 - b2**k)).sqrt() + eps) + decay * x)

    return move


def judge(p: Problem) -> Run:
    """What the float64 result that all are judged by is made with."""
    return with_plain_attention(autograd if p.adamw else stored)(p)


def with_plain_attention(build: Build) -> Build:
    """Attention by the kernel that has a second derivative, where a problem's is fused; ours sees to it itself."""

    def built(p: Problem) -> Run:
        run = build(p)

        def plainly() -> list[Tensor]:
            with sdpa_kernel(SDPBackend.MATH):
                return run()

        return plainly if p.fused else run

    return built


def stored(p: Problem) -> Run:
    """Stored iterates by hand, one graph at a time."""
    host = Host(p.model)

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        batches = [*inner, outer]
        cut = [tuple(x.detach().requires_grad_() if tracked(x) else x for x in batch) for batch in batches]
        before = [x for batch in batches for x in batch if tracked(x)]
        wanted = [*(x for batch in cut for x in batch if tracked(x)), *p.outer]
        total = [torch.zeros_like(x) for x in wanted]

        def loss(k: int, w: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(host, w, (p.h, cut[k % len(inner)]))

        def pull(output: Any, w: dict[str, Tensor], along: Any, scale: float) -> list[Tensor]:
            at = [*w.values(), *wanted]
            found = torch.autograd.grad(output, at, along, materialize_grads=True, allow_unused=True)
            for t, d in zip(total, found[len(w) :], strict=True):
                t.add_(d, alpha=scale)
            return list(found[: len(w)])

        w, path = {n: x.detach().requires_grad_() for n, x in host.named_parameters()}, []
        for k in range(p.steps):
            path.append(w)
            grads = torch.autograd.grad(loss(k, w), list(w.values()))
            w = {n: (x - p.lr * d).detach().requires_grad_() for (n, x), d in zip(w.items(), grads, strict=True)}
        a = pull(torch.func.functional_call(host, w, (p.g, cut[-1])), w, None, 1.0)
        for k in reversed(range(p.steps)):
            grads = torch.autograd.grad(loss(k, path[k]), list(path[k].values()), create_graph=True)
            a = [x - p.lr * d for x, d in zip(a, pull(grads, path[k], a, -p.lr), strict=True)]
        if not before:
            return total
        through = torch.autograd.grad(before, p.outer, total[: len(before)], materialize_grads=True)
        return [x + d for x, d in zip(total[len(before) :], through, strict=True)]

    return run


def tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def jax(p: Problem) -> Run:
    """The problem written again in JAX: grad of a scan over the steps, jitted as a whole."""
    from .twin import compiled

    return compiled(p)


# --- peers ------------------------------------------------------------------------------------------------------


def higher(p: Problem) -> Run:
    library: Any = quietly("higher")
    sgd = p.optimizer()

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        with library.innerloop_ctx(p.model, sgd, copy_initial_weights=False) as (fast, optimizer):
            for k in range(p.steps):
                optimizer.step(p.h(fast, *inner[k % len(inner)]))
            return list(torch.autograd.grad(p.g(fast, *outer), p.outer))

    return run


def torchopt(p: Problem) -> Run:
    library: Any = quietly("torchopt")

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        if p.adamw:  # without moment_requires_grad it cuts the first moments off
            decay = p.optimizer().param_groups[0]["weight_decay"]
            optimizer = library.MetaAdamW(p.model, lr=p.lr, weight_decay=decay, moment_requires_grad=True)
        else:
            optimizer = library.MetaSGD(p.model, lr=p.lr)
        start = library.extract_state_dict(p.model, by="reference")
        for k in range(p.steps):
            optimizer.step(p.h(p.model, *inner[k % len(inner)]))
        grads = torch.autograd.grad(p.g(p.model, *outer), p.outer)
        library.recover_state_dict(p.model, start)
        return list(grads)

    return run


def learn2learn(p: Problem) -> Run:
    maml: Any = quietly("learn2learn.algorithms").MAML(p.model, lr=p.lr)

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        learner = maml.clone()
        for k in range(p.steps):
            learner.adapt(p.h(learner, *inner[k % len(inner)]))
        return list(torch.autograd.grad(p.g(learner, *outer), p.outer))

    return run


def betty(p: Problem) -> Run:
    """Its IterativeProblem under an outer problem with first_order=False: the gradient flows through the updates."""
    engines, configs, problems = (quietly(f"betty.{name}") for name in ("engine", "configs", "problems"))

    class Inner(problems.IterativeProblem):
        def forward(self, *args: Any) -> Any:
            return self.fmodule(self.params, self.buffers, *args)

        def training_step(self, batch: Any) -> Tensor:
            return p.h(self, *batch)

    class Outer(problems.ImplicitProblem):
        def training_step(self, batch: Any) -> Tensor:
            return p.g(self.inner, *batch)

        def trainable_parameters(self) -> list[Tensor]:
            return p.outer

        def optimizer_step(self, *_: Any, **__: Any) -> None:
            self.found = [x.grad for x in p.outer if x.grad is not None]

    def run() -> list[Tensor]:
        batches, last = p.batches()
        sgd = torch.optim.SGD(p.model.parameters(), lr=p.lr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # functorch.make_functional is deprecated
            config = configs.Config(unroll_steps=p.steps, retain_graph=True)
            inner = Inner("inner", config, p.model, sgd, train_data_loader=batches, device="cpu")
            holder = nn.Linear(1, 1)  # it wants a module and an optimizer; λ itself comes from trainable_parameters
            idle, config = torch.optim.SGD(holder.parameters(), lr=0.0), configs.Config(first_order=False)
            outer = Outer("outer", config, holder, idle, train_data_loader=[last], device="cpu")
            order = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
            engines.Engine([outer, inner], configs.EngineConfig(train_iters=p.steps), order).run()
        for x in p.model.parameters():
            x.grad = None
        return outer.found

    logging.disable(logging.INFO)  # it reports each set-up
    return run


def boat(p: Problem) -> Run:
    """Its NGD dynamics with RAD. It names losses by import path and has one batch for all steps: ours is a cycle."""
    library: Any = quietly("boat_torch")
    folder = tempfile.TemporaryDirectory()  # it logs both losses there each time, at the cost of evaluating them

    def run() -> list[Tensor]:
        inner, outer = p.batches()
        for x in p.outer:
            x.grad = None
        idle = torch.optim.SGD(p.outer, lr=0.0)
        config = {
            "fo_op": None, "gm_op": ["NGD"], "na_op": ["RAD"], "lower_iters": p.steps, "accumulate_grad": False,
            "lower_level_model": p.model, "upper_level_model": p.model, "lower_level_var": list(p.model.parameters()),
            "upper_level_var": p.outer, "lower_level_opt": p.optimizer(),
            "upper_level_opt": idle, "device": "cpu", "return_grad": True, "copy_last_param": False,
            "loss_log_path": os.path.join(folder.name, "log.json"), "GDA": {"alpha_init": 0.0},
            "RGT": {"truncate_iter": 0},
        }  # fmt: skip
        paths = {f"{level}_level_loss": {"function": f"{__name__}.boat_loss"} for level in ("lower", "upper")}
        with redirect_stdout(None):
            problem = library.Problem(config, paths)
            problem.build_ll_solver()
            problem.build_ul_solver()
            lower, upper = ({"loss": loss, "batches": itertools.cycle(b)} for loss, b in ((p.h, inner), (p.g, [outer])))
            grads, _ = problem.run_iter(lower, upper, current_iter=0)
        return [grad.clone() for grad in grads]

    return run


def boat_loss(feed: dict[str, Any], _: nn.Module, model: nn.Module, **__: Any) -> Tensor:
    return feed["loss"](model, *next(feed["batches"]))


def nothing(p: Problem) -> Run:
    raise NotImplementedError(f"no runner for {p.name}")


# The rows of every table, in this order. `p.tenth`: a tenth of the leanest unrolled peer's live bytes.
RUNNERS = [
    Runner("ours: reverse", "ours", ours(lambda p: bilevel.Reverse()), large=True),
    Runner("ours: reverse blocks=auto", "ours", ours(lambda p: bilevel.Reverse(blocks="auto")), only="P8"),
    Runner("ours: reverse micro=4", "ours", ours(lambda p: bilevel.Reverse(), step={"micro": 4}), only="P3"),
    Runner("ours: reverse checkpoint=sqrt", "ours", ours(lambda p: bilevel.Reverse(checkpoint="sqrt"))),
    Runner("ours: reverse memory=auto", "ours", ours(lambda p: bilevel.Reverse(memory="auto"))),
    Runner("ours: reverse memory=tenth", "ours", ours(lambda p: bilevel.Reverse(memory=p.tenth or "auto"))),
    Runner("ours: reverse compile", "ours", ours(lambda p: bilevel.Reverse(compile=True)), compiled=True),
    Runner(
        "ours: reverse compile memory=tenth", "ours",
        ours(lambda p: bilevel.Reverse(compile=True, memory=p.tenth or "auto")), compiled=True,
    ),
    Runner("ours: unroll", "ours", ours(lambda p: bilevel.Unroll()), large=True),
    Runner("ours: reverse tasks=N", "ours", ours(lambda p: bilevel.Reverse(), tasks=True), only="P4"),
    Runner("ours: unroll tasks=N", "ours", ours(lambda p: bilevel.Unroll(), tasks=True), only="P4"),
    Runner(
        "higher", "peer", with_plain_attention(higher), "higher", "higher", large=True,
        unable=("adamw", "has no differentiable AdamW"),
    ),
    Runner(
        "TorchOpt", "peer", with_plain_attention(torchopt), "torchopt", "torchopt", large=True,
        part=("torchopt._C", "its C++ extension does not load with this torch, and it falls back to Python in silence"),
    ),
    Runner("learn2learn", "peer", learn2learn, "learn2learn", "learn2learn"),
    Runner("Betty", "peer", betty, "betty-ml", "betty"),
    Runner("BOAT", "peer", boat, "boat-torch", "boat_torch"),
    Runner("hypertorch", "peer", nothing, absent="not on the package index, where that name is a hypergraph library"),
    Runner("autograd create_graph", "reference", autograd),
    Runner(
        "JAX jit + scan", "reference", jax, "jax", "jax", compiled=True,
        too_long=("P3", "full quick", "left out: in a scan on the CPU, XLA's convolutions are over 10 times as slow"),
    ),  # jax-ml/jax#12868
]  # fmt: skip
BY_NAME = {runner.name: runner for runner in RUNNERS}
