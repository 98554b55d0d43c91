"""The table of rules: which formula updates the weights of a class of optimizers, and what is known of the formula.

A formula updates one weight: (w, d, state, options) ↦ (w⁺, state⁺). `d` is the direction, in place of `.grad`. `state`
holds the optimizer's tensors for this weight, and is empty at first. `count` is 1 in the first update of the weight.
The other options are those of the parameter group, under torch's names. Any option may be a tensor that requires grad.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the class fixes
    own: bool = False  # the formula is the user's, and may use outer variables that are no options


RULES: dict[type[torch.optim.Optimizer], Rule] = {}


def optimizer_rule(kind: type[torch.optim.Optimizer]) -> Callable[[F], F]:
    """Register the rule of a class of optimizers, a function of one weight.

    The function is `rule(w, d, state, *, lr, count, **options)`: the weight, its direction (in place of `.grad`), the
    optimizer's tensors for it (`{}` before the first update), how many updates the weight has had with this one, and
    the options of its parameter group. It returns the new weight and the new state, in differentiable operations. A
    block compares it with the `step()` of the class, on small tensors. A class that has the rule of another one is
    registered by that class: `bilevel.optimizer_rule(MyAdam)(torch.optim.Adam)`.

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> class SignSGD(torch.optim.SGD):
        ...     @torch.no_grad()
        ...     def step(self, closure=None):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 p -= group["lr"] * p.grad.sign()
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
        same: Any = formula  # or a class that has the rule
        if isinstance(same, type) and same not in RULES:
            raise TypeError(f"bilevel.optimizer_rule: the rule of {same.__name__} is not known. Give a function.")
        RULES[kind] = RULES[same] if isinstance(same, type) else Rule(formula, own=True)
        return formula

    return register


def rule_for(name: str, *, elementwise: bool = True, counts: bool = True, **properties: Any) -> Callable[[F], F]:
    """Register a formula for a class of torch.optim, if this torch has the class."""

    def register(formula: F) -> F:
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            RULES[kind] = Rule(formula, elementwise=elementwise, counts=counts, **properties)
        return formula

    return register


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of the optimizer's class, or of the class whose `step` it inherits; raise if there is none."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if base in RULES and (base is kind or inspect.unwrap(base.step) is inspect.unwrap(kind.step)):
            return RULES[base]
    name, parent = kind.__name__, next((k.__name__ for k in kind.__mro__ if k in RULES), "")
    if hasattr(optimizer, "optimizer"):  # as the wrappers of accelerate and Lightning have
        raise TypeError(
            f"bilevel.inner: optimizer= got {name}, which wraps another optimizer. Give the wrapped one: "
            "optimizer.optimizer."
        )
    known = ", ".join(sorted({k.__name__ for k in RULES if k.__module__.startswith("torch.")}))
    why = _NO_RULE.get(name, f"It has a step() of its own. If that is {parent}'s, say so: " if parent else "")
    why += f"bilevel.optimizer_rule({name})(torch.optim.{parent}). " if parent and name not in _NO_RULE else ""
    raise TypeError(
        f"bilevel.inner: the rule of the optimizer {name} is not known. {why}Known are {known}. To use "
        "another one, register its rule, a function of one weight, before the block:\n\n"
        f"    @bilevel.optimizer_rule({name})\n"
        "    def rule(w, d, state, *, lr, count, **options):    # d: the gradient; state: {} at first; count: 1, 2, …\n"
        "        return w - lr * d, state                       # the new weight and the new state\n"
    )


_NO_RULE = {
    "LBFGS": "Its step evaluates the loss several times and chooses by the values, so it has no derivative. Where it "
    "converges, only the end matters: run LBFGS before the block, and take one step of solver='gd' at a small lr= in "
    "the block, with engine='cg'. ",
    "SparseAdam": "Gradients are dense inside a block: use Adam. ",
    "Lion": "If it is the Lion of Chen et al., register bilevel.optimizer_rule(Lion)(bilevel.lion). ",
    "SAM": "Give the loss as bilevel.sam(h, rho), and the optimizer that SAM wraps as optimizer=. ",
}


def check_returned(w: Tensor, returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a rule returned, as a weight and a state; raise an error that names the mistake otherwise."""
    if not (isinstance(returned, tuple) and len(cast("tuple[Any, ...]", returned)) == 2):
        raise TypeError(
            "bilevel.inner: the rule of an optimizer must return a pair, the new weight and the new state (a dict of "
            f"tensors, {{}} if there is none), got {type(returned).__name__}. For example: return w - lr * d, state."
        )
    new, state = cast("tuple[Any, Any]", returned)
    if not isinstance(new, Tensor) or new.shape != w.shape or not isinstance(state, Mapping):
        got = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
        raise TypeError(
            f"bilevel.inner: the rule of an optimizer must return the new weight, of shape {tuple(w.shape)}, and the "
            f"new state, a dict of tensors; got {got} and {type(state).__name__}."
        )
    return new, {str(key): torch.as_tensor(x) for key, x in cast("Mapping[str, Any]", state).items()}
