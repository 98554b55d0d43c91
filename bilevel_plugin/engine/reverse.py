"""Reverse mode over stored iterates, in the memory of a few states and of the graph of one step (paper, Alg. 2)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..autograd.bytes import graph_bytes, peak_bytes
from ..autograd.derive import Gradients, Traced, is_finite
from ..autograd.trees import State, as_leaves, tensors_of
from ..kernels.switches import full_precision
from ..model.model import Binding
from ..pullback import PULLBACKS, BlockByBlock, Pull, Which
from ..step.record import RecordedStep
from ..step.step import LossMonitor, Moved, Step
from ..update.update import SUM
from .base import End, Engine, OuterLoss, Tape, refuse_create_graph
from .journal import Journal, Position, checksum
from .plan import (
    Budget,
    Folder,
    Keep,
    Plan,
    Sweep,
    free,
    gaps_between,
    least_missed,
    parse,
    schedule,
    states_for_sqrt,
)
from .store import Kept, Store


def _is_path(place: str) -> bool:
    return os.sep in place or bool(os.altsep and os.altsep in place)


@dataclass(frozen=True)
class Reverse(Engine):
    """a = ∇g(w_K); for k = K … 1: G += a·∂Φ_k/∂λ, a = a·∂Φ_k/∂z, each at the z that step k began from.

    By default all K iterates are stored, and each step is run again once to get its graph.

    `memory` (bytes, "2GiB", or "auto": half of what the device has free) keeps as much as fits: the graphs of the last
    steps, which then need not be run again, and iterates for the others. With room for all graphs it is as fast as
    "unroll". Compiled steps have no graphs, so with `compile` only iterates are kept, as many as fit beside the memory
    of one pullback. That memory is measured on the first step of each kind, by an eager pullback. `loop.plan` shows
    what was chosen.

    `checkpoint=c` stores every c-th iterate and runs the steps between them once more. "sqrt" holds 1.6·√K iterates at
    any time, and runs each step once more on average. `truncate=m` goes back over the last m steps only, which gives a
    biased gradient for the memory and time of m steps (Shaban et al. 2019).

    `store` is where iterates are kept: on the "device"; on the "host" (pinned memory, copied without waiting), if the
    model is on an accelerator; or in a folder (a path with a separator, or a `pathlib.Path`), in a file that disappears
    when the block or the process ends. With a folder, `memory` holds as many iterates as fit, the others are in the
    file, and no graphs are kept. With `group=`, each of N ranks keeps 1/N of every iterate.

    `resume` needs a folder. Every `every` seconds the position of the sweep, the adjoint and the sums so far are
    written to it. If the process is killed, run the same script again: the steps are taken again, and the sweep
    continues bit for bit. It must be the same sweep, so the weights after the last step are compared, among other
    things. The inputs must be named, and no batch may require grad.

    `compile` runs step and pullback under torch.compile, from the second step on. What can't be compiled runs eagerly,
    with a warning that says why. The compiled code is cached for a model and its losses.

    `blocks` differentiates a step block by block, in about the memory of a plain training step. The graph of a whole
    step takes three to five times as much. It is "auto" (modules that stand in a ModuleList or Sequential with others
    of their class), a class of modules, modules of the model, or several of either. A step that does not allow this
    runs as without it, with a warning that says why. `memory` then keeps iterates, and no graphs.

    Examples:
        Two steps of rate 0.5 from 0 end at w = 0.75·λ, so dg/dλ = (w − 1)·0.75. The last step alone contributes
        (w − 1)·0.5.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> lam = torch.tensor(2.0, requires_grad=True)
        >>> h = lambda m: 0.5 * (m.weight - lam).square().sum()
        >>> g = lambda m: 0.5 * (m.weight - 1).square().sum()
        >>> for engine in bilevel.Reverse(), bilevel.Reverse("sqrt"), bilevel.Reverse(truncate=1):
        ...     with bilevel.inner(model, h, g, solver="gd", lr=0.5, engine=engine) as loop:
        ...         _ = loop.run(2)
        ...         print(loop.hypergrad(lam))
        tensor(0.3750)
        tensor(0.3750)
        tensor(0.2500)
    """

    checkpoint: int | Literal["sqrt"] = 1
    truncate: int | None = None
    memory: int | str | None = None
    store: str | os.PathLike[str] = "device"
    compile: bool = False
    blocks: Which | None = None
    resume: bool = False
    every: float = 60.0

    def __post_init__(self) -> None:
        if self.blocks is not None:
            BlockByBlock(self.blocks)  # raises if blocks= is wrong
            if self.compile:
                raise ValueError(
                    "bilevel.Reverse: blocks= runs parts of a step one by one, and compile= the step as a whole. Leave "
                    "out one of them."
                )
        wrong = self.checkpoint != "sqrt" if isinstance(self.checkpoint, str) else self.checkpoint < 1
        if wrong:
            raise ValueError(f"bilevel.Reverse: checkpoint must be 'sqrt' or at least 1, got {self.checkpoint!r}.")
        if self.truncate is not None and self.truncate < 1:
            raise ValueError(f"bilevel.Reverse: truncate must be at least 1, got {self.truncate}.")
        if isinstance(self.store, str) and self.store not in ("device", "host") and not _is_path(self.store):
            raise ValueError(
                "bilevel.Reverse: store must be 'device', 'host' or a folder, as a path with a separator (like "
                f"'./states') or as a pathlib.Path, got {self.store!r}."
            )
        if self.resume and not self.has_folder:
            raise ValueError(
                "bilevel.Reverse: resume=True writes how far the sweep has come into a folder: name one by store=."
            )
        if not self.every >= 0:
            raise ValueError(f"bilevel.Reverse: every must be a number of seconds, at least 0, got {self.every}.")
        if self.memory is not None:
            parse(self.memory)
            if self.checkpoint != 1:
                raise ValueError("bilevel.Reverse: memory= decides what to store: leave out checkpoint= or memory=.")

    @property
    def keeps_graphs(self) -> bool:
        return self.memory is not None and not self.compile and self.blocks is None and not self.has_folder

    @property
    def spares_memory(self) -> bool:
        return self.blocks is not None

    @property
    def has_folder(self) -> bool:
        """Whether iterates are stored in a file."""
        return self.store not in ("device", "host")

    @property
    def refuses_group(self) -> str:
        if self.resume:
            return "a sweep that is resumed is not tried with a group: leave out resume="
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
        self._steps: dict[int, RecordedStep] = {}
        self._store = Store(place=options.store)
        self._store.most = None if options.memory is None else 1  # until the number of rows that fit is known
        self._binding: Binding | None = None
        self._seconds = 0.0  # the time that the steps have taken
        self._saved: dict[int, Kept] = {}
        self._graphs: deque[tuple[int, Traced]] = deque()  # the graphs of the last steps
        self._takes_graphs = options.keeps_graphs  # whether steps keep graphs, until a state has to be dropped
        self._at_once = 1  # the number of graphs to have room for in the sweep
        self._sizes: dict[object, int] = {}
        self._budget: Budget | None = None
        self._start: State = {}
        self._last: State = {}
        self._count = 0
        self._begins: list[int] = []  # the first recorded step of each step of the loop
        self._losses: dict[int, list[OuterLoss]] = {}  # the added losses, by the number of recorded steps before them

    def start(self, z: State, copies: State) -> State:
        self._start = super().start(z, copies)
        return self._start

    def make_step(self, *args: object) -> Step:
        return super().make_step(*args) if self._compiler is None else self._compiler.step(*args)

    @property
    def _first(self) -> int:
        """The recorded step at which the sweep ends. A step of the loop may consist of several recorded steps."""
        m, last = self._options.truncate, self._steps.get(self._count - 1)
        if m is not None and last is not None and last.accumulates:  # the gradients so far of the next step
            m += 1
        return 0 if m is None or m >= len(self._begins) else self._begins[-m]

    def step(self, step: RecordedStep, z: State, monitor: LossMonitor) -> Moved:
        k, self._binding = self._count, step.step.binding
        if k in self._saved:  # left by a step that failed
            self._drop_failed(k)
        if self._takes_graphs:
            moved = step.take(z, monitor, graph=True)
            self._graphs.append((k, Traced(moved.at, moved.to, step.cut, step.leaves)))
            self._update_budget(step, z, moved)
            self._fit()
            moved.to = as_leaves(moved.to)
        else:
            self._admit(k, lambda: self._keep_shared(step, z), k + 1)
            started = time.perf_counter()
            moved = step.take(z, monitor)
            self._seconds += time.perf_counter() - started
            if self._options.memory is not None and self._update_budget(step, z, moved):
                self._fit()
        self._last = moved.to
        if k - 1 not in self._steps or self._steps[k - 1].k != step.k:
            self._begins.append(k)
        self._count += 1
        step.share_with(self._steps.get(k - 1))
        self._steps[k] = step
        if self._first > 0:
            self.reaches_start = False
            while self._graphs and self._graphs[0][0] < self._first:
                self._graphs.popleft()
            needed = max((j for j in self._saved if j <= self._first), default=self._first)
            self._drop([j for j in self._saved if j < needed])
            for j in [j for j in self._steps if j < needed]:
                del self._steps[j]
        return moved

    # --- which states are stored ---

    def _most_states(self, steps: int) -> int | None:
        """Return how many states may be held in a loop of so many steps, or None if there is no bound."""
        if self._options.checkpoint == "sqrt":
            return states_for_sqrt(steps)
        if self._budget is None or self._options.has_folder:
            return None
        return max(2, self._budget.states(self._at_once))

    def _admit(self, k: int, keep: Callable[[], Kept], end: int) -> None:
        """Store the state of the last step k. If there is no room, drop the state whose loss costs least."""
        c = self._options.checkpoint
        if isinstance(c, int) and k % c and self._saved:
            return
        most, saved = self._most_states(end), sorted(self._saved)
        if most is not None:
            if self._budget is not None and len(saved) >= most:
                self._at_once = self._budget.graphs_at_once(end, self._at_once)
                most = self._most_states(end) or most
            if not self._options.has_folder:
                self._store.most = most + 1  # the sweep holds one more, to compare the end of a step with
            before = len(saved)
            while saved and len(saved) >= most:
                i = least_missed(gaps_between([*saved, k], end), most, self._at_once)
                if i == len(saved):
                    return
                self._drop([saved.pop(i)])
            if before - len(saved) > 1:  # this room is for graphs, so rows must not take it
                self._store.shrink(most + 1)
        self._saved[k] = keep()

    @property
    def _shares_rows(self) -> bool:
        """Whether states share rows, which they do if all of them are stored, each whole and in memory."""
        options, binding = self._options, self._binding
        alone = options.checkpoint == 1 and options.truncate is None and options.memory is None
        return alone and not options.has_folder and binding is not None and not binding.shards

    def _keep_shared(self, step: RecordedStep, z: State) -> Kept:
        """Store a copy of z. If states share rows, tensors that accumulating steps do not change are stored once.

        Such a step changes no weight, and its derivative does not use the sum that it adds to.
        """
        before, binding = self._steps.get(self._count - 1), step.step.binding
        if z is self._start and not binding.shards and not self._options.has_folder:
            return z  # it is never written to, so it needs no copy
        if not self._shares_rows:
            return self._keep(z)
        rest = z if not step.accumulates else {n: x for n, x in z.items() if not n.endswith(SUM)}
        shared: State = {}
        if before is not None and before.accumulates and isinstance(last := self._saved[self._count - 1], dict):
            shared = last
        new = {n: x for n, x in rest.items() if n not in shared or n.endswith(SUM) or n in binding.moving}
        return (
            {**{n: x for n, x in shared.items() if n in rest}, **self._store.keep_in_memory(new)}
            if new
            else dict(shared)
        )

    def _drop_failed(self, k: int) -> None:
        before = self._steps.get(k - 1)
        if before is None or not before.accumulates or not self._shares_rows:
            self._drop([k])  # otherwise another state uses its rows too

    def _update_budget(self, step: RecordedStep, z: State, moved: Moved) -> bool:
        """Update the budget by the size of this step, if it is the largest so far. Return whether it has changed."""
        binding, old = step.step.binding, self._budget
        whole, state = sum(x.nbytes for x in moved.to.values()), old.state if old else 0
        if old is None or whole > old.whole:
            state = sum(x.nbytes for x in binding.shard(moved.to).values())
        whole = max(whole, old.whole if old else 0)
        unknown = step.kind not in self._sizes
        if unknown and self._takes_graphs:
            self._sizes[step.kind] = whole + graph_bytes(moved.to, moved.at, step.tensors())
            unknown = False
        memory = old.memory if old else parse(self._options.memory or "auto")
        if memory is None:
            memory = free(next(iter(moved.to.values())).device) // 2
        one_plan = binding.largest_on_any_rank  # all ranks must have the same plan
        heaviest, least, unknown = one_plan(max(self._sizes.values(), default=0), -memory, int(unknown))
        if unknown:  # on some rank; only all ranks together can run a step again
            self._sizes[step.kind] = self._measure(step, z, moved, whole)
            (heaviest,) = one_plan(max(self._sizes.values()))
        if old is not None and (heaviest, state) == (old.graph, old.state):
            return False
        self._budget = Budget(-least, heaviest, state, 0 if self._options.keeps_graphs else heaviest, whole)
        self._budget.check()
        return True

    def _measure(self, step: RecordedStep, z: State, moved: Moved, whole: int) -> int:
        """Run the step again, and return the bytes of its graph, or of its pullback if graphs are not kept."""
        with torch.enable_grad(), full_precision():
            if self._options.keeps_graphs:
                traced = step.trace(z)
                return whole + graph_bytes(traced.to, traced.at, step.tensors())
            pull = self._pull if self._compiler is None else PULLBACKS["lean"]()  # compiled code can't be measured
            statistics = step.step.binding.statistics
            a = {n: x.detach() for n, x in moved.to.items() if x.is_floating_point() and n not in statistics}
            return max(1, peak_bytes(lambda: step.pull(z, a, step.leaves, Gradients(), pull)))  # 0 means graphs

    def _fit(self) -> None:
        """Replace graphs by states, oldest first, until all fit. If no graph is left, a new state replaces another."""
        budget = self._budget
        assert budget is not None
        self._store.most = len(self._saved) + 1  # one row at a time, while graphs have to make room for it
        while self._graphs and not budget.fits(len(self._graphs), len(self._saved)):
            k, traced = self._graphs.popleft()
            if self._graphs:
                self._saved[k] = self._keep(traced.at)
            else:
                self._takes_graphs = False
                self._admit(k, lambda at=traced.at: self._keep(at), self._count + 1)
            del traced
        if self._options.has_folder:
            most = self._store.most = max(0, budget.states(1))
            for k in [k for k, kept in self._saved.items() if isinstance(kept, dict)][most:]:
                self._saved[k] = self._store.move_to_file(self._saved[k])
            self._store.shrink(most)
        elif not self._graphs:
            saved, end = sorted(self._saved), self._count + 1
            most = self._most_states(end) or 0
            while len(saved) > most:
                self._drop([saved.pop(least_missed(gaps_between(saved, end), most, self._at_once))])
            self._store.shrink(most + 1)

    def _keep(self, z: State) -> Kept:
        """Store a copy of z, or of this rank's part of it."""
        assert self._binding is not None
        return self._store.keep(self._binding.shard(z))

    def _fetch(self, kept: Kept) -> State:
        assert self._binding is not None
        return self._binding.unshard(self._store.fetch(kept))

    def _drop(self, steps: list[int]) -> None:
        for j in steps:
            if (kept := self._saved.pop(j)) is not self._start:
                self._store.drop(kept)

    def _room(self, steps: int, held: int) -> tuple[int, int]:
        if self._budget is not None and not self._options.has_folder:
            return self._budget.room(steps, held, self._store.rows - 1)
        most = self._most_states(self._count)
        return 1, steps if most is None else max(0, most - held)

    def _fits(self, graphs: int, states: int) -> bool:
        if self._budget is not None and not self._options.has_folder:
            return self._budget.fits(graphs, states)
        most = self._most_states(self._count)
        return most is None or states <= most

    @property
    def _end(self) -> int:
        """The first step whose graph is stored."""
        return self._graphs[0][0] if self._graphs else self._count

    def _schedule(self, end: int) -> Iterator[Keep | Sweep]:
        saved, first = sorted(j for j in self._saved if j < end), self._first
        for action in schedule(saved, end, self._room):
            if end <= first:  # all steps that truncate= asks for are done
                return
            yield action
            if isinstance(action, Sweep):
                end = action.at

    def plan(self) -> Plan:
        actions = self._schedule(self._end)
        reruns = sum(a.at - a.begin if isinstance(a, Keep) else a.end - a.begin for a in actions)
        sizes = (self._budget.memory, self._budget.graph, self._budget.state) if self._budget else (0, 0, 0)
        file = self._store.file
        if file is None:
            return Plan(self._count, len(self._graphs), len(self._saved), reruns, *sizes)
        folder = Folder(file.folder, file.states, file.nbytes, file.seconds / max(1, file.written))
        step = self._seconds / max(1, self._count)
        return Plan(self._count, 0, len(self._saved), reruns, *sizes, folder, step)

    def _backwards(self, left: int) -> Iterator[tuple[int, State, Traced | None]]:
        """Yield the recorded steps, last first, with the states that they start from, and with their graphs if stored.

        Of the steps without a stored graph, only the first `left` are visited.
        """
        end = min(left, self._end)
        for i in reversed(range(len(self._graphs))):
            k, traced = self._graphs[i]
            if self._saved:  # states will need the room of the graph
                self._graphs.pop()
                self._saved[k] = self._keep(traced.at)
            yield k, traced.at, traced
            del traced
        between: dict[int, Kept] = {}  # states between the saved ones, while they are needed
        gone = sorted((k for k in self._saved if k >= end), reverse=True)  # saved states that may be dropped
        last = -1  # the last state of the sweep, with which the end of the step before it is compared

        try:
            for action in self._schedule(end):
                begin, at = action.begin, action.at
                z = as_leaves(self._fetch(between[begin] if begin in between else self._saved[begin]))
                for k in range(begin, at):
                    z = as_leaves(self._steps[k].replay(z))
                if isinstance(action, Keep):
                    while gone and not self._fits(1, len(self._saved) + len(between) - (last >= 0) + 1):
                        self._drop([gone.pop(0)])
                    between[at] = self._keep(z)
                    continue
                graphs: list[tuple[State, Traced | None]] = []
                for k in range(at, action.end - 1):
                    traced = self._steps[k].trace(z)
                    graphs.append((traced.at, traced))
                    z = as_leaves(traced.to)
                    del traced
                graphs.append((z, None))  # the last step is run again by its pullback
                del z
                for k in reversed(range(max(at, self._first), action.end)):
                    yield k, *graphs.pop()
                if begin == at:
                    if last in between:
                        self._store.drop(between.pop(last))
                    elif last in self._saved:
                        gone.append(last)
                    last = begin
        finally:
            for state in between.values():
                self._store.drop(state)

    def add_loss(self, loss: End) -> None:
        self._losses.setdefault(self._count, []).append(loss.kept())

    def pull(self, end: End | None, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        if end is None and min(self._losses) < self._first:
            raise ValueError(
                f"bilevel.Reverse: an outer loss was added before the last {self._options.truncate} steps, which are "
                "all that truncate= goes back over. Leave out truncate= (checkpoint='sqrt' saves memory too), or add "
                "losses within these steps."
            )
        found, a = Gradients(), State()
        for _, a in self._sweep(end, inputs, found, self._options.resume):  # noqa: B007 (the last one is wanted)
            pass
        return found, a

    def _sweep(
        self, end: End | None, inputs: Sequence[Tensor] | None, found: Gradients, resume: bool = False
    ) -> Iterator[tuple[str, State]]:
        """Yield each place of the sweep, as errors name it, and the adjoint there."""
        adjoints = Store(rows=1)
        losses: Mapping[int, list[OuterLoss]] = self._losses if end is None else {self._count: [end]}
        a: State = {}
        for loss in losses.get(self._count, ()):
            a = _sum(a, loss.pull(inputs, found))
        kept = adjoints.replace(None, a) if a else None
        a = kept or a
        wanted = inputs if inputs is not None else self._all_leaves(losses)
        left = min(self._count, max(losses) + 1)  # later steps have no part in the losses
        journal = self._journal(inputs, found, a, losses) if resume else None
        if journal is not None and (position := journal.read(self._last, wanted)) is not None:
            left, a = position.left, position.adjoint
            found.direct = {id(x): (x, d) for x, d in zip(wanted, position.sums, strict=True) if d is not None}
        after = self._last if left == self._count else self._fetch(self._saved[left]) if left in self._saved else {}
        yield "in the outer loss itself", a
        for i, z, traced in self._backwards(left):
            step, new = self._steps[i], a
            if not a:  # there is no loss after this step
                pass
            elif traced is None:
                pulled = step.pull(z, a, wanted, found, self._pull, after)
                step.check_end(z, pulled, after)
                new = pulled.adjoint
                del pulled
            else:
                new = traced.vjp(a, wanted, found)
            for loss in losses.get(i, ()):
                new = _sum(new, loss.pull(wanted, found, z))
            after = z
            del traced, z  # before the next step's graph is made
            if new:
                a = kept = adjoints.replace(kept, new)
            del new
            if journal is not None:
                sums = [found.direct[id(x)][1] if id(x) in found.direct else None for x in wanted]
                journal.write(Position(i, a, sums))
            yield f"at step k = {step.k}{', or in the outer loss before it' if i in losses else ''}", a
        if journal is not None:
            journal.remove()

    def _journal(
        self, inputs: Sequence[Tensor] | None, found: Gradients, a: State, losses: Mapping[int, list[OuterLoss]]
    ) -> Journal:
        """Return the journal of this sweep, which only a sweep with the same numbers can continue."""
        if inputs is None:
            raise ValueError(
                "bilevel.Reverse: resume=True keeps sums for inputs that are named. Call loop.backward(inputs) or "
                "loop.hypergrad(inputs)."
            )
        if found.cut or any(x.cut for x in (*self._steps.values(), *(loss for at in losses.values() for loss in at))):
            raise ValueError(
                "bilevel.Reverse: resume=True, and a tensor of a batch requires grad: the graph behind it would be "
                "another one when the script is run again. Compute it inside h (or g), or set resume=False."
            )
        first = self._steps[min(self._steps)] if self._steps else None
        batch = tensors_of([t.batch for t in first.step.terms]) if first is not None else []
        options = dataclasses.replace(self._options, store="device", resume=False, every=0.0)
        about = {
            "the options": repr(options),
            "the version of torch": str(torch.__version__),
            "the number of steps": str(self._count),
            "the shapes of the weights": str({n: tuple(x.shape) for n, x in self._last.items()}),
            "the shapes of the inputs": str([tuple(x.shape) for x in inputs]),
            "the numbers of the inputs": checksum(inputs),
            "the first batch": checksum(batch),
            "the weights after the last step": checksum(self._last.values()),
            "the outer loss": checksum([*a.values(), *found.values()]),
            "the steps that have an outer loss": str(sorted(losses)),
            "the values or weights of the outer losses": checksum(
                x for at in losses.values() for loss in at for x in loss.numbers
            ),
        }
        return Journal(self._options.store, about, self._options.every)

    def _all_leaves(self, losses: Mapping[int, list[OuterLoss]]) -> list[Tensor]:
        """Return the outer variables of all steps. If requires_grad was set late, earlier steps use that tensor too."""
        every = [x for at in losses.values() for loss in at for x in loss.leaves]
        every += [x for step in self._steps.values() for x in step.leaves]
        return list({id(x): x for x in every}.values())

    def first_not_finite(self, end: End | None) -> str | None:
        found = Gradients()
        for where, a in self._sweep(end, None, found):
            if not is_finite([*a.values(), *found.values()]):
                return where
        return None


def _sum(x: State, y: State) -> State:
    """Return x + y, where a name that one of them lacks counts as 0."""
    return {**x, **{n: x[n] + v if n in x else v for n, v in y.items()}}
