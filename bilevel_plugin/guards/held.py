"""Between the steps the model holds the state of the loop, and only the loop changes it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.nn.utils import parametrize

from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State, same_bits
from ..model.model import Model


class Held:
    """What the model of a loop must still hold when the loop comes back to it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._children = [(m._modules, tuple(m._modules.values())) for m in model.modules]
        self._flags = [(p, p.requires_grad) for p in model.module.parameters()]
        mine = {**model.parameters, **({} if model.tasks.count else model.buffers)}
        self._places = [(holder, key, n, mine[n]) for holder, key, n in model.places if n in mine]

    def check(self, z: State, k: int, *, numbers: bool = True) -> None:
        """Raise if the model was changed since step k.

        Without `numbers`, the values of weights with an unchanged version are not compared. The step that follows
        compares them in any case (`check_not_written`).
        """
        model = self._model
        assert model.session is not None
        model.session.check_innermost()
        if not model.holds:
            return
        for holder, key, n, x in self._places:
            if holder.get(key) is not x:
                raise RuntimeError(
                    f"bilevel.inner: {n!r} of the model was replaced in the block, after step k = {k}, and may carry a "
                    "graph. Compute it inside h; build the model before the block, and open a new block after such a "
                    "change."
                )
        for now, then in self._children:
            if len(now) != len(then) or tuple(now.values()) != then:
                raise RuntimeError(
                    f"bilevel.inner: the layers of the model have changed in the block, after step k = {k}: one was "
                    "replaced, added or removed. Build the model before the block, and open a new block after such a "
                    "change."
                )
        for p, flag in self._flags:
            if p.requires_grad != flag:
                raise RuntimeError(self._flag(p, k))
        self._check_weights(z, k, numbers)
        self._check_buffers(z, k)
        if model.parametrized and parametrize._cache_enabled:
            raise RuntimeError(
                "bilevel.inner: parametrize.cached() is on, and the cached weights are not those of the current step. "
                "Use it inside h and g, not around the block."
            )

    def _check_weights(self, z: State, k: int, numbers: bool) -> None:
        model = self._model
        for (n, p), version in zip(model.parameters.items(), model.versions, strict=True):
            x = z[n]
            same = p._version == version and p.shape == x.shape and p.dtype == x.dtype
            if p.device.type == "cpu" and (numbers or not same):  # values may be back
                same = same_bits(p, x)
            if not same and not p.is_meta:
                raise RuntimeError(
                    f"bilevel.inner: the weight {n!r} was changed by hand after step k = {k}, and the derivative of "
                    "that change is not known. In the block it is loop.step that trains: leave out optimizer.step(), "
                    "load_state_dict and writing to the weights. What a step should do to them (a projection, say) "
                    "belongs into h, as a function of them."
                )
        model.note_versions()

    def _check_buffers(self, z: State, k: int) -> None:
        model = self._model
        for n, b in model.buffers.items():
            x = z[n] if n in z else model.held_buffers[n]
            if b.shape != x.shape or (b.device.type == "cpu" and not same_bits(b, x)):
                if model.companions is not None and n in model.companions.parameters:
                    raise RuntimeError(
                        f"bilevel.inner: {n!r} was changed by hand after step k = {k}. In the block a companion moves "
                        "by its rule (companions=), right after each step: leave out the code that moves it."
                    )
                raise RuntimeError(
                    f"bilevel.inner: the buffer {n!r} was changed in the block, after step k = {k}, and the derivative "
                    "of that change is not known. A look at the model in training mode updates running statistics: "
                    "call model.eval() before it, or loop(x) in place of model(x). What belongs to a step goes into h."
                )

    def check_not_written(self, z: State, k: int) -> None:
        """Raise if a loss of step k has written to the weights in a way that leaves their version unchanged."""
        if self._model.holds:
            for n, p in self._model.parameters.items():
                if p.device.type == "cpu" and not same_bits(p, z[n]):
                    raise RuntimeError(
                        f"bilevel.inner: the weight {n!r} was changed by hand after step k = {k - 1}, or a loss writes "
                        "to it (a projection), and the derivative of that change is not known. Leave it to loop.step, "
                        "or write it as a function of the weights that the loss uses: a parametrization, or a term of "
                        "the loss."
                    )

    def _flag(self, p: Tensor, k: int) -> str:
        name = next(n for n, q in self._model.module.named_parameters() if q is p)
        state = "unfrozen" if p.requires_grad else "frozen"
        return (
            f"bilevel.inner: the parameter {name!r} was {state} (requires_grad was set to {p.requires_grad}) in the "
            f"block, after step k = {k}. Set requires_grad "
            "before the block, and open a new block for another set of weights."
        )


def warn_if_read(model: Model, grads: Mapping[str, Tensor | None]) -> None:
    """Warn once if a loss uses a buffer that a step has changed by a rule whose derivative is not known."""
    for n, grad in grads.items():
        if model.seen.warns and grad is not None and (grad.is_meta or bool(grad.any())):
            model.seen.warns = False
            warnings.warn(
                f"bilevel.inner: the buffer {n!r} is changed by a step and read by a loss after it. The derivative "
                "of that change is not known (that of running statistics of BatchNorm and InstanceNorm is), and "
                "the hypergradient leaves it out. Leave it as bilevel.stop_gradient(...) in the loss that changes "
                "it, and it is part of the loop; or check=False if you know.",
                DerivativeWarning,
                stacklevel=8,
            )
