"""The choice of what to store of a loop and what to run again, so that the hypergradient fits into a given memory.

The reverse sweep can use the *graph* of a step directly. From a *state* (an iterate) the steps after it can be run
again. The length of the loop is not known while it runs. When a new state does not fit, one state is dropped: the one
that would cost the sweep least if the loop ended here (`least_missed`). The sweep itself reuses the room of the states
that it has passed for states between those that are left, placed by binomial checkpointing (Griewank & Walther 2000).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Room = Callable[[int, int], tuple[int, int]]  # (steps ahead, states held) -> graphs at once, further states


class Keep(NamedTuple):
    """Run from the state of step `begin` to that of step `at`, and store that state."""

    begin: int
    at: int


class Sweep(NamedTuple):
    """Run from the state of step `begin` to that of step `at`, then take the adjoint back over steps at … end − 1."""

    begin: int
    at: int
    end: int


def schedule(saved: Sequence[int], end: int, room: Room) -> Iterator[Keep | Sweep]:
    """Yield the actions that take the adjoint back from step end − 1, given the saved states in rising order.

    The room of a state is free as soon as the adjoint has passed all steps that start from it.
    """
    states = list(saved)
    while states:
        begin = states[-1]
        graphs, slots = room(end - begin, len(states))
        if end - begin <= graphs:
            yield Sweep(begin, begin, end)
            end = states.pop()
        elif slots > 0:
            pieces = -(-(end - begin) // graphs)
            at = end - graphs * (pieces - _split(pieces, slots + 1))
            yield Keep(begin, at)
            states.append(at)
        else:
            yield Sweep(begin, end - graphs, end)
            end -= graphs


def _reach(states: int, runs: int) -> int:
    """Return how many steps can be reversed with so many states, the first included, and `runs` runs of each."""
    return math.comb(states + runs, states) if states >= 0 and runs >= 0 else 0


def _runs(steps: int, states: int) -> int:
    return next(r for r in range(steps) if _reach(states, r) >= steps)


def _split(steps: int, states: int) -> int:
    """Return the step at which to store the next state."""
    runs = _runs(steps, states)
    return max(1, _reach(states, runs - 2), steps - _reach(states - 1, runs))


@functools.lru_cache(2**16)
def cost(steps: int, states: int) -> int:
    """Return how many steps must be run to reverse `steps` steps from the first, with so many states at a time."""
    runs = _runs(steps, states)
    return runs * steps - _reach(states + 1, runs - 1)


# --- while the loop runs ---


def least_missed(gaps: Sequence[int], states: int, graphs: int = 1) -> int:
    """Return the state to drop when one more than `states` would be held, if `graphs` are made at once.

    gaps[i] is the number of steps from the i-th state to the next one, or to the end. In the sweep, the steps after the
    i-th state are run again with the room of `states` − i states, since those after it are free by then. So if the
    i-th state is dropped, i ≥ 1,

        Σ_{j<i−1} c(gaps[j], states − j) + c(gaps[i−1] + gaps[i], states − i + 1) + Σ_{j>i} c(gaps[j], states − j + 1)

    steps are run again, where c is the cost of a gap. The result is the i for which this is smallest.
    """
    states = max(states, len(gaps) - 1)
    before, total = [0], 0
    for j, gap in enumerate(gaps[:-2]):
        total += gap_cost(gap, states - j, graphs) if gap > 1 else 0
        before.append(total)
    least, where, later = -1, 0, 0
    for i in range(len(gaps) - 1, 0, -1):
        total = before[i - 1] + gap_cost(gaps[i - 1] + gaps[i], states - i + 1, graphs) + later
        if total <= least or least < 0:
            least, where = total, i
        later += gap_cost(gaps[i], states - i + 1, graphs) if gaps[i] > 1 else 0
    return where


def gap_cost(steps: int, states: int, graphs: int = 1) -> int:
    """Return the cost of reversing the steps after a state, besides one run of each, in units of half a step.

    If several graphs are made at once, a step with a graph is not differentiated by the lean pullback. That costs about
    half a step more (four matrix products instead of three, where a step has two).
    """
    pieces = -(-steps // graphs)
    return 2 * graphs * cost(pieces, states) + (steps - pieces)


def kept_online(steps: int, states: int | Callable[[int], int]) -> list[int]:
    """Return the states that are held after so many steps, if at most `states`, or `states(k)`, are held at a time."""
    saved: list[int] = []
    for k in range(steps):
        most = states if isinstance(states, int) else states(k + 1)
        saved = [*saved, k]
        if len(saved) > most:
            del saved[least_missed(gaps_between(saved, k + 1), most)]
    return saved


def gaps_between(saved: Sequence[int], end: int) -> list[int]:
    return [after - at for at, after in zip(saved, (*saved[1:], end), strict=True)]


def reruns(saved: Sequence[int], end: int, states: int) -> int:
    """Return how many steps a sweep from these states runs again, besides once each, with room for so many states."""
    return sum(cost(gap, states - i) for i, gap in enumerate(gaps_between(saved, end)))


def fewest_reruns(steps: int, states: int) -> int:
    """Return the same for the best states, which are known if the number of steps is known from the start."""
    return 0 if steps <= states else cost(steps + 1, states) - steps


def states_for_sqrt(steps: int) -> int:
    """Return ⌈1.6·√K⌉. If K is known, √(2K) states are the fewest for which each step runs only once more.

    As K is not known while the loop runs, the states that are held are worse by a few per cent. The factor 1.6 instead
    of 1.41 makes up for that.
    """
    return math.isqrt(max(1, math.ceil(2.56 * steps) - 1)) + 1


# --- what the user sees of it ---


class Folder(NamedTuple):
    """The file that holds some of the states."""

    path: str
    states: int
    nbytes: int
    seconds: float  # the mean time to write a state


class Plan(NamedTuple):
    """What is stored for a reverse sweep that would start now. Without memory=, numbers of bytes are 0.

    With a folder, `folder` tells how many of the states are in it, and `seconds` is the mean time of a step.
    """

    steps: int
    graphs: int  # the number of stored graphs, of the last steps
    states: int  # the number of stored states, of the steps before them, in memory or in the folder
    reruns: int  # the number of steps that will be run again
    memory: int  # the bytes that are allowed
    graph: int  # the bytes of a step's graph, or of one pullback if graphs are not kept
    state: int  # the bytes of a state
    folder: Folder | None = None
    seconds: float = 0.0
    differences: int = 0  # the bytes of what rounding loses, with checkpoint="reversible"

    def __str__(self) -> str:
        there = self.folder.states if self.folder else 0
        held = self.graphs * self.graph + (self.states - there) * self.state
        if self.differences:
            return (
                f"{self.steps} steps: the last state is kept, and {self.differences / 1e6:.1f} MB of what rounding "
                f"loses; {self.reruns} steps will be run again"
            )
        size = f" about {held / 1e6:.1f} of {self.memory / 1e6:.1f} MB;" if self.memory else ""
        if self.folder is not None:
            size += (
                f" {there} of them ({self.folder.nbytes / 1e6:.1f} MB) in {self.folder.path}, where writing one takes "
                f"{1e3 * self.folder.seconds:.2f} ms and a step {1e3 * self.seconds:.2f};"
            )
        return (
            f"{self.steps} steps: {self.graphs} graphs and {self.states} states are kept,{size} "
            f"{self.reruns} steps will be run again"
        )
