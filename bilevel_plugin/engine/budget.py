"""A bound on memory: how many graphs and states fit, and the choice between them while the loop runs."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.bytes import graph_bytes, peak_bytes
from ..autograd.derive import Gradients, Traced
from ..autograd.trees import State
from ..kernels.switches import full_precision
from ..pullback import Pull
from ..step.fetching import Fetched
from ..step.step import Step
from ..step.traced import trace
from .schedule import Plan, fewest_reruns, gap_cost, gaps_between, least_missed
from .states import States
from .store import Store


@dataclass
class Budget:
    """How many graphs and states fit in memory, given the bytes of each.

    `pull` is the memory of one pullback, if no graphs are kept. Then graphs are not counted.
    """

    memory: int
    graph: int
    state: int
    pull: int = 0
    whole: int = 0  # bytes of a whole state, if each rank stores a part of it

    def graphs(self, states: int) -> int:
        """Return how many graphs fit beside so many states."""
        left = self.memory - self.aside - states * self.state
        return left // self.graph if not self.pull else int(left >= 0)

    def states(self, graphs: int) -> int:
        """Return how many states fit beside so many graphs."""
        return (self.memory - self.aside - (0 if self.pull else graphs * self.graph)) // self.state

    @property
    def aside(self) -> int:
        """The memory for the rest: the graph of the outer loss, adjoints, and what a pullback allocates.

        If no graphs are kept, there are eight states besides: w_0 and z_K, which the loop holds, two adjoints, the last
        state of the sweep, and those that exist only while a step is run again.
        """
        whole = self.whole or self.state
        return self.pull + 8 * whole if self.pull else 2 * self.graph + 4 * whole

    def fits(self, graphs: int, states: int) -> bool:
        return graphs <= self.graphs(states)

    def room(self, steps: int, held: int, bought: int = 0) -> tuple[int, int]:
        """Return the cheapest split of the remaining memory, as numbers of graphs and of further states.

        Memory that is allocated for states stays theirs, also when fewer states are held.
        """
        most = max(1, min(steps, self.graphs(max(held, bought))))

        def slots(graphs: int) -> int:
            return max(0, self.states(graphs) - held)

        best = min(_powers(most), key=lambda m: (gap_cost(steps, 1 + slots(m), m), m))
        return best, slots(best)

    def graphs_at_once(self, steps: int, least: int) -> int:
        """Return for how many graphs to leave room, at least `least`, if the states of so many steps do not all fit."""
        most = max(1, least, min(steps, self.graphs(2)))
        return min((m for m in _powers(most) if m >= least), key=lambda m: (self._estimate(steps, m), m), default=least)

    def _estimate(self, steps: int, graphs: int) -> int:
        pieces, states = -(-steps // graphs), max(1, self.states(graphs))
        return 2 * graphs * fewest_reruns(pieces, states) + (steps - pieces)

    def check(self) -> None:
        if not self.fits(1, 2):
            least = self.aside + 2 * self.state + (0 if self.pull else self.graph)
            step = f"going back over one step takes {self.pull}" if self.pull else f"the graph of one has {self.graph}"
            raise ValueError(
                f"bilevel.Reverse: memory={self.memory} bytes can't hold a loop of such steps: {step} bytes and a "
                f"state has {self.state}, so it takes at least {least}. Give more, or smaller batches."
            )


def _powers(most: int) -> set[int]:
    return {most, *(2**i for i in range(most.bit_length()))}


class Measured(States):
    """States under a budget that is known as soon as a step of each kind was taken.

    `pull` is the pullback of which the memory is measured if no graphs are kept.
    """

    budget: Budget | None = None

    def __init__(self, store: Store, memory: int | str, pull: Pull, *, graphs: bool) -> None:
        super().__init__(store)
        store.most = 1  # until the number of rows that fit is known
        self.takes_graph = self._graphs = graphs
        self._memory, self._pull = memory, pull
        self._sizes: dict[object, int] = {}  # the bytes of the graph of a step, or of its pullback, for each kind

    def end(self, step: Step, z: State, to: State, d: State, traced: Traced | None) -> None:
        if traced is not None:
            self.graphs.append((self.count, traced))
        if self._update(step, z, to, traced) or self.takes_graph:
            self.fit()
        super().end(step, z, to, d, traced)

    def stop_graphs(self) -> None:
        super().stop_graphs()
        self._graphs = False  # from now on a budget counts pullbacks

    @abstractmethod
    def fit(self) -> None:
        """Drop graphs and states, or move them to the file, until the rest fits."""

    def plan(self) -> Plan:
        plan, budget = super().plan(), self.budget
        if budget is None:
            return plan
        return plan._replace(memory=budget.memory, graph=budget.graph, state=budget.state)

    def _update(self, step: Step, z: State, to: State, traced: Traced | None) -> bool:
        """Update the budget by the size of this step, if it is the largest so far. Return whether it has changed."""
        old, shards = self.budget, self.store.shards
        whole, state = sum(x.nbytes for x in to.values()), old.state if old else 0
        if old is None or whole > old.whole:
            state = whole if shards is None else sum(x.nbytes for x in shards.cut(to).values())
        whole = max(whole, old.whole if old else 0)
        kind, unknown = kind_of(step), False
        if kind not in self._sizes:
            if traced is not None:
                self._sizes[kind] = whole + graph_bytes(traced.to, traced.at, tensors_of_step(step))
            else:
                unknown = True
        memory = old.memory if old else parse(self._memory)
        if memory is None:
            memory = free(next(iter(to.values())).device) // 2
        one_plan = step.model.ranks.largest  # all ranks must have the same plan
        heaviest, least, unknown = one_plan(max(self._sizes.values(), default=0), -memory, int(unknown))
        if unknown:  # on some rank; only all ranks together can run a step again
            self._sizes[kind] = self._measure(step, z, to, whole)
            (heaviest,) = one_plan(max(self._sizes.values()))
        if old is not None and (heaviest, state) == (old.graph, old.state):
            return False
        self.budget = Budget(-least, heaviest, state, 0 if self._graphs else heaviest, whole)
        self.budget.check()
        return True

    def _measure(self, step: Step, z: State, to: State, whole: int) -> int:
        """Run the step again, and return the bytes of its graph, or of its pullback if graphs are not kept."""
        with torch.enable_grad(), full_precision():
            if self._graphs and step.calls == 1:
                traced = trace(step, z)
                return whole + graph_bytes(traced.to, traced.at, tensors_of_step(step))
            statistics = step.model.seen.statistics
            a = {n: x.detach() for n, x in to.items() if x.is_floating_point() and n not in statistics}
            return max(1, peak_bytes(lambda: step.pull(z, a, None, Gradients(), self._pull)))  # 0 means graphs


def kind_of(step: Step) -> object:
    """Return what steps with graphs of the same size have in common: the losses, on batches of the same shapes."""
    fetched = [t.batch.source.shapes for p in step.pieces for t in p.terms if isinstance(t.batch, Fetched)]
    names = tuple(t.name for p in step.pieces for t in p.terms)
    return names, tuple(fetched), tuple((x.shape, x.dtype) for x in tensors_of_step(step))


def tensors_of_step(step: Step) -> list[Tensor]:
    """Return the tensors that a step was given besides its state."""
    sealed = [x for piece in step.pieces for _, x, _ in piece.record.seals]
    return [*sealed, *(x for piece in step.pieces for x in piece.buffers.values())]


class Budgeted(Measured):
    """The graphs of the last steps, and the states of as many steps before them as fit."""

    def fit(self) -> None:
        """Replace graphs by states, oldest first, until all fit. If no graph is left, a new state replaces another."""
        budget = self.budget
        assert budget is not None
        self.store.most = len(self.saved) + 1  # one row at a time, while graphs have to make room for it
        while self.graphs and not budget.fits(len(self.graphs), len(self.saved)):
            k, traced = self.graphs.popleft()
            if self.graphs:
                self.saved[k] = self.store.keep(traced.at)
            else:
                self.takes_graph = False
                self.admit(k, traced.at)
            del traced
        if not self.graphs:
            saved, end = sorted(self.saved), self.count + 1
            most = self.most(end) or 0
            while len(saved) > most:
                self.drop(saved.pop(least_missed(gaps_between(saved, end), most, self.at_once)))
            self.store.shrink(most + 1)

    def admit(self, k: int, z: State) -> None:
        if self.budget is not None and len(self.saved) >= (self.most(k + 1) or 0):
            self.at_once = self.budget.graphs_at_once(k + 1, self.at_once)
        super().admit(k, z)

    def most(self, steps: int) -> int | None:
        return None if self.budget is None else max(2, self.budget.states(self.at_once))

    def room(self, steps: int, held: int) -> tuple[int, int]:
        if self.budget is None:
            return super().room(steps, held)
        return self.budget.room(steps, held, self.store.rows - 1)


class InFolder(Measured):
    """The states of all steps: in memory as many as fit, and the others in the file."""

    def fit(self) -> None:
        assert self.budget is not None
        most = self.store.most = max(0, self.budget.states(1))
        for k in [k for k, kept in self.saved.items() if isinstance(kept, dict)][most:]:
            self.saved[k] = self.store.move_to_file(self.saved[k])
        self.store.shrink(most)


def parse(memory: int | str) -> int | None:
    """Return the number of bytes, or None for "auto"."""
    if memory == "auto":
        return None
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[kmg]i?)b?\s*", str(memory).lower())
    if match is None or not float(match[1]):
        raise ValueError(
            f"bilevel.Reverse: memory must be a number of bytes, a size like '2GiB' or '500 MB', or 'auto', "
            f"got {memory!r}."
        )
    return int(float(match[1]) * units[match[2]])


def free(device: torch.device) -> int:
    """Return the bytes that are free on the device."""
    if device.type == "cpu":
        return min(_host_free(), _container_free())
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    raise ValueError(
        f"bilevel.Reverse: how much memory is free on {device.type!r} is not known here. Give memory in bytes."
    )


def _host_free() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        raise ValueError(
            "bilevel.Reverse: how much memory is free is not known on this system. Give memory in bytes."
        ) from None


def _container_free() -> int:
    """Return the bytes that are free below the limit of a container."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return int(limit.read()) - int(used.read())
    except (OSError, ValueError):  # no limit: there is no such file, or it says "max"
        return 2**63
