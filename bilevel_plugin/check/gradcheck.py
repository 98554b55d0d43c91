"""`bilevel.gradcheck` checks the hypergradient of a problem, and the second derivatives that it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.trees import State, map_tensors
from ..guards.opening import inner_parameters, refuse_model
from ..inner import inner
from ..inputs import Inputs, as_tuple, leaves
from ..model.losses import Loss
from ..model.model import Model
from ..step.conditions import Conditions
from ..step.piece import Term, value_of
from ..update.solvers import resolve as resolve_solver
from ..update.watch import resolve_optimizer
from .differences import Difference, NotChecked, Scale, compare
from .modules import failing_modules, randn_like
from .probe import Losses, Probe, guarded


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, the relative error, and the verdict: "ok", "WRONG" or "?" (undecided)."""

    what: str
    error: float
    verdict: str
    note: str = ""

    @staticmethod
    def of(what: str, found: Difference) -> Finding:
        """Return the finding for a comparison."""
        rough = f"the differences have an error of {found.rough:.1e}: a kink, or rounding"
        return Finding(what, found.error, found.verdict, rough if found.verdict == "?" else "")

    def __str__(self) -> str:
        error = [f"relative error {self.error:.1e}"] if self.error < math.inf else []
        return f"  {self.verdict:<5} {self.what}: {', '.join([*error, *([self.note] if self.note else [])])}"


@dataclass(frozen=True)
class Report:
    """The result of `gradcheck`. It is true in a boolean context if every comparison holds; print it to read it."""

    directions: list[Finding]
    second_derivatives: list[Finding]
    modules: list[str]

    def __bool__(self) -> bool:
        """Whether nothing is wrong, and the losses and one direction or more of each input passed."""
        passed = {f.what.rpartition(",")[0] for f in self.directions if f.verdict == "ok"}
        inputs = {f.what.rpartition(",")[0] for f in self.directions}
        return not self._wrong() and passed == inputs and all(f.verdict == "ok" for f in self.second_derivatives)

    def _wrong(self) -> bool:
        return any(f.verdict == "WRONG" for f in (*self.directions, *self.second_derivatives))

    def __str__(self) -> str:
        head = "all holds" if self else "something is WRONG" if self._wrong() else "undecided; try it in float64"
        lines = [f"bilevel.gradcheck: {head}"]
        lines += ["hypergradient against central differences, along random directions:", *map(str, self.directions)]
        lines += ["derivatives of the losses at w_0 against differences, in float64:"]
        lines += [*map(str, self.second_derivatives), *(f"  look at the module {m}" for m in self.modules)]
        return "\n".join(lines)


def gradcheck(
    model: nn.Module,
    h: Loss,
    g: Loss,
    inputs: Inputs,
    *batch: Any,
    outer: Any = (),
    steps: int = 3,
    directions: int = 3,
    seed: int = 0,
    tol: float | None = None,
    **options: Any,
) -> Report:
    """Check the hypergradient of your own problem, and the second derivatives it needs.

    It runs `steps` inner steps on one batch, and compares `hypergrad(inputs)` along random directions with central
    differences of g(w_K). Then it compares the derivatives of h and g with differences, in float64. If these fail, it
    tries the modules one by one, and names the deepest that fail. Model and inputs are left as they were.

    Args:
        inputs: leaves to differentiate for; further arguments as in `inner`, `step` and `hypergrad`.
        directions: how many random directions for each input.
        tol: the relative error to allow; by default 1e-6 in float64 and 1e-2 in float32. Check in float64 where you
            can: with kinks (ReLU, max pooling) or in float32 the differences may be too rough to decide.
        options: those of `inner`: solver, lr, optimizer, direction, clip, engine, tasks.

    Examples:
        A `.detach()` hides from autograd that the loss depends on λ, and the differences tell.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> lam = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        >>> g = lambda m: (m.weight - 1).square().sum()
        >>> h = lambda m: (m.weight - lam**2).square().sum()
        >>> bool(bilevel.gradcheck(model, h, g, lam, solver="gd", lr=0.1))
        True
        >>> h = lambda m: (m.weight - lam * lam.detach()).square().sum()
        >>> bool(bilevel.gradcheck(model, h, g, lam, solver="gd", lr=0.1))
        False
    """
    tensors = leaves(inputs, "gradcheck")
    scale = Scale.of([*tensors.values(), *model.parameters()], tol)
    devices = _model_of(model, options).devices
    settings: dict[str, Any] = {"check": False, **options}
    block = inner(model, h, g, **settings)

    def run(differentiate: bool) -> tuple[float, list[Tensor]]:
        torch.manual_seed(seed)
        with block as loop:
            loop.run(steps, *batch, outer=outer)
            if not differentiate:
                return float(loop.value), []
            return 0.0, loop.hypergrad(list(tensors.values()))

    with torch.random.fork_rng(devices=[d.index or 0 for d in devices if d.type == "cuda"]):
        found = _check_directions(tensors, run, directions, scale, seed)
        second, modules = _check_second_derivatives(model, (("h", h, batch), ("g", g, outer)), options, seed)
    return Report(found, second, modules)


def _check_directions(
    tensors: State,
    run: Callable[[bool], tuple[float, list[Tensor]]],
    directions: int,
    scale: Scale,
    seed: int,
) -> list[Finding]:
    try:
        _, grads = run(True)
    except RuntimeError as error:
        return [Finding("hypergrad raised", math.inf, "WRONG", _first_line(error))]
    findings: list[Finding] = []
    for (name, x), grad in zip(tensors.items(), grads, strict=True):
        for j in range(directions):
            v = randn_like(x, seed + j)
            there = x.detach().clone()

            def along(step: float, x: Tensor = x, v: Tensor = v, there: Tensor = there) -> Tensor:
                try:
                    with torch.no_grad():
                        x.copy_(there + step * v)
                    return torch.tensor(run(False)[0], dtype=torch.float64)
                finally:
                    with torch.no_grad():
                        x.copy_(there)

            got = (grad * v).sum().detach()
            what = f"input {name}, direction {j}" if name else f"input, direction {j}"
            # the entries of v have unit variance, so ‖∇‖ is the size of a typical ∇·v
            findings.append(Finding.of(what, compare(got, along, scale, typical=float(grad.norm()))))
    return findings


def _check_second_derivatives(
    model: nn.Module,
    losses: Sequence[tuple[str, Loss, Any]],
    options: dict[str, Any],
    seed: int,
) -> tuple[list[Finding], list[str]]:
    """Check the derivatives of each loss that a hypergradient needs, at the initial weights, by the sentinel's probe.

    These are the second derivatives of a loss that the steps descend, and the gradient of any other.
    """
    findings: list[Finding] = []
    modules: list[str] = []
    whole = _model_of(model, options)
    rule, _ = resolve_solver(options.get("solver", "bigsam"), options.get("lr"), options.get("optimizer") is not None)
    used = {"h"} | ({"g"} if any(rule.weights(k)[1] != 0 for k in range(1, 9)) else set[str]())
    whole.open()
    try:
        for name, loss, batch in losses:
            args = as_tuple(batch)
            if options.get("tasks") is not None:  # the loss is written for one task
                args = map_tensors(lambda x: x[0], args)
            torch.manual_seed(seed)
            z = {n: x.detach().clone() for n, x in (*whole.parameters.items(), *whole.buffers.items())}
            term = Term(name, loss, args)
            findings.append(_of_loss(term, whole, z, name in used))
            if findings[-1].verdict == "WRONG":

                def value(name: str = name, loss: Loss = loss, term: Term = term, z: State = z) -> Tensor:
                    torch.manual_seed(seed)
                    return whole.at(z, z, lambda at: value_of(whole, name, loss, at, term.given()), graph=True)

                modules += [m for m in failing_modules(whole, value, seed) if m not in modules]
    finally:
        whole.close()
    return findings, modules


def _of_loss(term: Term, model: Model, z: State, twice: bool) -> Finding:
    what = f"loss {term.name}"
    try:
        with guarded():
            probe = Probe(model, Conditions(model), z, z)
            parts = probe.first_derivative(term)
            if twice:
                parts += probe.second_derivative(Losses([term]))
    except NotChecked as why:
        return Finding(what, math.inf, "?", str(why))
    except RuntimeError as error:
        return Finding(what, math.inf, "WRONG", _first_line(error))
    worst = max(parts, key=lambda part: (part.difference.verdict == "WRONG", part.difference.error))
    if worst.difference.verdict == "WRONG":
        return Finding(what, worst.difference.error, "WRONG", f"along {worst.what}")
    return Finding(what, worst.difference.error, "ok")


def _model_of(model: nn.Module, options: dict[str, Any]) -> Model:
    refuse_model(model)
    return Model(model, inner_parameters(model, resolve_optimizer(options.get("optimizer"))[0]))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].removeprefix("bilevel.inner: ")
