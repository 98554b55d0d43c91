"""Whether a loss is the mean or the sum over samples in its derivatives too: the probe of `micro=`.

Its value, and its gradients with respect to the weights and to every outer variable, on four samples, are compared with
those of two parts, in float64 and in the modes that the step has. Weights of samples that are normalised over the batch
(softmax(λ), λ/Σλ) agree in value and in ∇_w as long as λ is uniform; ∇_λ tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..autograd.trees import State
from ..model.losses import value_and_aux
from ..model.model import Model
from ..model.tasks import row_of
from ..step.batches import Reduction, split
from ..step.conditions import Conditions, drawn_from, random_states, undisturbed
from ..step.piece import Term
from .differences import NotChecked
from .probe import Losses, Probe, guarded
from .sentinel import count_samples, few_samples

_ROWS, _ALLOWED = 4, 1e-6


def check_reduction(model: Model, z: State, buffers: State, term: Term, reduction: Reduction) -> None:
    """Raise if the loss has other derivatives than its parts together. What can't be evaluated so is not judged."""
    if model.tasks.count is not None:  # one task has the same derivatives
        z = row_of({n: z[n] for n in (*model.parameters, *model.seen.statistics) if n in z}, 0)
        buffers, term = row_of(buffers, 0), term._replace(batch=row_of(term.given(), 0))
    probe = Probe(model, Conditions(model), z, buffers)
    few = few_samples(term, _ROWS)
    if count_samples(few.name, few.given()) < 2:
        return

    def in_parts(module: nn.Module, *batch: Any) -> Tensor:
        values: list[Tensor] = []
        for piece in split(term.name, batch, 2, 0):
            value, _ = value_and_aux(term.name, term.loss(module, *piece.batch))
            values.append(piece.share * value if reduction == "mean" else value)
        return values[0] + values[1]

    try:
        with undisturbed(model), _ConstantDraws(), guarded():
            before = random_states(model.devices)
            whole = probe.gradients(Losses([few._replace(weight=1.0)]))
            if drawn_from(before, random_states(model.devices)) is not None:
                return  # by a function that the mode does not know
            parts = probe.gradients(Losses([few._replace(loss=in_parts, weight=1.0)]))
    except NotChecked:
        return
    for what in dict.fromkeys([*whole, *parts]):
        x, y = (found.get(what, torch.zeros(())) for found in (whole, parts))
        size = max(float(x.norm()), float(y.norm()))
        if float((x - y).norm()) > _ALLOWED * size:
            raise ValueError(
                f"bilevel.inner: {term.name} is not the {reduction} over the samples in {what}: on {_ROWS} of them, "
                f"that of two parts together differs by {float((x - y).norm()) / size:.1%}. micro= is not exact for a "
                "loss whose weights of samples are normalised over the batch (softmax, w / w.sum()), or that compares "
                "samples with each other, be it in training mode alone. Leave out micro=, or normalise by a constant. "
                f"reduction={reduction!r} skips this test."
            )


class _ConstantDraws(TorchFunctionMode):
    """A mode in which random numbers are constants, so that a sample has the same ones in any part of its batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removesuffix("_like").rstrip("_").removeprefix("_")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        if name not in ("rand", "randn", "uniform", "normal", "bernoulli", "exponential"):
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        try:
            drawn: Tensor = func(*args, **kwargs)
        finally:
            torch.set_rng_state(state)
        return drawn.fill_(0.5)
