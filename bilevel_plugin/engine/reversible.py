"""Training run backwards: no state is stored but the last, and of each step only what rounding loses (Maclaurin 2015).

From the state after a step, the inverse of the optimizer predicts the weight before it, then the gradient is computed
there by the step's own kernels, and with it the optimizer's tensors before the step are predicted. The predictions are
right up to rounding. What they are off by was stored when the step was taken, as integers in units in the last place
(residuals.py), so each state comes out bit for bit. A checksum of each state tells if one does not.
"""

from __future__ import annotations

import dataclasses
import time
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
from ..update.inverse import INVERSES
from ..update.update import Update
from .layout import dense_strides
from .predictions import Block, blocks, predictions
from .residuals import Log, as_integers, checksum, decode, encode, from_raw, raw
from .schedule import Plan
from .states import States, Steps, Visit
from .store import Store


class _Contents(NamedTuple):
    """What the state before a step consists of. What is in neither of the others is as it is after the step."""

    names: tuple[str, ...]
    predicted: tuple[str, ...]
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
        parts = blocks(heard.base, to, [n for n in z if n in heard.direction], z)
        predicted = {key for part in parts for n, *_ in part.pieces for key in (n, *part.names(n))}
        rest = [n for n in z if n not in predicted]
        changed = [n for n in rest if n not in to or not (z[n] is to[n] or is_same(z[n], to[n]))]
        contents = _Contents(
            tuple(z),
            tuple(n for n in z if n in predicted),
            tuple((n, z[n].shape, z[n].dtype, z[n].device) for n in changed),
        )
        begin, sizes, checksums = self._log.size, list[int](), list[int]()
        with torch.no_grad():
            for part, key, prediction in predictions(parts, to, lambda: (z, heard.direction)):
                bits = as_integers(part.flat(z, key))
                sizes.append(self._log.append(encode(_part(bits - as_integers(prediction), step.step.binding))))
                checksums.append(checksum(bits))
        sizes += [self._log.append(raw(z[n])) for n in changed]
        last = self._entries.get(self.count - 1)
        contents = last.contents if last is not None and last.contents == contents else contents
        return _Entry(begin, contents, tuple(sizes), tuple(checksums))

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
        what, coded = entry.contents, self._parts_of(entry)
        predicted = set(what.predicted)
        z = {n: after[n] if n not in predicted else _like(n, after) for n in what.names if n in after}
        data = [next(coded) for _ in entry.checksums]
        for (n, shape, dtype, device), part in zip(what.stored, coded, strict=True):
            z[n] = from_raw(part, torch.empty(shape, dtype=dtype, device=device))

        def at() -> tuple[State, State]:
            with _asking(step.step) as heard:
                step.replay(as_leaves({n: z[n] for n in what.names if n not in states}))
            return z, heard.direction

        parts = blocks(_base(step.step.update), after, predicted, z)
        states = {key for part in parts for n, *_ in part.pieces for key in part.names(n)}
        with torch.no_grad():
            found = predictions(parts, after, at)
            for (part, key, prediction), code, total in zip(found, data, entry.checksums, strict=True):
                bits = as_integers(prediction)
                off = decode(code, len(_part(bits, binding)), bits.dtype).to(bits.device)
                bits = bits + (binding.join_parts(off)[: len(bits)] if binding.shards else off)
                if checksum(bits) != total:
                    raise self._differs(step, part)
                part.write(z, key, bits.view(prediction.dtype))
        for n in what.predicted:  # momentum may have other strides than its weight
            if z[n].stride() != (strides := dense_strides(after[n])):
                z[n] = torch.empty_strided(z[n].shape, strides, dtype=z[n].dtype, device=z[n].device).copy_(z[n])
        return as_leaves({n: z[n] for n in what.names})

    def _parts_of(self, entry: _Entry) -> Iterator[bytes]:
        begin = entry.begin
        for size in entry.sizes:
            yield self._log.read(begin, begin + size)
            begin += size

    def _differs(self, step: RecordedStep, part: Block) -> RuntimeError:
        threads = torch.get_num_threads()
        how = f" (with {threads} threads, and {self._threads} then)" if threads != self._threads else ""
        more = f" and {len(part.pieces) - 1} more" if len(part.pieces) > 1 else ""
        return RuntimeError(
            f"bilevel.Reverse: {step.where} can't be run backwards: the state before it does not come out bit for bit "
            f"({part.pieces[0].name!r}{more}), since the gradient, computed again{how}, has other bits than at first. "
            "Kernels that add in any order do that; torch.use_deterministic_algorithms(True) replaces them. Or store "
            "states: checkpoint='sqrt'."
        )

    def plan(self) -> Plan:
        steps = self.count - self.first
        again = steps + sum(k >= self.first for k in self._entries)  # for its gradient, and for its pullback
        return super().plan()._replace(states=min(1, steps), reruns=again, differences=self._log.nbytes)


def _like(name: str, after: State) -> Tensor:
    """Return a tensor to be written to, with the strides of the weight that it belongs to."""
    x, w = after[name], after[name.rpartition("@")[0] or name]
    return torch.empty_strided(x.shape, dense_strides(w), dtype=x.dtype, device=x.device)


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
