"""The states that a sweep starts from: which are stored while the loop runs, and how the sweep gets the others.

Steps have the numbers 0, 1, …, and the state of a step is the one that it begins from. A step whose state is not stored
is reached from an earlier state, by running the steps between again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..autograd.derive import Traced
from ..autograd.trees import State, as_leaves
from ..step.step import Step
from ..step.traced import trace
from .layout import Shards
from .schedule import Folder, Keep, Plan, Sweep, gaps_between, least_missed, schedule
from .store import Kept, Store

Steps = Mapping[int, Step]


class Visit(NamedTuple):
    """A step that the sweep has come to, the state that it begins from, and its graph if that is stored."""

    k: int
    z: State
    traced: Traced | None = None


class States:
    """The states of every step, or of each `every`-th; at most bound(K) of them, after K steps."""

    takes_graph = False  # whether the next step is to keep its graph
    at_once = 1  # the number of graphs to have room for in the sweep

    def __init__(self, store: Store, every: int = 1, bound: Callable[[int], int] | None = None) -> None:
        self.store, self._every, self._bound = store, every, bound
        self.start: State = {}  # what the loop starts from; it is never written to, so it needs no copy
        self.saved: dict[int, Kept] = {}
        self.graphs: deque[tuple[int, Traced]] = deque()  # the graphs of the last steps, if steps keep them
        self.first = 0  # the step at which sweeps end
        self.count = 0  # the number of steps
        self._seconds = self._started = 0.0  # the time that they have taken

    # --- while the loop runs ---

    def begin(self, step: Step, z: State) -> None:
        """Store the state that the next step begins from, if it is to be stored."""
        if self.store.shards is None and step.model.ranks.shards:
            self.store.shards = Shards(step.model)
        if self.count in self.saved:  # left by a step that failed
            self.drop(self.count)
        if not self.takes_graph:
            self.admit(self.count, z)
        self._started = time.perf_counter()

    def end(self, step: Step, z: State, to: State, d: State, traced: Traced | None) -> None:
        """Count the step, which has gone from z to `to` in the direction d, with its graph if it was to be kept."""
        self._seconds += time.perf_counter() - self._started
        self.count += 1

    def admit(self, k: int, z: State) -> None:
        """Store the state of the last step k. If there is no room, drop the state whose loss costs least."""
        if k % self._every and self.saved:
            return
        most, saved = self.most(k + 1), sorted(self.saved)
        if most is not None:
            if self.store.file is None:
                self.store.most = most + 1  # the sweep holds one more, to compare the end of a step with
            before = len(saved)
            while saved and len(saved) >= most:
                i = least_missed(gaps_between([*saved, k], k + 1), most, self.at_once)
                if i == len(saved):
                    return
                self.drop(saved.pop(i))
            if before - len(saved) > 1:  # this room is for graphs, so rows must not take it
                self.store.shrink(most + 1)
        whole = self.store.shards is None and self.store.file is None
        self.saved[k] = z if z is self.start and whole else self.store.keep(z)

    def drop(self, k: int) -> None:
        if (kept := self.saved.pop(k)) is not self.start:
            self.store.drop(kept)

    def stop_graphs(self) -> None:
        """Store the states of the steps whose graphs are stored, since the next step keeps none."""
        self.takes_graph = False
        while self.graphs:
            k, traced = self.graphs.popleft()
            self.admit(k, traced.at)

    def forget_before(self, first: int) -> int:
        """Drop what sweeps that end at this step do not need, and return the first step that they do need."""
        self.first = first
        while self.graphs and self.graphs[0][0] < first:
            self.graphs.popleft()
        needed = max((j for j in self.saved if j <= first), default=first)
        for j in [j for j in self.saved if j < needed]:
            self.drop(j)
        return needed

    # --- what there is room for ---

    def most(self, steps: int) -> int | None:
        """Return how many states may be held in a loop of so many steps, or None if there is no bound."""
        return None if self._bound is None else self._bound(steps)

    def room(self, steps: int, held: int) -> tuple[int, int]:
        """Return how many graphs to make at once, and how many more states fit, to go back over so many steps."""
        most = self.most(self.count)
        return 1, steps if most is None else max(0, most - held)

    # --- the sweep ---

    def backwards(self, steps: Steps, left: int) -> Iterator[Visit]:
        """Visit the steps, last first. Of those whose graph is not stored, only the first `left` are visited."""
        end = min(left, first_graph(self))
        for i in reversed(range(len(self.graphs))):
            k, traced = self.graphs[i]
            if self.saved:  # states will need the room of the graph
                self.graphs.pop()
                self.saved[k] = self.store.keep(traced.at)
            yield Visit(k, traced.at, traced)
            del traced
        yield from _Return(self, steps, end).visits()

    def state(self, steps: Steps, k: int) -> State:
        """Return the state of step k for the beginning of a sweep, or nothing if it is not stored."""
        return self.store.fetch(self.saved[k]) if k in self.saved else {}

    def plan(self) -> Plan:
        reruns = sum(a.at - a.begin if isinstance(a, Keep) else a.end - a.begin for a in actions(self))
        plan = Plan(self.count, len(self.graphs), len(self.saved), reruns, 0, 0, 0)
        if (file := self.store.file) is None:
            return plan
        folder = Folder(file.folder, file.states, file.nbytes, file.seconds / max(1, file.written))
        return plan._replace(folder=folder, seconds=self._seconds / max(1, self.count))


# --- the way back ---


def first_graph(states: States) -> int:
    """Return the first step whose graph is stored."""
    return states.graphs[0][0] if states.graphs else states.count


def actions(states: States, end: int | None = None) -> Iterator[Keep | Sweep]:
    """Yield what a sweep does from this step back to the first that is wanted."""
    end = first_graph(states) if end is None else end
    for action in schedule(sorted(j for j in states.saved if j < end), end, states.room):
        if end <= states.first:  # all steps that truncate= asks for are done
            return
        yield action
        if isinstance(action, Sweep):
            end = action.at


class _Return:
    """One way back over the steps before `end`, with states of its own between those that are stored."""

    def __init__(self, states: States, steps: Steps, end: int) -> None:
        self._states, self._steps, self._end = states, steps, end
        self._between: dict[int, Kept] = {}  # states between the saved ones, while they are needed
        self._gone = sorted((k for k in states.saved if k >= end), reverse=True)  # saved states that may be dropped
        self._last = -1  # the last state of the sweep, with which the end of the step before it is compared

    def visits(self) -> Iterator[Visit]:
        store = self._states.store
        try:
            for action in actions(self._states, self._end):
                if isinstance(action, Keep):
                    self._keep(action)
                else:
                    yield from self._sweep(action)
                    if action.begin == action.at:
                        self._pass(action.at)
        finally:
            for state in self._between.values():
                store.drop(state)

    def _reach(self, begin: int, at: int) -> State:
        """Return the state of step `at`, by running the steps from `begin` to there again."""
        kept = self._between[begin] if begin in self._between else self._states.saved[begin]
        z = as_leaves(self._states.store.fetch(kept))
        for k in range(begin, at):
            z = as_leaves(self._steps[k].replay(z))
        return z

    def _keep(self, action: Keep) -> None:
        z, states = self._reach(action.begin, action.at), self._states
        while self._gone and not states.room(1, len(states.saved) + len(self._between) - (self._last >= 0))[1]:
            states.drop(self._gone.pop(0))
        self._between[action.at] = states.store.keep(z)

    def _sweep(self, action: Sweep) -> Iterator[Visit]:
        z = self._reach(action.begin, action.at)
        graphs: list[tuple[State, Traced | None]] = []
        for k in range(action.at, action.end - 1):
            step = self._steps[k]
            traced = None if step.calls > 1 else trace(step, z)  # one graph of several batches would be too large
            graphs.append((z if traced is None else traced.at, traced))
            z = as_leaves(step.replay(z) if traced is None else traced.to)
            del traced
        graphs.append((z, None))  # the last step is run again by its pullback
        del z
        for k in reversed(range(max(action.at, self._states.first), action.end)):
            yield Visit(k, *graphs.pop())

    def _pass(self, k: int) -> None:
        """The sweep has come to this state, so the one after it is no longer compared with."""
        if self._last in self._between:
            self._states.store.drop(self._between.pop(self._last))
        elif self._last in self._states.saved:
            self._gone.append(self._last)
        self._last = k
