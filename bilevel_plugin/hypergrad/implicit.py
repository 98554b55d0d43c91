"""Implicit differentiation at the fixed point z* = Φ(z*, λ), with α frozen at its last value.

    dg/dλ = ∂g/∂λ + v·∂Φ/∂λ,   v·(I − ∂Φ/∂z) = ∇_z g

Memory: the graph of one step, whatever K is. Right at the fixed point only; how far the loop is from it is
estimated by v·(Φ(z) − z), to first order the change of g that is still to come, and too large a one is an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..binding import State
from ..step import Gradients, Phi, Traced
from .base import Engine, Tape, as_leaves, one, refuse_create_graph

Operator = Callable[[State], State]


@dataclass(frozen=True)
class _Implicit(Engine):
    """The options of both engines.

    iterations: at most so many products with ∂Φ/∂z. tol: the relative residual to reach; None takes what the
    iterations give. settled: the largest change of g, relative to g, that may still be to come.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed point",)
    iterations: int = 1000
    tol: float | None = 1e-6
    settled: float = 0.01

    def tape(self) -> Tape:
        return _ImplicitTape(self)

    @abstractmethod
    def solve(self, pull: Operator, a: State) -> State:
        """v with v − pull(v) = a, where pull(v) = v·∂Φ/∂z."""

    def give_up(self, residual: float) -> RuntimeError:
        return RuntimeError(
            f"bilevel.inner: {type(self).__name__} has a relative residual of {residual:.1e} after {self.iterations} "
            f"iterations (tol {self.tol}). Give it more iterations, tol=None to take what it has, or use "
            "hypergrad='reverse'."
        )


@dataclass(frozen=True)
class CG(_Implicit):
    """Conjugate gradients on I − ∂Φ/∂w, which is c·∇²(the step's loss): symmetric, and positive at a minimum."""

    needs: ClassVar[tuple[str, ...]] = ("fixed point", "symmetry")

    def solve(self, pull: Operator, a: State) -> State:
        v, r, p = _scale(0.0, a), a, a
        rr = start = _dot(r, r)
        for _ in range(self.iterations):
            if self.tol is not None and rr <= self.tol**2 * start:
                return v
            if rr == 0:
                return v
            ap = _add(p, -1.0, pull(p))
            curvature = _dot(p, ap)
            if not curvature > 0:
                raise RuntimeError(
                    f"bilevel.inner: CG met a direction of curvature {curvature:.1e}: w_K is no strict minimum of the "
                    "step's loss, so that w(λ) has no derivative there. Add a regulariser to h, take more steps, or "
                    "use hypergrad='reverse'."
                )
            v, r = _add(v, rr / curvature, p), _add(r, -rr / curvature, ap)
            rr, before = _dot(r, r), rr
            p = _add(r, rr / before, p)
        if self.tol is not None and rr > self.tol**2 * start:
            raise self.give_up((rr / start) ** 0.5)
        return v


@dataclass(frozen=True)
class Neumann(_Implicit):
    """v = Σ_j a·(∂Φ/∂z)^j, for a Φ that contracts; takes momentum as well, and a Φ of no symmetry."""

    def solve(self, pull: Operator, a: State) -> State:
        v, term = a, a
        start = size = _dot(a, a)
        for _ in range(self.iterations):
            term = pull(term)
            v = _add(v, 1.0, term)
            size = _dot(term, term)
            if size == 0 or (self.tol is not None and size <= self.tol**2 * start):
                return v
            if not size <= 1e12 * start:
                raise RuntimeError(
                    "bilevel.inner: the Neumann series diverges: Φ does not contract at w_K. Use a smaller rate, or "
                    "hypergrad='reverse'."
                )
        if self.tol is not None:
            raise self.give_up((size / start) ** 0.5)
        return v


class _ImplicitTape(Tape):
    whole = False

    def __init__(self, options: _Implicit) -> None:
        self._options = options
        self._phi: Phi | None = None
        self._last: State = {}

    def step(self, phi: Phi, z: State) -> State:
        self._phi, self._last = phi, as_leaves(phi(z, graph=False).to)
        return self._last

    def pull(self, end: Traced, inputs: Sequence[Tensor] | None, create_graph: bool) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        found = Gradients()
        a = end.vjp(one(end), inputs, found)
        if self._phi is None:  # no step was taken: the direct gradient is all there is
            return found, {}
        phi = self._phi(self._last, graph=True)
        a = {n: a.get(n, torch.zeros_like(x)) for n, x in self._last.items()}
        in_z_alone = Traced(phi.at, phi.to)
        v = self._options.solve(lambda u: in_z_alone.vjp(u, (), Gradients()), a)
        self._check_settled(phi, v, end)
        phi.vjp(v, inputs, found)
        return found, {}

    def _check_settled(self, phi: Traced, v: State, end: Traced) -> None:
        (g,) = (float(x.detach()) for x in end.to.values())
        change = abs(_dot(v, {n: (phi.to[n] - x).detach() for n, x in phi.at.items()}))
        if not change <= self._options.settled * abs(g):
            raise RuntimeError(
                f"bilevel.inner: {type(self._options).__name__} differentiates the fixed point of the inner steps, and "
                f"the loop has not come to it: g = {g:.4g} would still change by about {change:.2g}. Take more steps, "
                f"use hypergrad='reverse', or allow it: {type(self._options).__name__}(settled=...)."
            )


def _dot(x: State, y: State) -> float:
    return sum(float((x[n] * y[n]).sum()) for n in x if n in y)


def _scale(c: float, x: State) -> State:
    return {n: c * value for n, value in x.items()}


def _add(x: State, c: float, y: State) -> State:
    """x + c·y, where what y lacks is 0."""
    return {n: value + c * y[n] if n in y else value for n, value in x.items()}
