"""What losses hold beside their arguments, as it was when a step used it, so that an error can name what has changed.

A *place* is a variable that a loss closes over, a global that it reads, an attribute or an entry of these, or an
attribute of a module of the model. The places are listed once for the losses of a step; a snapshot of a step has a
small mark for each of them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.contents import OPAQUE, Place, names_in, places_in, read
from ..model.losses import Loss, WithKeywords
from ..model.model import Model

_DEPTH = 4
_PLACES = 400  # more of them are data
_SAMPLED = 8  # tensors that are sampled; of others the version is compared
_ENTRIES = 257  # of a tensor that is sampled
_PLAIN = frozenset({bool, int, float, str, complex, bytes, type(None)})
_GONE = object()


class _Named(NamedTuple):
    """A place, with its whole name and whose it is."""

    name: str
    whose: str
    holder: Any
    key: Any
    sampled: bool

    def now(self) -> Any:
        try:
            return read(self.holder, self.key)
        except (KeyError, IndexError, ValueError):
            return _GONE


@dataclass
class Plan:
    """The places of some losses and a model."""

    losses: tuple[Loss, ...]  # held, so that their ids stay theirs
    places: list[_Named] = field(default_factory=list[_Named])
    draws: bool = False  # whether they may draw random numbers from Python's or NumPy's global generators
    last: tuple[Any, ...] = ()  # the last marks, which steps share while nothing changes

    def marks(self) -> tuple[Any, ...]:
        new = tuple([mark(p.now(), p.sampled) for p in self.places])
        if new != self.last:
            self.last = new
        return self.last


_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Snapshot:
    """What the losses of a step held at its beginning."""

    plan: Plan
    marks: tuple[Any, ...]

    def refilled(self) -> str | None:
        """Name a tensor that was changed since by NumPy or through .data, which leaves its version unchanged."""
        for p, then in zip(self.plan.places, self.marks, strict=True):
            if p.name.endswith(_RUNNING):  # which torch moves, also those of modules outside of the model
                continue
            if type(then) is _OfTensor and then.sample is not None and isinstance(x := p.now(), Tensor):
                now = mark(x, sampled=True)
                if now[:2] == then[:2] and now.sample != then.sample and not x.requires_grad:
                    return f"the tensor {p.name!r} (shape {tuple(x.shape)}), which {p.whose} holds,"
        return None

    def cause(self) -> str:
        """Say what has changed since, and what to do about it."""
        moved = [(p, then) for p, then in zip(self.plan.places, self.marks, strict=True)]
        found = sorted(((_rank(p.now()), text) for p, then in moved if (text := _changed(p, then))), key=lambda x: x[0])
        if found:
            return " ".join(text for _, text in found[:3])
        for p in self.plan.places:
            if hasattr(p.now(), "__next__"):
                return (
                    f"{p.whose} holds the iterator {p.name!r}, which yields something else each time. Give the step "
                    "what it yields: loop.step(next(iterator))."
                )
        return (
            "Nothing that h and g hold was found to have changed: the losses, or direction=, have another result each "
            "time that they are run (by a clock, a file, an object of another library). Pass what they read in the "
            "batch, and draw random numbers by torch's global generator."
        )


class _OfTensor(NamedTuple):
    key: int
    version: int
    sample: int | None


def snapshot(model: Model, losses: Sequence[Loss]) -> Snapshot:
    """Return what these losses and the model hold now."""
    plans = model.seen.plans
    plan = plans.get(key := tuple(map(id, losses)))
    if plan is None:
        if len(plans) >= 16:  # losses that are made anew in every step
            plans.clear()
        plan = plans[key] = _plan(model, losses)
    return Snapshot(plan, plan.marks())


def _plan(model: Model, losses: Sequence[Loss]) -> Plan:
    plan, names = Plan(tuple(losses)), ("h", "g") if len(losses) > 1 else ("the loss",)
    own = {id(x) for x in (*model.parameters.values(), *model.buffers.values(), *model.module.buffers())}
    seen = own | set(map(id, model.modules))
    for loss, whose in zip(losses, names, strict=False):
        loss = loss.loss if isinstance(loss, WithKeywords) else loss
        _walk(plan, loss, "", getattr(loss, "__name__", "").replace("<lambda>", "") or whose, _DEPTH, seen)
    for name, m in model.module.named_modules():
        of_torch = type(m).__module__.partition(".")[0] == "torch"
        whose = f"the module {name!r} of the model" if name else "the model"
        if not of_torch:
            _walk(plan, type(m).forward, "", whose, 2, seen)
        for place in places_in(m):
            if (of_torch and type(read(*place[1:])) is not float) or place[0] == "training":
                continue
            _add(plan, place, "", whose, _DEPTH - 1, seen)
    return plan


def _walk(plan: Plan, x: Any, name: str, whose: str, depth: int, seen: set[int]) -> None:
    """Add the places in x, and in what they hold."""
    if depth == 0 or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, types.FunctionType):
        plan.draws = plan.draws or "random" in names_in(x.__code__)
    for place in places_in(x):
        _add(plan, place, name, whose, depth, seen)


def _add(plan: Plan, place: Place, name: str, whose: str, depth: int, seen: set[int]) -> None:
    key, holder, index = place
    value = read(holder, index)
    plan.draws = plan.draws or _is_global_generator(getattr(value, "__self__", None))
    if isinstance(value, OPAQUE) or len(plan.places) >= _PLACES or (isinstance(value, Tensor) and id(value) in seen):
        return
    name = f"{name}{key}" if key.startswith("[") else f"{name}.{key}".lstrip(".")
    if not isinstance(value, (types.FunctionType, types.MethodType, nn.Module)):
        sampled = sum(p.sampled for p in plan.places) < _SAMPLED and (isinstance(value, Tensor) or is_array(value))
        plan.places.append(_Named(name, whose, holder, index, sampled))
    _walk(plan, value, name, whose, depth - 1, seen)


def _is_global_generator(x: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    return isinstance(x, random.Random) or (numpy is not None and isinstance(x, numpy.RandomState))


def is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and hasattr(x, "tobytes")


def leaves_of(batch: Any) -> list[Any]:
    """Return what a batch holds that may be changed."""
    leaves = batch if type(batch) is tuple else pytree.tree_leaves(batch)
    if any(isinstance(x, (list, dict, tuple)) for x in leaves):
        leaves = pytree.tree_leaves(leaves)
    return [x for x in leaves if isinstance(x, Tensor) or is_array(x)]


def mark(x: Any, sampled: bool = False) -> Any:
    """Return what stands for a value: itself, if it is a number or a string, or something small."""
    if type(x) in _PLAIN:
        return x
    if isinstance(x, Tensor):
        return _OfTensor(id(x), 0 if x.is_inference() else x._version, _sample(x) if sampled else None)
    if isinstance(x, (list, dict, set, tuple)):
        return id(x), len(cast("list[Any]", x))
    if isinstance(x, torch.Generator):
        return hash(x.get_state().numpy().tobytes()) if x.device.type == "cpu" else id(x)
    if sampled and is_array(x):
        return id(x), hash(x.ravel()[:: max(1, x.size // _ENTRIES)].tobytes())
    if (state := getattr(x, "bit_generator", None)) is not None:
        return hash(repr(state.state))
    return id(x)


def _rank(x: Any) -> int:
    """Return how likely a change of a thing is a cause: a number or a tensor more than a list, which may be a log."""
    return 0 if type(x) in _PLAIN or isinstance(x, Tensor) or is_array(x) else 2 if isinstance(x, (list, dict)) else 1


def _sample(x: Tensor) -> int | None:
    """Return a checksum of some entries of a tensor on the host."""
    if x.device.type != "cpu" or x.layout != torch.strided or not x.is_contiguous() or x.is_quantized:
        return None
    try:
        flat = x.detach().numpy().ravel()
        return hash(flat[:: max(1, flat.size // _ENTRIES)].tobytes())
    except (TypeError, RuntimeError):  # a type that NumPy does not have, or a tensor without values
        return None


def _changed(p: _Named, then: Any) -> str | None:
    """Say how a place has changed since its mark, or return None if it has not."""
    x = p.now()
    if (now := mark(x, p.sampled)) == then:
        return None
    of = f"{p.name!r}, which {p.whose} reads," if not p.whose.startswith("the m") else f"{p.name!r} of {p.whose}"
    if x is _GONE:
        return f"{of} is gone. Keep it until the hypergradient is taken, or pass it in the batch."
    if isinstance(x, torch.Generator) or hasattr(x, "bit_generator"):
        return (
            f"The generator {of} has drawn other numbers since. Draw from torch's global generator, whose state is "
            "restored, or pass what is drawn in the batch."
        )
    if type(now) in _PLAIN and type(then) in _PLAIN:
        return f"{of} was {then!r} in this step, and is {now!r} at this moment. Pass it in the batch."
    if isinstance(x, Tensor) or is_array(x):
        kind = "tensor" if isinstance(x, Tensor) else "array"
        same = isinstance(then, tuple) and now[0] == cast("tuple[Any, ...]", then)[0]
        how = "was changed after this step used it" if same else "is another one than in this step"
        return (
            f"The {kind} {of} (shape {tuple(x.shape)}) {how}. Pass it in the batch, and give each step one of its own "
            "(.clone(), .copy())."
        )
    if isinstance(x, (list, dict, set, tuple)) and now[0] == (then[0] if isinstance(then, tuple) else None):
        size = cast("tuple[int, int]", then)[1]
        return f"{of} had {size} entries in this step, and has {now[1]} at this moment. Pass them in the batch."
    return f"{of} is another object than in this step. Pass it in the batch."
