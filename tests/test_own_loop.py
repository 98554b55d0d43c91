"""The block runs the loop that was there: the judge is that loop, written out, and central differences of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from problems import Ridge, differences, hypergrad, relative, weighted
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")

OWN = {"reverse": "reverse", "sqrt": bilevel.Reverse("sqrt"), "forward": "forward"}  # the parameters are the leaves
SWAPPED = {"memory": bilevel.Reverse(memory="1GiB"), "unroll": "unroll"}  # the weights are tensors of their own
ENGINES = {**OWN, **SWAPPED}
IMPLICIT = {"cg": "cg", "neumann": "neumann"}
STEPS, SAMPLES, RATE = 4, 6, 0.2


class Case(NamedTuple):
    """A model and losses as a user has them; `build(lam)` makes one, the same each time."""

    model: nn.Module
    h: Callable[..., Tensor]
    g: Callable[..., Tensor]
    batch: tuple[Any, ...]
    outer: tuple[Any, ...]


Build = Callable[[Tensor], Case]
Between = Callable[[int, nn.Module, torch.optim.Optimizer], object]


class Found(NamedTuple):
    """What came of a loop: every tensor of the model at its end, g there, and (of a block) its hypergradient."""

    state: dict[str, Tensor]
    value: float
    grad: Tensor | None = None
    statistics: frozenset[str] = frozenset()  # buffers of floating point


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


def start() -> Tensor:
    return torch.linspace(-1, 1, SAMPLES).requires_grad_()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {n: t.detach().clone() for n, t in named}


def plain(
    build: Build,
    lam: Tensor,
    optimizer: Callable[[nn.Module], Any] | None = sgd,
    between: Between = lambda *_: None,
    steps: int = STEPS,
    clip: Callable[[nn.Module], object] = lambda _: None,
) -> Found:
    """The loop as it stood in the user's file."""
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam.detach().clone())
    stepper = (optimizer or sgd)(model)
    torch.manual_seed(1)
    for k in range(steps):
        stepper.zero_grad()
        h(model, *batch).backward()
        clip(model)
        stepper.step()
        between(k, model, stepper)
    state = tensors(model)
    torch.manual_seed(2)
    with torch.no_grad():
        return Found(state, float(g(model, *outer)))


def block(
    build: Build,
    lam: Tensor,
    engine: Any = "reverse",
    optimizer: Callable[[nn.Module], Any] | None = sgd,
    between: Between = lambda *_: None,
    steps: int = STEPS,
    but: str = "",
    **options: Any,
) -> Found:
    """The same loop in a block, which leaves everything as it was (`but`: see unchanged). No optimizer: by lr=."""
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    stepper = (optimizer or sgd)(model)
    before, held = everything(model), lam.grad
    torch.manual_seed(1)
    options = {"solver": "gd", "check": False, **({"optimizer": stepper} if optimizer else {"lr": RATE}), **options}
    with bilevel.inner(model, h, g, engine=engine, **options) as loop:
        for k in range(steps):
            loop.step(*batch, outer=outer)
            between(k, model, stepper)
        state = tensors(model)
        torch.manual_seed(2)
        value = float(loop.value)
        torch.manual_seed(2)
        grad = loop.hypergrad(lam)
        assert_same(tensors(model), state)  # neither of the two leaves anything behind
    assert lam.grad is held
    unchanged(model, before, but)
    return Found(state, value, grad, frozenset(n for n, b in model.named_buffers() if b.is_floating_point()))


def slope(build: Build, lam: Tensor, v: Tensor, **how: Any) -> float:
    return differences(lambda: plain(build, lam, **how).value, lam, v)


def exact(
    build: Build,
    engine: Any = "reverse",
    *,
    bits: bool | None = None,
    tolerance: float = 1e-6,
    clip: tuple[Any, Callable[[nn.Module], object]] | None = None,
    lam: Tensor | None = None,
    **how: Any,
) -> Found:
    """The block's weights, buffers, g and hypergradient are those of the plain loop. `clip`: as an option, by hand.

    With reverse bit for bit, but for running statistics and what reads them: their update may be written otherwise.
    """
    lam = start() if lam is None else lam
    hand = {} if clip is None else {"clip": clip[1]}
    found = block(build, lam, engine, **how, **({} if clip is None else {"clip": clip[0]}))
    return judge(found, build, lam, (engine == "reverse") if bits is None else bits, tolerance, **how, **hand)


def judge(found: Found, build: Build, lam: Tensor, bits: bool, tolerance: float = 1e-6, **how: Any) -> Found:
    """`how` is that of the block, of which the plain loop has no use for some."""
    how = {key: value for key, value in how.items() if key in ("optimizer", "between", "steps", "clip")}
    expected = plain(build, lam, **how)
    weights, statistics = ({n: t for n, t in expected.state.items() if (n in found.statistics) == s} for s in (0, 1))
    assert list(found.state) == list(expected.state)
    assert_same(found.state, weights, bits)
    assert_same(found.state, statistics, False)
    bits = bits and not statistics
    assert found.value == (expected.value if bits else pytest.approx(expected.value, rel=1e-12))
    v = torch.randn(lam.shape, generator=torch.Generator().manual_seed(7))
    assert found.grad is not None
    assert not found.grad.requires_grad
    assert float(found.grad.norm()) > 1e-8  # a gradient of 0 would agree with anything flat
    assert abs(float((found.grad * v).sum()) - slope(build, lam, v, **how)) <= tolerance * float(found.grad.norm())
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], bits: bool = True) -> None:
    for n, t in expected.items():
        torch.testing.assert_close(
            got[n], t, rtol=0 if bits else 1e-12, atol=0 if bits else 1e-13, msg=lambda m, n=n: f"{n}: {m}"
        )


REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError)


def says(error: BaseException, words: tuple[str, ...]) -> None:
    assert re.match(r"bilevel\.\w+: ", str(error)), f"a bare {type(error).__name__}: {error}"
    for word in words:
        assert re.search(word, str(error), re.IGNORECASE), f"{word!r} is not in: {error}"


@contextlib.contextmanager
def refused(*words: str):
    """Refused: one of ours, that names the mistake and what to do."""
    with pytest.raises(REFUSALS) as caught:
        yield
    says(caught.value, words)


def right_or_refused(
    build: Build, engine: Any, *words: str, tolerance: float = 1e-6, lam: Tensor | None = None, **how: Any
) -> bool:
    """Whether it was right, else it was refused: never another loop in silence."""
    lam = start() if lam is None else lam
    try:
        found = block(build, lam, engine, **how)
    except bilevel.DerivativeWarning:  # pytest makes errors of warnings; only where check= is on
        return False
    except REFUSALS as error:
        says(error, words)
        return False
    judge(found, build, lam, bits=False, tolerance=tolerance, **how)
    return True


# --- what must come back ---


def everything(model: nn.Module) -> list[tuple[str, Any, dict[str, Any]]]:
    """Every tensor and submodule that a module holds (in lists one by one), its mode, and the tensors' flags."""
    return [
        (f"{where or 'the model'}: {name}", x, _face(x))
        for where, module in model.named_modules()
        for holder in (vars(module), module._parameters, module._buffers, module._modules)
        for name, value in holder.items()
        for x in (value if isinstance(value, list) else [value])
        if isinstance(x, (Tensor, nn.Module)) or name == "training"
    ]


def _face(x: Any) -> dict[str, Any]:
    if not isinstance(x, Tensor):
        return {}
    grad = x.grad if x.is_leaf else None
    bits = None if grad is None else grad.clone()
    flags = {"requires_grad": x.requires_grad, "graph": x.grad_fn}
    return {"numbers": x.detach().clone(), "memory": x.data_ptr(), "grad": grad, "its numbers": bits, **flags}


def unchanged(model: nn.Module, before: list[tuple[str, Any, dict[str, Any]]], but: str = "") -> None:
    """The model is what it was, `but` for "memory", "grad" or "modules" that the user himself has changed."""
    if but == "modules":
        return
    after, free = everything(model), ("grad", "its numbers") if but == "grad" else (but,)
    assert [n for n, _, _ in after] == [n for n, _, _ in before]
    for (name, new, face), (_, old, was) in zip(after, before, strict=True):
        assert new is old, f"{name} is another object"
        for key, a in face.items():
            b = was[key]
            both = isinstance(a, Tensor) and isinstance(b, Tensor) and key != "grad"
            assert key in free or (torch.equal(a, b) if both else a is b or a == b), f"{name}, {key}: {b} is now {a}"


# --- problems ---


def data(n: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randint(2, (n,))


def losses(make: Callable[[], nn.Module], wrap: Callable[..., Any] = lambda h, g: (h, g)) -> Build:
    """Weighted samples in h; `wrap` changes the losses, or is given the model (third argument) to close over."""

    def build(lam: Tensor) -> Case:
        model, (x, y), (xv, yv) = make(), data(), data(5)
        h, g = weighted(lam)
        h, g = wrap(h, g) if wrap.__code__.co_argcount == 2 else wrap(h, g, model)
        return Case(model, h, g, (x, y), (xv, yv))

    return build


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2))


def train_and_eval(h, g):
    """What every vision script does."""
    return (lambda m, *b: h(m.train(), *b)), (lambda m, *b: g(m.eval(), *b))


class Rows(nn.Module):
    """A layer over (batch, time, feature), for what is given as (batch, 3): three times one feature."""

    def __init__(self, layer: nn.Module, width: int = 4):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, 2)

    def forward(self, x):
        y = self.layer(x.unsqueeze(-1))
        return self.out((y[0] if isinstance(y, tuple) else y)[:, -1])


class Listed(nn.Module):
    """Weights in a ParameterList and a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([torch.randn(3, 4), torch.randn(4, 2)])
        self.more = nn.ParameterDict({"b": torch.randn(2)})

    def forward(self, x):
        for w in self.ws:
            x = (x @ w).tanh()
        return x + self.more["b"]


class Odd(nn.Module):
    """Weights without dimensions, without elements, in another layout, and one that no loss touches."""

    def __init__(self):
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))
        self.turned, self.unused = nn.Parameter(torch.randn(2, 3).t()), nn.Parameter(torch.ones(2))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.scale * (x @ self.turned).tanh() + self.none.sum()


class Tied(nn.Module):
    """One weight in two places, one submodule under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.c, self.out = self.a, nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is the old style that is tried
        return nn.utils.weight_norm(nn.Linear(4, 4))


def old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 4)).eval()


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batchnorm and dropout": lambda: mlp(nn.BatchNorm1d(4), nn.Dropout(0.3)),
    "lstm": lambda: Rows(nn.LSTM(1, 4, batch_first=True)),
    "gru": lambda: Rows(nn.GRU(1, 4, 2, batch_first=True)),
    "pruned": lambda: mlp(pruned()),
    "old weight norm": lambda: mlp(old_weight_norm()),
    "old spectral norm": lambda: mlp(old_spectral_norm()),
    "weight norm": lambda: mlp(parametrizations.weight_norm(nn.Linear(4, 4))),
    "orthogonal": lambda: mlp(parametrizations.orthogonal(nn.Linear(4, 4))),
    "attention": lambda: Rows(
        nn.Sequential(nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 4, 0.1, batch_first=True))
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 4, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)
    ).to(memory_format=torch.channels_last),
    "lists": Listed,
    "odd": Odd,
    "tied": Tied,
    "half frozen": half_frozen,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_the_block_is_the_plain_loop(name, engine):
    """Bit for bit with reverse; attention has another kernel in the block than outside."""
    bits = False if name in ("attention", "weight norm", "old weight norm") else None
    exact(losses(MODELS[name]), ENGINES[engine], bits=bits)


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
@pytest.mark.parametrize(
    "clip",
    [
        (0.05, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)),
        (1e6, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6)),
        (lambda d: {n: x.tanh() for n, x in d.items()}, lambda m: [p.grad.tanh_() for p in m.parameters()]),
    ],
    ids=["norm", "norm that is not reached", "function"],
)
def test_clipping(clip, engine):
    momentum = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=0.9, weight_decay=0.1)
    exact(losses(mlp), ENGINES[engine], bits=False, clip=clip, optimizer=momentum)


# --- the model holds the current weights ---


@pytest.mark.parametrize("engine", [*ENGINES, *IMPLICIT])
def test_the_model_holds_the_weights_of_each_step(engine):
    build, lam, probe = losses(mlp), start(), torch.randn(2, 3)
    outputs: list[Tensor] = []
    plain(build, lam, between=lambda k, m, _: outputs.append(m(probe).detach()))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before, parameters = everything(model), list(model.parameters())
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine={**ENGINES, **IMPLICIT}[engine], check=False) as loop:
        for expected in outputs:
            loop.step(*batch, outer=outer)
            torch.testing.assert_close(model(probe), expected, rtol=1e-12, atol=1e-14)
            assert torch.equal(model(probe), loop(probe))
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            for n, t in model.state_dict().items():
                assert torch.equal(t, loop.weights[n])
            assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    unchanged(model, before)


def test_with_tasks_the_model_keeps_its_weights():
    model, x = mlp(), torch.randn(2, 5, 3)
    before, loss = everything(model), lambda m, x: m(x).square().mean()
    with bilevel.inner(model, loss, loss, solver="gd", lr=0.1, tasks=2, check=False) as loop:
        for _ in range(3):
            loop.step(x, outer=x)
            unchanged(model, before)
            assert loop(x).shape == (2, 5, 2)
            assert not torch.allclose(loop(x)[0], model(x[0]))
            unchanged(model, before)
    unchanged(model, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_averages_targets_and_evaluations_in_the_block(engine):
    """EMA, a copy of the best, a target network and the user's evaluate(model), each after each step."""
    probe = torch.randn(4, 3)

    def bystanders():
        seen: dict[str, list[Any]] = {"ema": [], "target": [], "loss": [], "copy": [], "saved": []}
        kept: dict[str, Any] = {}

        @torch.no_grad()
        def evaluate(model):
            model.eval()
            loss = float(model(probe).square().mean())
            model.train()
            return loss

        def between(k, model, _):
            if not kept:
                kept["target"] = copy.deepcopy(model)
                kept["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            kept["ema"].update_parameters(model)
            if k % 2:
                kept["target"].load_state_dict(model.state_dict())
            seen["loss"].append(evaluate(model))
            seen["ema"].append(nn.utils.parameters_to_vector(kept["ema"].parameters()).detach())
            seen["target"].append(kept["target"].eval()(probe).detach())
            seen["copy"].append(copy.deepcopy(model).eval()(probe).detach())
            seen["saved"].append(torch.cat([t.flatten().double() for t in model.state_dict().values()]))

        return seen, between

    build = losses(MODELS["batchnorm and dropout"], train_and_eval)
    lam = start()
    expected, between = bystanders()
    reference = plain(build, lam, between=between)
    seen, between = bystanders()
    found = block(build, lam, ENGINES[engine], between=between)
    for name in expected:
        for a, b in zip(seen[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")
    assert_same(found.state, reference.state, engine == "reverse")
    v = torch.ones(SAMPLES)
    how = {"between": lambda k, m, _: bystanders()[1](k, m, None)}
    assert abs(float(found.grad @ v) - slope(build, lam, v, **how)) < 1e-6 * float(found.grad.norm())


def test_a_target_network_that_h_reads_trains_as_in_the_plain_loop_and_is_noticed():
    """h reads a copy of w_k that is renewed in the block: another path to λ, of which no engine knows."""
    targets: dict[int, nn.Module] = {}

    def wrap(h, g, model):
        target = targets[id(model)] = copy.deepcopy(model).requires_grad_(False)
        return (lambda m, x, y: h(m, x, y) + (m(x) - target(x)).square().mean()), g

    build, lam = losses(mlp, wrap), start()
    renew = lambda k, m, _: targets[id(m)].load_state_dict(m.state_dict())
    expected = plain(build, lam, between=renew)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), check=False) as loop:
        for k in range(STEPS):
            loop.step(*batch, outer=outer)
            renew(k, model, None)
        assert_same(tensors(model), expected.state)
        with refused("changed|run again"):
            loop.hypergrad(lam)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_the_model_itself_in_the_block(engine):
    """hypergrad(loss=) of what model(x) gave: as from loop(x), or refused."""
    build, lam = losses(mlp), start()
    model, h, g, batch, (xv, yv) = build(lam)
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
        loop.run(STEPS, *batch, outer=(xv, yv))
        expected = loop.hypergrad(lam, loss=F.cross_entropy(loop(xv), yv))
        torch.testing.assert_close(expected, loop.hypergrad(lam))
        try:
            got = loop.hypergrad(lam, loss=F.cross_entropy(model(xv), yv))
        except REFUSALS as error:
            says(error, (r"loop\(x\)|engine='reverse'",))
        else:
            torch.testing.assert_close(got, expected)


# --- after the block, however it ended ---


class Mine(Exception):
    """An error of the user's own."""


def worn(name: str) -> nn.Module:
    """A model with a history: gradients, a part in another mode, a frozen weight."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model(torch.randn(5, 3)).square().mean().backward()
    last = list(model.modules())[-1]
    last.train(not last.training)
    next(iter(model.parameters())).requires_grad_(False)
    return model


def raising(f: Callable[..., Tensor], at: int, error: type[BaseException]) -> Callable[..., Tensor]:
    calls = 0

    def loss(model, *batch):
        nonlocal calls
        calls += 1
        if calls == at:
            model(*batch[:1])  # buffers have moved by now
            model.eval()
            raise error("in a loss")  # a new one each time: what is raised twice carries both tracebacks
        return f(model, *batch)

    return loss


def end(loop, batch, outer, lam):
    loop.run(3, *batch, outer=outer)
    loop.hypergrad(lam)


def in_the_body(loop, batch, outer, lam):
    loop.run(2, *batch, outer=outer)
    raise Mine


WORN = ["batchnorm and dropout", "lstm", "pruned", "old weight norm", "old spectral norm", "orthogonal", "odd", "tied"]
OTHERS = ["sqrt", "memory", "forward"]
WAYS_OUT: dict[
    str, tuple[Callable[..., Any], dict[str, tuple[int, type[BaseException]]], type[BaseException] | None]
] = {
    "the end": (end, {}, None),
    "an exception in the body": (in_the_body, {}, Mine),
    "an exception in h, at first": (end, {"h": (1, Mine)}, Mine),
    "an exception in h": (end, {"h": (3, Mine)}, Mine),
    "an interrupt in h": (end, {"h": (2, KeyboardInterrupt)}, KeyboardInterrupt),
    "an exception in g": (end, {"g": (1, Mine)}, Mine),
    "an interrupt in g": (end, {"g": (1, KeyboardInterrupt)}, KeyboardInterrupt),
    "memory that is out": (end, {"h": (3, MemoryError)}, MemoryError),
}


@pytest.mark.parametrize(
    ("way", "engine"),
    [*itertools.product(WAYS_OUT, ["reverse", "unroll"]), *itertools.product(["the end", "an exception in g"], OTHERS)],
)
@pytest.mark.parametrize("name", WORN)
def test_everything_is_what_it_was(name, way, engine):
    body, breaks, error = WAYS_OUT[way]
    model, lam, batch, outer = worn(name), start(), data(), data(5)
    h, g = weighted(lam)
    h, g = (raising(f, *breaks[n]) if n in breaks else f for n, f in (("h", h), ("g", g)))
    before = everything(model)
    with pytest.raises(error) if error else contextlib.nullcontext():
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=ENGINES[engine], check=False) as loop:
            body(loop, batch, outer, lam)
    unchanged(model, before)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, check=False) as loop:  # nothing is left held
        loop.run(2, *batch, outer=outer)
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_modes_that_the_body_set_are_put_back(engine):
    model, lam, batch, outer = worn("batchnorm and dropout"), start(), data(), data(5)
    before = everything(model)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
        loop.run(2, *batch, outer=outer)
        model.eval()
        loop.hypergrad(lam)
        assert not any(m.training for m in model.modules())
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt, MemoryError])
def test_an_exception_in_a_replay_leaves_the_last_weights_in_the_model(engine, error):
    """In hypergrad the model goes back through w_{K−1}, …: the block goes on from w_K all the same."""
    build, lam = losses(MODELS["batchnorm and dropout"], train_and_eval), start()
    expected, whole = plain(build, lam, steps=STEPS + 1), block(build, lam, steps=STEPS + 1)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)
    torch.manual_seed(1)
    h = raising(h, STEPS + 2, error)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=ENGINES[engine], check=False) as loop:
        loop.run(STEPS, *batch, outer=outer)
        held, random = tensors(model), torch.get_rng_state()
        with pytest.raises(error):
            loop.hypergrad(lam)
        assert_same(tensors(model), held)
        assert all(m.training for m in model.modules())
        torch.set_rng_state(random)
        loop.step(*batch, outer=outer)
        assert_same(tensors(model), expected.state)
        torch.testing.assert_close(loop.hypergrad(lam), whole.grad, rtol=1e-12, atol=0)
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("how", ["dropped", "closed", "thrown into"])
def test_an_abandoned_generator(how, engine):
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)

    def train():
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
            while True:
                yield float(loop.step(*batch, outer=outer).h)

    running = train()
    assert next(running) != next(running)
    if how == "closed":
        running.close()
    elif how == "thrown into":
        with pytest.raises(Mine):
            running.throw(Mine())
    del running
    gc.collect()
    unchanged(model, before)


@pytest.mark.parametrize("second", ["reverse", "unroll", "memory"])
@pytest.mark.parametrize("first", ["reverse", "unroll"])
@pytest.mark.parametrize("out_of_order", [False, True])
def test_two_blocks_on_one_model(first, second, out_of_order):
    """The second starts from the first one's weights; whichever closes last, the model is what it was before both."""
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)
    blocks = [
        bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=ENGINES[e], check=False)
        for e in (first, second)
    ]
    one = blocks[0].__enter__()
    one.run(2, *batch, outer=outer)
    middle = tensors(model)
    two = blocks[1].__enter__()
    assert_same(tensors(model), middle)
    two.run(2, *batch, outer=outer)
    last = tensors(model)
    if out_of_order:
        blocks[0].__exit__(None, None, None)
        assert_same(tensors(model), last)
        two.step(*batch, outer=outer)
        got = two.hypergrad(lam)
        blocks[1].__exit__(None, None, None)
    else:
        blocks[1].__exit__(None, None, None)
        assert_same(tensors(model), middle)
        one.step(*batch, outer=outer)
        got = one.hypergrad(lam)
        blocks[0].__exit__(None, None, None)
    unchanged(model, before)
    other = worn("lstm")
    with torch.no_grad():
        for n, p in other.named_parameters():
            p.copy_(middle[n] if out_of_order else p)
    with bilevel.inner(other, *weighted(lam), solver="gd", lr=0.1, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        torch.testing.assert_close(got, loop.hypergrad(lam), rtol=1e-10, atol=1e-14)


def test_an_exception_through_two_blocks():
    model, lam, batch, outer = worn("pruned"), start(), data(), data(5)
    before = everything(model)
    options = {"solver": "gd", "lr": 0.1, "check": False}
    with pytest.raises(Mine), bilevel.inner(model, *weighted(lam), **options) as one:
        one.run(2, *batch, outer=outer)
        with bilevel.inner(model, *weighted(lam), engine="unroll", **options) as two:
            two.run(2, *batch, outer=outer)
            raise Mine
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_steps_of_two_blocks_in_turns(engine):
    """Two generators on one model, one step each: right or refused, and the model is put back."""
    build, lam = losses(mlp), start()
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)
    alone = block(build, lam, engine, steps=2)

    def train():
        with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=engine, check=False) as loop:
            for _ in range(2):
                loop.step(*batch, outer=outer)
                yield None
            yield loop.hypergrad(lam)

    one, two = train(), train()
    try:
        for _ in range(2):
            next(one)
            next(two)
        torch.testing.assert_close(next(one), alone.grad)
    except REFUSALS as error:
        says(error, ("block|loop|by hand",))
    finally:
        one.close()
        two.close()
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_commit_in_a_nested_block_is_a_change_by_hand(engine):
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    before = everything(model)
    options = {"solver": "gd", "lr": 0.1, "check": False}
    with refused("commit_|by hand|changed"), bilevel.inner(model, *weighted(lam), engine=engine, **options) as one:
        one.run(2, *batch, outer=outer)
        with bilevel.inner(model, *weighted(lam), **options) as two:
            two.step(*batch, outer=outer)
            two.commit_()
        one.step(*batch, outer=outer)
    unchanged(model, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_commit_keeps_what_the_plain_loop_ends_with(engine):
    build, lam = losses(MODELS["batchnorm and dropout"], train_and_eval), start()
    expected = plain(build, lam)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    parameters = [(p, p.data_ptr()) for p in model.parameters()]
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=ENGINES[engine], check=False) as loop:
        loop.run(STEPS, *batch, outer=outer)
        loop.commit_()
        loop.hypergrad(lam)
        loop.step(*batch, outer=outer)
    assert_same(tensors(model), expected.state, False)
    assert all(p is q and p.data_ptr() == at for p, (q, at) in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["the model", "a module around it"])
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_second_thread_with_the_same_model_is_refused(engine, wrap):
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)
    caught: list[BaseException] = []

    def another():
        try:
            with bilevel.inner(wrap(model), *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
                loop.run(2, *batch, outer=outer)
        except BaseException as error:
            caught.append(error)

    def in_a_thread():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "it waits for the other block to end"

    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
        loop.run(2, *batch, outer=outer)
        held = tensors(model)
        in_a_thread()
        assert_same(tensors(model), held)
        loop.step(*batch, outer=outer)
        loop.hypergrad(lam)
    unchanged(model, before)
    (error,) = caught
    assert isinstance(error, RuntimeError)
    says(error, ("thread", "copy"))
    caught.clear()
    in_a_thread()  # the block has ended: nobody else has it now
    assert not caught
    unchanged(model, before)


# --- modes ---


def watch_modes(f, seen):
    def loss(model, *batch):
        seen.append(model.training)
        return f(model, *batch)

    return loss


@pytest.mark.parametrize("engine", ENGINES)
def test_modes_that_g_sets_between_the_steps_do_not_reach_the_next_h(engine):
    build, lam, seen = losses(MODELS["batchnorm and dropout"], lambda h, g: (h, train_and_eval(h, g)[1])), start(), []
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(
        model, watch_modes(h, seen), g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False
    ) as loop:
        for _ in range(3):
            loop.step(*batch, outer=outer)
            _ = loop.value
            assert all(m.training for m in model.modules())
            loop.hypergrad(lam)
            assert all(m.training for m in model.modules())
            loop.backward()
            assert all(m.training for m in model.modules())
        assert all(seen)


@pytest.mark.parametrize("engine", ENGINES)
def test_modes_that_g_sets_in_a_step_are_those_of_the_plain_loop(engine):
    """Of a BiG-SAM loop written by hand: g follows h, and what it leaves is what the next h finds."""
    build = losses(MODELS["batchnorm and dropout"], lambda h, g: (h, train_and_eval(h, g)[1]))
    lam, seen = start(), []

    def by_hand() -> float:
        torch.manual_seed(0)
        model, h, g, batch, outer = build(lam.detach())
        torch.manual_seed(1)
        for _ in range(3):
            seen.append(model.training)
            loss = RATE * (0.5 * h(model, *batch) + 0.5 * g(model, *outer))
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), grads, strict=True):
                    p -= d
        with torch.no_grad():
            return float(g(model, *outer))

    value, expected = by_hand(), list(seen)
    assert expected == [True, False, False]
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)
    seen.clear()
    torch.manual_seed(1)
    solver = bilevel.BiGSAM(RATE, alpha=0.5)
    with bilevel.inner(model, watch_modes(h, seen), g, solver=solver, engine=ENGINES[engine], check=False) as loop:
        loop.run(3, *batch, outer=outer)
        assert seen == expected
        assert float(loop.value) == pytest.approx(value, rel=1e-12)
        grad = loop.hypergrad(lam)
    unchanged(model, before)
    v = torch.randn(SAMPLES)
    assert abs(float(grad @ v) - differences(by_hand, lam, v)) < 1e-6 * float(grad.norm())


# --- a backward that runs the model again ---


class Checkpointed(nn.Module):
    """Blocks of layers of which the backward pass runs each again."""

    def __init__(self, *middle: nn.Module, reentrant: bool, sequential: bool = False):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(4, 4), *copy.deepcopy(middle), nn.Tanh())
        self.first, self.blocks, self.last = nn.Linear(3, 4), nn.Sequential(block(), block()), nn.Linear(4, 2)
        self.reentrant, self.sequential = reentrant, sequential

    def forward(self, x):
        x = self.first(x)
        if not x.requires_grad:  # as torchvision asks: a reentrant one warns where nothing is differentiated
            return self.last(self.blocks(x))
        if self.sequential:
            return self.last(checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant))
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=self.reentrant)
        return self.last(x)


class DenseBlock(nn.Module):
    """As torchvision's DenseNet(memory_efficient=True): a bottleneck over all features so far, run again."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.reentrant = nn.Linear(3, 4), reentrant
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(6)])
        self.layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(6, 2)])
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        features = [self.first(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            bottleneck = lambda *parts, norm=norm, layer=layer: layer(norm(torch.cat(parts, 1)).tanh())
            again = any(f.requires_grad for f in features)
            features.append(
                checkpoint(bottleneck, *features, use_reentrant=self.reentrant) if again else bottleneck(*features)
            )
        return self.last(torch.cat(features, 1))


class Recompute(torch.autograd.Function):
    """A backward of one's own, that runs the module again (as reversible layers do) and is right to any order."""

    depth = 0

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run = run
        ctx.save_for_backward(x, *weights)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        Recompute.depth += 1
        try:
            if Recompute.depth > 20:
                raise RuntimeError("it runs within itself: the module has weights of another step, that depend on this")
            with torch.enable_grad():
                there = x.view_as(x)
                return None, *torch.autograd.grad(ctx.run(there), (there, *weights), grad, create_graph=True)
        finally:
            Recompute.depth -= 1


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Recompute.apply(self.middle, self.first(x), *self.middle.parameters()))


RECOMPUTING = {
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(reentrant=True),
    "with dropout": lambda: Checkpointed(nn.Dropout(0.3), reentrant=False),
    "with dropout, reentrant": lambda: Checkpointed(nn.Dropout(0.3), reentrant=True),
    "sequential": lambda: Checkpointed(reentrant=False, sequential=True),
    "sequential, reentrant": lambda: Checkpointed(reentrant=True, sequential=True),
    "dense": lambda: DenseBlock(False),
    "dense, reentrant": lambda: DenseBlock(True),
    "reversible": Reversible,
}
EVAL = lambda h, g: (h, lambda m, *b: g(m.eval(), *b))


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("name", RECOMPUTING)
def test_recomputing_backwards_are_exact(name, engine):
    """Running statistics move twice a step where BatchNorm is run again, and so they do here."""
    wrap = EVAL if "dropout" in name else lambda h, g: (h, g)
    exact(losses(RECOMPUTING[name], wrap), ENGINES[engine])


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "with dropout, reentrant"])
def test_recomputing_backwards_under_momentum_and_clipping(name):
    momentum = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=0.9, nesterov=True)
    clip = (0.3, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.3))
    exact(losses(RECOMPUTING[name], EVAL), bits=False, optimizer=momentum, clip=clip)


@pytest.mark.parametrize("reentrant", [False, True])
def test_running_statistics_that_are_moved_twice_a_step_and_read_by_g(reentrant):
    build = losses(lambda: DenseBlock(reentrant), train_and_eval)
    assert not right_or_refused(build, "reverse", "checkpoint|BatchNorm|running")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_leaves_other_gradients_alone(reentrant):
    """A reentrant one can only be run by .backward(), which adds to every leaf's .grad."""
    encoder, lam = nn.Linear(3, 3), start()
    encoder.weight.grad = torch.ones_like(encoder.weight)
    build = losses(lambda: Checkpointed(reentrant=reentrant), lambda h, g: ((lambda m, x, y: h(m, encoder(x), y)), g))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = everything(model)
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        loop.hypergrad([lam, *encoder.parameters()])
    unchanged(model, before)
    assert lam.grad is None
    assert encoder.bias.grad is None
    assert torch.equal(encoder.weight.grad, torch.ones_like(encoder.weight))


@pytest.mark.parametrize("engine", SWAPPED)
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "sequential, reentrant", "dense"])
def test_engines_that_swap_weights_refuse_checkpointing(name, engine):
    model, lam = RECOMPUTING[name](), start()
    before = everything(model)
    with refused("checkpoint", "reverse"):
        hypergrad(model, *weighted(lam), lam, data(), data(5), solver="gd", lr=0.1, check=False, engine=SWAPPED[engine])
    unchanged(model, before)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "sequential, reentrant", "dense"])
def test_checkpointing_under_tasks_is_right_or_refused(name):
    torch.manual_seed(0)
    model, lam = RECOMPUTING[name](), start()
    before, (x, y) = everything(model), (torch.stack(parts) for parts in zip(data(), data(), strict=True))
    options = {"solver": "gd", "lr": RATE, "check": False}
    try:
        got = hypergrad(model, *weighted(lam), lam, (x, y), (x, y), **options, tasks=2)
    except REFUSALS as error:
        says(error, ("checkpoint", "tasks"))
    else:
        apart = [hypergrad(model, *weighted(lam), lam, (x[i], y[i]), (x[i], y[i]), **options) for i in range(2)]
        assert relative(got, apart[0] + apart[1]) < 1e-10
    unchanged(model, before)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "with dropout", "sequential", "dense"])
def test_recomputing_backwards_in_forward_mode_are_right_or_refused(name):
    wrap = EVAL if "dropout" in name else lambda h, g: (h, g)
    right = right_or_refused(losses(RECOMPUTING[name], wrap), "forward", "checkpoint", "reverse")
    assert right == (name != "dense")


@pytest.mark.parametrize("engine", ["forward", *SWAPPED])
def test_a_backward_of_ones_own_that_runs_the_module_again_is_right_or_fails(engine):
    """Where the weights of the step are no longer in the module: an error of any kind, but no number."""
    lam = start()
    try:
        found = block(losses(Reversible), lam, ENGINES[engine])
    except RuntimeError:
        return
    judge(found, losses(Reversible), lam, bits=False)


@pytest.mark.parametrize("engine", IMPLICIT)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_backwards_at_a_fixed_point(reentrant, engine):
    decay = lambda h, g: ((lambda m, *b: h(m, *b) + sum(p.square().sum() for p in m.parameters())), g)
    build = losses(lambda: Checkpointed(reentrant=reentrant), decay)
    assert right_or_refused(build, engine, "checkpoint", "reverse", steps=150, tolerance=1e-5) or reentrant


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradient_checkpointing_of_hugging_face(family, reentrant, transformers):
    sizes = {"vocab_size": 11, "attn_implementation": "eager"}
    if family == "bert":
        wide = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config, kind = (
            transformers.BertConfig(**sizes, **wide, num_labels=2),
            transformers.BertForSequenceClassification,
        )
    else:
        narrow = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
        config, kind = transformers.GPT2Config(**sizes, **narrow, use_cache=False), transformers.GPT2LMHeadModel

    def build(lam):
        model = kind(config).double().train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ids, y = torch.randint(11, (SAMPLES, 5)), torch.randint(2, (SAMPLES,))
        scores = lambda m, ids: m(input_ids=ids).logits.reshape(SAMPLES, -1)
        h = lambda m, ids, y: (lam.sigmoid() * F.cross_entropy(scores(m, ids), y, reduction="none")).mean()
        g = lambda m, ids, y: F.cross_entropy(scores(m.eval(), ids), y)
        return Case(model, h, g, (ids, y), (ids.flip(0), y))

    exact(build, steps=3)


# --- buffers are state ---


def normed(norm: Callable[[], nn.Module], *rest: int) -> Callable[[], nn.Module]:
    """A model with the layer on (batch, 4, *rest), whose running statistics have a history."""

    def make() -> nn.Module:
        width = 4 * int(torch.tensor(rest or (1,)).prod())
        layer = norm()
        model = nn.Sequential(
            nn.Linear(3, width), nn.Unflatten(1, (4, *rest)), layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2)
        )
        for _ in range(3):
            model(torch.randn(4, 3))
        return model

    return make


NORMS = {
    "1d": normed(lambda: nn.BatchNorm1d(4)),
    "1d, momentum 0.5": normed(lambda: nn.BatchNorm1d(4, momentum=0.5)),
    "1d, momentum 1": normed(lambda: nn.BatchNorm1d(4, momentum=1.0)),
    "1d, no momentum": normed(lambda: nn.BatchNorm1d(4, momentum=None)),
    "1d, not affine": normed(lambda: nn.BatchNorm1d(4, momentum=0.5, affine=False)),
    "1d over time": normed(lambda: nn.BatchNorm1d(4, momentum=0.5), 3),
    "2d": normed(lambda: nn.BatchNorm2d(4), 2, 2),
    "2d, no momentum, not affine": normed(lambda: nn.BatchNorm2d(4, momentum=None, affine=False), 1, 2),
    "3d, momentum 0.5": normed(lambda: nn.BatchNorm3d(4, momentum=0.5), 1, 2, 2),
    "3d, no momentum": normed(lambda: nn.BatchNorm3d(4, momentum=None), 2, 1, 2),
    "no statistics": normed(lambda: nn.BatchNorm1d(4, track_running_stats=False)),
    "sync": normed(lambda: nn.SyncBatchNorm(4, momentum=0.5)),
    "instance 1d": normed(lambda: nn.InstanceNorm1d(4, momentum=0.5, track_running_stats=True), 3),
    "instance 2d, affine": normed(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 2, 2),
    "instance 3d": normed(lambda: nn.InstanceNorm3d(4, momentum=0.5, track_running_stats=True), 1, 2, 2),
    "two layers": lambda: mlp(nn.BatchNorm1d(4, momentum=0.5), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "own class": normed(lambda: type("Mine", (nn.BatchNorm1d,), {})(4, momentum=0.5)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_state(name, engine):
    """h in training and g in eval mode: λ moves the statistics, and g reads them."""
    exact(losses(NORMS[name], train_and_eval), ENGINES[engine])


def test_running_statistics_matter():
    """What would be missed: with one step, all of the first layer's influence on them."""
    found = exact(losses(NORMS["1d, momentum 0.5"], train_and_eval), steps=2)
    frozen = exact(losses(NORMS["1d, momentum 0.5"], lambda h, g: (h, lambda m, *b: g(m.train(), *b))), steps=2)
    assert relative(found.grad, frozen.grad) > 0.05


BATCHNORM = NORMS["1d, momentum 0.5"]


def two_calls(h, g):
    return train_and_eval(lambda m, x, y: h(m, x, y) + h(m, 2 * x + 1, y) / 2, g)


def one_call_in_eval(h, g):
    return train_and_eval(lambda m, x, y: h(m, x, y) + h(m.eval(), x + 1, y), g)


def shared_by_h_and_g(h, g):
    return (lambda m, *b: h(m.train(), *b)), lambda m, *b: g(m.eval(), *b) + 0 * m.train()(b[0]).sum()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrap", [two_calls, one_call_in_eval, shared_by_h_and_g])
def test_running_statistics_in_losses_of_several_calls(wrap, engine):
    exact(losses(BATCHNORM, wrap), ENGINES[engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_in_eval_mode_throughout(engine):
    """Frozen statistics: they enter as they are, and stay."""
    build = losses(lambda: BATCHNORM().eval())
    found = exact(build, ENGINES[engine])
    torch.manual_seed(0)
    model = build(start()).model
    assert torch.equal(found.state["2.running_mean"], model[2].running_mean)
    assert int(found.state["2.num_batches_tracked"]) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_in_both_modes(engine):
    """Every other step is in eval mode and reads what the one before wrote: statistics in the middle of the loop."""
    modes = lambda k, m, _: m.train(k % 2 == 1)
    exact(losses(BATCHNORM, lambda h, g: (h, lambda m, *b: g(m.eval(), *b))), ENGINES[engine], between=modes)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["closed over", "in the batch"])
def test_learned_data_reach_g_through_the_statistics(how, engine):
    """λ is the data of h: after one step of rate 0, g depends on them by the statistics alone."""
    lam = torch.randn(SAMPLES, 3, requires_grad=True)

    def build(x):
        model, y, outer = BATCHNORM(), torch.randint(2, (SAMPLES,)), data(5)
        h = lambda m, x, y: F.cross_entropy(m.train()(x), y)
        g = lambda m, x, y: F.cross_entropy(m.eval()(x), y)
        if how == "closed over":
            return Case(model, lambda m, y: h(m, x, y), g, (y,), outer)
        return Case(model, h, g, (x, y), outer)

    exact(build, ENGINES[engine], lam=lam, steps=2)
    found = exact(build, ENGINES[engine], lam=lam, steps=1, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0))
    assert float(found.grad.norm()) > 1e-3


@pytest.mark.parametrize("engine", ["reverse", "sqrt", "memory", "unroll"])
def test_initial_weights_reach_g_through_the_statistics(engine):
    """Of w_0, after a step: the first layer's output is what the statistics are of."""
    build = losses(BATCHNORM, train_and_eval)
    model, h, g, batch, outer = build(start())
    with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=ENGINES[engine], check=False) as loop:
        loop.run(2, *batch, outer=outer)
        grads = loop.hypergrad(model)

    def value() -> float:
        other = copy.deepcopy(model)
        stepper = sgd(other)
        for _ in range(2):
            stepper.zero_grad()
            h(other, *batch).backward()
            stepper.step()
        return float(g(other, *outer).detach())

    for name in ("0.weight", "2.weight", "5.bias"):
        v = torch.randn_like(grads[name])
        expected = differences(value, model.get_parameter(name), v)
        assert abs(float((grads[name] * v).sum()) - expected) < 1e-6 * float(grads[name].norm())


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll"])
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_running_statistics_under_other_optimizers(rule, engine):
    rules = {
        "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
        "adam": lambda m: torch.optim.Adam(m.parameters(), 0.05, eps=1e-3),
    }
    exact(losses(BATCHNORM, train_and_eval), ENGINES[engine], bits=False, optimizer=rules[rule])


@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_under_bigsam(engine):
    """g in eval mode in every step, with a toggle of its own: statistics are read and written in turns."""
    lam = start()

    def toggled(model, x, y):
        model.eval()
        try:
            return F.cross_entropy(model(x), y)
        finally:
            model.train()

    build = losses(BATCHNORM, lambda h, g: (h, toggled))

    def by_hand() -> float:
        torch.manual_seed(0)
        model, h, g, batch, outer = build(lam.detach())
        for k in (1, 2, 3):
            alpha = k**-0.25
            loss = RATE * alpha * h(model, *batch)
            loss = loss if k == 1 else loss + RATE * (1 - alpha) * g(model, *outer)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, d in zip(model.parameters(), grads, strict=True):
                    p -= d
        with torch.no_grad():
            return float(g(model, *outer))

    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    with bilevel.inner(model, h, g, solver="bigsam", lr=RATE, engine=ENGINES[engine], check=False) as loop:
        loop.run(3, *batch, outer=outer)
        assert float(loop.value) == pytest.approx(by_hand(), rel=1e-12)
        grad = loop.hypergrad(lam)
    v = torch.randn(SAMPLES)
    assert abs(float(grad @ v) - differences(by_hand, lam, v)) < 1e-6 * float(grad.norm())


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
@pytest.mark.parametrize("name", ["1d, momentum 0.5", "1d, no momentum", "instance 1d"])
def test_running_statistics_of_tasks(name, engine):
    """Each task has its own: the sum of plain loops, one for each."""
    torch.manual_seed(0)
    model, lam = NORMS[name](), torch.tensor(0.3, requires_grad=True)
    before = everything(model)
    h = lambda m, x, y: lam.exp() * F.cross_entropy(m.train()(x), y)
    g = lambda m, x, y: F.cross_entropy(m.eval()(x), y)
    (x, y), (xv, yv) = ((torch.stack(parts) for parts in zip(data(), data(), strict=True)) for _ in range(2))
    x[1] += 2

    def by_hand() -> float:
        total = 0.0
        for i in range(2):
            one = copy.deepcopy(model)
            stepper = sgd(one)
            for _ in range(3):
                stepper.zero_grad()
                h(one, x[i], y[i]).backward(inputs=list(one.parameters()))
                stepper.step()
            total += float(g(one, xv[i], yv[i]).detach())
        return total

    try:
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, tasks=2, engine=ENGINES[engine], check=False) as loop:
            loop.run(3, x, y, outer=(xv, yv))
            value, grad = float(loop.value), loop.hypergrad(lam)
    except REFUSALS as error:
        if name != "1d, no momentum":  # which reads a count that vmap can't give
            raise
        says(error, ("momentum", "tasks"))
        return
    unchanged(model, before)
    assert value == pytest.approx(by_hand(), rel=1e-12)
    assert float(grad) == pytest.approx(differences(by_hand, lam, torch.ones(())), rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "words", "right"),
    [
        (lambda k, m, _: setattr(m[2], "momentum", 0.5 / (k + 2)), "run again", ("forward", "memory", "unroll")),
        (lambda k, m, _: m[2].reset_running_stats() if k == 1 else None, "buffer|running|by hand|changed", ()),
        (lambda k, m, _: m[2].running_mean.mul_(0.5) if k == 1 else None, "buffer|running|by hand|changed", ()),
        (lambda k, m, _: m[2].requires_grad_(k % 2 == 1), "requires_grad|frozen", ()),
    ],
    ids=["a schedule of its momentum", "reset", "by hand", "frozen in turns"],
)
def test_a_layer_that_is_changed_between_the_steps(change, words, right, engine):
    """As the plain loop does, or refused: a step that is run again would take another momentum."""
    found = right_or_refused(losses(BATCHNORM, train_and_eval), ENGINES[engine], words, between=change)
    assert found == (engine in right)


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_that_the_body_moves(engine):
    """model(x) in training mode between the steps, for precise statistics: refused."""

    def forward(k, m, _):
        with torch.no_grad():
            m.train()(torch.ones(4, 3) * torch.arange(4.0)[:, None])

    build = losses(BATCHNORM, train_and_eval)
    assert not right_or_refused(build, ENGINES[engine], "buffer|running|by hand|changed", between=forward)


class Centred(nn.Module):
    """A running mean of one's own: a buffer that is no layer's of torch."""

    def __init__(self, replaced: bool = False, dtype: torch.dtype | None = None):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4, dtype=dtype))
        self.replaced = replaced

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                new = (0.5 * self.centre + 0.5 * x.mean(0)).to(self.centre.dtype)
                if self.replaced:
                    self.centre = new
                else:
                    self.centre.copy_(new)
        return self.read(x)

    def read(self, x):
        return x - self.centre


class Counted(Centred):
    """A buffer that is written and never read again."""

    def read(self, x):
        return x


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
def test_another_buffer_that_h_changes_and_g_reads_is_warned_of(engine, replaced):
    build, lam = losses(lambda: mlp(Centred(replaced)), train_and_eval), start()
    model, h, g, batch, outer = build(lam)
    with pytest.warns(bilevel.DerivativeWarning) as told:  # the sentinel has its say as well: h has a stop-gradient
        hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1, engine=ENGINES[engine])
    assert any("buffer '1.centre'" in str(w.message) for w in told)


@pytest.mark.parametrize("dtype", [None, torch.int64], ids=["not read", "whole numbers"])
def test_other_buffers_are_not_warned_of(dtype):
    """pytest makes errors of warnings. Integers have no derivative to miss."""
    layer = (lambda: Counted()) if dtype is None else (lambda: Centred(dtype=dtype))
    build, lam = losses(lambda: mlp(layer()), train_and_eval), start()
    model, h, g, batch, outer = build(lam)
    assert float(hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1).norm()) > 0


def test_another_buffer_that_the_next_h_reads_is_warned_of():
    """g need not read it: the path through the next step is missed as well."""
    build, lam = losses(lambda: mlp(Centred()), lambda h, g: (h, lambda m, x, y: m[0].weight.square().sum())), start()
    model, h, g, batch, outer = build(lam)
    with pytest.warns(bilevel.DerivativeWarning) as told:
        hypergrad(model, h, g, lam, batch, outer, solver="gd", lr=0.1)
    assert any("buffer '1.centre'" in str(w.message) for w in told)


@pytest.mark.parametrize("engine", IMPLICIT)
def test_implicit_engines_and_running_statistics(engine):
    """At a fixed point of weights and statistics they are right."""
    decay = lambda h, g: train_and_eval(lambda m, *b: h(m, *b) + sum(p.square().sum() for p in m.parameters()), g)
    build = losses(BATCHNORM, decay)
    assert right_or_refused(build, engine, "BatchNorm|running|buffer", steps=150, tolerance=1e-5)


def test_ridge_as_a_plain_loop():
    """The judge itself, against a closed form: many plain steps, and differences of them."""
    ridge = Ridge.random()
    penalty = lambda m, lam: (lam.exp() - ridge.lam.exp()) * m.w.square().sum() / 2
    build = lambda lam: Case(ridge.model(), lambda m: ridge.h(m) + penalty(m, lam), ridge.g, (), ())
    lam = ridge.lam.detach().clone().requires_grad_()
    got = slope(build, lam, torch.ones(()), steps=300)
    assert got == pytest.approx(float(ridge.hypergradient()), rel=1e-6)
