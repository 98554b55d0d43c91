"""The derivative, without a graph, of an update that is affine in each entry: w⁺ = c_ww·w + c_wb·b + c_wd·d, b⁺ alike.

Such an update has the same few coefficients in every entry. The formula itself gives them, at the unit vectors. Then
the adjoints are sums of a few tensors: ā_x = Σ_y c_yx·a_y, for all weights of a parameter group at once.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd.trees import State
from .registry import Rule

Matrix = Mapping[str, Mapping[str, float]]  # by name of an output, and of an input; the weight is "", d is "d"
_NUMBERS = (int, float, bool, str, type(None))


def matrix_of(rule: Rule, options: Mapping[str, Any], held: tuple[str, ...]) -> Matrix | None:
    """Return the coefficients of an affine rule for a weight with these tensors; None if they are no plain numbers."""
    if not (rule.affine and rule.elementwise) or rule.own:
        return None
    if not all(isinstance(x, _NUMBERS) for x in options.values()):
        return None
    return _matrix(rule.formula, tuple(options.items()), held)


@functools.lru_cache(maxsize=256)
def _matrix(formula: Any, options: tuple[tuple[str, Any], ...], held: tuple[str, ...]) -> Matrix:
    names = ("", *held, "d")
    units = torch.eye(len(names), len(names) + 1, dtype=torch.float64)  # the last column is the constant part
    with torch.no_grad():
        w, new = formula(units[0], units[-1], dict(zip(held, units[1:-1], strict=True)), **dict(options))
    # a tensor that the formula does not return stays as it is
    outputs: dict[str, Tensor] = {**dict(zip(held, units[1:-1], strict=True)), "": w, **new}
    rows = {y: (x[:-1] - x[-1]).tolist() for y, x in outputs.items()}
    return {y: {x: c for x, c in zip(names, row, strict=True) if c} for y, row in rows.items()}


def pull_affine(names: Sequence[str], matrix: Matrix, a: State) -> tuple[State, State]:
    """Return the adjoints of the weights of these names with their tensors, and u, from the adjoint a.

    The weights are alike: a has the same entries for each.
    """
    adjoint: State = {}
    u: State = {}
    along = {y: [a[_key(n, y)] for n in names] for y in matrix if _key(names[0], y) in a}
    for x in dict.fromkeys(x for row in matrix.values() for x in row):
        total: Sequence[Tensor] | None = None
        for y, tensors in along.items():
            if (c := matrix[y].get(x)) is not None:
                if total is None:
                    total = tensors if c == 1 else torch._foreach_mul(tensors, c)  # pyright: ignore[reportPrivateImportUsage]
                else:
                    total = torch._foreach_add(total, tensors, alpha=c)  # pyright: ignore[reportPrivateImportUsage]
        if total is not None and x == "d":
            u.update(zip(names, total, strict=True))
        elif total is not None:
            adjoint.update(zip((_key(n, x) for n in names), total, strict=True))
    return adjoint, u


def _key(name: str, tensor: str) -> str:
    return f"{name}@{tensor}" if tensor else name
