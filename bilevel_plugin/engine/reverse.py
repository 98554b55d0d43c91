"""Reverse mode over stored iterates, in the memory of a few states and of the graph of one step (paper, Alg. 2)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..autograd.derive import Gradients, is_finite
from ..autograd.trees import Pairs, State, as_leaves
from ..pullback import PULLBACKS, BlockByBlock, Pull, Which
from ..step.computed import Computed
from ..step.ends import check_end
from ..step.monitor import LossMonitor
from ..step.piece import Piece
from ..step.step import Step
from ..step.sums import plus
from ..step.traced import traced_at
from ..update.update import Update
from .base import Engine, OuterLoss, Tape, refuse_create_graph
from .budget import Budgeted, InFolder
from .journal import Journal, Position, about
from .options import check_place, check_states, is_folder
from .reversible import Reversible
from .schedule import Plan, states_for_sqrt
from .states import States
from .store import Store

if TYPE_CHECKING:
    from ..pullback.compiled import Compiler

Place = tuple[int, int]  # (the number of steps before it, the number of pieces of the next step before it)
Losses = Mapping[Place, Sequence[OuterLoss]]
Pulls = Mapping[Place, Sequence["OuterLoss | Computed"]]


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
    any time, and runs each step once more on average. "reversible" holds the last iterate and runs the training
    backwards from it, bit for bit. Of each step it keeps what rounding loses, about two bits a weight, and computes the
    gradient once more. That takes an optimizer with momentum. `truncate=m` goes back over the last m steps only, which
    gives a biased gradient for the memory and time of m steps (Shaban et al. 2019).

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

    checkpoint: int | Literal["sqrt", "reversible"] = 1
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
        check_states(self.checkpoint, self.memory, compiles=self.compile)
        check_place(self.store, resume=self.resume)
        if self.truncate is not None and self.truncate < 1:
            raise ValueError(f"bilevel.Reverse: truncate must be at least 1, got {self.truncate}.")
        if not self.every >= 0:
            raise ValueError(f"bilevel.Reverse: every must be a number of seconds, at least 0, got {self.every}.")

    @property
    def keeps_graphs(self) -> bool:
        return self.memory is not None and not self.compile and self.blocks is None and not self.has_folder

    @property
    def spares_memory(self) -> bool:
        return self.blocks is not None

    @property
    def has_folder(self) -> bool:
        """Whether iterates are stored in a file."""
        return is_folder(self.store)

    @property
    def refuses_group(self) -> str:
        if self.resume:
            return "a sweep that is resumed is not tried with a group: leave out resume="
        return "compiled steps are not tried with a group: leave out compile=" if self.compile else ""

    def tape(self) -> Tape:
        return _ReverseTape(self)

    def states(self, pull: Pull) -> States:
        """Return an empty record of the states that these options ask for."""
        store = Store(place=self.store)
        if self.memory is not None:
            kind = InFolder if self.has_folder else Budgeted
            return kind(store, self.memory, pull, graphs=self.keeps_graphs)
        if isinstance(self.checkpoint, str):
            return States(store, bound=states_for_sqrt) if self.checkpoint == "sqrt" else Reversible(store)
        return States(store, self.checkpoint)


class _ReverseTape(Tape):
    def __init__(self, options: Reverse) -> None:
        self._options = options
        self._pull: Pull = PULLBACKS["lean"]() if options.blocks is None else BlockByBlock(options.blocks)
        self._compiler: Compiler | None = None
        self.states = options.states(self._pull)
        if options.compile:
            from ..pullback.compiled import Compiler  # here, since torch's compiler takes a second to import

            self._compiler = Compiler()
            self._pull = self._compiler.pull
        self._steps: dict[int, Step] = {}
        self._last: State = {}
        self._losses: dict[Place, list[OuterLoss]] = {}  # the added losses
        self._computed: dict[Place, list[Computed]] = {}  # the values that were computed from the weights
        self._open: Step | None = None

    def start(self, z: State, copies: State) -> State:
        self.states.start = super().start(z, copies)
        return self.states.start

    def plan(self) -> Plan:
        return self.states.plan()

    # --- the loop: keep what the sweep will need ---

    def begin(self, step: Step, z: State, *, whole: bool) -> None:
        if self.states.takes_graph and not whole:  # one graph of several batches would be too large
            self.states.stop_graphs()
        self.states.begin(step, z)
        self._open = step

    def evaluate(self, step: Step, z: State, pieces: Sequence[Piece], cut: Pairs, monitor: LossMonitor) -> State:
        compiler, modes = self._compiler, [m.training for m in step.model.modules]
        if compiler is None:
            return step.evaluate(z, pieces, cut, monitor, graph=self.states.takes_graph)
        means = step.evaluate(z, pieces, cut, monitor, first=compiler.first)
        compiler.examine(pieces, modes)
        return means

    def close(self, step: Step, z: State, update: Update) -> State:
        graph, k, open = self.states.takes_graph, self.states.count, step.open
        to = step.close(z, update, graph=graph)
        assert open is not None
        self.states.end(step, z, to, open.mean, traced_at(step, z, to) if graph else None)
        step.share_with(self._steps.get(k - 1))
        self._steps[k], self._open, self._last = step, None, as_leaves(to)
        if self._options.truncate is not None and (first := k + 1 - self._options.truncate) > 0:
            self.reaches_start = False
            needed = self.states.forget_before(first)
            for j in [j for j in self._steps if j < needed]:
                del self._steps[j]
            self._computed = {at: values for at, values in self._computed.items() if at[0] >= needed}
        return self._last

    def add_loss(self, loss: OuterLoss) -> None:
        pieces = 0 if self._open is None else len(self._open.pieces)
        self._losses.setdefault((self.states.count, pieces), []).append(loss.kept())

    def compute(self, value: Computed, z: State) -> tuple[Any, State]:
        if self._options.resume:
            raise ValueError(
                "bilevel.Reverse: resume=True can't continue through a value of loop.compute, which would be another "
                "tensor when the script is run again. Set resume=False."
            )
        given = value.first(z)
        if value.values:
            pieces = 0 if self._open is None else len(self._open.pieces)
            self._computed.setdefault((self.states.count, pieces), []).append(value)
        return given, z

    # --- the sweep: Alg. 2 ---

    def pull(
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        if end is None and min(self._losses)[0] < self.states.first:
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
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, found: Gradients, resume: bool = False
    ) -> Iterator[tuple[str, State]]:
        """Yield each place of the sweep, as errors name it, and the adjoint there."""
        states, count = self.states, self.states.count
        open = self._open if self._open is not None and self._open.pieces else None  # if its batch failed, it has none
        outer: Losses = self._losses if end is None else {(count, len(open.pieces) if open else 0): [end]}
        losses = _with_computed(outer, self._computed)
        a: State = {}
        z = as_leaves(self._last or states.start)
        if open is not None:  # it has changed no weight
            a = open.pull(z, a, inputs, found, self._pull, losses=_between(losses, count)).adjoint
        for loss in losses.get((count, 0), ()):
            a = plus(a, loss.pull(inputs, found, None if loss is end else z))
        del z
        adjoints = Store(rows=1)
        a = kept = adjoints.replace(None, a) if a else {}
        wanted = inputs if inputs is not None else self._all_leaves(losses)
        left = min(count, max(k for k, _ in outer) + 1)  # later steps have no part in the losses
        journal = self._journal(inputs, found, a, outer) if resume else None
        if journal is not None and (position := journal.read(self._last, wanted)) is not None:
            left, a = position.left, position.adjoint
            found.direct = {id(x): (x, d) for x, d in zip(wanted, position.sums, strict=True) if d is not None}
        after = self._last if left == count else states.state(self._steps, left)
        yield "in the outer loss itself", a
        for k, z, traced in states.backwards(self._steps, left):
            step, between, new = self._steps[k], _between(losses, k), a
            if traced is not None and a:
                new = traced.vjp(a, wanted, found)
            elif a or between:
                pulled = step.pull(z, a, wanted, found, self._pull, after, between)
                check_end(step, z, pulled, after)
                new = pulled.adjoint
                del pulled
            for loss in losses.get((k, 0), ()):
                new = plus(new, loss.pull(wanted, found, z))
            after = z
            del traced, z  # before the next step's graph is made
            if new:
                a = kept = adjoints.replace(kept or None, new)
            del new
            if journal is not None:
                journal.write(Position.of(k, a, wanted, found))
            yield f"at step k = {step.k}{', or in the outer loss before it' if (k, 0) in losses else ''}", a
        if journal is not None:
            journal.remove()

    def _journal(self, inputs: Sequence[Tensor] | None, found: Gradients, a: State, losses: Losses) -> Journal:
        """Return the journal of this sweep, which only a sweep with the same numbers can continue."""
        options = dataclasses.replace(self._options, store="device", resume=False, every=0.0)
        what = {"the options": repr(options), **about(self._steps, self._last, inputs, found, a, losses)}
        return Journal(self._options.store, what, self._options.every)

    def _all_leaves(self, losses: Pulls) -> list[Tensor]:
        """Return the outer variables of all steps. If requires_grad was set late, earlier steps use that tensor too."""
        every = [x for at in losses.values() for loss in at for x in loss.leaves]
        steps = [*self._steps.values(), *([self._open] if self._open else [])]
        every += [x for step in steps for piece in step.pieces for x in piece.record.leaves]
        return list({id(x): x for x in every}.values())

    def first_not_finite(self, end: OuterLoss | None) -> str | None:
        found = Gradients()
        for where, a in self._sweep(end, None, found):
            if not is_finite([*a.values(), *found.values()]):
                return where
        return None


def _with_computed(losses: Losses, computed: Mapping[Place, Sequence[Computed]]) -> Pulls:
    """Return the losses and the computed values of each place, in the order in which the sweep comes to them."""
    return {at: [*losses.get(at, ()), *reversed(computed.get(at, ()))] for at in {**losses, **computed}}


def _between(losses: Pulls, k: int) -> dict[int, Sequence[OuterLoss | Computed]]:
    """Return the losses between the pieces of step k, by the number of pieces before them."""
    return {j: at for (i, j), at in losses.items() if i == k and j}
