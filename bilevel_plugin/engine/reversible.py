"""Training run backwards: no state is stored but the last, and of each step only what rounding loses (Maclaurin 2015).

From the state after a step, the inverse of the optimizer predicts the weight before it, then the gradient is computed
there by the step's own kernels, and with it the optimizer's tensors before the step are predicted. The predictions are
right up to rounding. What they are off by was stored when the step was taken, as integers in units in the last place
(residuals.py), so each state comes out bit for bit. A checksum of each state tells if one does not.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..autograd.graph import State, as_leaves
from ..model.model import Binding
from ..step.record import RecordedStep
from ..step.step import Moved, Step, is_same
from ..update.inverse import INVERSES, Inverse, numbers, wide
from ..update.update import Update
from .residuals import Log, checksum, decode, encode, from_order, from_raw, order, raw
from .schedule import Plan
from .states import States, Steps, Visit
from .store import Store

_TOGETHER = 2**22  # the numbers that are predicted and coded together


class _Contents(NamedTuple):
    """What the state before a step consists of. What is in none of the last three is as it is after the step."""

    names: tuple[str, ...]
    weights: tuple[str, ...]  # predicted without the direction
    tensors: tuple[str, ...]  # predicted with it
    stored: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]  # as they are


class _Entry(NamedTuple):
    """The record of one step in the log: where it begins, and the sizes and checksums of its parts."""

    begin: int
    contents: _Contents
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


class Reversible(States):
    """The last state, and for each step the differences between the state before it and its prediction."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._log, self._entries = Log(store), dict[int, _Entry]()
        self._last: State = {}
        self._reached: tuple[int, State] = -1, {}
        self._plain: Update | None = None
        self._heard: _Listening | None = None
        self._threads = torch.get_num_threads()

    # --- while the loop runs ---

    def begin(self, step: RecordedStep, z: State) -> None:
        """Have the step tell which direction its optimizer was given."""
        self._plain = step.step.update
        _refuse(self._plain)
        step.step.update, self._heard = _listening(self._plain)
        self._started = time.perf_counter()

    def end(self, step: RecordedStep, z: State, moved: Moved) -> None:
        assert self._plain is not None
        assert self._heard is not None
        step.step.update = self._plain
        if self.count:  # the first state is there
            self._entries[self.count] = self._record(step, z, moved.to, self._heard)
        self._heard, self._last = None, moved.to
        super().end(step, z, moved)

    def _record(self, step: RecordedStep, z: State, to: State, heard: _Listening) -> _Entry:
        """Store what it takes to get from the state after the step to z."""
        found, known = _Inverted(heard.base, to), set(heard.direction)
        weights = tuple(n for n in z if n in known)
        tensors = tuple(n for n in z if n in to and n.rpartition("@")[0] in known)
        rest = [n for n in z if n not in known and n not in tensors]
        changed = [n for n in rest if n not in to or not (z[n] is to[n] or is_same(z[n], to[n]))]
        contents = _Contents(
            tuple(z), weights, tensors, tuple((n, z[n].shape, z[n].dtype, z[n].device) for n in changed)
        )
        last = self._entries.get(self.count - 1)
        begin, sizes, checksums = self._log.size, list[int](), list[int]()
        with torch.no_grad():
            for names, predicted in found.before(weights, tensors, lambda: (z, heard.direction)):
                whole = order(_flat(z[n] for n in names))
                off = _part(whole - order(predicted), step.step.binding)
                sizes.append(self._log.append(encode(off)))
                checksums.append(checksum(whole))
        sizes += [self._log.append(raw(z[n])) for n in changed]
        same = last is not None and last.contents == contents
        return _Entry(begin, last.contents if last and same else contents, tuple(sizes), tuple(checksums))

    def forget_before(self, first: int) -> int:
        self.first = first
        for k in [k for k in self._entries if k < first]:
            del self._entries[k]
        if first in self._entries:
            self._log.forget_before(self._entries[first].begin)
        return first

    # --- the sweep ---

    def state(self, steps: Steps, k: int) -> State:
        at, z = self.count, self._last
        while at > k:
            at, z = at - 1, self._before(steps[at - 1], at - 1, z)
        self._reached = at, z
        return z

    def backwards(self, steps: Steps, left: int) -> Iterator[Visit]:
        k, z = self._reached if self._reached[0] == left else (self.count, self._last)
        self._reached = -1, {}
        while k > self.first:
            k, z = k - 1, self._before(steps[k - 1], k - 1, z)
            if k < left:
                yield Visit(k, z)

    def _before(self, step: RecordedStep, k: int, after: State) -> State:
        """Return the state that step k began from, of which `after` is the state after it."""
        if k == 0:
            return self.start
        entry, binding = self._entries[k], step.step.binding
        parts = self._parts_of(entry)
        what, z = entry.contents, {n: after[n] for n in entry.contents.names if n in after}
        coded = [next(parts) for _ in entry.checksums]
        for (n, shape, dtype, device), data in zip(what.stored, parts, strict=True):
            z[n] = from_raw(data, torch.empty(shape, dtype=dtype, device=device))
        direction: State = {}

        def at() -> tuple[State, State]:
            nonlocal z
            z = as_leaves({n: x for n, x in z.items() if n not in what.tensors})
            with _asking(step.step) as heard:
                step.replay(z)
            direction.update(heard.direction)
            return z, direction

        found = _Inverted(_base(step.step.update), after)
        with torch.no_grad():
            for (names, predicted), data, total in zip(
                found.before(what.weights, what.tensors, at), coded, entry.checksums, strict=True
            ):
                before = order(predicted)
                off = decode(data, len(_part(before, binding)), before.dtype).to(before.device)
                before += off if not binding.shards else binding.join_parts(off)[: len(before)]
                if checksum(before) != total:
                    raise self._differs(step, names)
                z.update(_like(from_order(before, predicted.dtype), {n: after[n] for n in names}))
        return as_leaves({n: z[n] for n in what.names})

    def _parts_of(self, entry: _Entry) -> Iterator[bytes]:
        begin = entry.begin
        for size in entry.sizes:
            yield self._log.read(begin, begin + size)
            begin += size

    def _differs(self, step: RecordedStep, names: list[str]) -> RuntimeError:
        threads = torch.get_num_threads()
        how = f" (with {threads} threads, and {self._threads} then)" if threads != self._threads else ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return RuntimeError(
            f"bilevel.Reverse: {step.where} can't be run backwards: the state before it does not come out bit for bit "
            f"({names[0]!r}{more}), since its gradient, computed again{how}, has other bits than at first. Kernels "
            "that add in any order do that; torch.use_deterministic_algorithms(True) replaces them. Or store states: "
            "checkpoint='sqrt'."
        )

    def plan(self) -> Plan:
        steps = self.count - self.first
        again = steps + sum(k >= self.first for k in self._entries)  # for its gradient, and for its pullback
        return super().plan()._replace(states=min(1, steps), reruns=again, differences=self._log.nbytes)


# --- predictions ---


class _Inverted:
    """The predictions of the state before a step, from the state `after` it."""

    def __init__(self, update: Update, after: State) -> None:
        self._after = after
        self._held: dict[str, State] = defaultdict(dict)
        for key, x in after.items():
            name, at, tensor = key.rpartition("@")
            if at:
                self._held[name][tensor] = x
        self._rules: dict[str, tuple[Inverse, dict[str, Any]]] = {}
        for names, options, rule in getattr(update, "groups", ()):
            plain = numbers(options)
            for n in names:
                count = cast("Any", update).counts.get(n, 0) + 1
                self._rules[n] = INVERSES[rule.formula], {**plain, "count": count}

    def before(self, weights: Iterable[str], tensors: tuple[str, ...], at: Any) -> Iterator[tuple[list[str], Tensor]]:
        """Yield names and their predictions in one row: first weights, then tensors at the (z, d) that `at` returns."""
        for names in _together(weights, self._after):
            yield names, _flat(self._weight(n).to(self._after[n].dtype) for n in names)
        if not tensors:
            return
        z, d = at()
        found: dict[str, Tensor] = {}
        for names in _together(tensors, self._after):
            for n in dict.fromkeys(key.rpartition("@")[0] for key in names):
                inverse, options = self._rules[n]
                state = inverse.state(self._wide(n), wide(z[n].detach()), wide(d[n]), options)
                found.update({f"{n}@{key}": x for key, x in state.items()})
            yield names, _flat(found[key].to(self._after[key].dtype) for key in names)
            found.clear()

    def _wide(self, name: str) -> State:
        return {key: wide(x.detach()) for key, x in self._held[name].items()}

    def _weight(self, name: str) -> Tensor:
        inverse, options = self._rules[name]
        return inverse.weight(wide(self._after[name].detach()), self._wide(name), options)


def _together(names: Iterable[str], like: State) -> list[list[str]]:
    """Divide names into lists of about `_TOGETHER` numbers of one role, one dtype and one device."""
    found: dict[tuple[object, ...], list[list[str]]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for n in names:
        role = n.rpartition("@")[2] if "@" in n else "", like[n].dtype, like[n].device
        if role not in found or sizes[role] + like[n].numel() > _TOGETHER:
            found.setdefault(role, []).append([])
            sizes[role] = 0
        found[role][-1].append(n)
        sizes[role] += like[n].numel()
    return [part for parts in found.values() for part in parts]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def _like(flat: Tensor, others: State) -> State:
    """Return the tensors whose numbers are in one row, each with the shape and the strides of another one."""
    parts = flat.split([x.numel() for x in others.values()])
    views = {n: part.view(x.shape) for part, (n, x) in zip(parts, others.items(), strict=True)}
    return {
        n: x if x.stride() == others[n].stride() else torch.empty_like(others[n]).copy_(x) for n, x in views.items()
    }


def _part(whole: Tensor, binding: Binding) -> Tensor:
    """Return the numbers that this rank keeps."""
    if not binding.shards:
        return whole
    part = binding.part_of(len(whole))
    mine = whole[part.start : part.stop]
    return torch.cat([mine, mine.new_zeros(len(part) - len(mine))])


# --- the direction ---


@dataclass
class _Listening(Update):
    """An update that notes the direction that it is given, and applies `base` unless it is only `asked`."""

    base: Update
    asked: bool = False
    direction: State = field(default_factory=dict[str, Tensor])

    @property
    def options(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.options

    @property
    def closes_over(self) -> bool:
        return self.base.closes_over and not self.asked

    @property
    def accumulates(self) -> bool:
        return self.base.accumulates

    def moves(self, z: State, d: State) -> Iterable[str]:
        return self.base.moves(z, d)

    def __call__(self, z: State, d: State) -> State:
        self.direction = {} if self.accumulates else {n: x.detach() for n, x in d.items()}
        return dict(z) if self.asked else self.base(z, d)


def _base(update: Update) -> Update:
    """Return the update that an update of the direction and the like applies at the end."""
    inner = getattr(update, "update", None)
    return update if inner is None else _base(inner)


def _listening(update: Update, *, asked: bool = False) -> tuple[Update, _Listening]:
    inner = getattr(update, "update", None)
    if inner is None:
        heard = _Listening(update, asked)
        return heard, heard
    listening, heard = _listening(inner, asked=asked)
    return dataclasses.replace(cast("Any", update), update=listening), heard


@contextmanager
def _asking(step: Step) -> Generator[_Listening]:
    """Inside this context the step changes nothing, and what is yielded tells which direction it was given."""
    plain = step.update
    step.update, heard = _listening(plain, asked=True)
    try:
        yield heard
    finally:
        step.update = plain


def _refuse(update: Update) -> None:
    """Refuse an update that has no inverse."""
    base = _base(update)
    if base.accumulates:
        return
    why, groups = "", getattr(base, "groups", None)
    if groups is None:
        why = "a plain step, w − lr·d: without momentum it keeps nothing of the direction"
    for names, options, rule in groups or ():
        inverse = INVERSES.get(rule.formula)
        if names and (inverse is None or inverse.lacks(options)):
            lacks = "it has no inverse here" if inverse is None else inverse.lacks(options)
            why = f"the rule {getattr(rule.formula, '__name__', rule.formula)!r}: {lacks}"
    if why:
        raise ValueError(
            f"bilevel.Reverse: checkpoint='reversible' can't run a step backwards that is {why}. Use "
            "checkpoint='sqrt', or one of the optimizers that can be inverted: SGD and RMSprop with momentum, Adam, "
            "AdamW, NAdam, RAdam."
        )
