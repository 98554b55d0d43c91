"""The gallery: loops in the style of what people run, each as a plain loop and as the same loop with a block around it.

A loop is a folder docs/loops/<name>/ with three files:

    setup.py    make(dtype=torch.float64) -> Setup: model, data, and `outer`, a list of tensors that require grad;
                the docstring is one sentence that says what the loop is
    plain.py    train(s) -> Tensor: the loop as people write it; it trains s.model in place and returns the outer loss
    wrapped.py  train(s) -> (Tensor, list[Tensor]): the same with the block, the outer loss and its hypergradient; the
                docstring is the prose of the page, whose first line may be a title (`# MAML`)

A plain.py may have `reference(s) -> list[Tensor]` as well, where the gradient is not the derivative of the outer loss
(first-order MAML): wrapped.py's gradients are then compared with those, and not with differences.

`python -m docs.loops [names]` measures and writes the pages; with `--check` it only prints the errors.
A folder that lacks one of the three files is left out.
"""

from __future__ import annotations

import ast
import difflib
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
FILES = ("setup.py", "plain.py", "wrapped.py")
END, HYPERGRADIENT = 1e-10, 1e-6  # the largest relative errors that the tests accept


@dataclass(frozen=True)
class Entry:
    """One loop of the gallery."""

    name: str

    def module(self, file: str) -> ModuleType:
        return importlib.import_module(f"docs.loops.{self.name}.{file}")

    def make(self) -> Any:
        return self.module("setup").make(torch.float64)

    def plain(self, s: Any) -> Tensor:
        torch.manual_seed(0)
        return self.module("plain").train(s).detach()

    def wrapped(self, s: Any) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        value, grads = self.module("wrapped").train(s)
        return value.detach(), list(grads)

    def reference(self, s: Any) -> list[Tensor] | None:
        """The gradient that plain.py states, where it is not the derivative of the outer loss."""
        function = getattr(self.module("plain"), "reference", None)
        if function is None:
            return None
        torch.manual_seed(0)
        return list(function(s))

    def code(self, file: str) -> list[str]:
        """The lines of a file below its docstring."""
        text = (FOLDER / self.name / f"{file}.py").read_text()
        first = ast.parse(text).body[0]
        documented = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
        return "\n".join(text.splitlines()[first.end_lineno if documented else 0 :]).strip("\n").splitlines()

    def docstring(self, file: str) -> str:
        found = ast.get_docstring(ast.parse((FOLDER / self.name / f"{file}.py").read_text()))
        if not found:
            raise ValueError(f"docs/loops/{self.name}/{file}.py has no docstring.")
        return found.strip()


def entries() -> list[Entry]:
    """The loops whose folders have all three files, by name."""
    found = (path for path in sorted(FOLDER.iterdir()) if all((path / file).exists() for file in FILES))
    return [Entry(path.name) for path in found]


# --- checks -----------------------------------------------------------------------------------------------------


def end_error(entry: Entry) -> float:
    """‖wrapped − plain‖ / ‖plain‖ over all trained tensors, or of the outer loss; infinite if an integer differs."""
    s, t = entry.make(), entry.make()
    a, (b, _) = entry.plain(s), entry.wrapped(t)
    plain, wrapped = trained(s), trained(t)
    if plain.keys() != wrapped.keys():
        return float("inf")
    if any(not torch.equal(x, wrapped[n]) for n, x in plain.items() if not x.is_floating_point()):
        return float("inf")
    names = [n for n, x in plain.items() if x.is_floating_point()]
    untrained = trained(entry.make())
    x, y, before = (flat([tensors[n] for n in names]) for tensors in (plain, wrapped, untrained))
    if torch.equal(x, before):
        raise ValueError(f"docs/loops/{entry.name}/plain.py leaves the model as it was, so its end point says nothing.")
    return max(relative(y, x), relative(b.reshape(1), a.reshape(1)))


def trained(s: Any) -> dict[str, Tensor]:
    """Every tensor of every module that the setup holds: the model, and an average or a target network beside it."""
    held = {f.name: getattr(s, f.name) for f in fields(s)} if is_dataclass(s) else s._asdict()
    modules = {name: value for name, value in held.items() if isinstance(value, nn.Module)}
    return {f"{name}.{n}": x.detach() for name, module in modules.items() for n, x in module.state_dict().items()}


def hypergradient_error(entry: Entry, directions: int = 3) -> float:
    """The relative error of the hypergradient against central differences of the plain loop along random directions.

    Rounding wants large steps, curvature and kinks want small ones: the best of three step sizes counts.
    """
    s = entry.make()
    outer = [p.detach().clone() for p in s.outer]
    _, grads = entry.wrapped(s)
    shapes = [tuple(x.shape) for x in grads]
    if shapes != [tuple(p.shape) for p in outer]:
        raise ValueError(f"docs/loops/{entry.name}/wrapped.py: gradients of shapes {shapes} for other outer variables.")
    found = entry.reference(entry.make())
    if found is not None:
        return relative(flat(grads), flat(found))
    generator = torch.Generator().manual_seed(1)
    along = [[torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in outer] for _ in range(directions)]
    ours = torch.stack([sum((g * v).sum() for g, v in zip(grads, vs, strict=True)) for vs in along])

    def at(step: float, vs: list[Tensor]) -> Tensor:
        moved = entry.make()
        with torch.no_grad():
            for p, v in zip(moved.outer, vs, strict=True):
                p.add_(v, alpha=step)
        return entry.plain(moved)

    errors = []
    for step in (1e-5, 1e-4, 1e-6):
        differences = torch.stack([(at(step, vs) - at(-step, vs)) / (2 * step) for vs in along])
        errors.append(relative(ours, differences))
    return min(errors)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


# --- the difference ---------------------------------------------------------------------------------------------


def difference(entry: Entry, context: int = 3) -> list[str]:
    """The unified diff from the plain loop to the wrapped one. A line that was only indented is context."""
    plain, wrapped = entry.code("plain"), entry.code("wrapped")
    lines = []
    for group in _matcher(plain, wrapped).get_grouped_opcodes(context):
        lines += ["@@"] if lines else []
        for kind, i, i_end, j, j_end in group:
            if kind == "equal":
                lines += [f" {line}".rstrip() for line in wrapped[j:j_end]]
            else:
                lines += [f"-{line}".rstrip() for line in plain[i:i_end]]
                lines += [f"+{line}".rstrip() for line in wrapped[j:j_end]]
    return lines


def changed_lines(entry: Entry) -> tuple[int, int, int]:
    """How many lines the plain loop has, how many the wrapped one adds, and how many it takes away.

    Empty lines do not count, nor do lines that were only indented.
    """
    plain, wrapped = entry.code("plain"), entry.code("wrapped")
    added = removed = 0
    for kind, i, i_end, j, j_end in _matcher(plain, wrapped).get_opcodes():
        if kind != "equal":
            removed += sum(bool(line.strip()) for line in plain[i:i_end])
            added += sum(bool(line.strip()) for line in wrapped[j:j_end])
    return sum(bool(line.strip()) for line in plain), added, removed


def _matcher(a: list[str], b: list[str]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(None, [x.strip() for x in a], [x.strip() for x in b], autojunk=False)


# --- time and memory --------------------------------------------------------------------------------------------


def seconds(entry: Entry, runs: int = 11) -> tuple[float, float]:
    """Medians of the plain and of the wrapped loop, in turns, of the processor's time (others may use the machine).

    The first turn does not count: it warms up, and in it the sentinel checks the losses, once in a process.
    """
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        for times, train in zip(took, (entry.plain, entry.wrapped), strict=True):
            times.append(_clock(entry, train))
    return statistics.median(took[0][1:]), statistics.median(took[1][1:])


def _clock(entry: Entry, train: Callable[[Any], Any]) -> float:
    s = entry.make()
    gc.collect()
    started = time.process_time()
    train(s)
    return time.process_time() - started


def peak(entry: Entry) -> tuple[int, int]:
    """The most bytes that tensors hold in the plain and in the wrapped loop, with the model and the data."""
    from benchmarks.measure import live  # it takes the packages of the recipes

    entry.wrapped(entry.make())  # the sentinel's turn
    return live(lambda: entry.plain(entry.make())), live(lambda: entry.wrapped(entry.make()))
