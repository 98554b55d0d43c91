"""The updates of torch.optim: options and states of the user's optimizers, applied by the formula of their class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.trees import State, map_tensors
from . import formulas  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers the rules of torch.optim)
from .affine import matrix_of, pull_affine
from .operations import is_on
from .proof import NUMBERED, options_of, prove
from .registry import Formula, Rule, Tensors, check_returned, rule_of
from .solvers import Rate, evaluate
from .update import CountOnce, PulledUpdate, Update, UpdateRule, add, optimizer_state, weight_of
from .watch import Watch, refuse_hooks

_PART_BYTES = 2**24  # bytes of weights whose updates are differentiated together


class Group(NamedTuple):
    """A parameter group: the names of its weights, its options in one step, and its rule."""

    names: list[str]
    options: dict[str, Any]
    rule: Rule


class OptimizerRule(UpdateRule):
    """The rules of torch.optim objects, with their groups, options and present state; or a rule of the user.

    `names` has the weights of the inner problem. `factor` multiplies every rate. `count_once`, `repeat_for_tasks` and
    `vmapped` are methods of the model.
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
        self._formula = None if formula is None else Rule(formula, own=True)
        self._vmapped = vmapped
        self.start = {}
        self._count = dict.fromkeys(names.values(), 0)  # the number of updates of each weight so far
        self._proven: list[Any] = []  # the options of each group for which its rule was proven
        for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
            refuse_hooks(optimizer)
            for p in _held_by(optimizer):
                if p in names:
                    self._read_state(names[p], p, optimizer.state.get(p, {}), rule, repeat_for_tasks)
        self._watch = Watch(self._optimizers)

    def _read_state(
        self, name: str, p: Tensor, held: Mapping[str, Any], rule: Rule, repeat_for_tasks: Callable[[Tensor], Tensor]
    ) -> None:
        if rule.counts or isinstance(held.get("step"), (int, float)):
            self._count[name] = int(held.get("step", 0))
        for key, x in held.items():
            if isinstance(x, Tensor) and not (rule.counts and key == "step"):
                # a scalar that belongs to the whole weight is the same for all tasks
                shared = rule.elementwise and x.dim() == 0 and p.dim() > 0
                self.start[f"{name}@{key}"] = x.detach().clone() if shared else repeat_for_tasks(x.detach().clone())

    def open(self, current: Callable[[], State]) -> None:
        self._prove()
        self._watch.open(lambda optimizer: self._entries(optimizer, current()))

    def close(self) -> None:
        self._watch.close()

    def check(self) -> None:
        self._watch.check()
        self._prove()

    def _prove(self) -> None:
        """Compare each rule with the step of its optimizer, again if options other than rates have changed."""
        options = [options_of(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        if not _are_same(options, self._proven):
            for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
                prove(optimizer, rule)
            self._proven = options

    def at_step(self, k: int) -> Update:
        found: list[Tensor] = []
        factor = None if self._factor is None else evaluate("bilevel.inner: lr", self._factor, k)
        if isinstance(factor, Tensor):
            factor = self._option("lr", found, factor)
        groups: list[Group] = []
        for optimizer, rule in zip(self._optimizers, self._rules, strict=True):
            for group in optimizer.param_groups:
                options = {
                    n: map_tensors(partial(self._option, n, found), v) if isinstance(v, (Tensor, tuple)) else v
                    for n, v in {**group, **rule.options}.items()
                    if n != "params"
                }
                if factor is not None and "lr" in options:
                    options["lr"] = factor * options["lr"]
                groups.append(Group([self._names[p] for p in group["params"] if p in self._names], options, rule))
        if self._formula is not None:
            groups = [Group(list(self._names.values()), {"lr": factor}, self._formula)]
        counts = dict(self._count) if any(not rule.affine for *_, rule in groups) else {}
        return FormulaStep(groups, counts, self._vmapped, found)

    def _option(self, name: str, found: list[Tensor], x: Tensor) -> Tensor:
        """Return an option that is a tensor; one that requires grad is added to those that were found."""
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
        counts = {n: self._count[n] + 1 for n in moved}
        self._count.update(counts)
        if counts:  # loop.accumulate moves nothing
            self._watch.step_taken()

    def names_held_by(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        if not any(o is optimizer for o in self._optimizers):
            return None
        return [self._names[p] for p in _held_by(optimizer) if p in self._names]

    def write_state(self, z: State) -> None:
        """Write the optimizers' tensors that are in z into the `state` of the optimizers."""
        for optimizer in self._optimizers:
            for p, held in self._entries(optimizer, z).items():
                optimizer.state[p].update(held)
        self._watch.renew()

    def _entries(self, optimizer: torch.optim.Optimizer, z: State) -> dict[Tensor, dict[str, Any]]:
        """Return what is in z of the optimizer's state, by weight."""
        rule = next(r for o, r in zip(self._optimizers, self._rules, strict=True) if o is optimizer)
        fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        found: dict[Tensor, dict[str, Any]] = {}
        for p in _held_by(optimizer):
            if p not in self._names:
                continue
            n = self._names[p]
            if z[n].shape != p.shape:
                raise RuntimeError(
                    f"bilevel.inner: the state of the optimizer is that of {len(z[n])} tasks in this block, and an "
                    "optimizer holds one. Take the states before the block."
                )
            held: dict[str, Any] = {key: x.detach().clone() for key, x in optimizer_state(n, z).items()}
            if self._count[n] and type(optimizer) in NUMBERED:
                held["step"] = NUMBERED[type(optimizer)](self._count[n])
            elif self._count[n] and rule.counts:
                held["step"] = torch.tensor(float(self._count[n]), device=p.device if fused else None)
            if held:
                found[p] = held
        return found

    def lacks(self, need: str) -> str | None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if need == "fixed point" and self._formula is not None:
            return "it is not known whether a rule of your own has one"
        for rule, optimizer in zip(self._rules, self._optimizers, strict=True):
            if need == "fixed point" and not rule.affine:
                name = type(optimizer).__name__
                return f"{name} divides by a root that is 0 where the gradient is, and has no derivative there"
        if need == "symmetry" and any(is_on(g.get("momentum")) for g in groups):
            return "with momentum the Jacobian of a step is not symmetric; engine='neumann' takes it"
        if need == "symmetry" and any(g["lr"] is not groups[0]["lr"] and g["lr"] != groups[0]["lr"] for g in groups):
            return "with a rate for each group the Jacobian is not symmetric; engine='neumann' takes it"
        return None


def _are_same(options: Sequence[Any], others: Sequence[Any]) -> bool:
    try:
        return options == others
    except RuntimeError:  # tensors of several entries
        return False


def _held_by(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


@dataclass(frozen=True)
class FormulaStep(Update):
    """The update of an optimizer by the formula of its class, weight by weight."""

    groups: Sequence[Group]
    counts: Mapping[str, int]
    vmapped: Callable[[Callable[..., Any]], Callable[..., Any]]
    options: Sequence[Tensor] = ()

    @property
    def reads_direction(self) -> bool:
        return bool(self.options) or any(not rule.affine for *_, rule in self.groups)

    @property
    def closes_over(self) -> bool:
        return any(rule.own for *_, rule in self.groups)

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
                    count = self.counts.get(n, 0) + 1
                    new[n], state = self._update_weight(rule, z[n], d[n], held[n], {**options, "count": count})
                    new.update({f"{n}@{key}": x for key, x in state.items()})
        return new

    def _update_weight(
        self, rule: Rule, w: Tensor, d: Tensor, state: State, options: dict[str, Any]
    ) -> tuple[Tensor, Tensors]:
        if rule.elementwise:
            return rule.formula(w, d, state, **options)
        return self.vmapped(lambda *args: check_returned(args[0], rule.formula(*args, **options)))(w, d, state)

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

    def _pull_affine(self, z: State, d: State, a: State) -> tuple[State, State] | None:
        """Return a·∂Υ/∂z and a·∂Υ/∂d by the coefficients of the rules; None if a rule has none."""
        held: dict[str, list[str]] = {n: [] for n in d}
        given: dict[str, list[str]] = {n: [] for n in d}
        for tensors, names in ((held, z), (given, a)):
            for key in names:
                name, at, tensor = key.rpartition("@")
                if (weight := name if at else key) in tensors:
                    tensors[weight].append(tensor if at else "")
        adjoint, u = {n: x for n, x in a.items() if n in z and weight_of(n) not in d}, State()
        for names, options, rule in self.groups:
            alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
            for n in names:
                if n in d:
                    alike.setdefault((tuple(t for t in held[n] if t), tuple(given[n])), []).append(n)
            for (tensors, _), some in alike.items():
                if (matrix := matrix_of(rule, options, tensors)) is None:
                    return None
                to_z, to_d = pull_affine(some, matrix, a)
                adjoint.update(to_z)
                u.update(to_d)
        return adjoint, u

    def pull(self, z: State, d: State, a: State, wanted: Sequence[Tensor], *, end: bool = True) -> PulledUpdate:
        """Pull the adjoint a through Υ, some weights at a time, since the graph takes several times their bytes."""
        if not self.options and (affine := self._pull_affine(z, d, a)) is not None:
            adjoint, u = affine
            with torch.no_grad():
                return PulledUpdate(self(z, d) if end else {}, adjoint, u, [None] * len(wanted))
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


def _parts(d: State) -> list[set[str]]:
    """Divide the weights into sets of about `_PART_BYTES` bytes."""
    parts, room = [set[str]()], _PART_BYTES
    for n, x in d.items():
        if parts[-1] and x.nbytes > room:
            parts, room = [*parts, set[str]()], _PART_BYTES
        parts[-1].add(n)
        room -= x.nbytes
    return parts
