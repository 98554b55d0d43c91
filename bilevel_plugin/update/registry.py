"""The table of rules: which formula updates the weights of a class of optimizers, and what is known of the formula.

A formula updates one weight: (w, d, state, options) ↦ (w⁺, state⁺). `d` is the direction, in place of `.grad`. `state`
holds the optimizer's tensors for this weight, and is empty at first. `count` is 1 in the first update of the weight.
The other options are those of the parameter group, under torch's names. Any option may be a tensor that requires grad.
"""

from __future__ import annotations

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
        RULES[kind] = Rule(formula, own=True)
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
    """Return the rule of the optimizer's class, or raise an error that shows how to register one."""
    kind = type(optimizer)
    if kind in RULES:
        return RULES[kind]
    if hasattr(optimizer, "optimizer"):  # as the wrappers of accelerate and Lightning have
        raise TypeError(
            f"bilevel.inner: optimizer= got {kind.__name__}, which wraps another optimizer. Give the wrapped one: "
            "optimizer.optimizer."
        )
    known = ", ".join(sorted({k.__name__ for k in RULES if k.__module__.startswith("torch.")}))
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
