"""What to keep of a loop and what to run again, so that the hypergradient fits into a given memory.

A step's *graph* serves the reverse sweep as it is; from a *state* (an iterate) the steps after it can be run again.
Graphs of as many steps as fit are made in one go, so that a step is run again once wherever possible; where the states
of a loop do not all fit either, those that are kept lie as binomial checkpointing has them (Griewank & Walther 2000).
"""

from __future__ import annotations

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
    """How to go back over the steps … end − 1 from the saved states (in rising order)."""
    states, extra = list(saved), 0
    while states:
        begin = states[-1]
        graphs, slots = room(end - begin, len(saved) + extra)
        if end - begin <= graphs:
            yield Sweep(begin, begin, end)
            end = states.pop()
            extra -= extra > 0
        elif slots > 0:
            pieces = -(-(end - begin) // graphs)
            at = end - graphs * (pieces - _split(pieces, slots + 1))
            yield Keep(begin, at)
            states.append(at)
            extra += 1
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


def cost(steps: int, states: int) -> int:
    """How many steps have to be run to reach all the others from the first, with so many states kept at a time."""
    runs = _runs(steps, states)
    return runs * steps - _reach(states + 1, runs - 1)


@dataclass
class Budget:
    """Bytes in all, bytes of a step's graph and of a state: what fits beside what."""

    memory: int
    graph: int
    state: int

    def graphs(self, states: int) -> int:
        """How many graphs fit beside so many states."""
        return (self.memory - self.aside - states * self.state) // self.graph

    @property
    def aside(self) -> int:
        """For what is neither: the graph of the outer loss, adjoints, and what going back over a step allocates."""
        return 2 * self.graph + 4 * self.state

    def fits(self, graphs: int, states: int) -> bool:
        return graphs <= self.graphs(states)

    def room(self, steps: int, held: int) -> tuple[int, int]:
        """The split of what is left between graphs and states that runs the fewest steps again."""
        most = max(1, min(steps, self.graphs(held)))

        def slots(graphs: int) -> int:
            return max(0, (self.memory - self.aside - graphs * self.graph) // self.state - held)

        def runs(graphs: int) -> int:
            return graphs * cost(-(-steps // graphs), 1 + slots(graphs))

        best = min({most, *(2**i for i in range(most.bit_length()))}, key=lambda m: (runs(m), m))
        return best, slots(best)

    def check(self) -> None:
        if not self.fits(1, 2):
            least = self.aside + self.graph + 2 * self.state
            raise ValueError(
                f"bilevel.Reverse: memory={self.memory} bytes can't hold a loop: the graph of one step has "
                f"{self.graph} bytes and a state {self.state}, so it takes at least {least}. Give more, or smaller "
                "batches."
            )


class Plan(NamedTuple):
    """What a reverse sweep would work from now. Bytes are 0 if they were not asked for (no memory=)."""

    steps: int
    graphs: int  # kept, of the last steps
    states: int  # kept, of the steps before them
    reruns: int  # steps that will be run again
    memory: int  # bytes that were allowed
    graph: int  # bytes of a step's graph
    state: int  # bytes of a state

    def __str__(self) -> str:
        held = self.graphs * self.graph + self.states * self.state
        size = f" about {held / 1e6:.1f} of {self.memory / 1e6:.1f} MB;" if self.memory else ""
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
