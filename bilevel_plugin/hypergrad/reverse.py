"""Reverse mode over stored iterates: memory of a few states and the graph of one step (paper, Alg. 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..binding import State
from ..step import Gradients, Phi, Traced
from .base import Engine, Tape, as_leaves, finite, one, refuse_create_graph
from .store import Store


@dataclass(frozen=True)
class Reverse(Engine):
    """a = ∇g(w_K); for k = K … 1: G += a·∂Φ_k/∂λ, a = a·∂Φ_k/∂z, each at the z that step k began from.

    `checkpoint=c` stores every c-th iterate and runs the steps between again; "sqrt" widens c as the loop goes
    on, so that about 2√K iterates are held at any time. `truncate=m` goes back over the last m steps only: a
    biased gradient for the memory and time of m steps (Shaban et al. 2019).
    """

    checkpoint: int | Literal["sqrt"] = 1
    truncate: int | None = None

    def __post_init__(self) -> None:
        wrong = self.checkpoint != "sqrt" if isinstance(self.checkpoint, str) else self.checkpoint < 1
        if wrong:
            raise ValueError(f"bilevel.Reverse: checkpoint must be 'sqrt' or at least 1, got {self.checkpoint!r}.")
        if self.truncate is not None and self.truncate < 1:
            raise ValueError(f"bilevel.Reverse: truncate must be at least 1, got {self.truncate}.")

    def tape(self) -> Tape:
        return _ReverseTape(self)


class _ReverseTape(Tape):
    def __init__(self, options: Reverse) -> None:
        self._options = options
        self._every = 1 if options.checkpoint == "sqrt" else options.checkpoint
        self._phis: dict[int, Phi] = {}
        self._store = Store()
        self._saved: dict[int, State] = {}
        self._last: State = {}
        self._count = 0

    @property
    def _first(self) -> int:
        """The first step that the sweep goes back to."""
        return 0 if self._options.truncate is None else max(0, self._count - self._options.truncate)

    def step(self, phi: Phi, z: State) -> State:
        self._last = as_leaves(phi(z, graph=False).to)
        k, self._count = self._count, self._count + 1
        self._phis[k] = phi
        if k % self._every == 0:
            self._saved[k] = self._store.keep(z)
        if self._options.checkpoint == "sqrt" and len(self._saved) > 2 * self._every:
            self._every *= 2
            self._drop([j for j in self._saved if j % self._every])
        if self._first > 0:
            self.whole = False
            needed = max((j for j in self._saved if j <= self._first), default=0)
            self._drop([j for j in self._saved if j < needed])
            for j in [j for j in self._phis if j < needed]:
                del self._phis[j]
        return self._last

    def _drop(self, steps: list[int]) -> None:
        for j in steps:
            self._store.drop(self._saved.pop(j))

    def _backwards(self) -> Iterator[tuple[Phi, State]]:
        """Φ_K, z_{K−1}; Φ_{K−1}, z_{K−2}; …: what was not stored is run again, segment by segment."""
        end = self._count
        for begin in sorted(self._saved, reverse=True):
            store, segment = Store(rows=end - begin - 1), [as_leaves(self._saved[begin])]
            for k in range(begin, end - 1):
                segment.append(as_leaves(store.keep(self._phis[k](segment[-1], graph=False).to)))
            for k in reversed(range(max(begin, self._first), end)):
                yield self._phis[k], segment[k - begin]
            end = begin

    def pull(self, end: Traced, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        found = Gradients()
        *_, (_, a) = self._sweep(end, inputs, found)
        return found, a

    def _sweep(self, end: Traced, inputs: Sequence[Tensor] | None, found: Gradients) -> Iterator[tuple[int, State]]:
        adjoints, kept = Store(rows=2), None
        a = end.vjp(one(end), inputs, found)
        yield self._count + 1, a
        after, drifts = self._last, list[tuple[Phi, Tensor]]()
        for phi, z in self._backwards():
            traced = phi(z, graph=True)
            drifts += [(phi, x) for x in _drift(traced, after)]
            a = kept = adjoints.replace(kept, traced.vjp(a, inputs, found))
            del traced  # before the next step's graph is made
            yield phi.k, a
            after = z
        _check_same(drifts)

    def blame(self, end: Traced) -> int | None:
        found = Gradients()
        for k, a in self._sweep(end, None, found):
            if not finite([*a.values(), *found.values()]):
                return k
        return None


def _drift(again: Traced, after: State) -> list[Tensor]:
    """How far a step that was run again ended from where it ended at first, over the step's own length."""
    if all(x.device.type == "meta" for x in after.values()):
        return []
    if all(x.device.type == "cpu" and torch.equal(x, again.to[n]) for n, x in after.items()):
        return []

    def distance(x: State, y: State) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(x[n] - y[n]) for n in y if n in x]).norm()

    with torch.no_grad():
        size = torch.stack([torch.linalg.vector_norm(x) for x in after.values()]).norm()
        rounding = torch.finfo(size.dtype).eps * size
        return [distance(again.to, after) / (distance(again.at, after) + rounding + torch.finfo(size.dtype).tiny)]


def _check_same(drifts: list[tuple[Phi, Tensor]]) -> None:
    """Run again, a step must end where it ended: what changed in between would make the gradient wrong."""
    for phi, drift in drifts:
        assert phi.conditions is not None
        if not float(drift) <= phi.conditions.precision**0.5:
            raise RuntimeError(
                f"bilevel.inner: step k = {phi.k}, run again for the hypergradient, ended elsewhere (off by "
                f"{float(drift):.1e} of the step). Something that h or g reads has changed since, and is no tensor of "
                "the batch: the weights themselves, a closed-over tensor or number, Python's or NumPy's random "
                "numbers, a counter in the model. Pass it in the batch, draw with torch, or use "
                "hypergrad='unroll', which runs nothing again."
            )
