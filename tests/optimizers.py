"""Every class of torch.optim in a block, judged by the plain loop.

    make optimizers

The problem is a 6-5-1 tanh network with a weight λ_i for each sample, in float64, while the default dtype stays
float32: torch keeps some of its scalars in the default dtype, and a block has to do the same. The end point is that
of the plain loop, the hypergradient is that of its central differences. `main` runs the same problem through `higher`
and TorchOpt, and prints docs/results/optimizers.md.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from problems import differences, relative
from torch import Tensor, nn

import bilevel_plugin as bilevel

STEPS = 5
SAMPLES = 7
ENGINES: dict[str, Any] = {
    "reverse": "reverse",
    "unroll": "unroll",
    "sqrt": bilevel.Reverse(checkpoint="sqrt"),
    "memory": bilevel.Reverse(memory="1GiB"),
    "forward": "forward",
}

# The first set of options of each class is the one that settings, learnable rates and peers are tried with.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.3},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.02, "momentum": 0.5, "maximize": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True},
        {"lr": 0.02, "momentum": 0.9, "maximize": True, "foreach": True},
    ],
    "Adam": [
        {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"lr": 0.05},
        {"lr": 0.05, "amsgrad": True, "betas": (0.5, 0.6)},
        {"lr": 0.05, "amsgrad": True, "betas": (0.5, 0.6), "weight_decay": 0.1, "maximize": True},
        {"lr": 0.05, "eps": 1e-2},
        {"lr": 0.05, "betas": (0.0, 0.9)},
        {"lr": 0.05, "betas": (0.9, 0.0), "eps": 0.1},
        {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.05, "weight_decay": 0.1, "foreach": True},
        {"lr": 0.05, "weight_decay": 0.1, "fused": True, "amsgrad": True},
    ],
    "AdamW": [
        {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"lr": 0.05},
        {"lr": 0.05, "weight_decay": 0.0},
        {"lr": 0.05, "amsgrad": True, "betas": (0.5, 0.6), "weight_decay": 0.3},
        {"lr": 0.05, "maximize": True, "eps": 1e-3},
        {"lr": 0.05, "foreach": True},
        {"lr": 0.05, "fused": True, "maximize": True},
    ],
    "Adadelta": [
        {"lr": 1.0, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
        {"lr": 1.0},
        {"lr": 5.0, "rho": 0.5, "maximize": True, "weight_decay": 0.1},
        {"lr": 1.0, "foreach": True, "weight_decay": 0.1},
    ],
    "Adagrad": [
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        {"lr": 0.1},
        {"lr": 0.1, "lr_decay": 0.5, "eps": 1e-2},
        {"lr": 0.1, "maximize": True, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        {"lr": 0.1, "foreach": True, "lr_decay": 0.1},
        {"lr": 0.1, "fused": True, "lr_decay": 0.1, "weight_decay": 0.1},
    ],
    "Adamax": [
        {"lr": 0.05, "betas": (0.8, 0.7), "weight_decay": 0.1},
        {"lr": 0.05},
        {"lr": 0.05, "eps": 0.1, "maximize": True},
        {"lr": 0.05, "foreach": True, "weight_decay": 0.1},
    ],
    "ASGD": [
        {"lr": 0.1, "lambd": 0.1, "alpha": 0.6, "weight_decay": 0.1},
        {"lr": 0.1},
        {"lr": 0.1, "t0": 2.0, "lambd": 0.01},
        {"lr": 0.03, "maximize": True, "weight_decay": 0.1, "alpha": 0.5},
        {"lr": 0.1, "foreach": True, "lambd": 0.1, "t0": 1.0},
    ],
    "NAdam": [
        {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "momentum_decay": 0.1},
        {"lr": 0.05},
        {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.05, "eps": 1e-2, "maximize": True, "momentum_decay": 0.0},
        {"lr": 0.05, "foreach": True, "weight_decay": 0.1},
    ],
    "RAdam": [
        {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1},
        {"lr": 0.05},
        {"lr": 0.05, "betas": (0.8, 0.7)},
        {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 1e-2},
        {"lr": 0.02, "maximize": True, "weight_decay": 0.1},
        {"lr": 0.05, "foreach": True, "weight_decay": 0.1},
    ],
    "RMSprop": [
        {"lr": 0.02, "alpha": 0.8, "weight_decay": 0.1, "momentum": 0.5},
        {"lr": 0.02},
        {"lr": 0.02, "centered": True, "alpha": 0.7, "eps": 1e-2},
        {"lr": 0.02, "centered": True, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-2},
        {"lr": 0.01, "maximize": True, "eps": 1e-2},
        {"lr": 0.02, "foreach": True, "centered": True, "momentum": 0.5, "eps": 1e-2},
    ],
    "Rprop": [
        {"lr": 0.02, "etas": (0.4, 1.3)},
        {"lr": 0.02, "step_sizes": (0.015, 0.025)},
        {"lr": 0.02, "maximize": True},
        {"lr": 0.02, "foreach": True},
    ],
    "Adafactor": [
        {"lr": 0.05, "weight_decay": 0.1, "beta2_decay": -0.7, "d": 1.05},  # at d = 1 the first step is at a kink
        {"lr": 0.05},
        {"lr": 0.6, "eps": (1e-3, 0.3)},  # rates are bounded by 1/√t, and by 0.3
        {"lr": 0.05, "maximize": True, "d": 1.2},
        {"lr": 0.05, "weight_decay": 0.1, "foreach": True},
    ],
    "Muon": [
        {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.8},
        {"lr": 0.05, "nesterov": False},
        {"lr": 0.05, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.05, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
}
OPTIONS = {  # Muon came with torch 2.9, decoupled_weight_decay with 2.7
    name: [options for options in sets if options.keys() <= inspect.signature(kind).parameters.keys()]
    for name, sets in OPTIONS.items()
    if (kind := getattr(torch.optim, name, None))
}
Factor = float | Callable[[int], float]
SETTINGS = ("groups", "stepped before", "no gradient", "zero gradient", "scheduler")


@dataclass(frozen=True)
class Case:
    """A class with one set of options, in one setting."""

    name: str
    number: int = 0
    setting: str = ""
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        kind = self.dtype is not torch.float64 and str(self.dtype)
        said = " ".join(f"{k}={v}" for k, v in self.options.items() if k != "lr") if not self.setting else ""
        return ", ".join(x for x in (self.name, said, self.setting, kind) if x)

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.name][self.number]


class Net(nn.Module):
    """6-5-1 with tanh, and a second layer that is left out of the loss in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.side(x)) if side else torch.tanh(self.first(x))
        return self.last(hidden).squeeze(-1)


@dataclass
class Problem:
    """A network, its data, and λ: h = mean of softplus(λ_i)·(error_i)², g = mean of (error_i)² on other data."""

    case: Case
    model: nn.Module = field(init=False)
    lam: Tensor = field(init=False)
    fixed: Tensor = field(init=False)  # the λ of the steps that were taken before the block
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.case.dtype)
        self.x, self.x_val, self.y, self.y_val = draw(SAMPLES, 6), draw(SAMPLES, 6), draw(SAMPLES), draw(SAMPLES)
        if self.case.setting == "zero gradient":
            self.x[:5, 0] = 0  # no sample of the first two batches has this feature: a gradient of exactly 0
        self.model = Net().to(self.case.dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(draw(*p.shape) / 2)
        self.lam = draw(SAMPLES).requires_grad_()
        self.fixed = self.lam.detach().clone()
        if self.case.setting == "scheduler":
            self.schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def batch(self, k: int) -> tuple[Tensor, bool]:
        """The samples of step k, and whether the loss goes through the side layer."""
        return torch.arange(k, k + 4) % SAMPLES, self.case.setting == "no gradient" and k % 2 == 0

    def h(self, model: nn.Module, i: Tensor, side: bool = False) -> Tensor:
        return (nn.functional.softplus(self.lam[i]) * (model(self.x[i], side) - self.y[i]).square()).mean()

    def g(self, model: nn.Module) -> Tensor:
        return (model(self.x_val, self.case.setting == "no gradient") - self.y_val).square().mean()

    def empty_optimizer(self, model: nn.Module, **changed: Any) -> torch.optim.Optimizer:
        """The optimizer of the case, on this model."""
        options = {**self.case.options, **changed}
        held: list[Any] = [p for p in model.parameters() if self.case.name != "Muon" or p.ndim == 2]
        if self.case.setting == "groups":
            other = {"lr": 1.5 * options["lr"], **_other(self.case.name)}
            first = [p for p in model.first.parameters() if any(p is q for q in held)]
            held = [{"params": first, **other}, {"params": [p for p in held if all(p is not q for q in first)]}]
        return getattr(torch.optim, self.case.name)(held, **options)

    def optimizer(self, model: nn.Module, **changed: Any) -> torch.optim.Optimizer:
        """The optimizer after the steps that it took before the loop, if any; those have the case's own options."""
        if self.case.setting != "stepped before":
            return self.empty_optimizer(model, **changed)
        optimizer = self.empty_optimizer(model)
        kept, self.lam = self.lam, self.fixed
        for k in range(3):
            self.plain_step(model, optimizer, k)
        self.lam = kept
        for group in optimizer.param_groups:
            group.update(changed)
        return optimizer

    def plain_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.h(model, *self.batch(k))
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        return loss.detach()

    def plain(
        self, steps: int = STEPS, factor: Factor = 1.0, **changed: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The plain loop on a copy of the model, with all rates times a factor; returns model and optimizer."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model, **changed)
        scheduler = self.schedule and self.schedule(optimizer)
        for k in range(steps):
            rates = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (factor(k + 1) if callable(factor) else factor)
            loss = self.plain_step(model, optimizer, k)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            advance(scheduler, loss)
        return model, optimizer

    def value(self, **changed: Any) -> float:
        """g at the end of the plain loop."""
        return float(self.g(self.plain(**changed)[0]).detach())

    @contextlib.contextmanager
    def block(
        self, engine: str = "reverse", changed: dict[str, Any] | None = None, **given: Any
    ) -> Iterator[tuple[nn.Module, Any, torch.optim.Optimizer]]:
        """The same loop in a block, on a copy of the model; yields the model, the handle and the optimizer."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model, **(changed or {}))
        scheduler = self.schedule and self.schedule(optimizer)
        options = {"solver": "gd", "optimizer": optimizer, "engine": ENGINES[engine], "check": False, **given}
        with bilevel.inner(model, self.h, self.g, **options) as loop:
            for k in range(STEPS):
                losses = loop.step(*self.batch(k))
                advance(scheduler, losses.h)
            yield model, loop, optimizer

    def end_error(self, engine: str, **given: Any) -> float:
        """How far a block ends from where the plain loop ends."""
        with self.block(engine, **given) as (model, _, _):
            return distance(model.state_dict(), self.plain()[0].state_dict())

    def directions(self, n: int, count: int = 3) -> Tensor:
        """Some orthonormal directions in n dimensions, one in each row."""
        drawn = torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.linalg.qr(drawn)[0][:count]

    def numbers(self) -> list[tuple[str, int | None]]:
        """The options of the class that are real numbers, beside the rate, each with its place in a tuple."""
        found: list[tuple[str, int | None]] = []
        for name, value in self.empty_optimizer(self.model).defaults.items():
            if isinstance(value, tuple):
                found += [(name, i) for i in range(len(value))]
            elif name not in ("lr", "ns_steps") and isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append((name, None))
        return found


def advance(scheduler: Any, loss: Tensor) -> None:
    """scheduler.step(), with the loss if it asks for one."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(loss))
    elif scheduler:
        scheduler.step()


def _other(name: str) -> dict[str, Any]:
    """What the second group of parameters has that is other than in the first, beside the rate."""
    if name == "Rprop":
        return {"etas": (0.3, 1.1), "step_sizes": (1e-3, 0.05)}
    extra = {"SGD": {"momentum": 0.0}, "RMSprop": {"centered": True, "eps": 1e-2}, "ASGD": {"t0": 1.0}}
    return {"weight_decay": 0.3, **extra.get(name, {})}


@contextlib.contextmanager
def exact_newton_schulz() -> Iterator[None]:
    """Muon's iteration in the precision of the weights: in bfloat16 it is a staircase, without a derivative."""
    kept = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self, *a, **k: self.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = kept


@contextlib.contextmanager
def float64_scalars() -> Iterator[None]:
    """torch's own scalars in float64, where the differences go through them."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def differences_along(f: Callable[[], float], x: Tensor, directions: Tensor, eps: float = 2e-4) -> Tensor:
    """The derivative of f for x along each of the directions, by differences."""
    return torch.tensor([differences(f, x, v.view_as(x), eps) for v in directions], dtype=torch.float64)


@cache
def true_hypergradient(case: Case) -> Tensor:
    """The hypergradient along three directions, by differences of the plain loop."""
    problem = Problem(case)
    with exact_newton_schulz():
        return differences_along(problem.value, problem.lam, problem.directions(SAMPLES))


@cache
def end_of_plain_loop(case: Case, exact: bool) -> dict[str, Tensor]:
    """Where the plain loop ends; exact: with Muon's iteration in the precision of the weights."""
    with exact_newton_schulz() if exact else contextlib.nullcontext():
        return dict(Problem(case).plain()[0].state_dict())


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance of two tensors that have the same name."""
    assert got.keys() == expected.keys()
    return max(relative(got[n].detach(), expected[n]) for n in expected)


def errors(case: Case, engine: str, exact: bool = False) -> tuple[float, float]:
    """How far the end point and the hypergradient of a block are off from those of the plain loop."""
    problem = Problem(case)
    with exact_newton_schulz() if exact else contextlib.nullcontext(), problem.block(engine) as (model, loop, _):
        off = distance(model.state_dict(), end_of_plain_loop(case, exact))
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
    return off, relative(along, true_hypergradient(case))


def learnable(case: Case, option: str, place: int | None, engine: str, zero: bool = False) -> tuple[str, str]:
    """Whether an option can be an outer variable: right, refused, wrong or fails, and what was seen.

    It is a tensor that requires grad in the group; the plain loops that judge it have it as a number. Where torch's
    own constructor does not take a tensor, that is a refusal too. "nothing": that no loss depends on it is an error
    of the library, and true.
    """
    problem = Problem(case)
    given = problem.empty_optimizer(problem.model).defaults[option]
    # an ε of 1e-8 is too small to be moved by differences
    start = 0.0 if zero else 0.05 if option == "eps" else float((given if place is None else given[place]) or 0.1)
    variable = torch.tensor(start, dtype=torch.float64, requires_grad=True)

    def options(value: Any, other: Callable[[Any], Any] = lambda v: v) -> dict[str, Any]:
        if place is None:
            return {option: value}
        return {option: tuple(value if i == place else other(v) for i, v in enumerate(given))}

    with exact_newton_schulz(), float64_scalars():
        size = 1e-6 if case.name == "Rprop" else min(5e-5, start / 100) if start else 5e-5  # signs jump
        if zero:  # where 0 is the least that torch takes, a one-sided difference is what there is
            at = [problem.value(**options(k * size)) for k in range(5)]
            true = (-25 * at[0] + 48 * at[1] - 36 * at[2] + 16 * at[3] - 3 * at[4]) / (12 * size)
        else:
            one = torch.ones((), dtype=torch.float64)
            true = differences(lambda: problem.value(**options(variable.item())), variable, one, size)
        try:
            changed = options(variable, torch.tensor if case.name in ("Adam", "AdamW") else lambda v: v)
            problem.empty_optimizer(problem.model, **changed)
        except (TypeError, ValueError) as error:
            return "refused", f"by torch: {error}"
        try:
            with problem.block(engine, changed=changed) as (_, loop, _):
                got = loop.hypergrad(variable).item()
        except Exception as error:
            named = str(error).startswith("bilevel.")
            outcome = "nothing" if named and not true else "refused" if named and option in str(error) else "fails"
            return outcome, f"{type(error).__name__}: {error}; it is {true}"
    scale = max(abs(true), abs(got))
    right = abs(got - true) <= 1e-6 * scale or scale < 1e-10
    return "right" if right else "wrong", f"{got} for {true}"


def same_state(ours_of: torch.optim.Optimizer, theirs_of: torch.optim.Optimizer) -> None:
    """The two optimizers have the same groups and the same state."""
    ours, theirs = ours_of.state_dict(), theirs_of.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for i, state in theirs["state"].items():
        assert ours["state"][i].keys() == state.keys()
        for key, value in state.items():
            got = ours["state"][i][key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-14, msg=f"{key}: {got} is not {value}")
                assert not got.requires_grad
                assert got.grad_fn is None
            else:
                assert got == value
                assert type(got) is type(value)


# The table: the same problems through higher and TorchOpt

KERNELS = ("foreach", "fused")  # options that choose a kernel, not a rule
RIGHT, CLOSE = (1e-12, 1e-6), (1e-4, 1e-3)  # errors of end point and hypergradient
OUTCOMES = ("right", "close", "wrong", "fails", "absent")
Way = Callable[[Problem], tuple[dict[str, Tensor], Tensor]]


def by_block(engine: str) -> Way:
    """The end point and the hypergradient of a block."""

    def way(problem: Problem) -> tuple[dict[str, Tensor], Tensor]:
        with problem.block(engine) as (model, loop, _):
            return {n: p.detach().clone() for n, p in model.named_parameters()}, loop.hypergrad(problem.lam)

    return way


def by_higher(problem: Problem) -> tuple[dict[str, Tensor], Tensor]:
    """The end point and the hypergradient of `higher`."""
    import higher

    model = copy.deepcopy(problem.model)
    context = higher.innerloop_ctx(model, problem.optimizer(model), copy_initial_weights=False)
    with context as (fast, optimizer):
        for k in range(STEPS):
            optimizer.step(problem.h(fast, *problem.batch(k)))
        gradient = torch.autograd.grad(problem.g(fast), problem.lam)[0]
        names = [n for n, _ in model.named_parameters()]
        return dict(zip(names, (p.detach() for p in fast.parameters()), strict=True)), gradient


def by_torchopt(problem: Problem) -> tuple[dict[str, Tensor], Tensor]:
    """The end point and the hypergradient of TorchOpt."""
    import torchopt

    meta = getattr(torchopt, f"Meta{problem.case.name}", None)
    if meta is None or problem.case.setting in ("groups", "stepped before"):
        raise NotImplementedError("not supported by TorchOpt")  # nor is the state of a torch.optim optimizer
    model = copy.deepcopy(problem.model)
    optimizer = meta(model, **problem.case.options)
    for k in range(STEPS):
        optimizer.step(problem.h(model, *problem.batch(k)))
    gradient = torch.autograd.grad(problem.g(model), problem.lam)[0]
    return {n: p.detach() for n, p in model.named_parameters()}, gradient


@dataclass(frozen=True)
class Found:
    """What a library made of one case."""

    case: Case
    outcome: str  # one of OUTCOMES
    end: float = 0.0
    gradient: float = 0.0
    note: str = ""


def judge(case: Case, way: Way) -> Found:
    """Run a case through a library, and compare it with the plain loop. A layer that no loss reads is left out."""
    problem = Problem(case)
    if case.setting != "no gradient":
        del problem.model.side
    expected = {n: p.detach() for n, p in problem.plain()[0].named_parameters()}
    try:
        end, gradient = way(problem)
        if case.name == "Muon":
            with exact_newton_schulz():
                gradient = way(problem)[1]
    except Exception as error:
        absent = any(words in str(error) for words in ("not supported by", "unexpected keyword"))
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Found(case, "absent" if absent else "fails", note=said)
    off = distance(end, expected), relative(problem.directions(SAMPLES) @ gradient, true_hypergradient(case))
    within = lambda limits: all(e < limit for e, limit in zip(off, limits, strict=True))  # false for NaN
    return Found(case, "right" if within(RIGHT) else "close" if within(CLOSE) else "wrong", *off)


def count(found: Sequence[Found]) -> str:
    """How many there are of each outcome."""
    parts = [f"{sum(f.outcome == o for f in found)} {o}" for o in OUTCOMES if any(f.outcome == o for f in found)]
    return ", ".join(parts)


def worst(found: Sequence[Found]) -> str:
    """The largest error of the end point and of the hypergradient, as two cells."""
    ran = [f for f in found if f.outcome in ("right", "close", "wrong")]
    largest = [max((math.inf if math.isnan(e) else e for e in es), default=-1.0) for es in _errors(ran)]
    return " | ".join("–" if e < 0 else "NaN" if e == math.inf else f"{e:.0e}" for e in largest)


def _errors(found: Sequence[Found]) -> tuple[list[float], list[float]]:
    return [f.end for f in found], [f.gradient for f in found]


def learnable_row(name: str) -> str:
    """Which options of a class can be outer variables, and which are refused."""
    found: dict[str, list[str]] = {"right": [], "refused": [], "wrong": [], "fails": []}
    for option, place in [("lr", None), *Problem(Case(name)).numbers()]:
        outcomes = {learnable(Case(name, setting=s), option, place, "reverse")[0] for s in ("", "stepped before")}
        outcome = next((o for o in ("fails", "wrong", "refused", "right") if o in outcomes), None)
        if outcome:
            found[outcome].append(option if place is None else f"{option}[{place}]")
    return f"| {name} | " + " | ".join(", ".join(f"`{o}`" for o in of) or "–" for of in found.values()) + " |"


HEAD = f"""# Optimizers

Made by `make optimizers`, from the cases of `tests/optimizers.py`: a 6-5-1 tanh network in float64, a weight for each
sample as outer variable, {STEPS} steps. Each class of `torch.optim` is run with several sets of options, and with its
first set in these settings: {", ".join(SETTINGS)}. The end point is compared with
that of the plain loop, and the hypergradient with central differences of the plain loop.

- **right**: the end point to 1e-12, the hypergradient to 1e-6 (relative);
- **close**: to 1e-4 and 1e-3: an older rule, or scalars that are not rounded as in torch;
- **wrong**: further off, without an error;
- **fails**: an error of some other kind;
- **absent**: there is no such class or option.

A block runs each case with {len(ENGINES)} engines. The peers run those without a scheduler and without `foreach` or
`fused`, which choose a kernel and not a rule. Muon's Newton-Schulz iteration runs in bfloat16, and has no derivative:
its end point is compared as it is, its hypergradient is that of the same iteration in float64.

## How many cases are right
"""
LIBRARIES = ("a block", "`higher`", "TorchOpt")


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own, of torch's newer ways
    print(HEAD)
    print(f"| class | cases | {' | '.join(LIBRARIES)} |\n| --- | ---: |{' --- |' * len(LIBRARIES)}")
    largest: list[str] = []
    odd: dict[str, None] = {}  # in their order, each once
    for name, sets in OPTIONS.items():
        cases = [Case(name, i) for i in range(len(sets))] + [Case(name, setting=s) for s in SETTINGS]
        rules = [c for c in cases if c.setting != "scheduler" and not any(k in c.options for k in KERNELS)]
        ours = [judge(c, by_block(e)) for c in cases for e in ENGINES]
        found = (ours, [judge(c, by_higher) for c in rules], [judge(c, by_torchopt) for c in rules])
        print(f"| {name} | {len(cases)} | {' | '.join(map(count, found))} |")
        largest.append(f"| {name} | {' | '.join(map(worst, found))} |")
        for who, of in zip(LIBRARIES, found, strict=True):
            for f in of:
                if f.outcome in ("wrong", "fails"):
                    said = f"{f.end:.0e} | {f.gradient:.0e}" if not f.note else f"{f.note[:100].replace('|', '/')} | –"
                    odd[f"| {who} | {f.case} | {said} |"] = None
    print("\n## The largest errors\n\nRelative errors of the end point, and then of the hypergradient.\n")
    print(f"| class | {' | '.join(f'{who}: end | gradient' for who in LIBRARIES)} |")
    print("| --- |" + " ---: | ---: |" * len(LIBRARIES) + "\n" + "\n".join(largest))
    rounded = [errors(Case("Muon", i), "reverse")[1] for i in range(len(OPTIONS["Muon"]))]
    print("\nAs Muon runs, with the path of bfloat16, its hypergradient differs from that of float64 by ", end="")
    print(", ".join(f"{100 * e:.1f} %" for e in rounded) + " in its sets of options.")
    print("\n## What is wrong or fails\n\n| library | case | end point | hypergradient |\n| --- | --- | ---: | ---: |")
    print("\n".join(odd))
    print("\n## Options as outer variables\n\nEach is a tensor that requires grad in the optimizer's group, under the")
    print("engine `reverse`. The optimizer is new, or was stepped before.\n")
    print("| class | right | refused by name | wrong | fails |\n| --- | --- | --- | --- | --- |")
    for name in OPTIONS:
        print(learnable_row(name))


if __name__ == "__main__":
    main()
