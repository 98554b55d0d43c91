"""`make gpu-check`: what could not be run without a GPU, on yours; one page of Markdown to send us.

Parity with the CPU in float64, random state, states on the host, synchronisation, time and memory, a short run of
both recipes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_recipes.data_cleaning.__main__ import main as data_cleaning
from bilevel_recipes.data_cleaning.clean import batches
from bilevel_recipes.device import set_tf32
from bilevel_recipes.few_shot import Episodes, Images
from bilevel_recipes.few_shot.__main__ import main as few_shot
from bilevel_recipes.few_shot.sources import load
from bilevel_recipes.few_shot.train import encode_task, loss, zero_head
from bilevel_recipes.models import build_encoder

from .problems import Weighted, make, mean_loss
from .runners import BY_NAME, ours

TOLERANCE = 1e-8  # of float64 on smooth problems of six steps
N, STEPS = 12, 6
Row = tuple[str, bool | None, str]  # what, whether it holds (None: a figure, or not for this device), in words


# --- the problems ---------------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    """A layer on (batch, time, feature), the mean over time, a linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.out((y[0] if isinstance(y, tuple) else y).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def convolutions() -> nn.Module:
    norm = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Softplus(), nn.AvgPool2d(2)]
    return nn.Sequential(*norm, nn.Flatten(), nn.Linear(64, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (8,)),
    "convolution, BatchNorm": (convolutions, (1, 8, 8)),
    "LSTM": (lambda: Sequences(nn.LSTM(8, 8, batch_first=True)), (5, 8)),
    "attention": (lambda: Sequences(Attention()), (5, 8)),
}
DROPOUT: tuple[Callable[[], nn.Module], tuple[int, ...]] = (
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)), (8,),
)  # fmt: skip
ENGINES: dict[str, Any] = {
    "reverse": bilevel.Reverse(),
    "reverse sqrt": bilevel.Reverse("sqrt"),
    "reverse memory=auto": bilevel.Reverse(memory="auto"),
    "reverse store=host": bilevel.Reverse(store="host"),
    "unroll": bilevel.Unroll(),
    "forward": bilevel.Forward(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
}


class Case:
    """A data-cleaning problem, made on the CPU and moved: the same numbers on every device."""

    def __init__(self, made: tuple[Callable[[], nn.Module], tuple[int, ...]], device: str, dtype: torch.dtype) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = made[0]().to(device, dtype)
            x, y = torch.randn(2, N, *made[1]), torch.randint(3, (2, N))
            self.x, self.y = x.to(device, dtype), y.to(device)
            self.lam = torch.randn(N).to(device, dtype).requires_grad_()
        self.h = Weighted(self.lam)
        self.rows = torch.arange(N, device=device)

    def steps(self, loop: Any, count: int = STEPS) -> None:
        for _ in range(count):
            loop.step(self.x[0], self.y[0], self.rows, outer=(self.x[1], self.y[1]))

    def hypergradient(self, engine: Any, optimizer: str = "SGD", seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        options = {"solver": bilevel.BiGSAM(1.0), "optimizer": OPTIMIZERS[optimizer](self.model), "engine": engine}
        with bilevel.inner(self.model, self.h, mean_loss, **options) as loop:
            self.steps(loop)
            return loop.hypergrad(self.lam)


def relative(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().cpu(), expected.detach().cpu()
    return float((got - expected).norm() / expected.norm())


def held(what: str, error: float, most: float = TOLERANCE) -> Row:
    return what, error <= most, f"relative difference {error:.1e}"


def attempt(what: str, run: Callable[[], tuple[bool | None, str]]) -> Row:
    """A row; if the run raises, what it says and the last place in this repository, so that the others go on."""
    try:
        return what, *run()
    except Exception as error:
        places = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        at = f"{Path(places[-1].filename).name}:{places[-1].lineno}, {places[-1].line}"
        return what, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({at})"


def together(what: str, rows: list[Row]) -> Row:
    """Rows of one kind in one: those that failed, or else the words of all, each once."""
    wrong = [f"{name}: {words}" for name, holds, words in rows if holds is False]
    names = ", ".join(name for name, _, _ in rows)
    if wrong:
        return what, False, "; ".join(wrong)
    return (
        f"{what} ({names})",
        None if any(holds is None for _, holds, _ in rows) else True,
        "; ".join(dict.fromkeys(words for _, _, words in rows)),
    )


# --- the checks -----------------------------------------------------------------------------------------------------


def parity(device: str) -> Iterator[Row]:
    """Float64 on the device against float64 on the CPU: every engine on every kind of layer."""
    for kind, made in MODELS.items():
        for optimizer in OPTIMIZERS:
            expected = Case(made, "cpu", torch.float64).hypergradient(bilevel.Unroll(), optimizer)

            def differ(engine: Any, made: Any = made, optimizer: str = optimizer, expected: Tensor = expected) -> float:
                return relative(Case(made, device, torch.float64).hypergradient(engine, optimizer), expected)

            rows = [
                attempt(name, lambda engine=engine, differ=differ: held("", differ(engine))[1:])
                for name, engine in ENGINES.items()
            ]
            yield together(f"{kind}, {optimizer}", rows)
    for name in ("cg", "neumann"):
        yield attempt(f"ridge, {name}", lambda name=name: held("", relative(
            ridge(device, name), ridge("cpu", "unroll")), 1e-5)[1:])  # fmt: skip


def ridge(device: str, engine: str) -> Tensor:
    """A quadratic that the loop solves, for the engines that need its minimum."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, k, generator=draw, dtype=torch.float64).to(device) / 8**0.5 for k in (3, 1))
    decay = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    model = nn.Linear(3, 1, bias=False, device=device, dtype=torch.float64)
    nn.init.zeros_(model.weight)

    def h(model: Any) -> Tensor:
        return (model(a) - b).square().sum() / 2 + decay.exp() * model.weight.square().sum() / 2

    def g(model: Any) -> Tensor:
        return (model(a[:4]) - b[4:]).square().sum()

    with bilevel.inner(model, h, g, solver="gd", lr=0.3, engine=engine) as loop:
        loop.run(200)
        return loop.hypergrad(decay)


def random_state(device: str) -> Iterator[Row]:
    """Dropout: a step that is run again must draw what it drew, and leave the generator where it was."""
    expected, other = (Case(DROPOUT, device, torch.float64).hypergradient(bilevel.Unroll(), seed=s) for s in (0, 1))
    yield "another seed gives another gradient", relative(other, expected) > 1e-3, f"{relative(other, expected):.1e}"
    for name in ("reverse", "reverse sqrt", "reverse store=host"):
        yield held(f"dropout, {name} against unroll", relative(
            Case(DROPOUT, device, torch.float64).hypergradient(ENGINES[name]), expected))  # fmt: skip
    after: list[Tensor] = []
    for name in ("unroll", "reverse"):
        Case(DROPOUT, device, torch.float64).hypergradient(ENGINES[name])
        after.append(torch.rand(3, device=device))
    yield "what is drawn after a reverse sweep", torch.equal(*after), "should be what is drawn after unroll"


def has_bf16_lstm(device: str) -> bool:
    """Whether torch can run an LSTM in bf16 there: asked, since it depends on the CPU."""
    with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
        try:
            torch.nn.LSTM(2, 2, device=device)(torch.zeros(1, 1, 2, device=device))
        except RuntimeError:
            return False
    return True


def low_precision(device: str) -> Iterator[Row]:
    """bf16 autocast and TF32 against float32, and what the types of weights are."""
    for kind, made in MODELS.items():
        exact = Case(made, device, torch.float32).hypergradient(bilevel.Reverse())
        if kind == "LSTM" and not has_bf16_lstm(device):
            yield f"{kind}, bf16", None, "torch has no bf16 LSTM for this CPU (oneDNN takes it from AVX-512)"
            continue
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            rough = Case(made, device, torch.float32).hypergradient(bilevel.Reverse())
        fine = rough.dtype == torch.float32 and bool(rough.isfinite().all())
        yield f"{kind}, bf16 against float32", fine, f"relative difference {relative(rough, exact):.1e}"
        if torch.device(device).type == "cuda":
            set_tf32(True)
            rough = Case(made, device, torch.float32).hypergradient(bilevel.Reverse())
            set_tf32(False)
            yield f"{kind}, TF32 against float32", None, f"relative difference {relative(rough, exact):.1e}"


@contextlib.contextmanager
def _refuse_sync() -> Generator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def no_sync(device: str) -> AbstractContextManager[None]:
    """On a GPU, an error where the host would wait for it; torch can't tell on the CPU."""
    return _refuse_sync() if torch.device(device).type == "cuda" else nullcontext()


def synchronisation(device: str) -> Iterator[Row]:
    """Nothing in the inner loop makes the host wait."""
    seen = True if torch.device(device).type == "cuda" else None
    words = "no synchronisation" if seen else "run; only a GPU can tell"

    def loops(engine: Any, optimizer: str, made: Any) -> tuple[bool | None, str]:
        case = Case(made, device, torch.float32)
        case.hypergradient(engine, optimizer)  # once before: libraries are loaded, and wait
        options = {"optimizer": OPTIMIZERS[optimizer](case.model), "engine": engine}
        with bilevel.inner(case.model, case.h, mean_loss, **options) as loop, no_sync(device):
            case.steps(loop, 3)
        return seen, words

    def cleaning() -> tuple[bool | None, str]:
        case = Case((mlp, (8,)), device, torch.float32)
        feed = batches((case.x[0], case.y[0]), 4, torch.Generator())
        next(feed)
        with bilevel.inner(case.model, case.h, mean_loss) as loop, no_sync(device):
            for _ in range(4):
                loop.step(*next(feed), outer=(case.x[1], case.y[1]))
        return seen, words

    def tasks() -> tuple[bool | None, str]:
        images = Images(load("digits", None).part("train"), device=device)
        episodes, encoder = Episodes(images, 4, 5, 1, 2), build_encoder("conv4", images.shape, 0).to(device)
        (x, _), (x_query, _) = next(episodes)
        head = zero_head(encode_task(encoder, x, x_query)[0].shape[-1], 5).to(device)
        with no_sync(device):
            (x, y), (x_query, y_query) = next(episodes)
            f, f_query = encode_task(encoder, x, x_query)
            with bilevel.inner(head, loss, loss, lr=0.4, tasks=4, engine="unroll") as loop:
                loop.run(3, f, y, outer=(f_query, y_query))
        return seen, words

    for name, engine in ENGINES.items():
        rows = [
            attempt(f"{kind} {optimizer}", lambda e=engine, o=optimizer, m=made: loops(e, o, m))
            for kind, made in MODELS.items()
            for optimizer in OPTIMIZERS
        ]
        yield together(f"inner loop, {name}", rows)
    yield attempt("data cleaning: mini-batches and steps", cleaning)
    yield attempt("few-shot: tasks, encoder and steps", tasks)


# --- time and memory ------------------------------------------------------------------------------------------------

RUNNERS = {
    **{name: BY_NAME[name].build for name in ("autograd create_graph", "ours: unroll", "ours: reverse")},
    **{name: BY_NAME[name].build for name in ("ours: reverse memory=auto", "ours: reverse checkpoint=sqrt")},
    "ours: reverse store=host": ours(lambda p: bilevel.Reverse(store="host")),
    "ours: reverse compile": BY_NAME["ours: reverse compile"].build,
    "higher": BY_NAME["higher"].build,
}
LAYOUTS: dict[str, tuple[bool, bool, bool]] = {  # bf16, TF32, channels-last
    "bf16": (True, False, False),
    "TF32": (False, True, False),
    "channels-last": (False, False, True),
    "bf16, channels-last": (True, False, True),
    "TF32, channels-last": (False, True, True),
}


def cost(device: str, run: Callable[[], Any], rounds: int) -> tuple[float, float | None]:
    """Median seconds of a run, and on a GPU the most memory that tensors held in it, in MB, beside what was there."""
    cuda = torch.device(device).type == "cuda"
    times, peak, before = list[float](), None, 0
    run()
    for _ in range(rounds):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        times.append(time.perf_counter() - begin)
    return statistics.median(times), peak


def table(device: str, problems: Sequence[str], size: str, rounds: int, runners: Sequence[str]) -> Iterator[str]:
    """Markdown: each problem of `python -m benchmarks`, its runners, and low precision for Reverse."""
    for name in problems:
        with torch.device(device):
            p = make(name, size)
        yield f"\n**{name}**: {p.title}, K = {p.steps}\n"
        yield "| | ms | peak MB |"
        yield "| --- | ---: | ---: |"
        for runner in runners:
            yield _line(runner, device, rounds, lambda r=runner, p=p: RUNNERS[r](p))
        if name not in ("P2", "P3"):
            continue
        for label, (bf16, tf32, last) in LAYOUTS.items():
            if (last and name == "P2") or (tf32 and torch.device(device).type != "cuda"):
                continue
            with torch.device(device):
                p = make(name, size)
            if last:
                p.model = p.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            set_tf32(tf32)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
                yield _line(f"ours: reverse, {label}", device, rounds, lambda p=p: RUNNERS["ours: reverse"](p))
            set_tf32(False)


def _line(label: str, device: str, rounds: int, build: Callable[[], Callable[[], Any]]) -> str:
    try:
        seconds, peak = cost(device, build(), rounds)
    except Exception as error:  # a peer, a compiler: a row that says why, and the table goes on
        return f"| {label} | {type(error).__name__}: {' '.join(str(error).split())[:100]} | |"
    return f"| {label} | {1e3 * seconds:.1f} | {'' if peak is None else f'{peak:.1f}'} |"


# --- the recipes ----------------------------------------------------------------------------------------------------


def recipes(device: str, short: bool) -> Iterator[Row]:
    """Both commands on digits, as a user would run them; the figures beside those of the CPU."""
    quick = ["--steps", "5", "--outer-steps", "2"] if short else ["--outer-steps", "3"]
    cleaning = [*quick, "--baselines", "none"]
    images = [*cleaning, "--model", "cnn", "--batch-size", "64", "--momentum", "0.5"]
    tasks = ["--outer-steps", "60", "--test-episodes", "300", "--curve-points", "1"]
    tasks = ["--outer-steps", "2", "--test-episodes", "10", "--curve-points", "1"] if short else tasks
    cuda = torch.device(device).type == "cuda"
    low = ["--bf16", *(["--tf32"] if cuda else [])]
    plans: list[tuple[str, Callable[[list[str]], int], list[str], list[str]]] = [
        ("data cleaning, linear", data_cleaning, cleaning, []),
        ("data cleaning, cnn, batches of 64", data_cleaning, images, [*low, "--channels-last"]),
        ("few-shot", few_shot, tasks, []),
        # on a CPU --bf16 is refused for images as small as these
        *([("few-shot", few_shot, tasks, low)] if cuda else []),
    ]
    for what, command, flags, extra in plans:
        here = _figure(command, (*flags, *extra, "--device", device))
        there = _figure(command, (*flags, "--device", "cpu"))
        near = isinstance(here, float) and isinstance(there, float) and (short or abs(here - there) < 0.1)
        yield " ".join([what, *extra]), near, f"{here} on {device}, {there} on the CPU in float32"


@functools.cache
def _figure(command: Callable[[list[str]], int], flags: tuple[str, ...]) -> float | str:
    """F1, or for few-shot the accuracy, of the last row of the command's results; or what it said instead."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = command([*flags, "--quiet", "--out", f"{folder}/out"])
        if status:
            return f"status {status}: {said.getvalue().strip()}"
        record = json.loads(Path(folder, "out/results.json").read_text())["runs"][-1]
    value = record["f1_clean"] if "f1_clean" in record else record["scores"][str(record["steps"])]["mean"]
    return round(float(value), 4)


# --- the page -------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[str], Iterator[Row]]] = {
    "Float64 against the CPU": parity,
    "Random state": random_state,
    "Low precision": low_precision,
    "Synchronisation": synchronisation,
}


def machine(device: str) -> str:
    words = [f"torch {torch.__version__}", f"Python {platform.python_version()}", platform.platform()]
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(torch.device(device))
        words += [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"]
        words += [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"]
    return "; ".join(words)


def lines(title: str, rows: Callable[[], Iterator[Row]]) -> tuple[list[str], bool]:
    """A section, and whether all of it holds; an exception is a row too, with its traceback."""
    text, well = [f"\n## {title}\n"], True
    try:
        for what, holds, words in rows():
            text.append(f"- {'ok' if holds else 'not judged' if holds is None else 'FAILED'}: {what}: {words}")
            well = well and holds is not False
    except Exception:
        return [*text, "- FAILED:\n", "```", traceback.format_exc().strip(), "```"], False
    return text, well


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu tries the script itself (cuda)")
    p.add_argument("--out", type=Path, default=Path("runs/gpu-check.md"), metavar="FILE", help="(runs/gpu-check.md)")
    p.add_argument("--size", default="quick", choices=("tiny", "quick", "full"), help="of the timed problems (quick)")
    p.add_argument("--problems", default="P1,P2,P3,P4-5,P5", metavar="P", help="to time, with commas (all)")
    p.add_argument("--runners", default=",".join(RUNNERS), metavar="R", help="to time, with commas (all)")
    p.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds (5)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    a = parser().parse_args(argv)
    if torch.device(a.device).type == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA GPU here, so there is nothing to check.", file=sys.stderr)
        return 2
    if torch.device(a.device).type == "cuda":
        torch.cuda.set_device(torch.device(a.device).index or 0)  # whose memory is measured
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    page, well = [f"# gpu-check on {a.device}\n", machine(a.device)], True
    checks = {**CHECKS, "Recipes": lambda device: recipes(device, a.size == "tiny")}
    try:
        for title, check in checks.items():
            set_tf32(False)  # a recipe may have left it on
            text, holds = lines(title, lambda check=check: check(a.device))
            print("\n".join(text), flush=True)
            page, well = page + text, well and holds
        set_tf32(False)
        page.append("\n## Time and memory")
        print(page[-1])
        for line in table(a.device, a.problems.split(","), a.size, a.rounds, a.runners.split(",")):
            print(line, flush=True)
            page.append(line)
    finally:
        torch.set_float32_matmul_precision(precision[0])
        torch.backends.cudnn.allow_tf32 = precision[1]
        page[1:1] = [f"**{'all checks hold' if well else 'something FAILED'}**. "]
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text("\n".join(page) + "\n")
    print(f"\n{'All checks hold' if well else 'Something FAILED'}; please send us this page: {a.out}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
