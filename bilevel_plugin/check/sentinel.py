"""The sentinel, which checks that the derivatives a hypergradient depends on are those of the losses.

It looks at few samples of the last batches, which run the same code as all of them, and compares what `probe` names
with differences. This reveals any cause that makes the two differ: `.detach()` that drops a path, a custom backward
that can't be differentiated, a straight-through estimator.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State, map_tensors, tensors_of
from ..engine.budget import free
from ..kernels.statistics import NORMALISATIONS
from ..model.losses import Loss
from ..model.model import Model
from ..model.tasks import row_of
from ..step.batches import samples_of, split
from ..step.piece import Term
from ..step.step import Step
from ..update.prepared import Prepared
from .compared import Compared
from .differences import NotChecked
from .held import switches
from .probe import Losses, Probe, guarded
from .updates import IN_STATE, compare_update

_G, _UPDATE = "the gradient of g", "the derivative of direction=, a hook or a rule"
_BYTES_A_WEIGHT = 32  # that the check takes: float64 weights, their gradient one by one, and a cotangent
_CHECKED: set[object] = set()  # what was checked: the structures of models, with the losses and their switches


class Sentinel:
    """Checks the derivatives of one loop when its first hypergradient is taken."""

    def __init__(
        self, model: Model, g: Loss | None, check: Literal["first", "always", False], *, sparing: bool = False
    ) -> None:
        self._model, self._g, self._check = model, g, check
        self._sparing = sparing  # the loop is one that just fits into the memory

    def is_due(self, step: Step) -> bool:
        """Whether steps of this kind must still be checked. A call that returns True marks them as checked."""
        if self._check is False or next(iter(self._model.parameters.values())).is_meta:
            return False
        if self._check == "always":
            return True
        losses = tuple((t.name, switches(t.loss)) for piece in step.pieces for t in piece.terms)
        update = switches(step.update) if step.update is not None and step.update.closes_over else type(step.update)
        key = self._model.structure(), switches(self._model.module), switches(self._g), losses, step.only, update
        new = key not in _CHECKED
        _CHECKED.add(key)
        return new

    def examine(
        self, step: Step, z: State, buffers: State, outer: tuple[Any, ...] | None, trained: Collection[str]
    ) -> None:
        """Compare the derivatives of a step's losses, and of g, with differences at the current weights."""
        model, piece = self._model, next(piece for piece in step.pieces if piece.terms)
        losses, one = Losses(piece.terms, piece.only), model.tasks.count is not None
        with piece.record.conditions.replaying():  # a batch that is fetched may draw random numbers
            _ = [t.given() for t in piece.terms]
        if one:  # one task has the same derivatives to test
            z = row_of({n: z[n] for n in (*model.parameters, *model.seen.statistics) if n in z}, 0)
            buffers, outer = row_of(buffers, 0), row_of(outer, 0)
            if piece.row is None:
                losses = losses._replace(terms=[t._replace(batch=row_of(t.given(), 0)) for t in piece.terms])
        last = [] if self._g is None or outer is None else [Term("g", self._g, outer)]
        try:
            with guarded():
                if self._sparing:
                    self._check_memory()
                probe = Probe(model, piece.record.conditions, z, buffers)
            found = self._compared(probe, losses, last, trained)
            if step.update is not None and step.update.closes_over and not one:
                probe.rows = None  # the update is that of the whole batch
                with guarded():
                    parts = compare_update(step.update, z, probe.gradient_of(losses))
                if isinstance(step.update, Prepared):  # which compares the derivatives of its functions when it runs
                    parts = [part for part in parts if part.what not in IN_STATE]
                found.append((_UPDATE, parts))
        except NotChecked as why:
            warnings.warn(
                f"bilevel.inner: the derivatives of this loop could not be checked: {why}. Check them by "
                "bilevel.gradcheck on a small problem. check=False leaves out the check and this warning.",
                DerivativeWarning,
                stacklevel=5,
            )
            return
        finally:
            piece.release()
        for what, parts in found:
            self._warn(what, parts, None if what == _G else step.k)

    def _compared(
        self, probe: Probe, losses: Losses, last: Sequence[Term], trained: Collection[str]
    ) -> list[tuple[str, list[Compared]]]:
        """Compare the derivatives on few samples; on all of them where a few do not do, or have nothing to compare."""
        given = *last, *losses.terms
        few = [few_samples(t, self._rows) for t in given]
        n = next((n for t in losses.terms if (n := count_samples(t.name, t.given()))), 0)
        why: object = "nothing depends on them"
        for rows in (None, (n, self._rows)):  # outer variables may have an entry for each sample of the batch
            probe.rows = rows
            try:
                found = self._look(probe, losses, few, bool(last), trained)
                if all(any(part.says_something for part in parts) for _, parts in found):
                    return found
                break
            except Exception as error:
                why = error
        if self._sparing:
            raise NotChecked(f"memory is short, and on {self._rows} samples alone: {why}")
        probe.rows = None
        return self._look(probe, losses, given, bool(last), trained)

    def _look(
        self, probe: Probe, losses: Losses, terms: Sequence[Term], with_g: bool, trained: Collection[str]
    ) -> list[tuple[str, list[Compared]]]:
        found: list[tuple[str, list[Compared]]] = []
        with guarded():
            if with_g:
                found.append((_G, probe.first_derivative(terms[0], trained)))
            if inner := terms[with_g:]:
                parts = probe.second_derivative(losses._replace(terms=inner), trained)
                found.append((f"the second derivative of {' and '.join(t.name for t in inner)}", parts))
        return found

    @property
    def _rows(self) -> int:
        """Two samples, as losses may compare them with each other; of two, batch statistics have hardly a gradient."""
        return 4 if any(isinstance(m, NORMALISATIONS) for m in self._model.modules) else 2

    def _check_memory(self) -> None:
        """Raise if what the check takes would not fit."""
        weights = self._model.parameters.values()
        need, device = _BYTES_A_WEIGHT * sum(p.numel() for p in weights), next(iter(weights)).device
        if device.type in ("cpu", "cuda") and need > (available := free(device)):
            raise NotChecked(f"the check takes about {need / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free")

    def _warn(self, what: str, parts: Sequence[Compared], k: int | None) -> None:
        wrong = [part for part in parts if part.difference.verdict == "WRONG"]
        if not wrong:
            return
        worst = max(wrong, key=lambda part: part.difference.error)
        at = "" if k is None else f", on the batch of step k = {k}"
        of = "its values" if what == _UPDATE else "the loss"
        warnings.warn(
            f"bilevel.inner: {what} is not the derivative of {of}{at}: along {worst.what} it differs by "
            f"{worst.difference.error:.2%} from differences in float64, so the hypergradient may be wrong. Likely "
            "causes: a .detach() or torch.no_grad() that drops a dependence on the weights (bilevel.stop_gradient(x) "
            "in its place takes the same steps, and keeps the dependence), an autograd.Function whose backward can't "
            "be differentiated, a straight-through estimator, or spectral_norm in training mode. bilevel.gradcheck "
            "names the module. check=False silences this warning.",
            DerivativeWarning,
            stacklevel=6,
        )


@contextmanager
def anew() -> Generator[None]:
    """Check the derivatives inside of this context even if they were checked before."""
    before = set(_CHECKED)
    _CHECKED.clear()
    try:
        yield
    finally:
        _CHECKED.update(before)


def few_samples(term: Term, few: int) -> Term:
    """Return the loss on its first samples, at most so many; on the whole batch if it can't be sliced.

    A tensor of the batch that requires grad gets leaves of its own, which no longer lead to the whole of it.
    """
    name, batch = term.name, term.given()
    wanted = [x.requires_grad for x in tensors_of(batch)]
    with torch.no_grad():
        while count_samples(name, batch) > few:
            batch = split(name, batch, 2, 0)[0].batch
    if batch is term.given():
        return term
    batch = map_tensors(lambda x: x.detach(), batch)
    for x, requires_grad in zip(tensors_of(batch), wanted, strict=True):
        x.requires_grad_(requires_grad)
    return term._replace(batch=batch)


def count_samples(name: str, batch: tuple[Any, ...]) -> int:
    """Return the number of samples in the batch; 0 if it has none, or can't be sliced."""
    try:
        return samples_of(name, batch, 0) or 0
    except (TypeError, ValueError):
        return 0
