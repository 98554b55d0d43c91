"""Υ, the update after a gradient: z⁺ = Υ(z, d), written so that autograd can differentiate it.

d is the solver's direction; it stands where `.grad` does in torch.optim. The state z of the inner problem holds the
weights under their names and an optimizer's tensors under "name@tensor". As in torch.optim, a weight that the step's
loss does not touch is left alone. The optimizer is read at every step (so a learning-rate scheduler works), never
stepped.

An `UpdateRule` belongs to a loop; `at_step` gives the `Update` of one step, with the options as they are then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)
from torch.overrides import TorchFunctionMode

from .graph import State, map_tensors
from .solvers import Rate, Value, evaluate

Transform = Callable[[State], State]  # of the direction: clipping, a hook
CountOnce = Callable[[Tensor], Tensor]  # see Binding.count_once_across_ranks


@dataclass
class PulledUpdate:
    """What pulling an adjoint through Υ gives: z⁺, a·∂Υ/∂z, u = a·∂Υ/∂d, and the gradients of wanted options."""

    to: State
    adjoint: State
    cotangent: State
    wanted: Sequence[Tensor | None]


class Update(ABC):
    """The update of one step, z⁺ = Υ(z, d), with the options that it had then."""

    options: Sequence[Tensor] = ()  # the tensors among its options that require grad

    @property
    def reads_direction(self) -> bool:
        """Whether the derivative of Υ depends on the numbers of d, not only on its shape."""
        return True

    @abstractmethod
    def __call__(self, z: State, d: State) -> State:
        """z⁺, in differentiable operations."""

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor]) -> PulledUpdate:
        """Pull the adjoint a through Υ, by autograd."""
        at = {n: x.detach().requires_grad_() for n, x in z.items() if x.is_floating_point()}
        direction = {n: x.detach().requires_grad_() for n, x in d.items()}
        with torch.enable_grad():
            to = self({**z, **at}, direction)
        keys = [n for n in a if to[n].requires_grad]
        inputs = [*at.values(), *direction.values(), *wanted]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if keys:
            grads = torch.autograd.grad(
                [to[n] for n in keys], inputs, [a[n] for n in keys], allow_unused=True, retain_graph=bool(self.options)
            )
        first, second = len(at), len(at) + len(direction)
        return PulledUpdate(
            {n: x.detach() for n, x in to.items()},
            {n: g for n, g in zip(at, grads, strict=False) if g is not None},
            {n: g for n, g in zip(direction, grads[first:second], strict=True) if g is not None},
            grads[second:],
        )


class UpdateRule(ABC):
    """What a loop updates its weights by."""

    start: State  # the optimizer's tensors at the beginning
    has_no_rate: bool = False  # the rate is in the direction already (a solver object's)

    @abstractmethod
    def at_step(self, k: int) -> Update:
        """Υ_k, with the options as they are now."""

    def count(self, d: Iterable[str]) -> None:  # noqa: B027 (most have nothing to count)
        """Called after a step, with the names of the weights that it moved."""

    def check(self) -> None:  # noqa: B027 (plain steps have no optimizer)
        """Raise if something was done to the optimizer that a step would not see."""

    def lacks(self, need: str) -> str | None:
        """Why Υ can't give what an engine needs ("fixed point", "symmetry"), or None if it can."""
        return None


# --- plain steps ---


@dataclass(frozen=True)
class Descent(Update):
    """w⁺ = w − lr·d."""

    lr: Value = 1.0
    options: Sequence[Tensor] = ()

    @property
    def reads_direction(self) -> bool:
        return bool(self.options)

    def __call__(self, z: State, d: State) -> State:
        lr = self.lr
        if isinstance(lr, Tensor):
            return {n: x - lr * d[n] if n in d else x for n, x in z.items()}
        return {n: torch.sub(x, d[n], alpha=lr) if n in d else x for n, x in z.items()}

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor]) -> PulledUpdate:
        if self.options:
            return super().pull(z, d, a, wanted)
        with torch.no_grad():
            u = {n: x * -self.lr for n, x in a.items() if n in d}
            return PulledUpdate(self(z, d), dict(a), u, [None] * len(wanted))


@dataclass
class DescentRule(UpdateRule):
    """Plain steps, at a rate that may depend on k."""

    rate: Rate | None
    count_once: CountOnce
    start: State = field(default_factory=dict[str, Tensor])
    _last: Descent | None = None

    @property
    def has_no_rate(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rate is None

    def at_step(self, k: int) -> Update:
        lr = 1.0 if self.rate is None else evaluate("bilevel.inner: lr", self.rate, k)
        if not (isinstance(lr, Tensor) and lr.requires_grad):
            lr = lr.detach().clone() if isinstance(lr, Tensor) else lr  # it may be written to
            if self._last is None or isinstance(lr, Tensor) or self._last.lr != lr:
                self._last = Descent(lr)  # else the step before has the same
            return self._last
        return Descent(self.count_once(lr), (lr,))


# --- optimizers ---

Formula = Callable[[State, str, Tensor, int, Mapping[str, Any]], None]


class OptimizerRule(UpdateRule):
    """The rule of a torch.optim object, with its groups, options and present state."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], count_once: CountOnce) -> None:
        self._optimizer, self._count_once = optimizer, count_once
        self._formula = _formula(optimizer)
        self._names = [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]
        self._held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        _refuse_hooks(optimizer)
        self.start = {}
        self._count: dict[str, int] = {}  # updates that a weight has had (Adam's bias correction)
        for p, name in names.items():
            held: dict[str, Any] = optimizer.state.get(p, {})
            self._count[name] = int(held.get("step", 0))
            for key, x in held.items():
                if isinstance(x, Tensor) and not (self._formula and key == "step"):
                    self.start[f"{name}@{key}"] = x.detach().clone()

    def check(self) -> None:
        groups = self._optimizer.param_groups
        if [[id(p) for p in group["params"]] for group in groups] != self._held:
            raise RuntimeError(
                "bilevel.inner: the param_groups of the optimizer have changed in the block (add_param_group). Set "
                "them up before the block, and open a new block after such a change."
            )
        _refuse_hooks(self._optimizer)

    def at_step(self, k: int) -> Update:
        options = [{n: v for n, v in group.items() if n != "params"} for group in self._optimizer.param_groups]
        found: list[Tensor] = []
        for o in options:
            o["decoupled"] = o.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
            for n, v in o.items():
                if isinstance(v, (Tensor, tuple)):
                    o[n] = map_tensors(lambda x: self._option(x, found), v)
        groups = list(zip(self._names, options, strict=True))
        if self._formula is None:
            return TorchStep(type(self._optimizer), groups, found)
        return FormulaStep(self._formula, groups, dict(self._count) if self._formula is _adam else {}, found)

    def _option(self, x: Tensor, found: list[Tensor]) -> Tensor:
        if not x.requires_grad:
            return x.detach().clone().reshape(()) if x.numel() == 1 else x.detach().clone()  # schedulers write to it
        found.append(x)
        return self._count_once(x.reshape(()) if x.numel() == 1 else x)

    def count(self, d: Iterable[str]) -> None:
        if self._formula is _adam:
            self._count.update({n: self._count[n] + 1 for n in d})

    def lacks(self, need: str) -> str | None:
        groups = self._optimizer.param_groups
        if need == "fixed point" and self._formula is not _sgd:
            name = type(self._optimizer).__name__
            return f"{name} divides by a root that is 0 where the gradient is, and has no derivative there"
        if need == "symmetry" and any(_is_on(g["momentum"]) for g in groups):
            return "with momentum the Jacobian of a step is not symmetric; engine='neumann' takes it"
        if need == "symmetry" and any(g["lr"] is not groups[0]["lr"] and g["lr"] != groups[0]["lr"] for g in groups):
            return "with a rate for each group the Jacobian is not symmetric; engine='neumann' takes it"
        return None


@dataclass(frozen=True)
class FormulaStep(Update):
    """The update of SGD, Adam or AdamW by a formula of ours, weight by weight."""

    formula: Formula
    groups: Sequence[tuple[list[str], dict[str, Any]]]
    counts: Mapping[str, int]
    options: Sequence[Tensor] = ()

    @property
    def reads_direction(self) -> bool:
        return self.formula is not _sgd or bool(self.options)

    def __call__(self, z: State, d: State) -> State:
        new = dict(z)
        for names, options in self.groups:
            for n in names:
                if n in d:
                    x = -d[n] if options["maximize"] else d[n]
                    self.formula(new, n, x, self.counts.get(n, 0) + 1, options)
        return new


def _is_on(option: Any) -> bool:
    """Whether an option takes part: a tensor of value 0 does, since it may be differentiated for."""
    return isinstance(option, Tensor) or bool(option)


def _sgd(z: State, n: str, d: Tensor, count: int, o: Mapping[str, Any]) -> None:
    """b⁺ = μ·b + (1 − τ)·d (b⁺ = d at first); w⁺ = w − lr·b⁺, or w − lr·(d + μ·b⁺) for Nesterov."""
    if _is_on(o["weight_decay"]):
        d = d + o["weight_decay"] * z[n]
    if _is_on(o["momentum"]):
        key = f"{n}@momentum_buffer"
        z[key] = o["momentum"] * z[key] + (1 - o["dampening"]) * d if key in z else d
        d = d + o["momentum"] * z[key] if o["nesterov"] else z[key]
    lr = o["lr"]
    z[n] = z[n] - lr * d if isinstance(lr, Tensor) else torch.sub(z[n], d, alpha=lr)


def _adam(z: State, n: str, d: Tensor, count: int, o: Mapping[str, Any]) -> None:
    """m⁺ = β₁·m + (1 − β₁)·d, v⁺ = β₂·v + (1 − β₂)·d²; w⁺ = w − lr·m̂ / (√v̂ + ε), m̂ and v̂ unbiased."""
    beta1, beta2 = o["betas"]
    if _is_on(o["weight_decay"]):
        if o["decoupled"]:
            z[n] = z[n] - o["lr"] * o["weight_decay"] * z[n]
        else:
            d = d + o["weight_decay"] * z[n]
    m, v, top = (f"{n}@{key}" for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    z[m] = beta1 * z[m] + (1 - beta1) * d if m in z else (1 - beta1) * d
    z[v] = beta2 * z[v] + (1 - beta2) * d * d if v in z else (1 - beta2) * d * d
    second = z[v]
    if o["amsgrad"]:
        second = z[top] = torch.maximum(z[top], z[v]) if top in z else z[v]
    step = o["lr"] / (1 - beta1**count)
    z[n] = z[n] - step * z[m] / (_safe_root(second) / (1 - beta2**count) ** 0.5 + o["eps"])


def _safe_root(v: Tensor) -> Tensor:
    """√v with slope 0 at 0.

    √ has slope ∞ there. Where v is 0, so are m and d, and the slope of m/(√v + ε) is that of m alone: the root may be
    taken as constant, which is exact and keeps ∞·0 = nan out of the reverse sweep.
    """
    zero = v == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, v).sqrt())


@dataclass(frozen=True)
class TorchStep(Update):
    """The update of any other class of torch.optim: its own `differentiable=True` step, on copies."""

    kind: type[torch.optim.Optimizer]
    groups: Sequence[tuple[list[str], dict[str, Any]]]
    options: Sequence[Tensor] = ()

    def __call__(self, z: State, d: State) -> State:
        new = dict(z)
        graph = torch.is_grad_enabled()
        copies: dict[str, Tensor] = {}
        param_groups: list[dict[str, Any]] = []
        for names, options in self.groups:
            for n in names:
                if n in d:
                    copies[n] = z[n].clone()
                    if copies[n].requires_grad:
                        copies[n].retain_grad()  # so that torch lets the optimizer read .grad
            known = {o: v for o, v in options.items() if o not in ("decoupled", "differentiable", "foreach", "fused")}
            mine = [copies[n] for n in names if n in copies]
            if mine:
                param_groups.append({**known, "params": mine, "differentiable": graph, "foreach": False})
        if not param_groups:
            return new
        optimizer = self.kind(param_groups, differentiable=graph)  # pyright: ignore[reportCallIssue]
        for n, x in copies.items():
            held = {key.split("@", 1)[1]: value for key, value in z.items() if key.startswith(f"{n}@")}
            if held:
                optimizer.state[x] = {key: value.clone() for key, value in held.items()}
            x.grad = d[n]
        with _SafeRoot():
            optimizer.step()
        for n, x in copies.items():
            new[n] = x
            for key, value in optimizer.state[x].items():
                if isinstance(value, Tensor):
                    new[f"{n}@{key}"] = value
        return new


class _SafeRoot(TorchFunctionMode):
    """√ with slope 0 at 0, where torch has ∞: see `_safe_root`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.sqrt, torch.sqrt) and not kwargs:
            return _safe_root(args[0])
        if func is Tensor.sqrt_:
            return args[0].copy_(_safe_root(args[0]))
        return func(*args, **(kwargs or {}))


BY_TORCH = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def _formula(optimizer: torch.optim.Optimizer) -> Formula | None:
    """Our formula for the optimizer; None for those that torch itself can differentiate."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return _sgd
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return _adam
    if any(kind is getattr(torch.optim, name) for name in BY_TORCH):
        return None
    wrapped = getattr(optimizer, "optimizer", None)  # accelerate's and Lightning's have it so
    remedy = "Use one of them, or leave it out and set lr."
    raise TypeError(
        f"bilevel.inner: optimizer= takes torch.optim.SGD, Adam, AdamW, {', '.join(BY_TORCH)}, got {kind.__name__}, "
        f"whose rule this library does not know. "
        f"{'Give the one that it wraps: optimizer.optimizer.' if wrapped else remedy}"
    )


def _refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    own = (getattr(optimizer, kind, None) for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        if hooks:
            raise ValueError(
                "bilevel.inner: the optimizer has a hook on its step, and a block reads the optimizer without stepping "
                "it. Remove the hook; what it does to the gradient can be written as clip=, a function of the "
                "direction."
            )


# --- functions of the direction ---


def clip_norm(max_norm: float, norm_type: float = 2.0) -> Transform:
    """d·min(1, max_norm / (‖d‖ + 10⁻⁶)), as torch.nn.utils.clip_grad_norm_ does it."""
    if not max_norm > 0:
        raise ValueError(f"bilevel.clip_norm: max_norm must be positive, got {max_norm}.")

    def clip(d: State) -> State:
        norms = torch.stack([torch.linalg.vector_norm(x, norm_type) for x in d.values()])
        factor = (max_norm / (torch.linalg.vector_norm(norms, norm_type) + 1e-6)).clamp(max=1.0)
        return {n: x * factor for n, x in d.items()}

    return clip


def clip_value(value: float) -> Transform:
    """Every entry of d held between −value and value, as torch.nn.utils.clip_grad_value_ does it."""
    if not value > 0:
        raise ValueError(f"bilevel.clip_value: value must be positive, got {value}.")
    return lambda d: {n: x.clamp(-value, value) for n, x in d.items()}


def hooks_of(parameters: State) -> Transform | None:
    """The hooks on parameters (register_hook) as a function of the direction; None if there are none."""
    hooked = {n: list(p._backward_hooks.values()) for n, p in parameters.items() if p._backward_hooks}
    if not hooked:
        return None

    def apply(d: State) -> State:
        new = dict(d)
        for n, hooks in hooked.items():
            for hook in hooks:
                if n in new:
                    changed = hook(new[n])
                    new[n] = new[n] if changed is None else changed
        return new

    return apply


@dataclass(frozen=True)
class Transformed(Update):
    """An update after functions of the direction."""

    transforms: Sequence[Transform]
    update: Update

    @property
    def options(self) -> Sequence[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update.options

    def __call__(self, z: State, d: State) -> State:
        for transform in self.transforms:
            d = transform(d)
        return self.update(z, d)


def resolve_clip(clip: float | Transform | None) -> Transform | None:
    """The function of the direction that `clip=` asks for."""
    if clip is None or callable(clip):
        return clip
    if isinstance(clip, bool) or not isinstance(clip, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "bilevel.inner: clip= takes the largest norm as a number, or a function of the direction (a dict of "
            f"tensors) such as bilevel.clip_value(0.1), got {type(clip).__name__}."
        )
    return clip_norm(clip)
