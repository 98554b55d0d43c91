"""Implicit differentiation at the fixed point z* = Φ(z*, λ), with α frozen at its last value.

    dg/dλ = ∂g/∂λ + v·∂Φ/∂λ,   v·(I − ∂Φ/∂z) = ∇_z g

Memory: the graph of one step, whatever K is. It is right at the fixed point only. Whether the loop has
reached it is tested on the hypergradient itself, which is taken at z and nearer to the fixed point, and may differ by
`settled`: at Φ(z), or for CG where a Newton step leads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..autograd import rows
from ..autograd.derive import Gradients, Traced, vjp
from ..autograd.trees import State, as_leaves
from ..step.step import Step
from ..step.traced import traced
from ..update.update import Update
from .base import Engine, OuterLoss, Tape, refuse_create_graph

Operator = Callable[[State], State]


@dataclass(frozen=True)
class _Implicit(Engine):
    """The options of both engines.

    iterations: the largest number of products with ∂Φ/∂z. tol: the relative residual to reach; None accepts what the
    iterations give. settled: how much the hypergradient may change, relative to its size, from z to Φ(z), or to
    where a Newton step leads.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed point",)
    nearer: ClassVar[str] = "after one more step"
    iterations: int = 1000
    tol: float | None = 1e-6
    settled: float = 0.01

    @property
    def traces_steps(self) -> bool:
        return True

    def tape(self) -> Tape:
        return _ImplicitTape(self)

    @abstractmethod
    def solve(self, pull: Operator, a: State) -> State:
        """Return v with v − pull(v) = a, where pull(v) = v·∂Φ/∂z."""

    def ahead(self, pull: Operator, z: State, to: State) -> State:
        """Return a state nearer to the fixed point than z is, given to = Φ(z)."""
        return to

    def not_converged(self, residual: float) -> RuntimeError:
        return RuntimeError(
            f"bilevel.{type(self).__name__}: the relative residual is {residual:.1e} after {self.iterations} "
            f"iterations (tol={self.tol}). Allow more iterations, accept the result by tol=None, or use "
            "engine='reverse'."
        )


@dataclass(frozen=True)
class CG(_Implicit):
    """Conjugate gradients on I − ∂Φ/∂w, which is c·∇²(the step's loss): symmetric, and positive at a minimum.

    Examples:
        The minimiser of h is w* = 1/(1 + λ), and dw*/dλ = −1/(1 + λ)².

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> lam = torch.tensor(1.0, requires_grad=True)
        >>> h = lambda m: 0.5 * (m.weight - 1).square().sum() + 0.5 * lam * m.weight.square().sum()
        >>> g = lambda m: m.weight.sum()
        >>> with bilevel.inner(model, h, g, solver="gd", lr=0.4, engine=bilevel.CG()) as loop:
        ...     _ = loop.run(30)
        ...     print(loop.hypergrad(lam))
        tensor(-0.2500)
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed point", "symmetry")
    nearer: ClassVar[str] = "after a Newton step"

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
                    f"bilevel.CG: found a direction of curvature {curvature:.1e}, so w_K is not a strict minimum of "
                    "the step's loss, and w(λ) has no derivative there. Add a regulariser to h, take more steps, or "
                    "use engine='reverse'."
                )
            v, r = _add(v, rr / curvature, p), _add(r, -rr / curvature, ap)
            rr, before = _dot(r, r), rr
            p = _add(r, rr / before, p)
        if self.tol is not None and rr > self.tol**2 * start:
            raise self.not_converged((rr / start) ** 0.5)
        return v

    def ahead(self, pull: Operator, z: State, to: State) -> State:
        """Return the fixed point by one Newton step, z + (I − ∂Φ/∂z)⁻¹(Φ(z) − z), whatever the rate of the steps is."""
        return _add(z, 1.0, self.solve(pull, {n: to[n] - x for n, x in z.items()}))


@dataclass(frozen=True)
class Neumann(_Implicit):
    """v = Σ_j a·(∂Φ/∂z)^j, for a Φ that contracts. Φ need not be symmetric, so momentum is allowed.

    Examples:
        The minimiser of h is w* = 1/(1 + λ), and dw*/dλ = −1/(1 + λ)².

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> lam = torch.tensor(1.0, requires_grad=True)
        >>> h = lambda m: 0.5 * (m.weight - 1).square().sum() + 0.5 * lam * m.weight.square().sum()
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        >>> g = lambda m: m.weight.sum()
        >>> with bilevel.inner(model, h, g, solver="gd", optimizer=sgd, engine=bilevel.Neumann()) as loop:
        ...     _ = loop.run(60)
        ...     print(loop.hypergrad(lam))
        tensor(-0.2500)
    """

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
                    "bilevel.Neumann: the Neumann series diverges: Φ does not contract at w_K. Use a smaller rate, or "
                    "engine='reverse'."
                )
        if self.tol is not None:
            raise self.not_converged((size / start) ** 0.5)
        return v


class _ImplicitTape(Tape):
    reaches_start = False

    def __init__(self, options: _Implicit) -> None:
        self._options = options
        self._step: Step | None = None
        self._last: State = {}

    def begin(self, step: Step, z: State, *, whole: bool) -> None:
        pass

    def close(self, step: Step, z: State, update: Update) -> State:
        to = step.close(z, update)
        self._step, self._last = step, as_leaves(to)
        return to

    def add_loss(self, loss: OuterLoss) -> None:
        raise ValueError(
            f"bilevel.inner: engine={type(self._options).__name__} differentiates the fixed point of the steps, so it "
            "can't take losses at earlier weights (loop.add_outer_loss). Use engine='reverse', 'unroll' or 'forward'."
        )

    def pull(
        self, end: OuterLoss | None, inputs: Sequence[Tensor] | None, create_graph: bool
    ) -> tuple[Gradients, State]:
        refuse_create_graph(create_graph)
        assert end is not None
        found = Gradients()
        step = self._step
        a = end.pull(inputs, found)
        if step is None:  # no step was taken: the direct gradient is all there is
            return found, {}
        ahead = self._at(step, self._last, a, inputs, found)
        other = Gradients()
        if end.is_function:  # a loss= that the user computed can't be evaluated at another state
            a = end.pull(inputs, other, ahead)
        else:
            end.pull(inputs, other)
        self._at(step, ahead, a, inputs, other)
        self._check_settled(found, other)
        return found, {}

    def _at(self, step: Step, z: State, a: State, inputs: Sequence[Tensor] | None, into: Gradients) -> State:
        """Add a·(I − ∂Φ/∂z)⁻¹·∂Φ/∂λ at z to the sums, and return Φ(z)."""

        def run(found: Traced) -> State:
            at = {n: x for n, x in found.at.items() if x.requires_grad}

            def pull(u: State) -> State:
                grads = vjp(found.to, u, list(at.values()))
                return {n: g for n, g in zip(at, grads, strict=True) if g is not None}

            known = {n: x for n, x in a.items() if n in at}
            count = rows.number([at[n] for n in known], list(known.values()))
            each = [known] if count is None else [{n: x[i] for n, x in known.items()} for i in range(count)]
            solve, zeros = self._options.solve, {n: torch.zeros_like(x) for n, x in at.items()}
            solved = [solve(pull, {**zeros, **of_row}) for of_row in each]
            v = solved[0] if count is None else {n: torch.stack([x[n] for x in solved]) for n in at}
            found.vjp(v, inputs, into)
            to = {n: x.detach().clone() for n, x in found.to.items()}
            w = {n: x.detach() for n, x in at.items() if n in step.model.parameters}
            return as_leaves({**to, **self._options.ahead(pull, w, to)})

        return traced(step, z, run)

    def _check_settled(self, here: Gradients, ahead: Gradients) -> None:
        """Raise if the gradients change too much, each weighted by the size of its variable to have the unit of g."""
        changes: dict[int, float] = {}  # for each row of a vector of outer losses
        sizes: dict[int, float] = {}
        for mine, others in ((here.direct, ahead.direct), (here.cut, ahead.cut)):
            for key, (x, grad) in mine.items():
                other = others[key][1] if key in others else torch.zeros_like(grad)
                unit, many = float(x.detach().norm()) or 1.0, grad.dim() > x.dim()
                for i, (mine_i, other_i) in enumerate(zip(grad, other, strict=True) if many else [(grad, other)]):
                    changes[i] = changes.get(i, 0.0) + unit * float((mine_i - other_i).norm())
                    sizes[i] = sizes.get(i, 0.0) + unit * max(float(mine_i.norm()), float(other_i.norm()))
        wrong = [i for i, change in changes.items() if not change <= self._options.settled * sizes[i]]
        if wrong:
            change, size = changes[wrong[0]], sizes[wrong[0]]
            name = type(self._options).__name__
            raise RuntimeError(
                f"bilevel.{name}: the engine differentiates the fixed point of the inner steps, and the loop has not "
                f"reached it: {self._options.nearer} the gradient would change by "
                f"{change / size if size else 1.0:.1%}. Take more steps, use engine='reverse', or allow the change: "
                f"bilevel.{name}(settled=...)."
            )


def _dot(x: State, y: State) -> float:
    return sum(float((x[n] * y[n]).sum()) for n in x if n in y)


def _scale(c: float, x: State) -> State:
    return {n: c * value for n, value in x.items()}


def _add(x: State, c: float, y: State) -> State:
    """Return x + c·y, where entries that y lacks count as 0."""
    return {n: value + c * y[n] if n in y else value for n, value in x.items()}
