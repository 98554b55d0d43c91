"""Υ, the update after a gradient: z⁺ = Υ(z, d), written so that autograd can differentiate it.

d is the solver's direction; it takes the place of `.grad` in torch.optim. The state z of the inner problem holds the
weights under their names, and an optimizer's tensors under "name@tensor". As in torch.optim, a weight on which the
step's loss does not depend is left unchanged. The optimizer is read at every step, so that a learning-rate scheduler
works. It is never stepped.

An `UpdateRule` belongs to a loop; `at_step` gives the `Update` of one step, with the options at that time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from ..autograd.derive import grad
from ..autograd.trees import State, map_tensors
from .formulas import RULES, Formula, Rule, Tensors, is_on, rule_of
from .solvers import Rate, Value, evaluate

CountOnce = Callable[[Tensor], Tensor]  # Binding.count_once_across_ranks
SUM = "@grad"  # the suffix of the sum of the directions since the last step, as `.grad` has it in the plain loop


@dataclass
class PulledUpdate:
    """The result of pulling an adjoint a through Υ: z⁺, a·∂Υ/∂z, u = a·∂Υ/∂d, and the gradients of wanted options."""

    to: State
    adjoint: State
    cotangent: State
    wanted: Sequence[Tensor | None]


class Update(ABC):
    """The update of one step, z⁺ = Υ(z, d), with the options that it had then."""

    options: Sequence[Tensor] = ()  # the tensors among its options that require grad

    @property
    def reads_direction(self) -> bool:
        """Whether the derivative of Υ depends on the values of d, and not only on its shape."""
        return True

    @property
    def accumulates(self) -> bool:
        """Whether the update changes no weight, and only adds to a sum that its derivative does not read."""
        return False

    @property
    def closes_over(self) -> bool:
        """Whether the update calls a function of the user, which may use outer variables that `options` lacks."""
        return False

    def moves(self, z: State, d: State) -> Iterable[str]:
        """Return the names of the weights that the update changes."""
        return tuple(d)

    @abstractmethod
    def __call__(self, z: State, d: State) -> State:
        """Compute z⁺ = Υ(z, d) in differentiable operations."""

    def direction_between(self, z: State, to: State, names: Iterable[str]) -> State | None:
        """Return the direction d with z⁺ = Υ(z, d) for these weights, or None if z and z⁺ do not determine it."""
        return None

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        """Pull the adjoint a through Υ, by autograd. Without `end`, z⁺ is not returned."""
        at = {n: x.detach().requires_grad_() for n, x in z.items() if x.is_floating_point()}
        direction = {n: x.detach().requires_grad_() for n, x in d.items()}
        with torch.enable_grad():
            to = self({**z, **at}, direction)
        keys = [n for n in a if n in to and to[n].requires_grad]
        inputs = [*at.values(), *direction.values(), *wanted]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if keys:
            grads = grad([to[n] for n in keys], inputs, [a[n] for n in keys], retain_graph=bool(self.options))
        first, second = len(at), len(at) + len(direction)
        return PulledUpdate(
            {n: x.detach() for n, x in to.items()} if end else {},
            {n: g for n, g in zip(at, grads, strict=False) if g is not None},
            {n: g for n, g in zip(direction, grads[first:second], strict=True) if g is not None},
            grads[second:],
        )


class UpdateRule(ABC):
    """The rule by which a loop updates its weights."""

    start: State  # the optimizer's tensors at the beginning
    has_no_rate: bool = False  # the direction already contains the rate (of a solver object)

    @abstractmethod
    def at_step(self, k: int) -> Update:
        """Return Υ_k, with the present options."""

    def count(self, moved: Iterable[str]) -> None:  # noqa: B027 (plain steps have nothing to count)
        """Count an update of each of these weights; called after a step with the names of those that it changed."""

    def names_held_by(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        """Return the weights that the optimizer holds, or None if it is not one of this loop's optimizers."""
        return None

    def write_state(self, z: State) -> None:
        """Write the optimizer's part of z into the optimizer itself."""
        raise ValueError(
            "bilevel.inner: commit_(optimizer=True) has no optimizer to write to. Open the block with optimizer=..., "
            "or leave out optimizer=True."
        )

    def check(self) -> None:  # noqa: B027 (plain steps have no optimizer)
        """Raise if the optimizer was changed in a way that a step would not notice."""

    def lacks(self, need: str) -> str | None:
        """Return why Υ does not have what an engine needs ("fixed point", "symmetry"), or None if it has it."""
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

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        if self.options:
            return super().pull(z, d, a, wanted, end=end)
        with torch.no_grad():
            u = {n: x * -self.lr for n, x in a.items() if n in d}
            to = self(z, d) if end else {}
            return PulledUpdate(to, {n: x for n, x in a.items() if n in z}, u, [None] * len(wanted))


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
            lr = lr.detach().clone() if isinstance(lr, Tensor) else lr  # the tensor may be written to later
            if self._last is None or isinstance(lr, Tensor) or self._last.lr != lr:
                self._last = Descent(lr)  # otherwise it shares the update of the previous step
            return self._last
        return Descent(self.count_once(lr), (lr,))


# --- optimizers ---


def resolve_optimizer(given: Any) -> tuple[tuple[torch.optim.Optimizer, ...], Formula | None]:
    """Return the optimizers that `optimizer=` was given, or the rule that it was given."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        return (() if given is None else (given,)), None
    if isinstance(given, (list, tuple)):
        several = cast("Sequence[Any]", given)
        if several and all(isinstance(o, torch.optim.Optimizer) for o in several):
            return tuple(several), None
    elif callable(given) and not isinstance(given, type):
        return (), cast("Formula", given)
    raise TypeError(
        "bilevel.inner: optimizer= takes an optimizer of torch.optim, a list of them, or a function "
        f"rule(w, d, state, *, lr, count) -> (new w, new state), got {given!r}."
    )


def _is_same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether an entry of an optimizer's state is the object that was there before, and was not written to."""
    return before[0] is now[0] and before[1] == now[1]


def _is_equal(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether it is that object, or another one with the same values."""
    (x, version), (y, _) = before, now
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return x is y or (type(x) is type(y) and (isinstance(x, dict) or bool(x == y)))  # a dict is the whole state
    kept = x._version == version and x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    return kept and (x is y or x.is_meta or torch.equal(x, y))


class OptimizerRule(UpdateRule):
    """The rules of torch.optim objects, with their groups, options and present state; or a rule of the user.

    `names` has the weights of the inner problem. `factor` multiplies every rate. `count_once`, `repeat_for_tasks` and
    `vmapped` are methods of the binding.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        formula: Formula | None,
        names: Mapping[Tensor, str],
        factor: Rate | None,
        count_once: CountOnce,
        repeat_for_tasks: Callable[[Tensor], Tensor],
        vmapped: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._optimizers, self._names, self._factor, self._count_once = tuple(optimizers), names, factor, count_once
        self._rules = [rule_of(optimizer) for optimizer in optimizers]
        self._formula = None if formula is None else Rule(formula)
        self._held = self._ids()
        self._vmapped = vmapped
        self.start = {}
        self._count = dict.fromkeys(names.values(), 0)  # the number of updates of each weight so far
        for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
            _refuse_hooks(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p in names:
                        self._read_state(names[p], p, optimizer.state.get(p, {}), rule, repeat_for_tasks)
        self._state, self._checked = self._state_of_optimizers(), False

    def _read_state(
        self, name: str, p: Tensor, held: Mapping[str, Any], rule: Rule, repeat_for_tasks: Callable[[Tensor], Tensor]
    ) -> None:
        if rule.counts:
            self._count[name] = int(held.get("step", 0))
        for key, x in held.items():
            if isinstance(x, Tensor) and not (rule.counts and key == "step"):
                # a scalar that belongs to the whole weight is the same for all tasks
                shared = rule.elementwise and x.dim() == 0 and p.dim() > 0
                self.start[f"{name}@{key}"] = x.detach().clone() if shared else repeat_for_tasks(x.detach().clone())

    def _ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for o in self._optimizers for group in o.param_groups]

    def _state_of_optimizers(self) -> dict[tuple[int, int, str], tuple[Any, int]]:
        """Return the state of each optimizer, and what it holds for each weight, with the versions of tensors."""
        found: dict[tuple[int, int, str], tuple[Any, int]] = {}
        for i, optimizer in enumerate(self._optimizers):
            found[i, 0, ""] = optimizer.state, 0
            for p, held in optimizer.state.items():
                for key, x in held.items():
                    found[i, id(p), key] = x, x._version if isinstance(x, Tensor) else 0
        return found

    def check(self) -> None:
        before, now = self._state, self._state_of_optimizers()
        # before the first step it may be loaded anew (accelerate does), but later that would undo what the steps did
        is_kept = _is_same if self._checked else _is_equal
        if before.keys() != now.keys() or not all(is_kept(before[n], now[n]) for n in now):
            raise RuntimeError(
                "bilevel.inner: the state of the optimizer has changed in the block (load_state_dict, or momentum that "
                "was reset). It is read when the block is opened, and never again. Keep the weights by commit_() "
                "before such a change, and open a new block after it."
            )
        self._state, self._checked = now, True
        if self._ids() != self._held:
            raise RuntimeError(
                "bilevel.inner: the param_groups of the optimizer have changed in the block (add_param_group). Set "
                "them up before the block, and open a new block after such a change."
            )
        for optimizer in self._optimizers:
            _refuse_hooks(optimizer)

    def at_step(self, k: int) -> Update:
        found: list[Tensor] = []
        factor = None if self._factor is None else evaluate("bilevel.inner: lr", self._factor, k)
        if isinstance(factor, Tensor):
            factor = self._option("lr", factor, found)
        groups: list[_Group] = []
        for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
            for group in optimizer.param_groups:
                options = {n: v for n, v in group.items() if n != "params"}
                for n, v in options.items():
                    if isinstance(v, (Tensor, tuple)):
                        options[n] = map_tensors(lambda x, n=n: self._option(n, x, found), v)
                if isinstance(optimizer, torch.optim.AdamW):
                    options["decoupled_weight_decay"] = True
                if factor is not None and "lr" in options:
                    options["lr"] = factor * options["lr"]
                groups.append(_Group([self._names[p] for p in group["params"] if p in self._names], options, rule))
        if self._formula is not None:
            groups = [_Group(list(self._names.values()), {"lr": factor}, self._formula)]
        counts = dict(self._count) if any(not rule.affine for *_, rule in groups) else {}
        return FormulaStep(groups, counts, self._vmapped, found)

    def _option(self, name: str, x: Tensor, found: list[Tensor]) -> Tensor:
        if not x.requires_grad:
            return x.detach().clone().reshape(()) if x.numel() == 1 else x.detach().clone()  # schedulers write to it
        if x.grad_fn is not None and x._version:
            raise ValueError(
                f"bilevel.inner: the option {name!r} of the optimizer is a tensor with a graph. Something, probably a "
                "scheduler, has written to it in place, so that its derivative is lost. Give the optimizer a number "
                "(lr=1.0), and give the learnable rate to the block: bilevel.inner(..., optimizer=optimizer, lr=rate) "
                "multiplies the rate that the scheduler sets."
            )
        found.append(x)
        return self._count_once(x.reshape(()) if x.numel() == 1 else x)

    def count(self, moved: Iterable[str]) -> None:
        self._count.update({n: self._count[n] + 1 for n in moved})
        for optimizer in self._optimizers:  # otherwise a scheduler would warn that the optimizer was not stepped
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def names_held_by(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        if not any(o is optimizer for o in self._optimizers):
            return None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [self._names[p] for p in held if p in self._names]

    def write_state(self, z: State) -> None:
        """Write the optimizers' tensors that are in z into the `state` of the optimizers."""
        by_name = {n: p for p, n in self._names.items()}
        for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
            for n in self.names_held_by(optimizer) or ():
                held = {key: x.detach().clone() for key, x in optimizer_state(n, z).items()}
                if rule.counts and self._count[n]:
                    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
                    where = by_name[n].device if fused else None
                    held["step"] = torch.tensor(float(self._count[n]), device=where)
                if held:
                    optimizer.state[by_name[n]].update(held)
        self._state = self._state_of_optimizers()

    def lacks(self, need: str) -> str | None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if need == "fixed point" and self._formula is not None:
            return "it is not known whether a rule of your own has one"
        for rule, optimizer in zip(self._rules, self._optimizers, strict=True):
            if need == "fixed point" and not rule.affine:
                name = type(optimizer).__name__
                return f"{name} divides by a root that is 0 where the gradient is, and has no derivative there"
        if need == "symmetry" and any(is_on(g["momentum"]) for g in groups):
            return "with momentum the Jacobian of a step is not symmetric; engine='neumann' takes it"
        if need == "symmetry" and any(g["lr"] is not groups[0]["lr"] and g["lr"] != groups[0]["lr"] for g in groups):
            return "with a rate for each group the Jacobian is not symmetric; engine='neumann' takes it"
        return None


class _Group(NamedTuple):
    names: list[str]
    options: dict[str, Any]
    rule: Rule


_PART_BYTES = 2**24  # bytes of weights whose updates are differentiated together


def _parts(d: State) -> list[set[str]]:
    """Divide the weights into sets of about `_PART_BYTES` bytes."""
    parts, room = [set[str]()], _PART_BYTES
    for n, x in d.items():
        if parts[-1] and x.nbytes > room:
            parts, room = [*parts, set[str]()], _PART_BYTES
        parts[-1].add(n)
        room -= x.nbytes
    return parts


def weight_of(key: str) -> str:
    """Return the name of the weight that this entry of the state is, or whose optimizer tensor it is."""
    return key.rpartition("@")[0] or key


def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return x + y, where None counts as 0."""
    return x if y is None else y if x is None else x + y


def optimizer_state(name: str, z: State) -> State:
    """Return the optimizer's tensors for one weight."""
    begin = f"{name}@"
    return {key[len(begin) :]: x for key, x in z.items() if key.startswith(begin) and key != f"{name}{SUM}"}


@dataclass(frozen=True)
class FormulaStep(Update):
    """The update of an optimizer by the formula of its class, weight by weight."""

    groups: Sequence[_Group]
    counts: Mapping[str, int]
    vmapped: Callable[[Callable[..., Any]], Callable[..., Any]]
    options: Sequence[Tensor] = ()

    @property
    def reads_direction(self) -> bool:
        return bool(self.options) or any(not rule.affine for *_, rule in self.groups)

    @property
    def closes_over(self) -> bool:
        return any(rule not in RULES.values() for *_, rule in self.groups)

    def __call__(self, z: State, d: State) -> State:
        new = dict(z)
        held: dict[str, State] = {n: {} for n in d}
        for key, x in z.items():
            name, at, tensor = key.rpartition("@")
            if at and name in held:
                held[name][tensor] = x
        for names, options, rule in self.groups:
            for n in names:
                if n in d:
                    new[n], state = self._update_weight(
                        rule, z[n], d[n], held[n], {**options, "count": self.counts.get(n, 0) + 1}
                    )
                    new.update({f"{n}@{key}": x for key, x in state.items()})
        return new

    def direction_between(self, z: State, to: State, names: Iterable[str]) -> State | None:
        wanted, found = set(names), dict[str, Tensor]()
        with torch.no_grad():
            for held, options, rule in self.groups:
                for n in wanted.intersection(held):
                    state, new = optimizer_state(n, z), optimizer_state(n, to)
                    d = None if rule.direction is None or not new else rule.direction(z[n], state, new, **options)
                    if d is None:
                        return None
                    found[n] = d.detach()
        return found if found.keys() == wanted else None

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        """Pull the adjoint a through Υ, some weights at a time, since the graph takes several times their bytes."""
        parts = _parts(d) if all(rule.elementwise for *_, rule in self.groups) else [set(d)]
        if len(parts) == 1:
            return super().pull(z, d, a, wanted, end=end)
        whole = PulledUpdate(
            {}, {n: x for n, x in a.items() if n in z and weight_of(n) not in d}, {}, [None] * len(wanted)
        )
        if end:
            whole.to.update({n: x for n, x in z.items() if weight_of(n) not in d})
        for names in parts:
            its_z, its_d, its_a = ({n: x for n, x in s.items() if weight_of(n) in names} for s in (z, d, a))
            part = super().pull(its_z, its_d, its_a, wanted, end=end)
            whole.to.update(part.to)
            whole.adjoint.update(part.adjoint)
            whole.cotangent.update(part.cotangent)
            whole.wanted = [add(x, y) for x, y in zip(whole.wanted, part.wanted, strict=True)]
        return whole

    def _update_weight(
        self, rule: Rule, w: Tensor, d: Tensor, state: State, options: dict[str, Any]
    ) -> tuple[Tensor, Tensors]:
        if rule.elementwise:
            return rule.formula(w, d, state, **options)
        return self.vmapped(lambda *args: check_returned(args[0], rule.formula(*args, **options)))(w, d, state)


def check_returned(w: Tensor, returned: Any) -> tuple[Tensor, State]:
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


def _refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    own = (getattr(optimizer, kind, None) for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        if hooks:
            raise ValueError(
                "bilevel.inner: the optimizer has a hook on its step. A block reads the optimizer and never steps it, "
                "so the hook would not run. Remove it; what it does to the gradient can be written as direction=, a "
                "function of the direction."
            )
