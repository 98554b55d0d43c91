"""`bilevel.gradcheck` checks the hypergradient of a problem, and the second derivatives that it depends on.

Both are compared with central differences of fourth order: with D(ε) = (f(ε) − f(−ε)) / 2ε,

    f′(0) = (4·D(ε) − D(2ε)) / 3 + O(ε⁴),

and D(ε) − D(2ε) estimates the error of the differences themselves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..autograd.graph import find_leaves
from ..autograd.trees import State, map_tensors, tensors_of
from ..inner import inner
from ..kernels.replace import replaced
from ..loop import Inputs, as_tuple, flatten
from ..model.losses import Loss
from ..model.model import Binding
from ..step.record import Conditions
from ..step.step import Step, Term
from ..update.solvers import resolve as resolve_solver
from ..update.update import Descent, resolve_optimizer
from .sentinel import TOLERANCE, NotChecked, Probe


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, the relative error, and the verdict: "ok", "WRONG" or "?" (undecided)."""

    what: str
    error: float
    verdict: str
    note: str = ""

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
    tensors = flatten(inputs)
    for name, x in tensors.items():
        if not x.is_leaf:
            raise ValueError(
                f"bilevel.gradcheck: the input{name and f' {name}'} (shape {tuple(x.shape)}) is not a leaf, so it "
                "can't be moved to take differences. Give the leaf that it is computed from."
            )
    scale = _Scale.of([*tensors.values(), *model.parameters()], tol)
    binding = Binding(model, resolve_optimizer(options.get("optimizer"))[0])
    settings: dict[str, Any] = {"check": False, **options}
    block = inner(model, h, g, **settings)

    def run(differentiate: bool) -> tuple[float, list[Tensor]]:
        torch.manual_seed(seed)
        with block as loop:
            loop.run(steps, *batch, outer=outer)
            if not differentiate:
                return float(loop.value), []
            return 0.0, loop.hypergrad(list(tensors.values()))

    with torch.random.fork_rng(devices=[d.index or 0 for d in binding.devices if d.type == "cuda"]):
        found = _check_directions(tensors, run, directions, scale, seed)
        second, modules = _check_second_derivatives(model, (("h", h, batch), ("g", g, outer)), options, seed)
    return Report(found, second, modules)


def _check_directions(
    tensors: State,
    run: Callable[[bool], tuple[float, list[Tensor]]],
    directions: int,
    scale: _Scale,
    seed: int,
) -> list[Finding]:
    try:
        _, grads = run(True)
    except RuntimeError as error:
        return [Finding("hypergrad raised", math.inf, "WRONG", _first_line(error))]
    findings: list[Finding] = []
    for (name, x), grad in zip(tensors.items(), grads, strict=True):
        for j in range(directions):
            v = _randn(x, seed + j)
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
            findings.append(_compare(what, got, along, scale, float(grad.norm())))
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
    binding = Binding(model, resolve_optimizer(options.get("optimizer"))[0])
    rule, _ = resolve_solver(options.get("solver", "bigsam"), options.get("lr"), options.get("optimizer") is not None)
    used = {"h"} | ({"g"} if any(rule.weights(k)[1] != 0 for k in range(1, 9)) else set[str]())
    binding.open()
    try:
        for name, loss, batch in losses:
            args = as_tuple(batch)
            if options.get("tasks") is not None:  # the loss is written for one task
                args = map_tensors(lambda x: x[0], args)
            torch.manual_seed(seed)
            z = {n: x.detach().clone() for n, x in (*binding.parameters.items(), *binding.buffers.items())}
            term = Term(name, loss, args)
            try:
                probe = Probe(binding, Conditions(binding), z, z)
                u, error = probe.first_derivative(term)
                if name in used:
                    error = max(error, probe.second_derivative(Step(1, binding, [term], [1.0], Descent()), u))
                verdict = "ok" if error <= TOLERANCE else "WRONG"
                findings.append(Finding(f"loss {name}", error, verdict))
            except NotChecked as why:
                findings.append(Finding(f"loss {name}", math.inf, "?", str(why)))
            except RuntimeError as error:
                findings.append(Finding(f"loss {name}", math.inf, "WRONG", _first_line(error)))
            if findings[-1].verdict == "WRONG":

                def value(term: Term = term, z: State = z) -> Tensor:
                    torch.manual_seed(seed)
                    with binding.inside(z, z, graph=True) as inside:
                        return binding.loss(term.name, term.loss, inside, term.batch)

                modules += [m for m in _failing_modules(binding, value, seed) if m not in modules]
    finally:
        binding.close()
    return findings, modules


def _check_hessian(what: str, value: Callable[[State], Tensor], w: State, scale: _Scale, seed: int) -> Finding:
    """Compare ∇²f·v by double backward with differences of ∇f along v."""
    v = {n: _randn(x, seed) for n, x in w.items()}

    def gradient(step: float, create_graph: bool = False) -> tuple[State, Sequence[Tensor | None]]:
        with torch.enable_grad():
            at = {n: (x + step * v[n]).requires_grad_() for n, x in w.items()}
            return at, torch.autograd.grad(value(at), list(at.values()), create_graph=create_graph, allow_unused=True)

    def flat(parts: Sequence[Tensor | None]) -> Tensor:
        filled = [torch.zeros_like(x) if p is None else p for p, x in zip(parts, w.values(), strict=True)]
        return torch.cat([p.detach().flatten().double() for p in filled])

    try:
        at, first = gradient(0.0, create_graph=True)
        find_leaves(value(at), at.values(), twice=True)
        dot = [(p * v[n]).sum() for n, p in zip(at, first, strict=True) if p is not None and p.requires_grad]
        if not dot:  # the loss seems linear in w; the differences show whether a second derivative is missing
            second: Sequence[Tensor | None] = [None] * len(at)
        else:
            second = torch.autograd.grad(torch.stack(dot).sum(), list(at.values()), allow_unused=True)
    except RuntimeError as error:
        return Finding(what, math.inf, "WRONG", f"no second derivative: {_first_line(error)}")
    return _compare(what, flat(second), lambda step: flat(gradient(step)[1]), scale)


def _failing_modules(binding: Binding, value: Callable[[], Tensor], seed: int) -> list[str]:
    """Return the deepest modules whose second derivatives fail, on the arguments that the loss calls them with."""
    calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: (
                calls.setdefault(name, (copy.deepcopy(module).double(), *map_tensors(_detached_double, (args, kwargs))))
                and None
            ),
            with_kwargs=True,
        )
        for name, module in binding.model.named_modules()
    ]
    try:
        with torch.enable_grad(), suppress(RuntimeError):  # the finding already has this error
            value()
    finally:
        for hook in hooks:
            hook.remove()
    scale = _Scale.of([])
    failing: list[tuple[str, str]] = []
    for name, (module, args, kwargs) in calls.items():

        def probe(
            w: State, module: nn.Module = module, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs
        ) -> Tensor:
            torch.manual_seed(seed)
            inputs = iter([x for n, x in w.items() if n.startswith("@")])
            args, kwargs = map_tensors(lambda x: next(inputs) if x.is_floating_point() else x, (args, kwargs))
            state = {n: x for n, x in w.items() if not n.startswith("@")}
            state |= {n: b.detach().clone() for n, b in module.named_buffers()}
            with replaced():
                out = functional_call(module, state, args, kwargs)
            outs = [x for x in tensors_of(out) if x.is_floating_point()]
            return torch.stack([(_randn(x, seed) * (x + x * x / 2)).sum() for x in outs]).sum()

        at = {n: p.detach().clone() for n, p in module.named_parameters() if p.is_floating_point()}
        floating = [x for x in tensors_of((args, kwargs)) if x.is_floating_point()]
        at |= {f"@{i}": x for i, x in enumerate(floating)}
        if at and (finding := _check_hessian(name, probe, at, scale, seed)).verdict == "WRONG":
            failing.append((name, f"{name or 'itself'!r} ({type(module).__name__}): {finding.note or 'wrong values'}"))
    return [
        text
        for name, text in failing
        if not any(n != name and n.startswith(f"{name}." if name else "") for n, _ in failing)
    ]


@dataclass(frozen=True)
class _Scale:
    """The ε of the differences, the relative error to allow, and the rounding unit of the function."""

    eps: float
    tol: float
    unit: float

    @staticmethod
    def of(tensors: Sequence[Tensor], tol: float | None = None) -> _Scale:
        fine = all(x.dtype == torch.float64 for x in tensors if x.is_floating_point())
        return _Scale(1e-4, tol or 1e-6, 2**-53) if fine else _Scale(5e-3, tol or 1e-2, 2**-24)


def _compare(what: str, got: Tensor, along: Callable[[float], Tensor], scale: _Scale, typical: float = 0.0) -> Finding:
    """Compare the derivative by autograd with central differences."""
    error, rough = _differences(got, along, scale, 1, typical)
    if error > scale.tol:  # judge by the smallest ε whose differences are good enough, or else by the best
        tried = [_differences(got, along, scale, 1 / 8, typical), (error, rough)]
        tried += [_differences(got, along, scale, 8, typical)]
        error, rough = next((d for d in tried if d[1] <= scale.tol), min(tried, key=lambda d: d[1]))
    if error <= scale.tol:
        return Finding(what, error, "ok")
    if error <= rough:
        return Finding(what, error, "?", f"the differences have an error of {rough:.1e}: a kink, or rounding")
    return Finding(what, error, "WRONG")


def _differences(
    got: Tensor, along: Callable[[float], Tensor], scale: _Scale, factor: float, typical: float
) -> tuple[float, float]:
    """Return the relative errors of `got` and of the differences: D(ε) − D(2ε), plus the rounding of f over ε."""
    eps = scale.eps * factor
    ahead, behind = along(eps), along(-eps)
    near, far = (ahead - behind) / (2 * eps), (along(2 * eps) - along(-2 * eps)) / (4 * eps)
    expected = (4 * near - far) / 3
    got = got.to(expected)
    size = max(float(expected.norm()), float(got.norm()), typical)
    if size == 0:
        return 0.0, 0.0
    rough = float((near - far).norm()) + 4 * scale.unit * float(ahead.norm()) / eps
    return float((got - expected).norm()) / size, rough / size


def _randn(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def _detached_double(x: Tensor) -> Tensor:
    return x.detach().double() if x.is_floating_point() else x.detach()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].removeprefix("bilevel.inner: ")
