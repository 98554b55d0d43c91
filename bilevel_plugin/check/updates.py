"""The derivative of an update that runs functions of the user: `direction=`, hooks on parameters, a rule of one's own.

With fixed numbers a, the derivative of ⟨a, Υ(z, d)⟩ along a direction in d, in z, or in an outer variable that the
function closes over, must be its differences. `.item()` or `.detach()` in such a function shows here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..autograd.derive import grad
from ..autograd.graph import find_leaves
from ..autograd.trees import State
from ..update.update import Update
from .compared import SCALE, Compared
from .differences import compare
from .double import InFloat64, random_like

_PARTS = {"d": "the direction", "z": "the weights and the optimizer's state"}
IN_STATE = tuple(_PARTS.values())


def compare_update(update: Update, z: State, d: State) -> list[Compared]:
    """Compare the derivative of the update at the state z and the direction d with differences, part by part."""
    at = {"z": _floating(z), "d": _floating(d)}
    others = {n: x for n, x in z.items() if n not in at["z"]}

    def evaluate(t: Mapping[str, Tensor | float], moved: Mapping[int, Tensor]) -> tuple[Tensor, InFloat64]:
        """Return ⟨a, Υ(z, d)⟩, where each part is moved relative to its own entries: what is 0 stays 0."""
        at_t = {part: {n: x + t[part] * (x * _numbers_like(x)) for n, x in xs.items()} for part, xs in at.items()}
        with InFloat64(dict(moved)) as mode, torch.enable_grad():
            to = update({**others, **at_t["z"]}, at_t["d"])
            floating = [x for x in to.values() if x.is_floating_point()]
            return torch.stack([(x * _numbers_like(x)).sum() for x in floating]).sum(), mode

    t = {part: torch.zeros((), dtype=torch.float64, requires_grad=True) for part in at}
    value, mode = evaluate(t, {})
    read = {id(x) for x in find_leaves(value, t.values())[0]} if value.requires_grad else set[int]()
    outer = {key: pair for key, pair in mode.found.items() if id(pair[1]) in read}
    inputs = [*t.values(), *(stand_in for _, stand_in in outer.values())]
    grads = grad([value], inputs, [None]) if value.requires_grad else [None] * len(inputs)

    def one(what: str, got: float, part: str | None, key: int | None) -> Compared:
        def f(by: float) -> Tensor:
            moved = {k: s.detach() + (by * random_like(s) if k == key else 0.0) for k, (_, s) in outer.items()}
            return evaluate({p: by if p == part else 0.0 for p in at}, moved)[0].detach()

        found = compare(got, f, SCALE, typical=1e-6 * float(value.detach().abs()), here=value.detach())
        return Compared(what, found, got != 0 or found.error > 0)

    result = [one(_PARTS[part], 0.0 if g is None else float(g), part, None) for part, g in zip(at, grads, strict=False)]
    for (key, (x, stand_in)), g in zip(outer.items(), grads[len(at) :], strict=True):
        got = 0.0 if g is None else float((g * random_like(stand_in)).sum())
        result.append(one(f"the outer variable of shape {tuple(x.shape)}", got, None, key))
    return result


def _numbers_like(x: Tensor) -> Tensor:
    """Return fixed random numbers of size 1, whatever the values of x."""
    return random_like(torch.zeros_like(x, requires_grad=False))


def _floating(state: State) -> State:
    return {n: x.detach().double() for n, x in state.items() if x.is_floating_point()}
