"""What to keep of a loop and what to run again, so that the hypergradient fits into a given memory.

A step's *graph* serves the reverse sweep as it is; from a *state* (an iterate) the steps after it can be run again.
How long the loop will be is not known while it runs: as soon as a new state does not fit, the state goes that the sweep
would miss least if the loop ended here (`least_missed`). In the sweep, the room of states that were gone over is used
for others between those that are left, placed by binomial checkpointing (Griewank & Walther 2000).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Room = Callable[[int, int], tuple[int, int]]  # (steps ahead, states held) -> graphs at once, further states


class Keep(NamedTuple):
    """Run from the state of step `begin` to that of step `at`, and keep it."""

    begin: int
    at: int


class Sweep(NamedTuple):
    """Run from the state of step `begin` to that of step `at`, make the graphs of at … end − 1, go back over them."""

    begin: int
    at: int
    end: int


def schedule(saved: Sequence[int], end: int, room: Room) -> Iterator[Keep | Sweep]:
    """How to go back over the steps … end − 1 from the saved states (in rising order).

    A state whose steps were all gone over counts as free: its room may be taken by another.
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
    """How many steps can be gone back over with so many states, the first included, if none is run more often."""
    return math.comb(states + runs, states) if states >= 0 and runs >= 0 else 0


def _runs(steps: int, states: int) -> int:
    return next(r for r in range(steps) if _reach(states, r) >= steps)


def _split(steps: int, states: int) -> int:
    """Where to put the next state."""
    runs = _runs(steps, states)
    return max(1, _reach(states, runs - 2), steps - _reach(states - 1, runs))


@functools.lru_cache(2**16)
def cost(steps: int, states: int) -> int:
    """How many steps have to be run to reach all the others from the first, with so many states kept at a time."""
    runs = _runs(steps, states)
    return runs * steps - _reach(states + 1, runs - 1)


# --- while the loop runs ---


def least_missed(gaps: Sequence[int], states: int, graphs: int = 1) -> int:
    """The state to drop when one more than `states` would be held, if `graphs` are made at once.

    gaps[i] is the number of steps from the i-th state to the next one, or to the end. In the sweep, the steps after the
    i-th state are run again with the room of `states` − i states, since those after it are free by then. So dropping
    the i-th state, i ≥ 1, leaves

        Σ_{j<i−1} c(gaps[j], states − j) + c(gaps[i−1] + gaps[i], states − i + 1) + Σ_{j>i} c(gaps[j], states − j + 1)

    to be run again, where c is the cost of a gap. The i for which this is least is returned.
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
    """What it costs to go back over the steps after a state, beyond one run of each, in halves of a step.

    Where several graphs are made at once, a step that is gone over by its graph is not pulled through the lean way,
    which costs about half a step more (four matrix products in place of three, where a step has two).
    """
    pieces = -(-steps // graphs)
    return 2 * graphs * cost(pieces, states) + (steps - pieces)


def kept_online(steps: int, states: int | Callable[[int], int]) -> list[int]:
    """The states that are held after so many steps, if at most `states` are held at any time (or that of each k)."""
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
    """How many steps a sweep runs again besides once each, from these states and with the room of so many."""
    return sum(cost(gap, states - i) for i, gap in enumerate(gaps_between(saved, end)))


def fewest_reruns(steps: int, states: int) -> int:
    """The same from the states that are best, if it is known from the start how many steps there will be."""
    return 0 if steps <= states else cost(steps + 1, states) - steps


def states_for_sqrt(steps: int) -> int:
    """⌈1.6·√K⌉: √(2K) states are the fewest with which each of K steps need be run only once more, if K is known.

    What is held before the end is known misses that by a few per cent; 1.6 in place of 1.41 makes up for it.
    """
    return math.isqrt(max(1, math.ceil(2.56 * steps) - 1)) + 1


@dataclass
class Budget:
    """Bytes in all, bytes of a step's graph and of a state: what fits beside what.

    `pull` is what going back over one step takes, where no graphs are kept; then a graph is never counted.
    """

    memory: int
    graph: int
    state: int
    pull: int = 0
    whole: int = 0  # of a state, where each of several processes keeps a part

    def graphs(self, states: int) -> int:
        """How many graphs fit beside so many states."""
        left = self.memory - self.aside - states * self.state
        return left // self.graph if not self.pull else int(left >= 0)

    def states(self, graphs: int) -> int:
        """How many states fit beside so many graphs."""
        return (self.memory - self.aside - (0 if self.pull else graphs * self.graph)) // self.state

    @property
    def aside(self) -> int:
        """For what is neither: the graph of the outer loss, adjoints, and what going back over a step allocates.

        Where no graphs are kept, eight states are w_0 and z_K, which the loop holds, two adjoints, the state that was
        gone over last, and those that come and go as a step is run again.
        """
        whole = self.whole or self.state
        return self.pull + 8 * whole if self.pull else 2 * self.graph + 4 * whole

    def fits(self, graphs: int, states: int) -> bool:
        return graphs <= self.graphs(states)

    def room(self, steps: int, held: int, bought: int = 0) -> tuple[int, int]:
        """The split of what is left between graphs and states that costs least.

        Memory that was bought for states takes no graphs, though fewer are held by now.
        """
        most = max(1, min(steps, self.graphs(max(held, bought))))

        def slots(graphs: int) -> int:
            return max(0, self.states(graphs) - held)

        best = min(_powers(most), key=lambda m: (gap_cost(steps, 1 + slots(m), m), m))
        return best, slots(best)

    def graphs_at_once(self, steps: int, least: int) -> int:
        """How many graphs to leave room for, `least` or more, where the states of so many steps do not all fit."""
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


class Folder(NamedTuple):
    """The states that are in a file."""

    path: str
    states: int
    nbytes: int
    seconds: float  # that writing one has taken, on the average


class Plan(NamedTuple):
    """What a reverse sweep would work from now. Bytes are 0 if they were not asked for (no memory=).

    With a folder, `folder` says how many of the states are in it, and `seconds` what a step has taken on the average.
    """

    steps: int
    graphs: int  # kept, of the last steps
    states: int  # kept, of the steps before them, wherever they are
    reruns: int  # steps that will be run again
    memory: int  # bytes that were allowed
    graph: int  # bytes of a step's graph, or those that going back over a step takes where graphs are not kept
    state: int  # bytes of a state
    folder: Folder | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        there = self.folder.states if self.folder else 0
        held = self.graphs * self.graph + (self.states - there) * self.state
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


def parse(memory: int | str) -> int | None:
    """Bytes; None for "auto"."""
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
    """Bytes that the device could still give."""
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
    """What the limit of a container leaves."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return int(limit.read()) - int(used.read())
    except (OSError, ValueError):  # none, or "max"
        return 2**63
