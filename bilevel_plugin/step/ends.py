"""A step that is run again for its derivative must end where it ended at first."""

from __future__ import annotations

import torch

from ..autograd.derive import norm
from ..autograd.trees import State, same_bits
from ..kernels.switches import full_precision
from ..update.update import weight_of
from .cotangent import Pulled
from .step import Step


def check_end(step: Step, z: State, pulled: Pulled, after: State) -> None:
    """Raise if a repeated step ends at another state than at first, since the gradient would be wrong.

    The kernels that have a second derivative round differently from those of the first run. If a gradient is 0 up
    to rounding, an update that divides by its size, such as Adam's, turns that rounding into a whole step. So if
    the ends differ, the step is run once more with the kernels of the first run, and the gradients are compared.
    """
    if _ends_at(step, z, pulled.to, after):
        return
    if pulled.direction and step.update is not None:
        moved, model = pulled.direction.keys(), step.model
        d = model.ranks.mean(step.again(z).direction, model.parameters)
        with full_precision(), torch.no_grad():
            again = step.update(z, d)
        again = {n: x if weight_of(n) in moved else pulled.to[n] for n, x in again.items() if n in pulled.to}
        if moved <= d.keys() and _ends_at(step, z, again, after) and _is_close(step, pulled.direction, d, {}):
            return
    raise step.pieces[0].record.differs()


def _ends_at(step: Step, z: State, to: State, after: State) -> bool:
    mine = {n: x for n, x in to.items() if n in after and x.is_floating_point()}
    if not mine or all(x.device.type == "cpu" and same_bits(x, after[n]) for n, x in mine.items()):
        return True
    return _is_close(step, mine, after, z)


def _is_close(step: Step, xs: State, others: State, start: State) -> bool:
    """Return whether xs equal the others up to rounding, relative to their distance from the start, or from 0."""
    with torch.no_grad():
        off = norm(x - others[n] for n, x in xs.items())
        size = norm(others[n] for n in xs)
        length = norm(start[n] - others[n] for n in xs if n in start) if start else size
        drift = off / (length + torch.finfo(size.dtype).eps * size + torch.finfo(size.dtype).tiny)
    precision = max(piece.record.conditions.precision for piece in step.pieces)
    return drift.device.type == "meta" or float(drift) <= precision**0.5
