"""A loop as it stands in a user's file, and the same in a block. The loop and differences of it judge the block."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from problems import REFUSALS, differences, says, weighted
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import bilevel_plugin as bilevel

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
    memory = x.data_ptr() if x.layout == torch.strided else None
    return {"numbers": x.detach().clone(), "memory": memory, "grad": grad, "its numbers": bits, **flags}


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
            same = torch.equal(_dense(a), _dense(b)) if both else a is b or a == b
            assert key in free or same, f"{name}, {key}: {b} is now {a}"


def _dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


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


# --- models and losses of several files ---


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


COMPILER = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*runs eagerly", "ignore::UserWarning:torch"
)


def attempt(model, h, g, lam, batch=(), outer=(), steps=STEPS, between=lambda k: None, but="", **options) -> Tensor:
    """The hypergradient of a block, wherever on the way it may be refused; the model is put back (`but`: unchanged)."""
    before = everything(model)
    try:
        with bilevel.inner(model, h, g, check=False, **{"solver": "gd", "lr": RATE, **options}) as loop:
            for k in range(steps):
                loop.step(*batch, outer=outer)
                between(k)
            return loop.hypergrad(lam)
    finally:
        unchanged(model, before, but)


def orthogonal() -> nn.Module:
    return mlp(parametrizations.orthogonal(nn.Linear(4, 4)))


class Words(nn.Module):
    """Tokens (here: the signs of a sample) through an embedding."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.out = nn.Embedding(2, 4, **options), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.embed((x > 0).long()).mean(1).tanh())
