"""The rules of torch.optim, as formulas that autograd can differentiate: (w, d, state, options) ↦ (w⁺, state⁺).

There is one formula for each class, and it updates one weight. `d` is the direction, in place of `.grad`. `state`
holds the optimizer's tensors for this weight, and is empty at first. `count` is 1 in the first update of the weight.
The other options are those of the parameter group, under torch's names. Any option may be a tensor that requires grad.

torch's own steps with `differentiable=True` are not used, because they turn a rate that is a tensor into a number, and
divide by roots that are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Formula = Callable[..., tuple[Tensor, Tensors]]  # rule(w, d, state, *, lr, count, **options)
F = TypeVar("F", bound=Formula)


@dataclass(frozen=True)
class Rule:
    """The formula that updates one weight, with the properties of the formula that others rely on."""

    formula: Formula
    elementwise: bool = False  # the formula works with any leading dimension, such as that of the tasks
    affine: bool = False  # its derivative does not depend on the values of w and d
    counts: bool = False  # torch keeps the number of updates in the state, as "step"
    direction: Callable[..., Tensor | None] | None = None  # computes d from (w, state, new state, **options)


RULES: dict[type[torch.optim.Optimizer], Rule] = {}


def optimizer_rule(kind: type[torch.optim.Optimizer]) -> Callable[[F], F]:
    """Register the rule of a class of optimizers, a function of one weight.

    The function is `rule(w, d, state, *, lr, count, **options)`: the weight, its direction (in place of `.grad`), the
    optimizer's tensors for it (`{}` before the first update), how many updates the weight has had with this one, and
    the options of its parameter group. It returns the new weight and the new state, in differentiable operations.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> class SignSGD(torch.optim.SGD):
        ...     pass
        >>> @bilevel.optimizer_rule(SignSGD)
        ... def sign_sgd(w, d, state, *, lr, **options):
        ...     return w - lr * d.sign(), state
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> lam = torch.tensor(2.0, requires_grad=True)
        >>> h = lambda m: (m.weight - lam).square().sum()
        >>> with bilevel.inner(model, h, solver="gd", optimizer=SignSGD(model.parameters(), lr=0.5)) as loop:
        ...     _ = loop.step()
        ...     print(model.weight.item())
        0.5
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):  # pyright: ignore
        raise TypeError(f"bilevel.optimizer_rule: takes a subclass of torch.optim.Optimizer, got {kind!r}.")

    def register(formula: F) -> F:
        RULES[kind] = Rule(formula)
        return formula

    return register


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of the optimizer's class, or raise an error that shows how to register one."""
    kind = type(optimizer)
    if kind in RULES:
        return RULES[kind]
    if hasattr(optimizer, "optimizer"):  # as the wrappers of accelerate and Lightning have
        raise TypeError(
            f"bilevel.inner: optimizer= got {kind.__name__}, which wraps another optimizer. Give the wrapped one: "
            "optimizer.optimizer."
        )
    known = ", ".join(sorted({k.__name__ for k in RULES}))
    why = _NO_RULE.get(kind.__name__, "")
    raise TypeError(
        f"bilevel.inner: the rule of the optimizer {kind.__name__} is not known. {why}Known are {known}. To use "
        "another one, register its rule, a function of one weight, before the block:\n\n"
        f"    @bilevel.optimizer_rule({kind.__name__})\n"
        "    def rule(w, d, state, *, lr, count, **options):    # d: the gradient; state: {} at first; count: 1, 2, …\n"
        "        return w - lr * d, state                       # the new weight and the new state\n"
    )


_NO_RULE = {
    "LBFGS": "Its line search evaluates the loss several times in a step, and the step has no derivative. ",
    "SparseAdam": "Gradients are dense inside a block: use Adam. ",
    "Adafactor": "It is not among the formulas of this library. ",
}


def _registered(
    name: str,
    *,
    elementwise: bool = True,
    affine: bool = False,
    counts: bool = True,
    direction: Callable[..., Tensor | None] | None = None,
) -> Callable[[F], F]:
    def register(formula: F) -> F:
        kind = getattr(torch.optim, name, None)  # Muon came with torch 2.9
        if kind is not None:
            RULES[kind] = Rule(formula, elementwise, affine, counts, direction)
        return formula

    return register


def _direction_by_average(
    w: Tensor, state: Tensors, new: Tensors, *, betas: Any, weight_decay: Any, maximize: bool,
    decoupled_weight_decay: bool = False, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Recover d from m⁺ = m + (1 − β₁)·(d − m); the error is 1/(1 − β₁) rounding units of the larger of |m| and |d|.

    Return None where that would be more than a hundred units, or where the dtype is too coarse.
    """
    if isinstance(betas[0], Tensor) or betas[0] > 0.99 or w.dtype not in (torch.float32, torch.float64):
        return None
    m, old = new["exp_avg"], state.get("exp_avg")
    d = m / (1 - betas[0]) if old is None else old + (m - old) / (1 - betas[0])
    if is_on(weight_decay) and not decoupled_weight_decay:
        d = _plus(d, -weight_decay, w)
    return -d if maximize else d


def is_on(option: Any) -> bool:
    """Whether an option is in use. A tensor of value 0 counts as in use, since its derivative may be wanted."""
    return isinstance(option, Tensor) or bool(option)


def safe_root(v: Tensor) -> Tensor:
    """√v with slope 0 at 0.

    The slope of √v at 0 is infinite. Where v is 0, so are m and d, and the slope of m/(√v + ε) is that of m alone. So
    the root may be taken as constant there, which is exact and keeps ∞·0 = nan out of the reverse sweep.
    """
    zero = v == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, v).sqrt())


# The next four functions use the operations of torch.optim, so that the steps are the same to the last bit. These
# operations take only numbers, so for an option that is a tensor the formula is written out.


def _plus(x: Tensor, c: Any, y: Tensor) -> Tensor:
    """x + c·y."""
    return x + c * y if isinstance(c, Tensor) else torch.add(x, y, alpha=c)


def _plus_ratio(w: Tensor, c: Any, x: Tensor, y: Tensor) -> Tensor:
    """w + c·x/y."""
    return w + c * x / y if isinstance(c, Tensor) else torch.addcdiv(w, x, y, value=c)


def _average(old: Tensor | None, new: Tensor, beta: Any) -> Tensor:
    """β·old + (1 − β)·new."""
    old = torch.zeros_like(new) if old is None else old
    return beta * old + (1 - beta) * new if isinstance(beta, Tensor) else torch.lerp(old, new, 1 - beta)


def _average_of_squares(old: Tensor | None, new: Tensor, beta: Any) -> Tensor:
    """β·old + (1 − β)·new²."""
    kept: Tensor = torch.zeros_like(new) if old is None else old * beta
    return kept + (1 - beta) * new * new if isinstance(beta, Tensor) else torch.addcmul(kept, new, new, value=1 - beta)


def _with_decay(w: Tensor, d: Tensor, weight_decay: Any, maximize: bool) -> Tensor:
    d = -d if maximize else d
    return _plus(d, weight_decay, w) if is_on(weight_decay) else d


def _as_tensor(x: Any, like: Tensor) -> Tensor:
    """Return a number as torch.optim keeps it: a tensor of torch's default dtype, whatever that of the weights is."""
    if isinstance(x, Tensor):
        return x.to(torch.get_default_dtype())
    return torch.tensor(x, dtype=torch.get_default_dtype(), device=like.device)


def _as_read(x: Tensor, learned: Any) -> Any:
    """Return such a tensor as torch.optim reads it: as a number, or as a tensor if it depends on a learned option."""
    if x.device.type == "cpu" and not isinstance(learned, Tensor):
        return x.item()
    return x if x.device.type == "mps" else x.double()


@_registered("SGD", affine=True, counts=False)
def sgd(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: bool,
    maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """b⁺ = μ·b + (1 − τ)·d (b⁺ = d at first); w⁺ = w − lr·b⁺, or w − lr·(d + μ·b⁺) for Nesterov."""
    d = _with_decay(w, d, weight_decay, maximize)
    if not is_on(momentum):
        return _plus(w, -lr, d), {}
    b = state.get("momentum_buffer")
    b = d if b is None else _plus(momentum * b, 1 - dampening, d)
    return _plus(w, -lr, _plus(d, momentum, b) if nesterov else b), {"momentum_buffer": b}


@_registered("Adam", direction=_direction_by_average)
@_registered("AdamW", direction=_direction_by_average)
def adam(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: bool,
    count: int, maximize: bool, decoupled_weight_decay: bool = False, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """m⁺ = β₁·m + (1 − β₁)·d, v⁺ = β₂·v + (1 − β₂)·d²; w⁺ = w − lr·m̂ / (√v̂ + ε), m̂ and v̂ unbiased."""
    w, d = _decayed(w, d, lr, weight_decay, maximize, decoupled_weight_decay)
    m, v = _moments(d, state, betas)
    new = {"exp_avg": m, "exp_avg_sq": v}
    if amsgrad:
        v = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], v) if "max_exp_avg_sq" in state else v
    rate, root = lr / (1 - betas[0] ** count), safe_root(v) / (1 - betas[1] ** count) ** 0.5 + eps
    return _plus_ratio(w, -rate, m, root), new


def _decayed(w: Tensor, d: Tensor, lr: Any, decay: Any, maximize: bool, decoupled: bool) -> tuple[Tensor, Tensor]:
    if decoupled and is_on(decay):
        return w * (1 - lr * decay), -d if maximize else d
    return w, _with_decay(w, d, decay, maximize)


def _moments(d: Tensor, state: Tensors, betas: Any) -> tuple[Tensor, Tensor]:
    return _average(state.get("exp_avg"), d, betas[0]), _average_of_squares(state.get("exp_avg_sq"), d, betas[1])


@_registered("NAdam", direction=_direction_by_average)
def nadam(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, momentum_decay: Any,
    count: int, maximize: bool, decoupled_weight_decay: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = w − lr·[(1 − μ_t)/(1 − Π)·d + μ_{t+1}/(1 − Π·μ_{t+1})·m⁺] / (√v̂ + ε), Π the product of the μ so far."""
    w, d = _decayed(w, d, lr, weight_decay, maximize, decoupled_weight_decay)
    m, v = _moments(d, state, betas)
    mu, following = (betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (count, count + 1))
    product = state.get("mu_product", _as_tensor(1.0, w)) * mu
    exact = _as_read(product, mu)
    root = safe_root(v / (1 - betas[1] ** count)) + eps
    w = _plus_ratio(w, -lr * (1 - mu) / (1 - exact), d, root)
    w = _plus_ratio(w, (-lr * following) / (1 - exact * following), m, root)
    return w, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}


@_registered("RAdam", direction=_direction_by_average)
def radam(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, count: int,
    maximize: bool, decoupled_weight_decay: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = w − lr·m̂·r/(√v̂ + ε'), r the rectification of the variance; w − lr·m̂ as long as there are too few steps."""
    w, d = _decayed(w, d, lr, weight_decay, maximize, decoupled_weight_decay)
    m, v = _moments(d, state, betas)
    new = {"exp_avg": m, "exp_avg_sq": v}
    unbiased = m / (1 - betas[0] ** count)
    most = 2 / (1 - betas[1]) - 1
    length = most - 2 * count * betas[1] ** count / (1 - betas[1] ** count)
    if not length > 5:
        return w - unbiased * lr, new
    rectified = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) ** 0.5
    return w - unbiased * lr * ((1 - betas[1] ** count) ** 0.5 / (safe_root(v) + eps)) * rectified, new


@_registered("Adamax")
def adamax(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, count: int,
    maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """u⁺ = max(β₂·u, |d| + ε); w⁺ = w − lr/(1 − β₁ᵗ)·m⁺/u⁺."""
    d = _with_decay(w, d, weight_decay, maximize)
    m = _average(state.get("exp_avg"), d, betas[0])
    size = d.abs() + eps
    u = torch.maximum(betas[1] * state["exp_inf"], size) if "exp_inf" in state else size
    return _plus_ratio(w, -lr / (1 - betas[0] ** count), m, u), {"exp_avg": m, "exp_inf": u}


@_registered("Adadelta")
def adadelta(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, rho: Any, eps: Any, weight_decay: Any, maximize: bool, **_: Any
) -> tuple[Tensor, Tensors]:
    """v⁺ = ρ·v + (1 − ρ)·d², δ = √(u + ε)/√(v⁺ + ε)·d, u⁺ = ρ·u + (1 − ρ)·δ²; w⁺ = w − lr·δ."""
    d = _with_decay(w, d, weight_decay, maximize)
    v = _average_of_squares(state.get("square_avg"), d, rho)
    u = state.get("acc_delta", torch.zeros_like(d))
    delta = (u + eps).sqrt() / (v + eps).sqrt() * d
    return _plus(w, -lr, delta), {"square_avg": v, "acc_delta": _average_of_squares(u, delta, rho)}


@_registered("Adagrad")
def adagrad(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, lr_decay: Any, eps: Any, weight_decay: Any, count: int,
    maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """s⁺ = s + d²; w⁺ = w − lr/(1 + (t − 1)·η)·d/(√s⁺ + ε)."""
    d = _with_decay(w, d, weight_decay, maximize)
    s = torch.addcmul(state["sum"], d, d) if "sum" in state else d * d
    return _plus_ratio(w, -lr / (1 + (count - 1) * lr_decay), d, safe_root(s) + eps), {"sum": s}


@_registered("RMSprop")
def rmsprop(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, alpha: Any, eps: Any, weight_decay: Any, momentum: Any,
    centered: bool, maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """v⁺ = α·v + (1 − α)·d², less the square of the mean of d if centered; b⁺ = μ·b + d/(√v⁺ + ε); w⁺ = w − lr·b⁺."""
    d = _with_decay(w, d, weight_decay, maximize)
    v = _average_of_squares(state.get("square_avg"), d, alpha)
    new = {"square_avg": v}
    if centered:
        mean = new["grad_avg"] = _average(state.get("grad_avg"), d, alpha)
        v = torch.addcmul(v, mean, mean, value=-1)
    root = safe_root(v) + eps
    if not is_on(momentum):
        return _plus_ratio(w, -lr, d, root), new
    b = state.get("momentum_buffer")
    b = new["momentum_buffer"] = torch.addcdiv(torch.zeros_like(d) if b is None else momentum * b, d, root)
    return _plus(w, -lr, b), new


@_registered("Rprop")
def rprop(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, etas: Any, step_sizes: Any, maximize: bool, **_: Any
) -> tuple[Tensor, Tensors]:
    """w⁺ = w − sign(d)·η, where η grows as long as the sign of d stays, and shrinks (without a step) where it turns."""
    d = -d if maximize else d
    turn = (d * state["prev"]).detach().sign() if "prev" in state else torch.zeros_like(d)
    size = state["step_size"] if "step_size" in state else torch.ones_like(d) * lr
    size = size * torch.where(turn > 0, etas[1], torch.where(turn < 0, etas[0], torch.ones_like(d)))
    size = torch.clamp(torch.clamp(size, min=step_sizes[0]), max=step_sizes[1])
    d = torch.where(turn < 0, 0.0, d)
    return w - d.sign() * size, {"prev": d, "step_size": size}


@_registered("ASGD")
def asgd(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, lambd: Any, alpha: Any, t0: Any, weight_decay: Any, count: int,
    maximize: bool, foreach: bool | None = None, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = (1 − λ·η)·w − η·d, with η = lr/(1 + λ·lr·t)^α of the step before; beside it, the average of w."""
    d = _with_decay(w, d, weight_decay, maximize)
    learned = next((x for x in (lr, lambd, alpha) if isinstance(x, Tensor) and x.requires_grad), None)
    eta = _as_read(state["eta"] if "eta" in state else _as_tensor(lr, w), learned)
    w = _plus(w * (1 - lambd * eta), -eta, d)
    mean = state.get("ax", torch.zeros_like(w))
    steps: Any = _as_tensor(float(count), w) if foreach else count  # torch's foreach code keeps its step as a tensor
    return w, {
        "ax": mean + (w - mean) * _as_tensor(1 / max(1, count - 1 - t0), w),
        "eta": _as_tensor(lr / (1 + lambd * lr * steps) ** alpha, w),
        "mu": _as_tensor(1 / max(1, count - t0), w),
    }


@_registered("Muon", elementwise=False, counts=False)
def muon(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, weight_decay: Any, momentum: Any, nesterov: bool,
    ns_coefficients: Sequence[Any], eps: float, ns_steps: int, adjust_lr_fn: str | None, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """b⁺ = μ·b + (1 − μ)·d; w⁺ = (1 − lr·ω)·w − lr'·O(b⁺), O the nearest orthogonal matrix, by Newton and Schulz.

    As in torch, the iteration runs in bfloat16. Its derivative is that of the same iteration in the dtype of the
    weights, since rounding to eight bits has no derivative.
    """
    b = _average(state.get("momentum_buffer"), d, momentum)
    direction = _average(d, b, 1 - momentum) if nesterov else b
    if any(isinstance(c, Tensor) for c in ns_coefficients):
        raise TypeError(
            "bilevel.inner: ns_coefficients of Muon holds a tensor. The coefficients are used in bfloat16, whose "
            "rounding has no derivative, so they can't be learned. Give numbers."
        )
    rounded = _orthogonal(direction.detach().bfloat16(), ns_coefficients, ns_steps, eps).to(w.dtype)
    if torch.is_grad_enabled():
        exact = _orthogonal(direction, ns_coefficients, ns_steps, eps)
        rounded = rounded + (exact - exact.detach())
    rows, columns = w.shape
    ratio = 0.2 * max(rows, columns) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1, rows / columns) ** 0.5
    return w * (1 - lr * weight_decay) - lr * ratio * rounded, {"momentum_buffer": b}


def _orthogonal(x: Tensor, coefficients: Sequence[Any], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
