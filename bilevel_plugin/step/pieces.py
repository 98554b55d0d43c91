"""How the losses of a call become pieces: the parts of a batch (micro=), and tasks that are taken one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.model import Model
from ..model.tasks import row_of
from .batches import Micro, split
from .fetching import Fetched
from .piece import Piece, Term

Batch = tuple[Any, ...]


def pieces_of(model: Model, terms: Sequence[Term], only: frozenset[str] | None, micro: Micro | None) -> list[Piece]:
    """Return the pieces whose gradients add up to that of the losses."""
    for t in terms:
        model.tasks.check_batch(t.name, t.given())
    rounds = [list(terms)] if micro is None else _parts(model, terms, micro)
    pieces = [Piece(model, [_of_row(t, row) for t in mine], only, row) for mine in rounds for row in model.tasks.rows]
    for piece in pieces:
        piece.part = micro is not None
    pieces[-1].last = True
    for t in terms:
        if isinstance(t.batch, Fetched):
            for its in pieces[0].terms:
                if isinstance(its.batch, Fetched):
                    its.batch.flow = len(pieces) == 1
            if len(pieces) > 1:
                t.batch.source.conditions.end_of_call()
    return pieces


def _of_row(term: Term, row: int | None) -> Term:
    return term if row is None else _with(term, lambda batch: row_of(batch, row), term.share)


def _parts(model: Model, terms: Sequence[Term], micro: Micro) -> list[list[Term]]:
    """Return the losses on each part of their batches."""
    reductions, dimension = dict(micro.reductions), model.tasks.batch_dimension
    parts = [(t, split(t.name, t.given(), micro.parts, dimension)) for t in terms]
    rounds: list[list[Term]] = []
    for i in range(micro.parts):
        mine: list[Term] = []
        for t, its in parts:
            if i < len(its):
                share = its[i].share if reductions[t.name] == "mean" else 1.0

                def part(batch: Batch, name: str = t.name, i: int = i) -> Batch:
                    return split(name, batch, micro.parts, dimension)[i].batch

                mine.append(_with(t, part, share))
        # a batch may have fewer samples, but all ranks need the same number of pieces
        if mine or not rounds or model.ranks.share != 1:
            rounds.append(mine)
    return rounds


def _with(term: Term, part: Callable[[Batch], Batch], share: float) -> Term:
    """Return the loss on a part of its batch."""
    batch = term.batch
    if isinstance(batch, Fetched):
        before = batch.part or (lambda whole: whole)
        return term._replace(batch=Fetched(batch.source, lambda whole: part(before(whole))), share=share)
    with torch.enable_grad():
        return term._replace(batch=part(batch), share=share)
