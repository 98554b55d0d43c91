"""Reverse mode over stored iterates: memory of a few states and the graph of one step (paper, Alg. 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..graph import Gradients, State, Traced, as_leaves, graph_bytes, is_finite
from ..pullback import PULLBACKS, BlockByBlock, Pull
from ..replay import RecordedStep
from ..step import LossMonitor, Moved, Step
from ..updates import SUM
from .base import End, Engine, Tape, refuse_create_graph
from .plan import Budget, Keep, Plan, Sweep, free, parse, schedule
from .store import Store


@dataclass(frozen=True)
class Reverse(Engine):
    """a = ∇g(w_K); for k = K … 1: G += a·∂Φ_k/∂λ, a = a·∂Φ_k/∂z, each at the z that step k began from.

    By default all K iterates are stored, and each step is run again once, to get its graph.

    `memory` (bytes, "2GiB", or "auto": half of what the device has free) keeps as much as fits instead: the graphs
    of the last steps, which then need not be run again, and iterates for the others. With room for all graphs it is
    as fast as "unroll". `loop.plan` tells what was chosen.

    `checkpoint=c` stores every c-th iterate and runs the steps between once more; "sqrt" widens c as the loop goes
    on, so that about 2√K iterates are held at any time. `truncate=m` goes back over the last m steps only: a
    biased gradient for the memory and time of m steps (Shaban et al. 2019). `offload` keeps iterates in host memory
    (pinned, copied without waiting), if the model is on an accelerator.

    `compile` runs step and pullback under torch.compile, from the second step on; what can't be compiled runs
    eagerly, with a warning that says why. Compiling takes its time once, for a model and its losses.
    """

    checkpoint: int | Literal["sqrt"] = 1
    truncate: int | None = None
    memory: int | str | None = None
    offload: bool = False
    compile: bool = False
    blocks: Any = None

    def __post_init__(self) -> None:
        wrong = self.checkpoint != "sqrt" if isinstance(self.checkpoint, str) else self.checkpoint < 1
        if wrong:
            raise ValueError(f"bilevel.Reverse: checkpoint must be 'sqrt' or at least 1, got {self.checkpoint!r}.")
        if self.truncate is not None and self.truncate < 1:
            raise ValueError(f"bilevel.Reverse: truncate must be at least 1, got {self.truncate}.")
        if self.memory is not None:
            parse(self.memory)
            if self.checkpoint != 1:
                raise ValueError("bilevel.Reverse: memory= decides what to store: leave out checkpoint= or memory=.")
            if self.compile:
                raise ValueError(
                    "bilevel.Reverse: memory= keeps graphs of autograd, and compiled steps have none. Leave out "
                    "compile=, or bound the memory with checkpoint=."
                )

    @property
    def keeps_graphs(self) -> bool:
        return self.memory is not None

    @property
    def refuses_group(self) -> str:
        return "compiled steps are not tried with a group: leave out compile=" if self.compile else ""

    def tape(self) -> Tape:
        return _ReverseTape(self)


class _ReverseTape(Tape):
    def __init__(self, options: Reverse) -> None:
        self._options = options
        self._pull: Pull = PULLBACKS["lean"]() if options.blocks is None else BlockByBlock(options.blocks)
        self._compiler = None
        if options.compile:
            from ..pullback import compiled  # here, since torch's compiler takes a second to import

            self._compiler, self._pull = compiled.Compiler(), compiled.pull
        self._every = 1 if options.checkpoint == "sqrt" else options.checkpoint
        self._steps: dict[int, RecordedStep] = {}
        self._store = Store(offload=options.offload)
        self._saved: dict[int, State] = {}
        self._graphs: deque[tuple[int, Traced]] = deque()  # of the last steps
        self._weighed: dict[object, int] = {}
        self._budget: Budget | None = None
        self._last: State = {}
        self._count = 0
        self._begins: list[int] = []  # where each step of the loop begins among the recorded ones

    def make_step(self, *args: object) -> Step:
        return super().make_step(*args) if self._compiler is None else self._compiler.step(*args)

    @property
    def _first(self) -> int:
        """The first recorded step that the sweep goes back to: one of the loop may be made of several."""
        m, last = self._options.truncate, self._steps.get(self._count - 1)
        if m is not None and last is not None and last.accumulates:  # of a step that is not taken yet
            m += 1
        return 0 if m is None or m >= len(self._begins) else self._begins[-m]

    def step(self, step: RecordedStep, z: State, monitor: LossMonitor) -> Moved:
        k = self._count
        if self._options.memory is None:
            if k in self._saved:  # of a step that failed
                self._forget(k)
            if k % self._every == 0:
                self._saved[k] = self._kept(step, z)
            moved = step.take(z, monitor)
        else:
            moved = step.take(z, monitor, graph=True)
            self._graphs.append((k, Traced(moved.at, moved.to, step.cut, step.leaves)))
            self._fit(self._weigh(step, moved))
            moved.to = as_leaves(moved.to)
        self._last = moved.to
        if k - 1 not in self._steps or self._steps[k - 1].k != step.k:
            self._begins.append(k)
        self._count += 1
        step.share_with(self._steps.get(k - 1))
        self._steps[k] = step
        if self._options.checkpoint == "sqrt" and len(self._saved) > 2 * self._every:
            self._thin()
        if self._first > 0:
            self.reaches_start = False
            while self._graphs and self._graphs[0][0] < self._first:
                self._graphs.popleft()
            needed = max((j for j in self._saved if j <= self._first), default=self._first)
            self._drop([j for j in self._saved if j < needed])
            for j in [j for j in self._steps if j < needed]:
                del self._steps[j]
        return moved

    def _kept(self, step: RecordedStep, z: State) -> State:
        """A copy of z. Where all states are kept, what accumulating steps leave alone is kept once.

        Such a step moves no weight, and its derivative does not read the sum that it adds to.
        """
        options, before = self._options, self._steps.get(self._count - 1)
        if options.checkpoint != 1 or options.truncate is not None:
            return self._store.keep(z)
        rest = z if not step.accumulates else {n: x for n, x in z.items() if not n.endswith(SUM)}
        shared = self._saved[self._count - 1] if before is not None and before.accumulates else {}
        new = {n: x for n, x in rest.items() if n not in shared or n.endswith(SUM) or n in step.step.binding.moving}
        return {**{n: x for n, x in shared.items() if n in rest}, **self._store.keep(new)} if new else dict(shared)

    def _forget(self, k: int) -> None:
        before = self._steps.get(k - 1)
        if before is None or not before.accumulates:  # else its rows are another's as well
            self._drop([k])

    def _weigh(self, step: RecordedStep, moved: Moved) -> Budget:
        """What fits, by the heaviest graph so far: steps of other losses or batches weigh otherwise."""
        kind = step.kind
        state = sum(x.nbytes for x in moved.to.values())
        if kind not in self._weighed:
            self._weighed[kind] = state + graph_bytes(moved.to, moved.at, step.tensors())
        memory = self._budget.memory if self._budget else parse(self._options.memory or "auto")
        if memory is None:
            memory = free(next(iter(moved.to.values())).device) // 2
        binding = step.step.binding  # the same plan on every rank
        heaviest, least = binding.largest_on_any_rank(max(self._weighed.values()), -memory)
        if self._budget is None or (heaviest, state) != (self._budget.graph, self._budget.state):
            self._budget = Budget(-least, heaviest, state)
            self._budget.check()
        return self._budget

    def _fit(self, budget: Budget) -> None:
        """Graphs give way to states, oldest first; and states to graphs, as long as their gaps are run in one go."""
        while not budget.fits(len(self._graphs), len(self._saved)):
            thinned = (len(self._saved) + 1) // 2
            if len(self._graphs) == 1 or (thinned < len(self._saved) and budget.fits(2 * self._every, thinned)):
                self._thin()
            else:
                self._release(*self._graphs.popleft())

    def _release(self, k: int, traced: Traced) -> None:
        """Forget a graph. Its state stays, if it is one of those to keep, or if none lies before it (truncate=)."""
        if k % self._every == 0 or not any(j <= k for j in self._saved):
            self._saved[k] = self._store.keep(traced.at)

    def _thin(self) -> None:
        self._every *= 2
        first = min(self._saved)  # with truncate=, not a multiple of anything
        self._drop([j for j in self._saved if j % self._every and j != first])

    def _drop(self, steps: list[int]) -> None:
        for j in steps:
            self._store.drop(self._saved.pop(j))

    def _room(self, steps: int, held: int) -> tuple[int, int]:
        return self._budget.room(steps, held) if self._budget else (1, steps)

    @property
    def _end(self) -> int:
        """The first step whose graph is kept."""
        return self._graphs[0][0] if self._graphs else self._count

    def _schedule(self, end: int) -> Iterator[Keep | Sweep]:
        saved = sorted(j for j in self._saved if j < end)
        return schedule(saved, end, self._room) if end > self._first else iter(())

    def plan(self) -> Plan:
        actions = self._schedule(self._end)
        reruns = sum(a.at - a.begin if isinstance(a, Keep) else a.end - a.begin for a in actions)
        sizes = (self._budget.memory, self._budget.graph, self._budget.state) if self._budget else (0, 0, 0)
        return Plan(self._count, len(self._graphs), len(self._saved), reruns, *sizes)

    def _backwards(self) -> Iterator[tuple[RecordedStep, State, Traced | None]]:
        """Φ_K, Φ_{K−1}, … with the states that they began from; and a graph, where there is one already."""
        end = self._end
        for i in reversed(range(len(self._graphs))):
            k, traced = self._graphs[i]
            if self._saved:  # their room will be needed
                self._graphs.pop()
                self._release(k, traced)
            yield self._steps[k], traced.at, traced
            del traced
        states, spent = dict(self._saved), None
        for action in self._schedule(end):
            z = as_leaves(self._store.fetch(states[action.begin]))
            for k in range(action.begin, action.at):
                z = as_leaves(self._steps[k].replay(z))
            if isinstance(action, Keep):
                states[action.at] = self._store.keep(z)
                continue
            graphs: list[tuple[State, Traced | None]] = []
            for k in range(action.at, action.end - 1):
                traced = self._steps[k].trace(z)
                graphs.append((traced.at, traced))
                z = as_leaves(traced.to)
                del traced
            graphs.append((z, None))  # the last one is pulled through as it is run again
            for k in reversed(range(max(action.at, self._first), action.end)):
                yield self._steps[k], *graphs.pop()
            if action.begin == action.at and action.begin not in self._saved:
                if spent is not None:
                    self._store.drop(spent)
                spent = states.pop(action.begin)  # where the step before should end: still to be compared with it

    def pull(self, end: End, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        found = Gradients()
        *_, (_, a) = self._sweep(end, inputs, found)
        return found, a

    def _sweep(self, end: End, inputs: Sequence[Tensor] | None, found: Gradients) -> Iterator[tuple[int, State]]:
        adjoints, kept = Store(rows=2), None
        a = end.pull(inputs, found)
        wanted = inputs if inputs is not None else self._all_leaves(end)
        yield self._count + 1, a
        after, new = self._last, a
        for step, z, traced in self._backwards():
            if traced is None:
                pulled = step.pull(z, a, wanted, found, self._pull, after)
                step.check_end(z, pulled.to, after)
                new = pulled.adjoint
                del pulled
            else:
                new = traced.vjp(a, wanted, found)
            after = z
            del traced, z  # before the next step's graph is made
            a = kept = adjoints.replace(kept, new)
            yield step.k, a

    def _all_leaves(self, end: End) -> list[Tensor]:
        """Every outer variable that any step has seen: one whose requires_grad was set late was there before."""
        every = [*end.leaves, *(x for step in self._steps.values() for x in step.leaves)]
        return list({id(x): x for x in every}.values())

    def first_step_not_finite(self, end: End) -> int | None:
        found = Gradients()
        for k, a in self._sweep(end, None, found):
            if not is_finite([*a.values(), *found.values()]):
                return k
        return None
