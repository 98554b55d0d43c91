"""Proofs by value: Υ is what the optimizer's own step does, and a function of the direction has its own derivative.

Nothing of the user's is moved: tensors are stand-ins, and random numbers come from a generator of this file.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State, map_tensors
from .registry import Rule, check_returned

_SIZES = (4, 3, 2, 2, 2, 2)  # of the stand-ins for weights: their first dimensions
_SCALES = (1.0, 1e-3, 0.5, 1e-3, 2.0, 1.0)  # of the directions: one step is blind to dampening, momentum and amsgrad
_RATE = 0.5
_ROUNDING = 1e-6  # of a class that computes in float32; a forgotten weight decay of 1e-5 is five times as much
_PROVEN: set[object] = set()  # (the class, its rule, the kinds of its groups)
NUMBERED: dict[type, type] = {}  # classes whose state counts the updates of a weight as "step", by a number
_KERNELS = {"fused": False, "capturable": False, "differentiable": False}  # other ways to compute the same step


# --- the step of an optimizer ---


def options_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the options of a parameter group, but for its rate."""
    return tuple(x for n, x in group.items() if n not in ("params", "lr"))


def prove(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Raise unless the rule is what the step of the optimizer does, on small tensors in float64.

    The step is that of the class, run on stand-ins for the weights, with the options of the groups. What is proven for
    a class depends on which options are in use, and not on their numbers, and is not proven again.
    """
    groups = optimizer.param_groups
    kind = type(optimizer), rule.formula, tuple(_kind(group) for group in groups)
    if kind in _PROVEN:
        return
    stand_ins = [_stand_in(group, len(groups) > 1) for group in groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            wrong = _compare(optimizer, rule, stand_ins)
    except Exception as error:
        wrong = None
        if rule.own:  # the classes of torch have options that need a device, and are tested as they are
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            warnings.warn(
                f"bilevel.inner: the rule of {type(optimizer).__name__} could not be compared with its step(), which a "
                f"block tries on small tensors: {said}. Compare them yourself; the block uses the rule.",
                DerivativeWarning,
                stacklevel=2,
            )
    if wrong is not None:
        raise ValueError(_message(optimizer, rule, wrong))
    _PROVEN.add(kind)


class _Wrong(NamedTuple):
    """Where a rule and a step differ."""

    step: int
    what: str
    by: float


def _message(optimizer: torch.optim.Optimizer, rule: Rule, wrong: _Wrong) -> str:
    name = type(optimizer).__name__
    on = [n for n, x in optimizer.param_groups[0].items() if n not in ("params", "lr", *_KERNELS) and _form(x)]
    whose = "that was registered for it" if rule.own else f"that it has from its base class, {rule.formula.__name__},"
    return (
        f"bilevel.inner: the rule of {name} {whose} is not what {name}.step() does: on a small tensor, at lr = "
        f"{_RATE}, {wrong.what} differs by {wrong.by:.1e} after step {wrong.step}. Other options in use: "
        f"{', '.join(on) or 'none'}. Register the rule of its step by bilevel.optimizer_rule({name})."
    )


def _kind(group: Mapping[str, Any]) -> object:
    """Return what a proof depends on: the options, a number as whether it is 0, and the dimensions of the weights."""
    options = tuple((n, _form(x)) for n, x in group.items() if n not in ("params", "lr", "initial_lr", "param_names"))
    return options, frozenset(p.dim() for p in group["params"]), len(group["params"]) > 1


def _form(x: object) -> object:
    if isinstance(x, (tuple, list)):
        return tuple(map(_form, x))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(x, Tensor):
        return "tensor"
    return x if isinstance(x, (bool, str, type(None))) else bool(x) if isinstance(x, (int, float)) else type(x)


def _stand_in(group: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """Return the group with small weights: one for each number of dimensions, and two if there is more than one."""
    dims = sorted({p.dim() for p in group["params"]})
    dims = [*dims, *dims[:1]] if several or len(group["params"]) > 1 else dims
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(_SIZES[:n], generator=generator, dtype=torch.float64) for n in dims]
    number = lambda x: x.item() if x.numel() == 1 else x.detach().clone()  # noqa: E731
    options = {n: map_tensors(number, x) for n, x in group.items() if n not in ("params", "param_names")}
    options |= {n: x for n, x in _KERNELS.items() if n in options}
    return {**options, **({"lr": _RATE} if "lr" in options else {}), "params": [nn.Parameter(x) for x in drawn]}


def _compare(optimizer: torch.optim.Optimizer, rule: Rule, groups: list[dict[str, Any]]) -> _Wrong | None:
    """Take some steps by the class and by the rule, and return the first difference."""
    generator = torch.Generator().manual_seed(2)
    weights = [p for group in groups for p in group["params"]]
    given = {p: {n: x for n, x in {**g, **rule.options}.items() if n != "params"} for g in groups for p in g["params"]}
    ours: dict[Tensor, Tensor] = {p: p.detach().clone() for p in weights}
    states: dict[Tensor, Mapping[str, Tensor]] = {p: {} for p in weights}
    with _stands_for(optimizer, groups) as stand_in:
        for i, scale in enumerate(_SCALES):
            for p in weights:
                p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            random = torch.get_rng_state()
            for p in weights:
                formula = rule.formula(ours[p], p.grad.clone(), states[p], count=i + 1, **given[p])
                ours[p], states[p] = check_returned(p, formula)
            torch.set_rng_state(random)
            type(stand_in).step(stand_in)
            for p in weights:
                found = {"the weight": (ours[p], p), **_pairs(states[p], stand_in.state[p])}
                for what, (x, y) in found.items():
                    if (off := _distance(x, y)) > _ROUNDING:
                        return _Wrong(i + 1, what, off)
        counted = stand_in.state[weights[0]].get("step") if weights else None
        if isinstance(counted, (int, float)) and counted == len(_SCALES):
            NUMBERED[type(optimizer)] = type(counted)
    return None


def _pairs(ours: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
    return {f"the state {n!r}": (x, theirs.get(n)) for n, x in ours.items()}


def _distance(x: Tensor, y: Any) -> float:
    if not isinstance(y, Tensor) or x.shape != y.shape:
        return float("inf")
    x, y = x.detach().double(), y.detach().double()
    off = ((x - y).abs() / (1 + y.abs())).nan_to_num(nan=float("inf"))
    return float((off * (x != y)).nan_to_num(nan=0.0).max()) if x.numel() else 0.0


@contextmanager
def _stands_for(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Generator[torch.optim.Optimizer]:
    """Yield an object of the optimizer's class that holds these groups, with an empty state.

    A step of one's own may reach the user's weights by other references, such as a wrapped optimizer. So their
    gradients are taken away meanwhile.
    """
    held = {n: copy.copy(x) if isinstance(x, (Tensor, list, dict, set)) else x for n, x in vars(optimizer).items()}
    held = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in held.items() if n != "step"}
    hooks = {n: OrderedDict[int, Any]() for n in held if n.startswith("_optimizer_") and n.endswith("_hooks")}
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update({**held, **hooks, "param_groups": groups, "state": defaultdict[Any, Any](dict)})
    own: list[Tensor] = []
    if not type(optimizer).__module__.startswith("torch."):
        own = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in own]
    try:
        for p in own:
            p.grad = None
        yield stand_in
    finally:
        for p, gradient in zip(own, gradients, strict=True):
            p.grad = gradient


def refuse_other_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise if `step` was replaced on the object. A scheduler of torch does so too, with the step of the class."""
    step = vars(optimizer).get("step")
    if step is None:
        return
    scheduled = getattr(step, "_wrapped_by_lr_sched", False)
    if not (scheduled and getattr(step, "__wrapped__", None) is type(optimizer).step):
        code = getattr(inspect.unwrap(step), "__qualname__", repr(step))
        raise ValueError(
            f"bilevel.inner: the step() of this {type(optimizer).__name__} was replaced on the object, by {code}. A "
            "block applies the rule of the class, and would leave out what the other one does. Put it back (del "
            "optimizer.step), and write what it does to the gradient as direction=; or make it a class of its own, "
            "with a rule by bilevel.optimizer_rule."
        )


# --- the derivative of a function of the direction ---


TOLERANCE = 1e-4  # of derivatives in float64
CAUSES = (
    "Likely causes: .item(), float(), .detach() or torch.no_grad() in it. Compute with tensors in their place. "
    "check=False silences this warning."
)
_MOST = 2**24  # the largest number of entries for which a proof makes copies in float64


def derivative_error(function: Callable[[State, State], State], d: State, w: State) -> float | None:
    """Return how far the derivative of a function of (d, w) is from central differences of it, relative to its size.

    One random cotangent and one random direction are enough, as in the sentinel. An entry of d that is exactly 0 is
    not moved, since functions such as the sign jump there. None: the function has no value in float64 to compare.
    """
    if sum(x.numel() for x in d.values()) > _MOST or any(x.is_meta for x in d.values()):
        return None
    for dtype, eps, allowance in ((torch.float64, (1e-6, 1e-5, 1e-4), 0.0), (None, (1e-2, 1e-3), 0.05)):
        at = [{n: x.to(dtype or x.dtype) for n, x in s.items()} for s in (d, w)]
        try:
            error = _derivative_error(function, at[0], at[1], eps)
        except RuntimeError:  # a network in it may take float32 alone
            continue
        return max(0.0, error - allowance)
    return None


def _derivative_error(function: Callable[[State, State], State], d: State, w: State, sizes: tuple[float, ...]) -> float:
    generator = torch.Generator().manual_seed(0)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

    with torch.no_grad():
        u = {n: normal(x) for n, x in function(d, w).items()}
        along = [normal(x) * x.square().mean().sqrt() * (x != 0) for x in (*d.values(), *w.values())]

    def value(*xs: Tensor) -> Tensor:
        new = function(dict(zip(d, xs, strict=False)), dict(zip(w, xs[len(d) :], strict=True)))
        return torch.stack([(u[n] * x).sum() for n, x in new.items()]).sum()

    start = [*d.values(), *w.values()]
    leaves = [x.detach().requires_grad_() for x in start]
    with torch.enable_grad():
        at = value(*leaves)
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if at.requires_grad:  # the function may use a graph of the user's
            grads = torch.autograd.grad(at, leaves, allow_unused=True, retain_graph=True)
    with torch.no_grad():
        ours = sum(float((g * v).sum()) for g, v in zip(grads, along, strict=True) if g is not None)
        errors: list[float] = []
        for eps in sizes:
            ahead, behind = (value(*(x + s * eps * v for x, v in zip(start, along, strict=True))) for s in (1, -1))
            true = float(ahead - behind) / (2 * eps)
            rounding = 1e2 * torch.finfo(at.dtype).eps * abs(float(at)) / eps
            errors.append(max(0.0, abs(ours - true) - rounding) / max(abs(ours), abs(true), 1e-30))
    return min(errors)
