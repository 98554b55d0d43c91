"""Training run backwards: no state is stored but the last, and of each step only what rounding loses (Maclaurin 2015).

From the state after a step, the inverse of the optimizer predicts the weight before it, then the gradient is computed
there by the step's own kernels, and with it the optimizer's tensors before the step are predicted. The predictions are
right up to rounding. What they are off by was stored when the step was taken, as integers in units in the last place
(residuals.py), so each state comes out bit for bit. A checksum of each state tells if one does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.derive import Traced
from ..autograd.trees import State, as_leaves
from ..kernels.switches import full_precision
from ..model.ranks import Alone
from ..step.step import Step
from ..step.sums import is_same
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
        self._threads = torch.get_num_threads()

    # --- while the loop runs ---

    def begin(self, step: Step, z: State) -> None:
        self._started = time.perf_counter()

    def end(self, step: Step, z: State, to: State, d: State, traced: Traced | None) -> None:
        assert step.update is not None
        _refuse(step.update.base)
        if self.count:  # the first state is there
            self._entries[self.count] = self._record(step, z, to, step.update, d)
        self._last = to
        super().end(step, z, to, d, traced)

    def _record(self, step: Step, z: State, to: State, update: Update, d: State) -> _Entry:
        """Store what it takes to get from the state after the step to z."""
        with torch.no_grad(), full_precision():
            direction = update.given(z, d)
        parts = blocks(update.base, to, [n for n in z if n in direction], z)
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
            for part, key, prediction in predictions(parts, to, lambda: (z, direction)):
                bits = as_integers(part.flat(z, key))
                sizes.append(self._log.append(encode(_part(bits - as_integers(prediction), step.model.ranks))))
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

    def _before(self, step: Step, k: int, after: State) -> State:
        """Return the state that step k began from, of which `after` is the state after it."""
        if k == 0:
            return self.start
        entry, ranks, update = self._entries[k], step.model.ranks, step.update
        assert update is not None
        what, coded = entry.contents, self._parts_of(entry)
        predicted = set(what.predicted)
        z = {n: after[n] if n not in predicted else _like(n, after) for n in what.names if n in after}
        data = [next(coded) for _ in entry.checksums]
        for (n, shape, dtype, device), part in zip(what.stored, coded, strict=True):
            z[n] = from_raw(part, torch.empty(shape, dtype=dtype, device=device))

        def at() -> tuple[State, State]:
            found = step.again(as_leaves({n: z[n] for n in what.names if n not in states})).direction
            with full_precision():
                return z, update.given(z, ranks.mean(found, step.model.parameters))

        parts = blocks(update.base, after, predicted, z)
        states = {key for part in parts for n, *_ in part.pieces for key in part.names(n)}
        with torch.no_grad():
            found = predictions(parts, after, at)
            for (part, key, prediction), code, total in zip(found, data, entry.checksums, strict=True):
                bits = as_integers(prediction)
                off = decode(code, len(_part(bits, ranks)), bits.dtype).to(bits.device)
                bits = bits + (ranks.join_parts(off)[: len(bits)] if ranks.shards else off)
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

    def _differs(self, step: Step, part: Block) -> RuntimeError:
        threads = torch.get_num_threads()
        how = f" (with {threads} threads, and {self._threads} then)" if threads != self._threads else ""
        more = f" and {len(part.pieces) - 1} more" if len(part.pieces) > 1 else ""
        return RuntimeError(
            f"bilevel.Reverse: step k = {step.k} can't be run backwards: the state before it does not come out bit for "
            f"bit ({part.pieces[0].name!r}{more}), since the gradient, computed again{how}, has other bits than at "
            "first. Kernels that add in any order do that; torch.use_deterministic_algorithms(True) replaces them. Or "
            "store states: checkpoint='sqrt'."
        )

    def plan(self) -> Plan:
        steps = self.count - self.first
        again = steps + sum(k >= self.first for k in self._entries)  # for its gradient, and for its pullback
        return super().plan()._replace(states=min(1, steps), reruns=again, differences=self._log.nbytes)


def _like(name: str, after: State) -> Tensor:
    """Return a tensor to be written to, with the strides of the weight that it belongs to."""
    x, w = after[name], after[name.rpartition("@")[0] or name]
    return torch.empty_strided(x.shape, dense_strides(w), dtype=x.dtype, device=x.device)


def _part(whole: Tensor, ranks: Alone) -> Tensor:
    """Return the numbers that this rank keeps."""
    if not ranks.shards:
        return whole
    part = ranks.part_of(len(whole))
    mine = whole[part.start : part.stop]
    return torch.cat([mine, mine.new_zeros(len(part) - len(mine))])


def _refuse(update: Update) -> None:
    """Refuse an update that has no inverse."""
    why, groups = "", getattr(update, "groups", None)
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
