"""How things are measured: memory in a process of its own for each case, time in turns within one process.

Processes are forked from a server that has imported torch and computed nothing, so that each starts from the same
state and at once (`multiprocessing`'s forkserver).
"""

from __future__ import annotations

import collections
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel_recipes.malloc import keep_memory

from .problems import SMOOTH, Problem, make
from .runners import BY_NAME, Run, Runner, judge

Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What every case of a table shares."""

    size: str
    threads: int
    malloc: str  # "keep" or "default"
    steps: int | None = None  # K, where it is not the problem's own
    tenth: int | None = None
    limit: int | None = None  # bytes: a process that holds more of its own is ended, and its row says so
    layout: str = "plain"  # or "recipe": an encoder as bilevel_recipes.models.build_encoder makes it

    def problem(self, name: str, **options: Any) -> Problem:
        p = make(name, self.size, steps=self.steps, **options)
        p.tenth = self.tenth
        if self.layout == "recipe" and p.encoder:
            p.encoder.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return p


# --- processes --------------------------------------------------------------------------------------------------


def apart(function: Callable[..., Result], setting: Setting, *args: Any) -> Result:
    """function(setting, *args) in a fresh process; what goes wrong there comes back as {"failed": why}."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, setting, args), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return {"failed": f"its process ended with {process.exitcode}" + " (out of memory?)" * (process.exitcode == -9)}
    finally:
        process.join()


def _child(sender: Any, function: Callable[..., Result], setting: Setting, args: tuple[Any, ...]) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])  # JAX has no other switch
    torch.set_num_threads(setting.threads)
    if setting.malloc == "keep":
        keep_memory()
    answered = threading.Lock()
    if setting.limit:
        threading.Thread(target=_end_beyond, args=(setting.limit, sender, answered), daemon=True).start()
    try:
        result = function(setting, *args)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = (str(error).strip().splitlines() or [""])[0]
        result = {"failed": f"{type(error).__name__}: {why[:200]} ({Path(where.filename).name}:{where.lineno})"}
    with answered:
        sender.send(result)


progress = {"step": 0}  # how far a run has come, where it keeps count: for those that are ended


def _end_beyond(limit: int, sender: Any, answered: threading.Lock) -> None:
    """End the process once it holds more than that, with a word why."""
    while own_memory() <= limit:
        time.sleep(0.05)
    with answered:
        at = f", at step {progress['step']:,}" if progress["step"] else ""
        why = f"ended: it held more than {limit / 2**30:.1f} GiB{at}"
        sender.send({"failed": why, "limit": limit, "step": progress["step"]})
        os._exit(0)


def own_memory() -> int:
    """Bytes of memory that are the process's own: resident, and not pages of a file, which the system can take back."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


# --- memory, operators, accuracy --------------------------------------------------------------------------------


def case(setting: Setting, name: str, runner: str, exact: list[NDArray[Any]]) -> Result:
    """What one hypergradient takes besides time; `exact` is the float64 result of the quick, smooth problem.

    On P8 the error is that of the method in float64, elsewhere that in float32.
    """
    chosen, p = BY_NAME[runner], setting.problem(name)
    run = chosen.build(p)
    found: Result = {"resident": _resident(p, run, chosen)}
    if chosen.name.startswith("JAX"):
        found |= {"live": None, "operators": None}
    else:
        found |= _live(run, count=not chosen.compiled and not p.slow)
    if name.startswith("P8"):
        run = chosen.build(judged(setting).problem(name, dtype=torch.float64))
    elif not (judged(setting).size == setting.size and name in SMOOTH):  # else it is the same problem
        run = chosen.build(judged(setting).problem(name, smooth=True))
    found["error"] = relative(run(), exact)
    return found


def training(setting: Setting, name: str) -> Result:
    """What K plain steps take: the peak of the bytes that tensors hold beyond the model and its data."""
    p = setting.problem(name)
    inner, _ = p.batches()
    p.train(inner)
    return {"resident": grown(lambda: p.train(inner)), "live": live(lambda: p.train(inner)), "iterates": p.iterates()}


def judged(setting: Setting) -> Setting:
    """The size at which results are compared: that of a quick run."""
    return replace(setting, size="tiny" if setting.size == "tiny" else "quick", steps=None)


def _resident(p: Problem, run: Run, runner: Runner) -> int:
    """How far the process grows beyond what it occupies once all is set up: imports, data, a step of either kind."""
    steps, p.steps = p.steps, p.steps if runner.compiled else 1
    run()
    p.plain()
    p.steps = steps
    return grown(run)


def grown(run: Callable[[], Any]) -> int:
    """How many bytes more than before the process occupies at its peak, while this runs."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Counter(TorchDispatchMode):
    """Counts the operators that reach the backend, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.by_name.total()

    def of(self, *names: str) -> int:
        return sum(self.by_name[name] for name in names)


def _live(run: Run, count: bool) -> Result:
    """The peak of the bytes that tensors hold, the same whatever the allocator does; and the number of operators."""
    operators = None
    if count:
        with Counter() as counter:
            run()
        operators = counter.count
    return {"live": live(run), "operators": operators}


def live(run: Callable[[], Any]) -> int:
    """The peak of the bytes that tensors hold while it runs, by the events of torch's profiler."""
    gc.collect()
    with silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = most = 0
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def silence() -> Generator[None]:
    """No stderr, for C++ code that logs its start and stop."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def exact(setting: Setting, name: str) -> Result:
    """The float64 result that all are judged by: written by hand, on the quick and smooth problem."""
    p = judged(setting).problem(name, smooth=True, dtype=torch.float64)
    return {"grads": [x.numpy() for x in judge(p)()]}


def relative(found: list[Tensor], true: list[NDArray[Any]]) -> float:
    """‖found − true‖ / ‖true‖ over all tensors together."""
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in xs]) for xs in (found, true))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# --- time -------------------------------------------------------------------------------------------------------

PLAIN = "plain"


def times(setting: Setting, name: str, runners: list[str], rounds: int, enough: float = 900.0) -> Result:
    """Seconds of each round, in turns, and of the set-up. After `enough` seconds three rounds will do."""
    begin, prepare = time.perf_counter(), dict[str, float]()
    problems = {key: setting.problem(name) for key in (PLAIN, *runners)}
    runs: dict[str, Callable[[], Any]] = {PLAIN: problems[PLAIN].plain}
    for runner in runners:
        started = time.perf_counter()
        runs[runner] = BY_NAME[runner].build(problems[runner])
        if BY_NAME[runner].compiled:
            runs[runner]()
        prepare[runner] = time.perf_counter() - started
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    gc.collect()
    gc.freeze()  # else every collection walks all modules again
    order, once = list(runs), list[str]()
    slow = problems[PLAIN].slow
    if slow:
        for key, p in problems.items():
            steps, p.steps = p.steps, 1
            runs[key]()
            p.steps = steps
    for turn in range(1 if slow else rounds + 1):  # the first is for warming up
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            if key in once:
                continue
            took = clock(runs[key])
            seconds[key].append(took)
            say(f"{name}: round {turn} of {rounds}, {key}, {took:.2f} s; {time.perf_counter() - begin:.0f} s so far")
        if turn == 0 and not slow:
            once = [key for key, (took,) in seconds.items() if took > max(60, 8 * seconds[PLAIN][0])]
            seconds = {key: took if key in once else [] for key, took in seconds.items()}
        if turn >= 3 and time.perf_counter() - begin > enough:
            break
    return {"seconds": seconds, "prepare": prepare, "once": once}


def clock(run: Callable[[], Any]) -> float:
    gc.collect()  # what the last one left in cycles
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def fresh(setting: Setting, name: str, runner: str) -> Result:
    """How much a process grows by its first hypergradient, and how many seconds it takes for the second."""
    chosen, p = BY_NAME[runner], setting.problem(name)
    run = chosen.build(p)
    return {"resident": _resident(p, run, chosen), "seconds": clock(run)}


def say(line: str) -> None:
    """A progress line on stderr: over the last one on a terminal, else below it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line[:120]}", end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)
