"""Inner blocks in a row, whole or broken off by an exception, and what is left of them.

As a script: memory and live tensors over 1,000 blocks of every engine, as a plot, and as the last part of
docs/results/soak.md.

    python tests/leaking.py docs/results/leaks.png
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

WIDTH, STEPS = 256, 6

ENGINES: dict[str, Callable[[], Any]] = {
    "reverse": bilevel.Reverse,
    "reverse, every 3rd": lambda: bilevel.Reverse(3),
    "reverse, sqrt": lambda: bilevel.Reverse("sqrt"),
    "reverse, memory": lambda: bilevel.Reverse(memory="1MiB"),
    "reverse, last 2": lambda: bilevel.Reverse(truncate=2),
    "unroll": bilevel.Unroll,
    "forward": bilevel.Forward,
    "cg": lambda: bilevel.CG(settled=1e9, tol=None, iterations=3),
    "neumann": lambda: bilevel.Neumann(settled=1e9, tol=None, iterations=3),
}
FAULTS = ("none", "h", "h, a TypeError", "arguments", "g", "body", "hypergrad", "backward")


class Fault(Exception):
    """What a user's code may raise at any place."""


class Canary:
    """Held by a node of a graph, and by nothing else: dies with it."""


@dataclass
class Trace:
    """Weak references to what a block used."""

    refs: list[weakref.ref[Any]] = field(default_factory=list)

    def put(self, value: Tensor) -> Tensor:
        """Watch the node that made the tensor: a tensor in Python may go before its graph does."""
        canary = Canary()
        assert value.grad_fn is not None
        value.grad_fn.metadata["canary"] = canary
        self.refs.append(weakref.ref(canary))
        return value

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


@dataclass
class Switch:
    """Whether a backward pass through λ fails."""

    on: bool = False


class _Guarded(torch.autograd.Function):
    """The identity, whose backward pass fails if the switch is on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.switch.on:
            raise Fault("in the middle of a backward pass")
        return grad, None


def block(engine: Any, fault: str = "none") -> Trace:
    """One block with a model and an outer variable of its own; the fault, if there is one, is caught here."""
    trace = Trace()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()
    lam = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    encoded = trace.put(x * lam[1].exp())  # a batch with a graph behind it
    trace.refs += [weakref.ref(model), weakref.ref(lam), weakref.ref(encoded)]
    calls, switch = {"h": 0, "g": 0}, Switch()

    def loss(name: str) -> Callable[..., Tensor]:
        def value(model: nn.Module, x: Tensor) -> Tensor:
            calls[name] += 1
            guarded: Any = _Guarded.apply(lam[0], switch)
            decay = sum(p.square().sum() for p in model.parameters())
            out = trace.put(model(x).square().mean() + guarded.exp() * decay)
            if calls[name] == STEPS // 2 and fault.split(",")[0] == name:
                raise TypeError("unsupported operand") if "TypeError" in fault else Fault(name)
            return out

        return value

    try:
        with bilevel.inner(model, loss("h"), loss("g"), solver=_solver(engine), engine=engine) as loop:
            for k in range(STEPS):
                loop.step(encoded, *([x] if fault == "arguments" else []), outer=x)
                if fault == "body" and k == STEPS // 2:
                    raise Fault("body")
            switch.on = fault == "hypergrad"
            if fault == "backward":
                loop.backward()
                loop.backward()  # the encoder's graph is gone: an error of autograd
            else:
                loop.hypergrad(lam)
    except (Fault, TypeError, RuntimeError):
        assert fault != "none"
        torch.zeros((), requires_grad=True).exp().backward()  # torch keeps what is left of a failed pass until the next
    else:
        # unroll keeps no graph of its own behind the batch: a second backward is fine there
        assert fault in ("none", "backward")
    return trace


def _solver(engine: Any) -> Any:
    return bilevel.Penalty(0.002) if isinstance(engine, (bilevel.CG, bilevel.Neumann)) else bilevel.BiGSAM(0.05)


def live_tensors() -> int:
    """Tensors that Python knows."""
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated() -> int | None:
    """Bytes that are in use on the C heap, graphs and tensors among them; None where the C library does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def resident() -> int:
    """Bytes of the process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(engine: str, blocks: int) -> list[tuple[int, int, int]]:
    """(live tensors, bytes on the heap, resident bytes) after each block; every kind of end takes its turn."""
    found: list[tuple[int, int, int]] = []
    gc.collect()
    gc.disable()  # by reference counts alone
    try:
        for i in range(blocks):
            block(ENGINES[engine](), FAULTS[i % len(FAULTS)])
            if i % 9 == 0:  # so that each of the 8 kinds of ends is seen
                found.append((live_tensors(), allocated() or 0, resident()))
    finally:
        gc.enable()
    return found


HEAD = """
## Memory and live tensors

![Live tensors, heap and resident memory over {blocks:,} blocks]({picture})

There are {blocks:,} blocks for each engine, without the garbage collector. Each block has a model and an outer variable
of its own. The blocks end in eight ways in turn: normally, or with an exception in h, in g, in the body, in `hypergrad`
or in `backward`. Live tensors are counted at the first block and at the last. The heap and the resident memory are in
MiB, after 100 blocks and at the end.

| engine | live tensors | heap after 100 | at the end | resident after 100 | at the end |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def main(path: Path, blocks: int = 1000) -> None:
    from bilevel_recipes import plots

    begin = time.perf_counter()
    torch.set_num_threads(1)
    where = [i + 1 for i in range(blocks) if i % 9 == 0]
    titles = ["live tensors", "heap in use, MiB", "resident, MiB"]
    figure, axes = plots.panels(titles)
    print(HEAD.format(blocks=blocks, picture=path.name))
    for colour, engine in zip(plots.COLOURS * 2, ENGINES, strict=False):
        rows = measure(engine, blocks)
        for ax, column, unit in zip(axes, zip(*rows, strict=True), (1, 2**20, 2**20), strict=True):
            ax.plot(where, [value / unit for value in column], color=colour, label=engine, linewidth=1)
            ax.set_xlabel("blocks")
        middle = rows[min(11, len(rows) - 1)]
        size = [f"{n / 2**20:.2f}" for n in (middle[1], rows[-1][1], middle[2], rows[-1][2])]
        print(f"| {engine} | {rows[0][0]}, {rows[-1][0]} | {' | '.join(size)} |", flush=True)
    for ax in axes:
        ax.set_ylim(0, 1.15 * ax.get_ylim()[1])
    plots.legend(figure, axes)
    plots.save(figure, path)
    path.with_suffix(".svg").unlink()
    print(f"\nThis took {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
