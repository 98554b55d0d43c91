"""The known causes of a wrong hypergradient or another end, and what speaks for each of them in the runs of a loop."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .readings import RANDOM, RATE, Reading, changed


@dataclass
class Evidence:
    """What the runs of a loop have shown."""

    block: Any
    unused: set[str]  # weights that some step left alone
    warnings: list[str] = field(default_factory=list[str])
    unsteady: dict[str, int] = field(default_factory=dict[str, int])  # what differs between two runs at the same λ
    moved: dict[str, int] = field(default_factory=dict[str, int])  # what differs when λ moves, by the first step
    other_length: bool = False  # whether the number of steps depends on λ
    other_start: bool = False  # whether the weights at the start of the block depend on λ
    without_gradient: list[str] = field(default_factory=list[str])
    draws_differ: bool = False  # whether the plain loop has drawn other random numbers
    wrong: bool = False
    end_is_off: list[str] = field(default_factory=list[str])

    def compare(self, base: Sequence[Reading], other: Sequence[Reading], other_start: bool) -> None:
        """Note what differs in a run at another λ."""
        for name, k in changed(base, other).items():
            self.moved.setdefault(name, k)
        self.other_length = self.other_length or len(base) != len(other)
        self.other_start = self.other_start or other_start


def causes(seen: Evidence) -> list[str]:
    """Return the causes that fit, those that were seen at work first."""
    found: list[str] = []
    if seen.wrong:
        found += [*_unsteady(seen), *_of_hypergradient(seen)]
    if seen.end_is_off:
        found += _of_end(seen)
    if (seen.wrong or seen.end_is_off) and not found:
        found.append(
            "none of the known causes shows. A state that your code keeps, and that h and g reach by a way that was "
            "not followed (a file, a C extension, an attribute deep inside of an object), would look like this."
        )
    return found


def _unsteady(seen: Evidence) -> list[str]:
    if not seen.unsteady:
        return []
    names = ", ".join(f"`{n}` of step k = {k}" for n, k in list(seen.unsteady.items())[:3])
    return [
        f"two runs at the same λ differ, first in {names}: random numbers of a generator of its own, an iterator that "
        "is used up, or a state that is kept from one call to the next. Make them inside of the function, from a seed."
    ]


def _of_hypergradient(seen: Evidence) -> list[str]:
    found: list[str] = []
    outside: dict[str, list[tuple[str, int]]] = {}
    for name, k in seen.moved.items():
        if name == RANDOM:
            found.append(
                f"the random state of step k = {k} changes with λ: the loop draws another number of random values, so "
                "a branch depends on the weights. Draw the same at every λ."
            )
        elif name.startswith(RATE):
            found.append(
                f"{name} of step k = {k} changes with λ: it was computed from losses (ReduceLROnPlateau, line search), "
                "and the hypergradient takes it for a constant. Use a schedule of k alone, or give lr= as a tensor."
            )
        else:
            outside.setdefault(name.partition(" (read by")[0].partition(".")[0], []).append((name, k))
    found += [_value_from_outside(names) for names in list(outside.values())[:4]]
    if seen.other_length:
        found.append("the number of steps changes with λ (early stopping): the outer loss jumps there. Fix the number.")
    if seen.other_start:
        found.append(
            "the weights at the start of the block change with λ: an earlier block was committed, or the model was "
            "initialised from λ. The hypergradient begins at the start of the block: put all steps into one block."
        )
    if seen.without_gradient:
        found.append(
            f"{', '.join(seen.without_gradient)} has no gradient at all, and the outer loss depends on it: it is used "
            "behind .detach(), .item(), .data or torch.no_grad(), or outside of h and g."
        )
    found += [f"the block has warned: {text}" for text in seen.warnings]
    return found + _of_options(seen)


def _value_from_outside(names: Sequence[tuple[str, int]]) -> str:
    (name, k), *others = names
    where = f"`{name}` of step k = {k}{f', and {len(others)} more like it,' if others else ''} changes with λ"
    if "." in name.partition(" (read by")[0] and "(read by" in name:
        return (
            f"{where}: a module or object beside the model follows the weights (a target network, an EMA, a queue), "
            "and the hypergradient takes it for a constant. Give it as a companion: bilevel.inner(..., "
            "companions={module: bilevel.ema(0.99)})."
        )
    return (
        f"{where}: it was computed from the weights, or from λ, outside of the losses, without a graph, and the "
        "hypergradient takes it for a constant. Compute it by loop.compute(fn, ...), or inside of h or g."
    )


def _of_options(seen: Evidence) -> list[str]:
    block, found = seen.block, list[str]()
    engine = type(block._engine).__name__
    if engine in ("CG", "Neumann"):
        found.append(f"engine={engine} is exact at a fixed point alone: take more steps, or engine='reverse'.")
    if getattr(block._engine, "truncate", None):
        found.append("truncate= leaves out the earlier steps on purpose.")
    if block._direction is not None:
        found.append(
            "direction= is a function of your own: what it reads besides its arguments (the weights, by p.grad += "
            "wd*p; a state of its own; .item()) is a constant in the hypergradient. It may take (d, w)."
        )
    if block._formula is not None:
        found.append("the rule is one of your own: compare it with the class's step(), and look for .detach() in it.")
    return found


def _of_end(seen: Evidence) -> list[str]:
    block, off, found = seen.block, set(seen.end_is_off), list[str]()
    solver = type(block._rule).__name__
    if solver != "GD":
        found.append(f"the solver is {solver}, which follows g as well as h: solver='gd' takes the plain loop's steps.")
    if seen.draws_differ:
        found.append(
            "the plain loop has drawn other random numbers than the block: another order of the batches, or dropout "
            "in another place. Draw them in the same order."
        )
    held = {id(p) for o in block._optimizers for group in o.param_groups for p in group["params"]}
    part = [n for n, p in block._model.named_parameters() if p.requires_grad and id(p) not in held]
    if block._clip is not None and block._optimizers and part:
        found.append(
            f"clip= is over the weights that the optimizer holds, and the plain loop may clip over all of the model's: "
            f"{part[0]!r} is not the optimizer's."
        )
    if off & seen.unused:
        found.append(
            f"{sorted(off & seen.unused)[0]!r} was left alone by some step, whose loss does not use it. The plain loop "
            "may have a gradient of zeros there (zero_grad(set_to_none=False)), with which momentum and weight decay "
            "go on."
        )
    if block._formula is not None or block._direction is not None:
        found.append("a rule or direction= of your own: it may not be what the plain loop's optimizer does.")
    if any(n.endswith(("running_mean", "running_var", "num_batches_tracked")) for n in off):
        found.append(
            "running statistics differ: the model ran in training mode more or less often than in the plain loop."
        )
    if not found:
        found.append(
            "what the plain loop does to the gradients or the weights, and the block does not know: clipping, hooks, "
            "weight decay by hand, a projection, another rate or schedule, another order of batches."
        )
    return found
