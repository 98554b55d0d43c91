"""How often steps are run again if K is not known beforehand: ours, the fewest possible, and two other rules.

    make plan

Nothing is computed but the plans themselves: s states are held at any time, a loop of K steps ends, and the sweep uses
the room of s states by binomial checkpointing. A cell has the steps that are run again per step, besides the one run of
each that makes its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bilevel_plugin.engine.schedule import fewest_reruns, kept_online, reruns, states_for_sqrt

HEAD = """# Which states to keep, if the number of steps is not known

Made by `make plan`. At most s states are held at any time, and the loop ends after K steps. A cell has the number of
steps that are run again, per step, besides the one run of each that makes its graph.

- **known K** is the least possible number, for a loop whose length is known (binomial checkpointing).
- **ours** drops the state that the sweep would miss least if the loop ended now.
- **levels** is the rule of Wang, Moin & Iaccarino (2009).
- **doubling** keeps every c-th state, and doubles c when the states do not fit.
- **doubling, states stay** is the same, but the sweep never replaces a state of the loop by another.
"""
STATES = (2, 3, 5, 10, 20, 50, 100)
LENGTHS = (1.5, 2, 3, 5, 10, 20, 50)  # K, as multiples of s


def doubling(steps: int, states: int) -> list[int]:
    """Every c-th state, where c doubles when they do not fit."""
    every, saved = 1, list[int]()
    for k in range(steps):
        saved += [k] * (k % every == 0)
        if len(saved) > states:
            every *= 2
            saved = [j for j in saved if j % every == 0]
    return saved


def levels(steps: int, states: int) -> list[int]:
    """Wang, Moin & Iaccarino (2009): a state is dispensable if a later one has a higher level."""
    saved, level = list[int](), dict[int, float]()
    for k in range(steps):
        level[k] = 0 if k else float("inf")
        if len(saved) >= states:
            spare = [j for i, j in enumerate(saved) if any(level[later] > level[j] for later in saved[i + 1 :])]
            if not spare:
                level[k] = level[saved[-1]] + 1
            if states > 1:
                saved.remove(spare[-1] if spare else saved[-1])
        if len(saved) < states:
            saved.append(k)
    return saved


def never_freed(saved: Sequence[int], steps: int, states: int) -> int:
    """The steps that are run again if the states of the loop stay where they are during the sweep."""
    left = states - len(saved)
    return sum(reruns([0], after - at, 1 + left) for at, after in zip(saved, (*saved[1:], steps), strict=True))


def cells() -> list[tuple[int, int, dict[str, float]]]:
    """(s, K, {rule: steps run again per step})."""
    rules: dict[str, Callable[[int, int], int]] = {
        "known K": fewest_reruns,
        "ours": lambda n, s: reruns(kept_online(n, s), n, s),
        "levels": lambda n, s: reruns(levels(n, s), n, s),
        "doubling": lambda n, s: reruns(doubling(n, s), n, s),
        "doubling, states stay": lambda n, s: never_freed(doubling(n, s), n, s),
    }
    return [
        (s, n, {name: rule(n, s) / n for name, rule in rules.items()})
        for s in STATES
        for n in (int(s * x) for x in LENGTHS)
    ]


def worst(states: int, most: int) -> float:
    """The largest ratio of (K + ours) to (K + the fewest), over every K up to `most`."""
    return max((n + reruns(kept_online(n, states), n, states)) / (n + fewest_reruns(n, states)) for n in range(1, most))


def main() -> None:
    found = cells()
    names = list(found[0][2])
    print(HEAD)
    print(f"| s | K | {' | '.join(names)} |\n| {' | '.join(['---:'] * (len(names) + 2))} |")
    for s, n, row in found:
        print(f"| {s} | {n} | {' | '.join(f'{row[name]:.2f}' for name in names)} |")
    print("\nThe largest ratio of K + *ours* to K + *known K*, over every K up to 300, is")
    print(", ".join(f"{worst(s, 301):.3f} for s = {s}" for s in (1, 2, 3, 5, 10, 20)) + ".\n")
    print('`Reverse(checkpoint="sqrt")` holds ⌈1.6·√K⌉ states:\n')
    print("| K | states | steps run again, per step |\n| ---: | ---: | ---: |")
    for n in (10, 100, 1000, 3000):
        s = states_for_sqrt(n)
        print(f"| {n:,} | {s} | {reruns(kept_online(n, states_for_sqrt), n, s) / n:.2f} |")


if __name__ == "__main__":
    main()
