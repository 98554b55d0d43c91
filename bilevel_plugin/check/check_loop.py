"""`bilevel.check_loop` runs a function of the user that opens blocks, and judges its first hypergradient.

The function is run at λ until it takes a hypergradient, and again at λ ± ε·v until the same place, where the outer loss
is read. Everything between the steps takes part, so that the differences know what the block can't.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.missing import DerivativeWarning
from ..autograd.trees import State
from ..inputs import Inputs, leaves
from . import sentinel
from .causes import Evidence, causes
from .differences import Scale, compare, groups
from .gradcheck import Finding
from .modules import randn_like
from .precise import in_float64, restored, tensors_held
from .readings import changed
from .runs import NotDouble, Run, Stop
from .watching import watching

_FLOAT64, _FLOAT32 = Scale((1e-4, 1e-5, 1e-6), 1e-5, 2**-53), Scale((5e-3, 6e-4, 4e-2), 2e-2, 2**-24)
_FLOORS = {_FLOAT64: 1e-7, _FLOAT32: 1e-3}  # derivatives this small, relative to the value, are measured by it
_SAME_END = {_FLOAT64: 1e-9, _FLOAT32: 1e-4}


@dataclass(frozen=True, repr=False)
class LoopReport:
    """The result of `check_loop`. `ok`, and its value as a boolean, is whether all holds; print it to read it."""

    hypergradient: list[Finding]
    end: list[Finding]
    causes: list[str]
    precision: str

    @property
    def ok(self) -> bool:
        """Whether every comparison holds."""
        return all(f.verdict == "ok" for f in (*self.hypergradient, *self.end))

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        wrong = any(f.verdict == "WRONG" for f in (*self.hypergradient, *self.end))
        head = "all holds" if self.ok else "something is WRONG" if wrong else "undecided"
        lines = [f"bilevel.check_loop: {head} ({self.precision})"]
        lines += ["the first hypergradient against differences of the outer loss:", *map(str, self.hypergradient)]
        if self.end:
            lines += ["the end of the training against the plain loop's:", *map(str, self.end)]
        if self.causes:
            lines += ["what may be the cause:", *(f"  - {cause}" for cause in self.causes)]
        return "\n".join(lines)


def check_loop(
    train: Callable[..., Any],
    lam: Inputs,
    plain: Callable[[], nn.Module | Mapping[str, Tensor]] | None = None,
    *,
    tol: float | None = None,
    seed: int = 0,
) -> LoopReport:
    """Check your own loop: its first hypergradient against differences, and its end against the plain loop's.

    `train` is run at λ and at λ ± ε·v, each time with the same random numbers, as far as its first `hypergrad` or
    `backward`. It may be any function that opens blocks: what happens between the steps belongs to the loop, and the
    differences tell whether the hypergradient knows of it. Where the loop allows it, all runs are in float64. λ, the
    models and all that the functions close over are left as they were.

    Args:
        train: the function, called as `train()`, or as `train(lam)` if it needs an argument.
        lam: the outer variables: a leaf, or a list, dict or module of leaves, which `train` uses as they are.
        plain: a function without arguments that runs the plain loop from the same weights, and returns the model, or
            a dict of its tensors by name.
        tol: the relative error to allow; by default 1e-5 in float64, and 2e-2 where only float32 will do.
        seed: of the random directions.

    Returns a report, which is true if all holds. If something is wrong it says which of the known causes fit, and a
    `DerivativeWarning` is given.

    Examples:
        The weight of the step is computed from the model, outside of the loss, and taken for a constant.

        >>> import torch, bilevel_plugin as bilevel
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> lam = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        >>> h = lambda m, c: c * (m.weight - lam).square().sum()
        >>> g = lambda m: (m.weight - 1).square().sum()
        >>> def train(constant):
        ...     with bilevel.inner(model, h, g, solver="gd", lr=0.1) as loop:
        ...         for _ in range(3):
        ...             loop.step(1.0 if constant else model.weight.detach().square().sum())
        ...         return loop.hypergrad(lam)
        >>> bilevel.check_loop(lambda: train(True), lam).ok
        True
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     report = bilevel.check_loop(lambda: train(False), lam)
        >>> report.ok
        False
        >>> print(report.causes[0].partition(":")[0])
        `the batch[0]` of step k = 2 changes with λ
    """
    tensors = leaves(lam, "check_loop")
    run = _Runs(_callable(train, lam), plain, list(tensors.values()), tol)
    report = _in_best_precision(run, list(tensors), seed)
    if not report.ok:
        warnings.warn(f"{report}", DerivativeWarning, stacklevel=2)
    return report


def _callable(train: Callable[..., Any], lam: Inputs) -> Callable[[], Any]:
    if not callable(train):
        raise TypeError(f"bilevel.check_loop: train must be a function that runs the loop, got {type(train).__name__}.")
    try:
        inspect.signature(train).bind()
    except TypeError:
        return lambda: train(lam)
    except ValueError:  # a built-in without a signature
        pass
    return train


class _Runs:
    """The runs of a function at different λ, and what they tell."""

    def __init__(
        self, train: Callable[[], Any], plain: Callable[[], Any] | None, lam: Sequence[Tensor], tol: float | None
    ) -> None:
        self._train, self._plain, self.lam, self._tol = train, plain, lam, tol
        self.tensors = tensors_held(train, [*lam, *([] if plain is None else tensors_held(plain))])
        self._devices = list({x.device for x in self.tensors if x.device.type not in ("cpu", "meta")})

    def once(self, differentiate: bool, scale: Scale) -> Run:
        """Run the function as far as its first hypergradient, and leave everything as it was."""
        run = Run(self.lam, differentiate, scale is _FLOAT64)
        with restored(self.tensors, self._devices), watching(run), suppress(Stop):
            self._train()
        if run.value is None:
            what = "opened no block" if run.block is None else "took no hypergradient"
            raise ValueError(
                f"bilevel.check_loop: the function {what}. It has to open `with bilevel.inner(...) as loop:` and call "
                "loop.hypergrad(...) or loop.backward() in it."
            )
        return run

    def check(self, names: Sequence[str], scale: Scale, precision: str, seed: int) -> LoopReport:
        """Compare the first hypergradient with differences, and the end with that of the plain loop."""
        with warnings.catch_warnings(record=True) as warned, sentinel.anew():
            warnings.simplefilter("always")
            base = self.once(True, scale)
        seen = Evidence(base.block, base.unused)
        seen.warnings = [str(w.message) for w in warned if issubclass(w.category, DerivativeWarning)]
        again = self.once(False, scale)
        seen.unsteady = changed(base.readings, again.readings)
        if base.value is None or again.value is None or not torch.equal(base.value, again.value):
            note = "two runs at the same λ give different values, so that differences tell nothing"
            found = [Finding("the outer loss", math.inf, "?", note)]
            seen.unsteady = seen.unsteady or {"something that no step reads": len(base.readings)}
        elif base.refused:
            found = [Finding("the hypergradient is refused", math.inf, "WRONG", base.refused)]
            self._value_at([_direction(x, torch.zeros_like(x), seed) for x in self.lam], 1e-4, base, scale, seen)
        else:
            found = self._differences(names, base, base.value, scale, seen, seed)
        end = [] if self._plain is None else self._compare_end(base, scale, seen)
        seen.wrong = any(f.verdict != "ok" for f in found)
        seen.end_is_off = [f.what for f in end if f.verdict != "ok"]
        return LoopReport(found, end, causes(seen), precision)

    def _differences(
        self, names: Sequence[str], base: Run, value: Tensor, scale: Scale, seen: Evidence, seed: int
    ) -> list[Finding]:
        along = [_direction(x, g, seed) for x, g in zip(self.lam, base.grads, strict=True)]
        got = {i: float((g.double() * along[i].double()).sum()) for i, g in enumerate(base.grads)}
        size = float(value.abs())
        tol = scale if self._tol is None else Scale(scale.epsilons, self._tol, scale.unit)
        found: list[Finding] = []
        for keys in groups({i: abs(x) for i, x in got.items()}):
            those = [v if i in keys else torch.zeros_like(v) for i, v in enumerate(along)]

            def f(by: float, those: Sequence[Tensor] = those) -> Tensor:
                return self._value_at(those, by, base, scale, seen)

            what = "input " + ", ".join(names[i] for i in keys) if any(names) else "the input"
            compared = compare(sum(got[i] for i in keys), f, tol, typical=_FLOORS[scale] * size)
            found.append(Finding.of(what, compared))
            if compared.verdict == "WRONG" and not any(bool(base.grads[i].any()) for i in keys):
                seen.without_gradient.append(what)
        return found

    def _value_at(self, along: Sequence[Tensor], by: float, base: Run, scale: Scale, seen: Evidence) -> Tensor:
        """Return the outer loss of a run at λ + by·v, and note what the run has read otherwise."""
        there = [x.detach().clone() for x in self.lam]
        try:
            with torch.no_grad():
                for x, v in zip(self.lam, along, strict=True):
                    x.add_(v, alpha=by)
            run = self.once(False, scale)
        finally:
            with torch.no_grad():
                for x, before in zip(self.lam, there, strict=True):
                    x.copy_(before)
        seen.compare(base.readings, run.readings, base.start != run.start)
        assert run.value is not None
        return run.value

    def _compare_end(self, base: Run, scale: Scale, seen: Evidence) -> list[Finding]:
        assert self._plain is not None
        with restored(self.tensors, self._devices):
            plain = self._plain()
            seen.draws_differ = base.random is not None and not torch.equal(base.random, torch.get_rng_state())
            given = plain.state_dict() if isinstance(plain, nn.Module) else plain
            if not isinstance(given, Mapping):
                raise TypeError(
                    "bilevel.check_loop: plain= must return the trained model, or a dict of its tensors by name, got "
                    f"{type(plain).__name__}."
                )
            ends: State = {n: x.detach().clone() for n, x in given.items() if isinstance(x, Tensor)}
        if not ends.keys() & base.end.keys():
            raise ValueError(
                f"bilevel.check_loop: plain= returned tensors named {sorted(ends)[:5]}, and the model of the block has "
                f"{sorted(base.end)[:5]}. Return the same model, or a dict with its names."
            )
        return [_same(n, x, base.end[n], _SAME_END[scale]) for n, x in ends.items() if n in base.end]


def _same(name: str, plain: Tensor, block: Tensor, allowed: float) -> Finding:
    x, y = plain.double(), block.double().to(plain.device)
    if x.shape != y.shape:
        return Finding(name, math.inf, "WRONG", f"shape {tuple(y.shape)} in the block, {tuple(x.shape)} in plain=")
    error = float((x - y).norm()) / (float(x.norm()) or 1.0)
    return Finding(name, error, "ok" if error <= allowed else "WRONG")


def _direction(x: Tensor, g: Tensor, seed: int) -> Tensor:
    """Return a direction as long as x, or of entries of size 1 where x is 0: random, plus the hypergradient's own."""
    v = randn_like(x, seed)
    if bool(g.any()):
        v = (v + g * (x.numel() ** 0.5 / float(g.norm()))) / 2**0.5
    size = float(x.detach().norm()) / x.numel() ** 0.5
    return v * (size or 1.0)


def _in_best_precision(runs: _Runs, names: Sequence[str], seed: int) -> LoopReport:
    """Check the loop in float64: as it is, or else cast. If it does not run in float64, check it as it is."""
    if all(x.dtype == torch.float64 for x in runs.tensors if x.is_floating_point()):
        try:
            return runs.check(names, _FLOAT64, "float64", seed)
        except NotDouble:
            pass
    try:
        with in_float64(runs.tensors):
            return runs.check(names, _FLOAT64, "cast to float64", seed)
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    return runs.check(names, _FLOAT32, f"as it is, since in float64: {why}", seed)
