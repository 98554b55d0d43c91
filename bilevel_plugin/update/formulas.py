"""The rules of torch.optim, as formulas that autograd can differentiate: (w, d, state, options) ↦ (w⁺, state⁺).

There is one formula for each class (`registry` says what it is given). torch's own steps with `differentiable=True` are
not used, because they turn a rate that is a tensor into a number, and divide by roots that are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operations import as_read, as_tensor, average, average_of_squares, is_on, plus, plus_ratio, safe_root, with_decay
from .registry import Tensors, rule_for


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
        d = plus(d, -weight_decay, w)
    return -d if maximize else d


@rule_for("SGD", affine=True, counts=False)
def sgd(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: bool,
    maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """b⁺ = μ·b + (1 − τ)·d (b⁺ = d at first); w⁺ = w − lr·b⁺, or w − lr·(d + μ·b⁺) for Nesterov."""
    d = with_decay(w, d, weight_decay, maximize)
    if not is_on(momentum):
        return plus(w, -lr, d), {}
    b = state.get("momentum_buffer")
    b = d if b is None else plus(momentum * b, 1 - dampening, d)
    return plus(w, -lr, plus(d, momentum, b) if nesterov else b), {"momentum_buffer": b}


@rule_for("Adam", direction=_direction_by_average)
@rule_for("AdamW", direction=_direction_by_average, options={"decoupled_weight_decay": True})
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
    return plus_ratio(w, -rate, m, root), new


def _decayed(w: Tensor, d: Tensor, lr: Any, decay: Any, maximize: bool, decoupled: bool) -> tuple[Tensor, Tensor]:
    if decoupled and is_on(decay):
        return w * (1 - lr * decay), -d if maximize else d
    return w, with_decay(w, d, decay, maximize)


def _moments(d: Tensor, state: Tensors, betas: Any) -> tuple[Tensor, Tensor]:
    return average(state.get("exp_avg"), d, betas[0]), average_of_squares(state.get("exp_avg_sq"), d, betas[1])


@rule_for("NAdam", direction=_direction_by_average)
def nadam(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, momentum_decay: Any,
    count: int, maximize: bool, decoupled_weight_decay: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = w − lr·[(1 − μ_t)/(1 − Π)·d + μ_{t+1}/(1 − Π·μ_{t+1})·m⁺] / (√v̂ + ε), Π the product of the μ so far."""
    w, d = _decayed(w, d, lr, weight_decay, maximize, decoupled_weight_decay)
    m, v = _moments(d, state, betas)
    mu, following = (betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (count, count + 1))
    product = state.get("mu_product", as_tensor(1.0, w)) * mu
    exact = as_read(product, mu)
    root = safe_root(v / (1 - betas[1] ** count)) + eps
    w = plus_ratio(w, -lr * (1 - mu) / (1 - exact), d, root)
    w = plus_ratio(w, (-lr * following) / (1 - exact * following), m, root)
    return w, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}


@rule_for("RAdam", direction=_direction_by_average)
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


@rule_for("Adamax")
def adamax(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, count: int,
    maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """u⁺ = max(β₂·u, |d| + ε); w⁺ = w − lr/(1 − β₁ᵗ)·m⁺/u⁺."""
    d = with_decay(w, d, weight_decay, maximize)
    m = average(state.get("exp_avg"), d, betas[0])
    size = d.abs() + eps
    u = torch.maximum(betas[1] * state["exp_inf"], size) if "exp_inf" in state else size
    return plus_ratio(w, -lr / (1 - betas[0] ** count), m, u), {"exp_avg": m, "exp_inf": u}


@rule_for("Adadelta")
def adadelta(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, rho: Any, eps: Any, weight_decay: Any, maximize: bool, **_: Any
) -> tuple[Tensor, Tensors]:
    """v⁺ = ρ·v + (1 − ρ)·d², δ = √(u + ε)/√(v⁺ + ε)·d, u⁺ = ρ·u + (1 − ρ)·δ²; w⁺ = w − lr·δ."""
    d = with_decay(w, d, weight_decay, maximize)
    v = average_of_squares(state.get("square_avg"), d, rho)
    u = state.get("acc_delta", torch.zeros_like(d))
    delta = (u + eps).sqrt() / (v + eps).sqrt() * d
    return plus(w, -lr, delta), {"square_avg": v, "acc_delta": average_of_squares(u, delta, rho)}


@rule_for("Adagrad")
def adagrad(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, lr_decay: Any, eps: Any, weight_decay: Any, count: int,
    maximize: bool, initial_accumulator_value: Any = 0.0, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """s⁺ = s + d²; w⁺ = w − lr/(1 + (t − 1)·η)·d/(√s⁺ + ε)."""
    d = with_decay(w, d, weight_decay, maximize)
    s = torch.addcmul(state["sum"] if "sum" in state else torch.zeros_like(d) + initial_accumulator_value, d, d)
    return plus_ratio(w, -lr / (1 + (count - 1) * lr_decay), d, safe_root(s) + eps), {"sum": s}


@rule_for("RMSprop")
def rmsprop(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, alpha: Any, eps: Any, weight_decay: Any, momentum: Any,
    centered: bool, maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """v⁺ = α·v + (1 − α)·d², less the square of the mean of d if centered; b⁺ = μ·b + d/(√v⁺ + ε); w⁺ = w − lr·b⁺."""
    d = with_decay(w, d, weight_decay, maximize)
    v = average_of_squares(state.get("square_avg"), d, alpha)
    new = {"square_avg": v}
    if centered:
        mean = new["grad_avg"] = average(state.get("grad_avg"), d, alpha)
        v = torch.addcmul(v, mean, mean, value=-1)
    root = safe_root(v) + eps
    if not is_on(momentum):
        return plus_ratio(w, -lr, d, root), new
    b = state.get("momentum_buffer")
    b = new["momentum_buffer"] = torch.addcdiv(torch.zeros_like(d) if b is None else momentum * b, d, root)
    return plus(w, -lr, b), new


@rule_for("Rprop")
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


@rule_for("ASGD")
def asgd(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, lambd: Any, alpha: Any, t0: Any, weight_decay: Any, count: int,
    maximize: bool, foreach: bool | None = None, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = (1 − λ·η)·w − η·d, with η = lr/(1 + λ·lr·t)^α of the step before; beside it, the average of w."""
    d = with_decay(w, d, weight_decay, maximize)
    learned = next((x for x in (lr, lambd, alpha) if isinstance(x, Tensor) and x.requires_grad), None)
    eta = as_read(state["eta"] if "eta" in state else as_tensor(lr, w), learned)
    w = plus(w * (1 - lambd * eta), -eta, d)
    mean = state.get("ax", torch.zeros_like(w))
    steps: Any = as_tensor(float(count), w) if foreach else count  # torch's foreach code keeps its step as a tensor
    return w, {
        "ax": mean + (w - mean) * as_tensor(1 / max(1, count - 1 - t0), w),
        "eta": as_tensor(lr / (1 + lambd * lr * steps) ** alpha, w),
        "mu": as_tensor(1 / max(1, count - t0), w),
    }


@rule_for("Adafactor", elementwise=False)
def adafactor(
    w: Tensor, g: Tensor, state: Tensors, /, *, lr: Any, beta2_decay: Any, eps: Any, d: Any, weight_decay: Any,
    count: int, maximize: bool, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """w⁺ = (1 − lr·ω)·w − max(ε₂, ‖w‖)·min(lr, 1/√t)·u/max(1, ‖u‖/d), u = g/√v⁺, with norms ‖·‖ a root of entries.

    For a matrix v⁺ is the product of a column and a row, r⁺·c⁺/mean(r⁺), which are averages of g² over the other one.
    """
    g = -g if maximize else g
    kept = 1 - count**beta2_decay
    kind = lr.dtype if isinstance(lr, Tensor) else torch.promote_types(w.dtype, torch.float32)  # of torch's scalars
    rate = torch.clamp(w.norm() / w.numel() ** 0.5, min=eps[1]).to(kind) * min(lr, count**-0.5)
    w = w * (1 - lr * weight_decay) if is_on(weight_decay) else w
    least = torch.finfo(w.dtype).eps if eps[0] is None else eps[0]
    if g.dim() > 1:
        row = average(state.get("row_var"), g.square().mean(-1, keepdim=True), kept)
        column = average(state.get("col_var"), g.square().mean(-2, keepdim=True), kept)
        new, v = {"row_var": row, "col_var": column}, row @ column / row.mean(-2, keepdim=True).clamp(min=least)
    else:
        v = average(state.get("variance"), g * g, kept)
        new = {"variance": v}
    u = v.clamp(min=least * least).rsqrt() * g
    return w - rate / torch.clamp(u.norm() / (u.numel() ** 0.5 * d), min=1.0).to(kind) * u, new


def lion(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, betas: Any = (0.9, 0.99), weight_decay: Any = 0.0, **_: Any
) -> tuple[Tensor, Tensors]:
    """w⁺ = (1 − lr·ω)·w − lr·sign(β₁·m + (1 − β₁)·d), m⁺ = β₂·m + (1 − β₂)·d: the rule of Lion (Chen et al. 2023).

    torch.optim has no such class. Give the rule to a block, `optimizer=functools.partial(bilevel.lion,
    weight_decay=0.1), lr=1e-4`, or register it for a class, `bilevel.optimizer_rule(Lion)(bilevel.lion)`. The weights
    move by signs, so a hypergradient goes through the rate, the decay and the weights before the step, never through d.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.lion(torch.zeros(2), torch.tensor([3.0, -0.5]), {}, lr=0.25)[0]
        tensor([-0.2500,  0.2500])
    """
    m = state.get("exp_avg")
    moved = w * (1 - lr * weight_decay) - lr * average(m, d, betas[0]).sign()
    return moved, {"exp_avg": average(m, d, betas[1])}


@rule_for("Muon", elementwise=False, counts=False)
def muon(
    w: Tensor, d: Tensor, state: Tensors, *, lr: Any, weight_decay: Any, momentum: Any, nesterov: bool,
    ns_coefficients: Sequence[Any], eps: float, ns_steps: int, adjust_lr_fn: str | None, **_: Any,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """b⁺ = μ·b + (1 − μ)·d; w⁺ = (1 − lr·ω)·w − lr'·O(b⁺), O the nearest orthogonal matrix, by Newton and Schulz.

    As in torch, the iteration runs in bfloat16. Its derivative is that of the same iteration in the dtype of the
    weights, since rounding to eight bits has no derivative.
    """
    b = average(state.get("momentum_buffer"), d, momentum)
    direction = average(d, b, 1 - momentum) if nesterov else b
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
