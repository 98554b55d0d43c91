"""Bilevel problems to measure the sentinel with: honest ones, and ones whose derivatives are silently wrong.

A problem is *honest* if autograd gives the derivative of the loop that runs: the hypergradient agrees with central
differences of g(w_K) over the outer variables, where w_K comes from a plain loop (`Problem.plain`, which knows nothing
of bilevel_plugin) that steps along what `torch.autograd.grad` calls the gradient of the user's loss. It is *dishonest*
if a `.detach()`, a custom backward, a straight-through estimator or the like makes the two differ, without an error.

`honest()` and `dishonest()` build their problems one after the other, each from a seed.
`tests/sentinel_study.py` runs them.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

Lam = dict[str, Tensor]
Loss = Callable[..., Tensor]  # (model, lam, *batch) -> scalar
KINDS = ("vector", "image", "sequence")  # what models read; some read tokens
BATCH, CLASSES, FEATURES, WIDTH, LENGTH, VOCABULARY = 12, 4, 6, 16, 5, 11


@dataclass(frozen=True, eq=False)
class Problem:
    """A bilevel problem, together with a plain loop that knows the truth about it.

    h and g are functions of (model, lam, *batch), so that the problem can be run with other outer variables or in
    another precision. `options` are those of `bilevel.inner`. `reference` is "differences", or "undefined" where
    g(w_K) jumps as λ moves (straight-through quantisers) or is rounded too coarsely, so that differences say nothing.
    """

    name: str
    model: nn.Module
    h: Loss
    g: Loss
    lam: Lam
    batch: tuple[Tensor, ...]
    outer: tuple[Tensor, ...]
    options: dict[str, Any]
    steps: int = 3
    autocast: bool = False
    reference: str = "differences"

    def losses(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return h and g as functions of (model, *batch), closed over λ as a user would write them."""
        return (
            lambda model, *batch: self.h(model, self.lam, *batch),
            lambda model, *batch: self.g(model, self.lam, *batch),
        )

    def twin(self, dtype: torch.dtype = torch.float64) -> Problem:
        """Return a copy of the problem, and of the optimizer in its options, in another precision."""
        model, options = copy.deepcopy((self.model, self.options))
        lam = {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in self.lam.items()}
        cast = [tuple(x.to(dtype) if x.is_floating_point() else x for x in xs) for xs in (self.batch, self.outer)]
        return replace(
            self, model=model.to(dtype), options=options, lam=lam, batch=cast[0], outer=cast[1], autocast=False
        )

    def plain(self, dtype: torch.dtype = torch.float64, lam: Lam | None = None) -> float:
        """Run the plain loop on a copy of the problem and return g(w_K)."""
        twin = self.twin(dtype)
        model, lam = twin.model, lam or twin.lam
        optimizer = twin.options.get("optimizer")
        weights = [p for p in model.parameters() if p.requires_grad]
        with seeded(0):
            for k in range(1, self.steps + 1):
                c_h, c_g = _coefficients(twin.options, k)
                loss = c_h * twin.h(model, lam, *twin.batch)
                if c_g:
                    loss = loss + c_g * twin.g(model, lam, *twin.outer)
                grads = torch.autograd.grad(loss, weights, allow_unused=True)
                for p, d in zip(weights, grads, strict=True):
                    if optimizer is not None:
                        p.grad = d
                    elif d is not None:
                        p.data.sub_(d)
                if optimizer is not None:
                    optimizer.step()
            return float(twin.g(model, lam, *twin.outer).detach())

    def directions(self, count: int = 3) -> list[Lam]:
        """Return fixed random directions in the space of λ, in float64."""
        generator = torch.Generator().manual_seed(1)
        draw = lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return [{n: draw(x) for n, x in self.lam.items()} for _ in range(count)]

    def along(self, gradient: Lam) -> Tensor:
        """Return the derivatives along `directions()` that a gradient for λ stands for."""
        dots = [sum((gradient[n].double() * v[n]).sum() for n in v) for v in self.directions()]
        return torch.stack([torch.as_tensor(d) for d in dots])

    def true_hypergradient(self, eps: float = 1e-5) -> Tensor:
        """Return dg(w_K(λ), λ) along `directions()`, by central differences of the plain loop in float64."""

        def moved(v: Lam, step: float) -> float:
            return self.plain(lam={n: (x.detach() + step * v[n]).requires_grad_() for n, x in self.lam.items()})

        return torch.tensor(
            [(moved(v, eps) - moved(v, -eps)) / (2 * eps) for v in self.directions()], dtype=torch.float64
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the given seed inside the block, and leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _coefficients(options: dict[str, Any], k: int) -> tuple[float, float]:
    """Return the weights of ∇h and ∇g in step k = 1, 2, …; an optimizer has a rate of its own."""
    lr = options.get("lr", 1.0)
    alpha = 1.0 if options["solver"] == "gd" else k**-0.25
    return lr * alpha, lr * (1 - alpha)


def _updates(model: nn.Module, update: str, lr: float) -> dict[str, Any]:
    """Return the options of `bilevel.inner` for one way of taking steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if update == "momentum":
        return {"solver": "gd", "optimizer": torch.optim.SGD(weights, lr=lr / 3, momentum=0.9)}
    if update == "adam":
        return {"solver": "gd", "optimizer": torch.optim.Adam(weights, lr=lr / 10, eps=1e-3)}
    return {"solver": update, "lr": lr}


# --- data ---


def _inputs(kind: str, n: int = BATCH) -> Tensor:
    if kind == "tokens":
        return torch.randint(VOCABULARY, (n, LENGTH))
    shape = {"vector": (FEATURES,), "image": (1, 8, 8), "sequence": (LENGTH, FEATURES)}[kind]
    return torch.randn(n, *shape)


def _data(kind: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    inner, outer = ((_inputs(kind), torch.randint(CLASSES, (BATCH,))) for _ in range(2))
    return inner, outer


# --- losses: an outer variable, h(model, lam, x, y), g(model, lam, x, y) ---


def ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def ce_with_prior(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """An outer loss that depends on λ itself as well."""
    return ce(model, lam, x, y) + sum(0.01 * v.square().sum() for v in lam.values())


def mse(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return (out - F.one_hot(y, CLASSES).to(out.dtype)).square().mean()


def _each_ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def weighted_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return (torch.sigmoid(lam["samples"]) * _each_ce(model, x, y)).mean()


def _decayed_mse(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return mse(model, lam, x, y) + lam["decay"].exp() * sum(p.square().sum() for p in model.parameters())


def _smoothed_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    logp, smoothing = F.log_softmax(model(x), -1), torch.sigmoid(lam["smoothing"])
    return (1 - smoothing) * F.nll_loss(logp, y) - smoothing * logp.mean()


def _class_weighted_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return (F.softplus(lam["classes"])[y] * _each_ce(model, x, y)).mean()


def _tempered_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x) * lam["temperature"].exp(), y)


def _weighted_hinge(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    margins = F.relu(1 + out - out.gather(1, y[:, None])).sum(1) - 1
    return (torch.sigmoid(lam["samples"]) * margins).mean()


def _adjusted_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x) + lam["logits"], y)


def _sparse_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return ce(model, lam, x, y) + lam["decay"].exp() * sum(p.abs().sum() for p in model.parameters())


def _weighted_huber(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    each = F.huber_loss(out, F.one_hot(y, CLASSES).to(out.dtype), reduction="none", delta=0.5).sum(1)
    return (torch.sigmoid(lam["samples"]) * each).mean()


def _shifted_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """The outer variable is added to the inputs, as in dataset distillation."""
    return F.cross_entropy(model(x + lam["inputs"]), y)


LOSSES: dict[str, tuple[str, Loss, Loss]] = {  # name: which outer variable, h, g
    "sample weights": ("samples", weighted_ce, ce),
    "weight decay": ("decay", _decayed_mse, mse),
    "label smoothing": ("smoothing", _smoothed_ce, ce),
    "class weights": ("classes", _class_weighted_ce, ce_with_prior),
    "temperature": ("temperature", _tempered_ce, ce),
    "hinge": ("samples", _weighted_hinge, ce),
    "logit adjustment": ("logits", _adjusted_ce, ce_with_prior),
    "L1": ("decay", _sparse_ce, ce),
    "huber": ("samples", _weighted_huber, mse),
    "inputs": ("inputs", _shifted_ce, ce),
}


def _outer_variable(which: str, x: Tensor) -> Lam:
    start = {
        "samples": lambda: torch.randn(len(x)),
        "decay": lambda: torch.tensor(-4.0),
        "smoothing": lambda: torch.tensor(-1.0),
        "classes": lambda: torch.randn(CLASSES),
        "temperature": lambda: torch.tensor(0.3),
        "logits": lambda: 0.3 * torch.randn(CLASSES),
        "inputs": lambda: 0.1 * torch.randn_like(x),
    }[which]()
    return {which: start}


# --- models: logits of CLASSES for inputs of one kind ---


def _mlp(
    act: Callable[[], nn.Module],
    norm: Callable[[int], nn.Module] = nn.Identity,
    last: Callable[[], nn.Module] = nn.Identity,
) -> nn.Module:
    """Return an MLP with two hidden layers: linear, normalisation, activation, and what comes last in each."""
    hidden = [(nn.Linear(size, WIDTH), norm(WIDTH), act(), last()) for size in (FEATURES, WIDTH)]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(WIDTH, CLASSES))


class Residual(nn.Module):
    """A residual network of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Tied(nn.Module):
    """One matrix for the way in and, transposed, for the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, CLASSES)
        self.decode = nn.Linear(FEATURES, WIDTH, bias=False)
        self.decode.weight = self.code.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.tanh(self.code(x)) @ self.decode.weight))


class Buffered(nn.Module):
    """Constants and a counter in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(FEATURES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.body = _mlp(nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x - self.mean)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(FEATURES, FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pair(x, x.flip(-1))))


class Checkpointed(nn.Module):
    """Two blocks that run again during the backward pass."""

    def __init__(self, act: Callable[[], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), act(), nn.Dropout(dropout)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Experts(nn.Module):
    """A soft mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(_mlp(nn.GELU) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([e(x) for e in self.experts], -1)
        return torch.einsum("ncj,nj->nc", outs, self.gate(x).softmax(-1))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = cell(FEATURES, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x)).mean(1))


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Attention(nn.Module):
    """Attention by F.scaled_dot_product_attention or by another function of (query, key, value), then a layer."""

    def __init__(
        self,
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
        stem: nn.Module | None = None,
        last: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem, self.last = stem or nn.Identity(), last or nn.Identity()
        self.qkv, self.head = nn.Linear(FEATURES, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.stem(x)).chunk(3, -1)
        return self.head(self.last(self.attend(q, k, v)).mean(1))


class Bag(nn.Module):
    """The mean of embeddings, and logits from them: by a layer, or by the embeddings of the first few words."""

    def __init__(self, tied: bool = False, body: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(VOCABULARY, WIDTH), body or nn.Tanh()
        self.head = None if tied else nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(self.words(x)).mean(1)
        return features @ self.words.weight[:CLASSES].T / 4 if self.head is None else self.head(features)


def _conv(*layers: nn.Module) -> nn.Module:
    """Return a convolutional network, with a linear layer of the size that the other layers ask for."""
    body = nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten())
    return body.append(nn.Linear(body(_inputs("image", 2)).shape[1], CLASSES))


def _conv_checkpointed() -> nn.Module:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return _conv(nn.Softplus(), Block(nn.Conv2d(4, 4, 3), nn.GELU(), nn.Dropout2d(0.2)), nn.AvgPool2d(2))


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "ReLU MLP": ("vector", lambda: _mlp(nn.ReLU)),
    "GELU MLP": ("vector", lambda: _mlp(nn.GELU)),
    "Tanh MLP": ("vector", lambda: _mlp(nn.Tanh)),
    "LeakyReLU MLP": ("vector", lambda: _mlp(nn.LeakyReLU)),
    "Hardswish MLP": ("vector", lambda: _mlp(nn.Hardswish)),
    "PReLU MLP": ("vector", lambda: _mlp(nn.PReLU)),
    "softmax regression": ("vector", lambda: nn.Linear(FEATURES, CLASSES)),
    "BatchNorm1d ReLU MLP": ("vector", lambda: _mlp(nn.ReLU, nn.BatchNorm1d)),
    "BatchNorm1d Tanh MLP": ("vector", lambda: _mlp(nn.Tanh, nn.BatchNorm1d)),
    "LayerNorm MLP": ("vector", lambda: _mlp(nn.GELU, nn.LayerNorm)),
    "Dropout MLP": ("vector", lambda: _mlp(nn.ReLU, last=lambda: nn.Dropout(0.3))),
    "residual": ("vector", Residual),
    "weight_norm": (
        "vector",
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(FEATURES, WIDTH)), nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES)),
        ),
    ),
    "tied": ("vector", Tied),
    "buffers": ("vector", Buffered),
    "Bilinear": ("vector", Bilinear),
    "mixture of experts": ("vector", Experts),
    "checkpointed": ("vector", lambda: Checkpointed(nn.GELU)),
    "checkpointed with dropout": ("vector", lambda: Checkpointed(nn.ReLU, 0.2)),
    "conv ReLU MaxPool": ("image", lambda: _conv(nn.ReLU(), nn.MaxPool2d(2))),
    "conv BatchNorm2d": ("image", lambda: _conv(nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2))),
    "conv GroupNorm": ("image", lambda: _conv(nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2))),
    "conv AdaptiveAvgPool": (
        "image",
        lambda: _conv(nn.Hardswish(), nn.Conv2d(4, 8, 3, groups=4), nn.AdaptiveAvgPool2d(2)),
    ),
    "conv checkpointed": ("image", _conv_checkpointed),
    "LSTM": ("sequence", lambda: Recurrent(nn.LSTM)),
    "GRU": ("sequence", lambda: Recurrent(nn.GRU)),
    "TransformerEncoderLayer": ("sequence", lambda: Encoder(dropout=0.0)),
    "TransformerEncoderLayer with dropout": (
        "sequence",
        lambda: Encoder(dropout=0.1, activation="gelu", norm_first=True),
    ),
    "MultiheadAttention": ("sequence", Multihead),
    "attention": ("sequence", Attention),
    "Embedding": ("tokens", Bag),
    "tied Embedding": ("tokens", lambda: Bag(tied=True)),
    "Embedding transformer": (
        "tokens",
        lambda: Bag(body=nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)),
    ),
}  # fmt: skip


def build(
    name: str,
    kind: str,
    make: Callable[[], nn.Module],
    loss: str | tuple[str | Callable[[], Lam], Loss, Loss],
    update: str = "gd",
    lr: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Problem:
    """Build a problem from a seed: `make` gives the model, `kind` says what its inputs are."""
    which, h, g = LOSSES[loss] if isinstance(loss, str) else loss
    with seeded(seed):
        model, (batch, outer) = make(), _data(kind)
        lam = _outer_variable(which, batch[0]) if isinstance(which, str) else which()
    problem = Problem(
        name=name, model=model, h=h, g=g, lam={n: x.requires_grad_() for n, x in lam.items()}, batch=batch,
        outer=outer, options=_updates(model, update, lr), **more,
    )  # fmt: skip
    return problem if dtype == torch.float32 else problem.twin(dtype)


# --- honest problems ---

UPDATES = ("gd", "bigsam", "momentum", "adam")


def honest(seeds: int = 1) -> Iterator[Problem]:
    """Yield the honest problems: every model with every loss, some under autocast, and traps for a sentinel."""
    for seed in range(seeds):
        yield from _crossed(seed)
        yield from _autocast(seed)
        yield from _traps(seed)


def _crossed(seed: int) -> Iterator[Problem]:
    for (i, (model, (kind, make))), (j, loss) in itertools.product(enumerate(MODELS.items()), enumerate(LOSSES)):
        if kind == "tokens" and loss == "inputs":
            continue
        update = UPDATES[(i + j + seed) % len(UPDATES)]
        dtype = torch.float64 if (i + 3 * j) % 10 == 9 else torch.float32
        name = f"{model} / {loss} / {update} / {str(dtype)[6:]} / seed {seed}"
        yield build(name, kind, make, loss, update, seed=seed, dtype=dtype, steps=2 + (i + j) % 2)


def _autocast(seed: int) -> Iterator[Problem]:
    losses = list(LOSSES)
    for i, (model, (kind, make)) in enumerate(MODELS.items()):
        if model in ("LSTM", "GRU"):  # oneDNN has them in bfloat16 only on CPUs with AVX-512
            continue
        for j in (i, i + 5):
            loss, update = losses[j % (len(losses) - 1)], UPDATES[(j + seed) % 4]
            name = f"{model} / {loss} / {update} / autocast / seed {seed}"
            problem = build(name, kind, make, loss, update, seed=seed, autocast=True)
            if _runs(problem):
                yield problem


def _runs(problem: Problem) -> bool:
    """Tell whether this machine has the kernels for two derivatives of a problem's losses."""
    twin = problem.twin(torch.float32)
    weights = [p for p in twin.model.parameters() if p.requires_grad]
    try:
        with seeded(0), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            with torch.autocast("cpu", torch.bfloat16):
                values = twin.h(twin.model, twin.lam, *twin.batch), twin.g(twin.model, twin.lam, *twin.outer)
            first = torch.autograd.grad(sum(values), weights, create_graph=True, allow_unused=True)
            torch.autograd.grad(sum(d.square().sum() for d in first if d is not None), weights, allow_unused=True)
    except RuntimeError:
        return False
    return True


class RightTwice(torch.autograd.Function):
    """sin, with a backward that autograd can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Map(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _mapped(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a maker of MLPs with a function as their activation."""
    return lambda: _mlp(lambda: Map(function))


class Frozen(nn.Module):
    """A part that no gradient reaches: a backbone under no_grad, or a teacher that does not require grad."""

    def __init__(self, teacher: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, WIDTH).requires_grad_(not teacher)
        self.head, self.spare = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.frozen(x).tanh()
        return self.head(features + features.square())


class Averaging(nn.Module):
    """Running statistics that are kept under no_grad, and never read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp(nn.Tanh)
        self.register_buffer("average", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        with torch.no_grad():
            self.average.lerp_(out.mean(0).to(self.average.dtype), 0.1)
        return out


class Constant(nn.Module):
    """A tensor of float32 that is an attribute, and not a buffer, so that `.double()` does not reach it."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.body, self.product = _mlp(nn.GELU), product
        self.constant = torch.randn(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.constant if self.product else x * self.constant[0])


class Single(nn.LayerNorm):
    """Layer normalisation that is always done in float32, as in many language models."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


class Messages(nn.Module):
    """Message passing on a ring, by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = layer(x)
            here = torch.arange(len(x))
            x = x.index_add(0, here.roll(1), torch.relu(x)) / 2
        return x


class InPlace(nn.Module):
    """Operations in place, as far as autograd allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.one(x))
        out = x.new_zeros(len(x), CLASSES)
        out[:, ::2] = self.two(x)[:, ::2]
        out[:, 1::2] = torch.tanh(self.two(x)[:, 1::2])
        return out.mul_(2)


class Whitened(nn.Module):
    """Decorrelated features, by a Cholesky factor that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        cov = x.T @ x / len(x) + 0.1 * torch.eye(FEATURES, dtype=x.dtype)
        return self.two(torch.linalg.solve_triangular(torch.linalg.cholesky(cov), x.T, upper=False).T)


def _zero_biases(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
    return model


def _evaluating(model: nn.Module) -> nn.Module:
    """Run a few training forwards, so that running statistics settle, and switch to evaluation."""
    for _ in range(5):
        model(_inputs("vector"))
    return model.eval()


def _shift(x: Tensor) -> Tensor:
    return (x - x.max(-1, keepdim=True).values.detach()).exp()


def _spectral_mlp(power_iterations: int = 1) -> nn.Module:
    normed = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=power_iterations)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), normed, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def _stable_softmax_ce(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy whose exponentials are shifted by a detached maximum, which cancels exactly."""
    out = model(x) * lam["temperature"].exp()
    top = out.max(-1, keepdim=True).values.detach()
    return ((out - top).exp().sum(-1).log() + top[:, 0] - out.gather(1, y[:, None])[:, 0]).mean()


def _distilled(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """Distillation from what the model's frozen part says, which does not move."""
    with torch.no_grad():
        soft = model.frozen(x)[:, :CLASSES].softmax(-1)
    return weighted_ce(model, lam, x, y) - (soft * model(x).log_softmax(-1)).sum(-1).mean()


def _fgsm(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """Training on adversarial examples; their signs are constant almost everywhere."""
    attacked = x.detach().requires_grad_()
    with torch.enable_grad():
        (d,) = torch.autograd.grad(ce(model, lam, attacked, y), attacked)
    return weighted_ce(model, lam, x + 0.1 * d.sign().to(x.dtype), y)


def _linear_loss(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    return -(lam["logits"] * model(x)).mean()


def _trimmed(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the samples with the smallest losses."""
    return (torch.sigmoid(lam["samples"]) * _each_ce(model, x, y)).topk(len(x) // 2, largest=False).values.mean()


def _zero_rows(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """Inputs that are 0 for every other sample: where biases start at 0, a ReLU starts at its kink."""
    blank = torch.arange(len(x))[:, None] % 2
    return weighted_ce(model, lam, x * blank, y)


def _scaled(loss: Loss, factor: float = 1.0, constant: float = 0.0) -> Loss:
    return lambda *args: factor * loss(*args) + constant


def _out_of_reach(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """An outer loss that is flat where the loop ends, so that the hypergradient is exactly 0."""
    return F.relu(ce(model, lam, x, y) - 100) + 1


def _through(function: Callable[[Tensor], Tensor]) -> Loss:
    """Cross entropy of logits that went through a function."""
    return lambda model, lam, x, y: F.cross_entropy(function(model(x)), y)


def _sample_weights_by(function: Callable[[Tensor], Tensor]) -> Loss:
    """A weighted cross entropy whose weights are a function of λ."""
    return lambda model, lam, x, y: (function(lam["samples"]) * _each_ce(model, x, y)).mean()


def _meta_weight_net() -> Lam:
    return {"one": torch.randn(1, 8), "bias": torch.randn(8), "two": torch.randn(8) / 2}


def _reweighted(detach: bool) -> Loss:
    """Sample weights from a small network that reads the sample's loss (Meta-Weight-Net)."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        each = _each_ce(model, x, y)
        read = each.detach() if detach else each
        return (torch.sigmoid(torch.tanh(read[:, None] * lam["one"] + lam["bias"]) @ lam["two"]) * each).mean()

    return h


def _traps(seed: int) -> Iterator[Problem]:
    """Yield honest problems that look dishonest, or that make differences hard to take."""
    relu, tanh, linear = (lambda: _mlp(nn.ReLU)), (lambda: _mlp(nn.Tanh)), (lambda: nn.Linear(FEATURES, CLASSES))
    weights, samples = "sample weights", ("samples", weighted_ce, ce)
    traps: dict[str, tuple[Any, ...]] = {  # name: a maker, a loss, and options of build
        "exponentials shifted by a detached maximum": (relu, ("temperature", _stable_softmax_ce, ce)),
        "softmax shifted by a detached maximum": (_mapped(lambda x: F.normalize(_shift(x), p=1, dim=-1)), weights),
        "frozen backbone under no_grad": (lambda: Frozen(False), weights),
        "detached attention, which rests": (lambda: Attention(_detached_attention), weights, {"kind": "sequence"}),
        "frozen teacher": (lambda: Frozen(True), ("samples", _distilled, ce)),
        "spectral_norm in eval mode": (lambda: _evaluating(_spectral_mlp()), weights),
        "BatchNorm in eval mode": (lambda: _evaluating(_mlp(nn.ReLU, nn.BatchNorm1d)), weights),
        "soft Gumbel-softmax": (_mapped(lambda x: 4 * F.gumbel_softmax(x, hard=False)), weights),
        "mask by a detached comparison": (_mapped(lambda x: x * (x > 0).to(x.dtype).detach()), weights),
        "ReLU at its kink": (lambda: _zero_biases(relu()), ("samples", _zero_rows, ce)),
        "L1 at its kink": (lambda: _zero_biases(tanh()), "L1"),
        "Function that is right twice": (_mapped(RightTwice.apply), weights),
        "signs of adversarial gradients": (tanh, ("samples", _fgsm, ce)),
        "running averages that nobody reads": (Averaging, weights),
        "linear inner loss": (linear, ("logits", _linear_loss, ce)),
        "flat outer loss": (tanh, ("samples", weighted_ce, _out_of_reach)),
        "large constant in h": (relu, ("samples", _scaled(weighted_ce, constant=1e4), ce)),
        "large constant in g": (relu, ("samples", weighted_ce, _scaled(ce, constant=1e4))),
        "tiny losses": (relu, ("samples", _scaled(weighted_ce, 1e-6), _scaled(ce, 1e-6)), {"lr": 3e5}),
        "huge losses": (relu, ("samples", _scaled(weighted_ce, 1e6), _scaled(ce, 1e6)), {"lr": 3e-7}),
        "trimmed loss": (relu, ("samples", _trimmed, ce)),
        "operations in place": (InPlace, weights),
        "message passing": (Messages, weights),
        "Cholesky whitening": (Whitened, weights),
        "Fourier transform": (_mapped(lambda x: torch.fft.fft(x, norm="ortho").abs()), weights),
        "sharp temperature": (tanh, ("samples", weighted_ce, _through(lambda z: 30 * z)), {"lr": 0.01}),
        "high frequency": (_mapped(lambda x: torch.sin(10 * x)), weights, {"lr": 0.01}),
        "norm of activations": (_mapped(lambda x: 4 * x / x.norm(dim=-1, keepdim=True)), weights),
        "constant attribute": (lambda: Constant(False), weights),
        "constant attribute in a product": (lambda: Constant(True), weights, {"reference": "undefined"}),
        "float32 inside": (lambda: _mlp(nn.GELU, Single), weights, {"reference": "undefined"}),
        "network as outer variable": (relu, (_meta_weight_net, _reweighted(detach=False), ce)),
        "wrong second derivative on λ alone": (tanh, ("samples", _sample_weights_by(SavedDetached.apply), ce)),
        "two outer variables": (tanh, (lambda: {"samples": torch.randn(BATCH), "logits": torch.randn(CLASSES)},
            lambda m, lam, x, y: weighted_ce(lambda v: m(v) + lam["logits"], lam, x, y), ce_with_prior)),
        "double precision": (relu, samples, {"dtype": torch.float64}),
    }  # fmt: skip
    for name, (make, loss, *options) in traps.items():
        for update in ("gd", "bigsam"):
            given = {"kind": "vector", "update": update, "seed": seed, **dict(*options)}
            yield build(f"{name} / {update} / seed {seed}", make=make, loss=loss, **given)
    loss = ("samples", weighted_ce, _through(SavedDetached.apply))  # ∇g alone is needed, and that is right
    yield build(f"wrong second derivative in g alone / gd / seed {seed}", "vector", tanh, loss, seed=seed)


# --- dishonest problems: what is wrong ---


class SavedDetached(RightTwice):
    """sin, with a right first derivative and a second one of 0: the saved input is detached."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].detach().cos()


class BackwardUnderNoGrad(RightTwice):
    """sin, with a backward pass that leaves no graph."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return grad * ctx.saved_tensors[0].cos()


class ConstantInBackward(torch.autograd.Function):
    """SiLU, whose slope is computed in the forward pass and kept as a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        ctx.slope = s * (1 + x * (1 - s))
        return x * s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class WrongBackward(RightTwice):
    """sin, whose first derivative is that of another function."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (0.7 * ctx.saved_tensors[0]).cos()


class Reversal(torch.autograd.Function):
    """The identity, whose backward pass turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _straight_through(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function in the forward pass, and the identity in the backward pass."""
    return lambda x: x + (function(x) - x).detach()


_clamp = _straight_through(lambda x: x.clamp(-0.3, 0.3))


def _hooked(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: 0.5 * grad)
    return x


def _normalising_hook(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: 0.1 * grad / (grad.norm() + 1e-3))
    return x


def _no_grad_statistics(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean, std = x.mean(0), x.std(0)
    return (x - mean) / (std + 0.1)


def _nearest_code(x: Tensor) -> Tensor:
    codes = torch.linspace(-1, 1, 5, dtype=x.dtype)
    return codes[(x.detach()[..., None] - codes).abs().argmin(-1)]


def _through_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(1 / (1 + x.detach().double().square().mean(-1, keepdim=True).numpy())).to(x.dtype)


Function = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Function] = {
    "Function that detaches what it saved": lambda x: SavedDetached.apply(2 * x + 1),
    "Function with a backward under no_grad": BackwardUnderNoGrad.apply,
    "Function with constants in its backward": lambda x: ConstantInBackward.apply(2 * x),
    "Function with a wrong first derivative": lambda x: WrongBackward.apply(x + 1),
    "gradient reversal": Reversal.apply,
    "scaled gradient": lambda x: 2 * x - x.detach(),
    "hook that scales": _hooked,
    "hook that normalises": _normalising_hook,
    "straight-through clamp": _clamp,
    "straight-through round": _straight_through(lambda x: (4 * x).round() / 4),
    "straight-through sign": _straight_through(torch.sign),
    "straight-through nearest code": _straight_through(_nearest_code),
    "hard Gumbel-softmax": lambda x: 4 * F.gumbel_softmax(x, hard=True),
    "detached normaliser": lambda x: 3 * x / (0.1 + x.detach().norm(dim=-1, keepdim=True)),
    "detached batch statistics": lambda x: (x - x.mean(0).detach()) / (0.1 + x.std(0).detach()),
    "batch statistics under no_grad": _no_grad_statistics,
    "detached gate": lambda x: x * torch.sigmoid(3 * x).detach(),
    "statistic by .item()": lambda x: x / (0.1 + x.std().item()),
    "statistic by .data": lambda x: x / (0.1 + x.data.abs().amax()),
    "statistic through numpy": _through_numpy,
}
WEIGHTS: dict[str, Function] = {
    "Function on weights": lambda w: SavedDetached.apply(8 * w + 1) / 4,
    "rounded weights": _straight_through(lambda w: (8 * w).round() / 8),
    "binarised weights": _straight_through(lambda w: w.abs().mean() * w.sign()),
    "detached weight norm": lambda w: w / (0.1 + w.detach().norm()),
    "scaled gradient of weights": lambda w: 1.5 * w - 0.5 * w.detach(),
    "weights standardised under no_grad": _no_grad_statistics,
    "clamped weights, straight through": _straight_through(lambda w: w.clamp(-0.1, 0.1)),
}
JUMPS = ("straight-through round", "straight-through sign", "straight-through nearest code", "hard Gumbel-softmax",
    "rounded weights", "binarised weights", "straight-through selection of samples", "straight-through accuracy as g",
)  # fmt: skip


class Faulty(nn.Module):
    """(1 − s)·tanh(x) + s·f(x): as much of a faulty function as the strength s says."""

    def __init__(self, fault: Function, strength: float, rest: Function = torch.tanh) -> None:
        super().__init__()
        self.fault, self.strength, self.rest = fault, strength, rest

    def forward(self, x: Tensor) -> Tensor:
        if self.strength == 1:
            return self.fault(x)
        return (1 - self.strength) * self.rest(x) + self.strength * self.fault(x)


def _host(host: str, fault: nn.Module) -> nn.Module:
    """Return a model of the kind that was asked for, with the faulty layer in its middle."""
    if host == "image":
        return _conv(fault, nn.AvgPool2d(2))
    if host == "sequence":
        return Attention(last=fault)
    first, second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.Tanh(), second, fault, nn.Linear(WIDTH, CLASSES))


def _host_of_weights(host: str, fault: nn.Module) -> nn.Module:
    """Return a model of the kind that was asked for, one of whose weights goes through the faulty layer."""
    model = _host(host, nn.Tanh())
    layer = model.qkv if host == "sequence" else model[0] if host == "image" else model[2]
    parametrize.register_parametrization(layer, "weight", fault)
    return model


def _detached_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (2 * q @ k.mT / WIDTH**0.5).softmax(-1).detach() @ v


def _attention_of_detached_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (2 * q @ k.detach().mT / WIDTH**0.5).softmax(-1) @ v


# Faulty inner losses: s is the strength.


def _td0(s: float) -> Loss:
    """TD(0): the value of the next state is a constant for the gradient, and not for the loop."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        value, reward = model(x)[:, 0], y.to(x.dtype)
        target = reward + 0.9 * s * value.roll(1).detach()
        return (torch.sigmoid(lam["samples"]) * (target - value).square()).mean() / 4

    return h


def _q_learning(s: float) -> Loss:
    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        values = model(x)
        target = (y == 0).to(x.dtype) + 0.9 * s * model(x.roll(1, 0)).max(-1).values.detach()
        taken = values.gather(1, y[:, None])[:, 0]
        return (torch.sigmoid(lam["samples"]) * F.smooth_l1_loss(taken, target, reduction="none")).mean()

    return h


def _simsiam(s: float) -> Loss:
    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        one, two = model(x), model(0.8 * x + 0.2)
        alike = F.cosine_similarity(one, two.detach()) + F.cosine_similarity(two, one.detach())
        return (
            torch.sigmoid(lam["samples"]) * ((1 - s) * F.cross_entropy(one, y, reduction="none") - s * alike)
        ).mean()

    return h


def _contrastive(s: float) -> Loss:
    """InfoNCE with keys that are detached."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        query, key = model(x), model(0.8 * x + 0.2)
        key = s * key.detach() + (1 - s) * key
        each = F.cross_entropy(query @ key.T, torch.arange(len(x)), reduction="none")
        return (torch.sigmoid(lam["samples"]) * each).mean()

    return h


def _of_each(weigh: Callable[[Tensor, float], Tensor]) -> Callable[[float], Loss]:
    """A weighted cross entropy, each of whose terms is multiplied by something detached that depends on it."""

    def with_strength(s: float) -> Loss:
        def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
            each = _each_ce(model, x, y)
            return (torch.sigmoid(lam["samples"]) * weigh(each, s) * each).mean()

        return h

    return with_strength


def _of_logits(change: Callable[[Tensor, float], Tensor]) -> Callable[[float], Loss]:
    """A weighted cross entropy of changed logits."""
    return lambda s: lambda model, lam, x, y: weighted_ce(lambda v: change(model(v), s), lam, x, y)


def _over_itself(s: float) -> Loss:
    """L / (L.detach())^s: every loss gets the same size."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        loss = weighted_ce(model, lam, x, y)
        return loss / loss.detach() ** s

    return h


def _balanced(s: float) -> Loss:
    """Two losses, the second scaled by the detached ratio of their gradients' norms."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        one = (torch.sigmoid(lam["samples"]) * F.cross_entropy(out, y, reduction="none")).mean()
        two = out.square().mean()
        norms = [torch.autograd.grad(loss, out, retain_graph=True)[0].norm() for loss in (one, two)]
        return one + s * (norms[0] / (norms[1] + 1e-3)).detach() * two

    return h


def _self_distilled(s: float) -> Loss:
    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        logp = model(x).log_softmax(-1)
        soft = -((2 * logp).softmax(-1).detach() * logp).sum(-1)
        return (torch.sigmoid(lam["samples"]) * ((1 - s) * F.nll_loss(logp, y, reduction="none") + s * soft)).mean()

    return h


def _policy_gradient(s: float) -> Loss:
    """The surrogate exp(log p − log p.detach())·A, right for one derivative."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        logp = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        ratio = s * (logp - logp.detach()).exp() + (1 - s) * logp
        return -(torch.sigmoid(lam["samples"]) * ratio).mean()

    return h


def _actor_critic(s: float) -> Loss:
    """The critic's value is a constant for the actor."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        value, logp, reward = out[:, 0], out[:, 1:].log_softmax(-1)[:, 0], y.to(x.dtype)
        loss = (reward - value).square() / 4 - s * (reward - value.detach()) * logp
        return (torch.sigmoid(lam["samples"]) * loss).mean()

    return h


def _adversarial(s: float) -> Loss:
    """Training on adversarial examples at a fixed distance, along detached gradients."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        attacked = x.detach().requires_grad_()
        with torch.enable_grad():
            (d,) = torch.autograd.grad(ce(model, lam, attacked, y), attacked)
        return weighted_ce(model, lam, x + 2 * s * (d / (1e-3 + d.flatten(1).norm(dim=1).mean())).to(x.dtype), y)

    return h


def _half_detached_decay(s: float) -> Loss:
    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        decay = sum((p * (s * p.detach() + (1 - s) * p)).sum() for p in model.parameters())
        return weighted_ce(model, lam, x, y) + 0.1 * decay

    return h


INNER: dict[str, Callable[[float], Loss]] = {
    "TD(0) targets": _td0,
    "Q-learning targets": _q_learning,
    "SimSiam": _simsiam,
    "contrastive loss with detached keys": _contrastive,
    "detached focal factor": _of_each(lambda each, s: (1 - (-each.detach()).exp()) ** (2 * s)),
    "detached weights of hard samples": _of_each(lambda each, s: len(each) * (2 * s * each).softmax(0).detach()),
    "detached sum of losses": _of_each(lambda each, s: 1 / (1 - s + s * each.sum().detach())),
    "detached norm of logits": _of_logits(lambda z, s: z / (1 - s + s * z.detach().norm(dim=-1, keepdim=True))),
    "scaled gradient of logits": _of_logits(lambda z, s: (1 + s) * z - s * z.detach()),
    "loss over its detached value": _over_itself,
    "losses balanced by detached gradients": _balanced,
    "self-distillation": _self_distilled,
    "policy gradient": _policy_gradient,
    "actor-critic": _actor_critic,
    "adversarial examples": _adversarial,
    "weight decay by w·w.detach()": _half_detached_decay,
}


# Faulty outer losses, and faulty uses of λ.


def _unseen_penalty(s: float) -> Loss:
    """A penalty on the gradient for the logits, taken without create_graph: g's value has it, its gradient has not."""

    def g(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            out = model(x)
            loss = F.cross_entropy(out, y)
            (d,) = torch.autograd.grad(loss, out, retain_graph=True)
        return loss + s * 20 * d.square().sum()

    return g


def _eval_mode(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """An outer loss at running statistics, which moved with the weights of every step."""
    training = model.training
    model.eval()
    try:
        return ce(model, lam, x, y)
    finally:
        model.train(training)


OUTER: dict[str, Callable[[float], Loss]] = {
    "scaled gradient in g": lambda s: _through(lambda z: (1 + s) * z - s * z.detach()),
    "gradient reversal in g": lambda s: _through(Faulty(Reversal.apply, s, torch.clone)),
    "Function with a wrong first derivative in g": lambda s: _through(Faulty(lambda z: WrongBackward.apply(3 * z), s)),
    "clamped logits in g, straight through": lambda s: _through(Faulty(_clamp, s, torch.clone)),
    "detached norm in g": lambda s: _through(lambda z: z / (1 - s + s * z.detach().norm(dim=-1, keepdim=True))),
    "penalty without a graph in g": _unseen_penalty,
    "loss over its detached value as g": lambda s: lambda *a: (lambda loss: loss / loss.detach() ** s)(ce(*a)),
    "straight-through accuracy as g": lambda s: lambda m, lam, x, y: Faulty(
        _straight_through(lambda p: (p > 0.3).to(p.dtype)), s, torch.clone)(
            1 - m(x).softmax(-1).gather(1, y[:, None])).mean(),
}  # fmt: skip
LAM: dict[str, Callable[[float], Function]] = {
    "detached sum of sample weights": lambda s: (
        lambda v: torch.sigmoid(v) / (1 - s + s * torch.sigmoid(v).sum().detach() / 6)
    ),
    "scaled gradient of λ": lambda s: lambda v: torch.sigmoid((1 + s) * v - s * v.detach()),
    "Function with a wrong first derivative on λ": lambda s: lambda v: 1 + Faulty(WrongBackward.apply, s)(v),
    "straight-through selection of samples": lambda s: (
        lambda v: Faulty(_straight_through(lambda p: (p > 0.5).to(p.dtype)), s, torch.clone)(torch.sigmoid(v))
    ),
}


def dishonest(seeds: int = 1) -> Iterator[Problem]:
    """Yield the dishonest problems: each fault in several strengths, models, precisions, and ways to take steps."""
    for seed in range(seeds):
        yield from _dishonest(seed)


def _dishonest(seed: int) -> Iterator[Problem]:
    draw = random.Random(seed).choice

    def variant(fault: str, kind: str, make: Callable[[], nn.Module], loss: Any, s: float) -> Problem:
        update, lr = draw(("gd", "gd", "bigsam", "bigsam", "momentum", "adam")), draw((0.2, 0.5, 1.0))
        dtype = draw((torch.float32, torch.float32, torch.float64))
        what = loss if isinstance(loss, str) else "sample weights"
        name = f"{fault} / {kind} / {what} / strength {s:g} / {update} {lr:g} / {str(dtype)[6:]} / seed {seed}"
        reference = "undefined" if fault in JUMPS else "differences"
        return build(name, kind, make, loss, update, lr, seed, dtype, reference=reference)

    def tanh(kind: str) -> Callable[[], nn.Module]:
        return lambda: _host(kind, nn.Tanh())

    losses = ("sample weights", "class weights", "temperature", "logit adjustment", "hinge", "huber")
    for (name, fault), s in itertools.product(ACTIVATIONS.items(), (1.0, 0.5, 0.1)):
        kind, layer = draw(KINDS), Faulty(fault, s)
        yield variant(name, kind, lambda kind=kind, layer=layer: _host(kind, layer), draw(losses), s)
    for (name, fault), s in itertools.product(WEIGHTS.items(), (1.0, 0.5, 0.1)):
        kind, layer = draw(KINDS), Faulty(fault, s, torch.clone)
        yield variant(name, kind, lambda kind=kind, layer=layer: _host_of_weights(kind, layer), draw(losses), s)
    for (name, fault), s in itertools.product(INNER.items(), (1.0, 0.5, 0.1)):
        kind = draw(KINDS)
        yield variant(name, kind, tanh(kind), ("samples", fault(s), ce), s)
    for (name, fault), s in itertools.product(OUTER.items(), (1.0, 0.3)):
        kind = draw(KINDS)
        yield variant(name, kind, tanh(kind), ("samples", weighted_ce, fault(s)), s)
    for (name, fault), s in itertools.product(LAM.items(), (1.0, 0.3)):
        kind = draw(KINDS)
        yield variant(name, kind, tanh(kind), ("samples", _sample_weights_by(fault(s)), ce), s)
    for attend, loss in itertools.product((_detached_attention, _attention_of_detached_keys), losses[:3]):
        make = lambda attend=attend: Attention(attend, stem=nn.Linear(FEATURES, FEATURES))
        yield variant(attend.__name__.strip("_").replace("_", " "), "sequence", make, loss, 1)
    for iterations, loss in itertools.product((1, 5), ("sample weights", "temperature")):
        make = lambda n=iterations: _spectral_mlp(n)
        yield variant(f"spectral_norm in training, iterations: {iterations}", "vector", make, loss, 1)
    for momentum in (0.1, 0.5, 1.0):
        make = lambda m=momentum: _mlp(nn.Tanh, lambda width: nn.BatchNorm1d(width, momentum=m))
        yield variant("BatchNorm with g in eval mode", "vector", make, ("samples", weighted_ce, _eval_mode), momentum)
    for kind in KINDS:
        loss = (_meta_weight_net, _reweighted(detach=True), ce)
        yield variant("network that reads detached losses", kind, tanh(kind), loss, 1)
        yield variant("teacher that is the student", kind, tanh(kind), ("samples", _distilled_from_itself, ce), 1)
    for s in (1.0, 0.5, 0.1):
        loss = ("samples", _decayed_backbone(s), ce)
        yield variant("decayed backbone under no_grad", "vector", lambda: Frozen(False), loss, s)


def _decayed_backbone(s: float) -> Loss:
    """A backbone under no_grad that moves all the same, since it is decayed."""

    def h(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
        decay = torch.sigmoid(lam["samples"]).mean() * model.frozen.weight.square().sum()
        return weighted_ce(model, lam, x, y) + s * decay

    return h


def _distilled_from_itself(model: nn.Module, lam: Lam, x: Tensor, y: Tensor) -> Tensor:
    """A teacher under no_grad that is the student."""
    with torch.no_grad():
        soft = (model(x) * math.e).softmax(-1)
    return weighted_ce(model, lam, x, y) - 2 * (soft * model(x).log_softmax(-1)).sum(-1).mean()
