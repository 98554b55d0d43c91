"""The problems P1 to P8: a model, two losses and data, the same for every runner. P9 is in whole_run.py.

    inner loop   w ← w − lr·∇h(w, λ), K times, plain gradient descent from the model's own weights (or AdamW, on P8)
    wanted       d g(w_K)/dλ, exactly

The data are random numbers of the right shapes: time and memory do not depend on what the pictures show. `smooth`
replaces ReLU and max pooling by Softplus and average pooling: at kinks two exact methods drift apart in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Any, ...]


@dataclass
class Problem:
    """One bilevel problem. `batches()` gives the inner batches, to be cycled through, and the batch of g."""

    name: str
    title: str
    kind: str  # which twin it has in twin.py
    model: nn.Module
    outer: list[Tensor]  # λ
    h: Callable[..., Tensor]
    g: Callable[..., Tensor]
    batches: Callable[[], tuple[list[Batch], Batch]]
    steps: int
    lr: float
    smooth: bool = False
    tenth: int | None = None  # bytes: a tenth of what the leanest unrolled peer holds
    single: tuple[nn.Module, Callable[..., Tensor], Callable[..., Tensor], int] | None = None  # one task, their number
    encoder: nn.Module | None = None
    images: Tensor | None = None
    adamw: bool = False  # AdamW in place of plain gradient steps
    fused: bool = False  # its attention is fused: who keeps graphs needs the kernel that has a second derivative
    slow: bool = False  # then it is timed once, and warmed up by a single step

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the plain loop."""
        w = self.model.parameters()
        return torch.optim.AdamW(w, lr=self.lr) if self.adamw else torch.optim.SGD(w, lr=self.lr)

    def iterates(self) -> int:
        """K·|z|: the bytes of K states, a state being the weights and what the optimizer keeps beside them.

        Nothing of it is assumed: one step of the optimizer itself, with gradients of 0, tells what it keeps.
        """
        w = [x.detach().clone().requires_grad_() for x in self.model.parameters()]
        optimizer = self.optimizer()
        optimizer.param_groups[0]["params"] = w
        for x in w:
            x.grad = torch.zeros_like(x)
        optimizer.step()
        kept = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, Tensor)]
        return self.steps * sum(x.numel() * x.element_size() for x in (*w, *kept))

    @property
    def unit(self) -> str:
        """What a time is a multiple of."""
        return "encoder pass" if self.encoder else f"{self.steps} plain steps"

    def plain(self) -> None:
        """The unit: K steps on h that nothing is asked of; with an encoder, one pass to and fro."""
        inner, outer = self.batches()
        if self.encoder:
            features = [inner[0][0], outer[0]]
            torch.autograd.grad(features, self.outer, [torch.ones_like(x) for x in features])
            return
        w = list(self.model.parameters())
        start = [x.detach().clone() for x in w]
        self.train(inner)
        with torch.no_grad():
            for x, old in zip(w, start, strict=True):
                x.copy_(old)

    def train(self, inner: list[Batch]) -> None:
        """K plain steps, after which the model is trained: what the memory of plain training is measured on."""
        if self.adamw:
            optimizer = self.optimizer()
            for k in range(self.steps):
                optimizer.zero_grad()
                self.h(self.model, *inner[k % len(inner)]).backward(inputs=list(self.model.parameters()))
                optimizer.step()
            optimizer.zero_grad()
            return
        w = list(self.model.parameters())
        for k in range(self.steps):
            grads = torch.autograd.grad(self.h(self.model, *inner[k % len(inner)]), w)
            with torch.no_grad():
                for x, grad in zip(w, grads, strict=True):
                    x.sub_(grad, alpha=self.lr)


@dataclass(frozen=True)
class Size:
    """How large. The quick size has the models of the full one, and fewer samples and steps."""

    samples: int  # P1 and P2, of each of the two sets
    long_samples: int  # P6
    batch: int  # P3
    texts: int  # P5, samples in a batch
    tasks: int  # P4
    queries: int  # P4, per class
    pixels: int  # images are pixels × pixels
    width: int  # hidden units of the MLP; filters are 64/300 of it
    steps: dict[str, int]
    horizons: tuple[int, ...]  # the K of P6


HORIZONS = (10, 32, 100, 320, 1000)
SIZES = {
    "full": Size(5000, 1000, 256, 64, 16, 10, 28, 300, {"P1": 100, "P2": 100, "P3": 20, "P5": 20}, HORIZONS),
    "quick": Size(1000, 200, 16, 16, 4, 5, 28, 300, {"P1": 50, "P2": 30, "P3": 5, "P5": 10}, (10, 40, 160)),
    "tiny": Size(12, 12, 4, 4, 2, 2, 16, 20, {"P1": 6, "P2": 6, "P3": 3, "P5": 3}, (3, 6)),
}  # fmt: skip
SMOOTH = ("P1", "P5", "P8")  # without kinks as they are, and judged at their own size where that is the quick one
LARGE = ("P8-128-3", "P8-128-20", "P8-256-3", "P8-256-20", "P8-128-3-adamw", "P8-128-20-adamw")  # width, K, optimizer
NAMES = ("P1", "P2", "P3", "P4-5", "P4-20", "P5", *LARGE)  # P6 is a study of its own: P2 at several K


def make(
    name: str, size: str = "full", *, smooth: bool = False, dtype: torch.dtype = torch.float32, steps: int | None = None
) -> Problem:
    """The named problem; the same numbers from every call, up to rounding to the dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        problem = MAKERS[name[:2]](name, SIZES[size], smooth, dtype)
    problem.steps, problem.smooth = steps or problem.steps, smooth
    return problem


# --- data cleaning: λ is a weight for each training sample ------------------------------------------------------


def _cleaning(
    name: str, title: str, kind: str, model: nn.Module, shape: tuple[int, ...], size: Size, dtype: torch.dtype,
    samples: int, batches: int = 1, lr: float = 0.1,
) -> Problem:  # fmt: skip
    """`samples` in each inner batch and in the batch of g; lr is the inner rate."""
    x, xv = torch.rand(batches, samples, *shape).to(dtype), torch.rand(samples, *shape).to(dtype)
    y, yv = torch.randint(10, (batches, samples)), torch.randint(10, (samples,))
    lam = torch.randn(batches * samples).to(dtype).requires_grad_()
    rows = torch.arange(batches * samples).view(batches, samples)
    inner = [(x[k], y[k], rows[k] if batches > 1 else slice(None)) for k in range(batches)]
    return Problem(name, title, kind, model.to(dtype), [lam], Weighted(lam), mean_loss, lambda: (inner, (xv, yv)),
                   size.steps.get(name, 0), lr)  # fmt: skip


class Weighted:
    """h = mean_i σ(λ_i)·ℓ_i."""

    def __init__(self, lam: Tensor) -> None:
        self.lam = lam

    def __call__(self, model: Any, x: Tensor, y: Tensor, i: Any) -> Tensor:
        return (torch.sigmoid(self.lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()


def mean_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """g: the loss on samples whose labels are known to be right."""
    return F.cross_entropy(model(x), y)


def linear(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    samples = size.samples if name == "P1" else size.long_samples // 2
    model = nn.Sequential(nn.Linear(size.pixels**2, 10))
    title = f"data cleaning, linear {size.pixels**2}-10, {samples} + {samples} samples"
    return _cleaning(name, title, "mlp", model, (size.pixels**2,), size, dtype, samples)


def mlp(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    samples = size.samples if name == "P2" else size.long_samples
    model = nn.Sequential(nn.Linear(size.pixels**2, size.width), kink(smooth), nn.Linear(size.width, 10))
    title = f"data cleaning, MLP {size.pixels**2}-{size.width}-10, {samples} + {samples} samples"
    return _cleaning(name, title, "mlp", model, (size.pixels**2,), size, dtype, samples)


def convolutions(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    filters = size.width * 64 // 300
    layers = [layer for c in (1, filters, filters, filters) for layer in block(c, filters, smooth, norm=False)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters * (size.pixels // 16) ** 2, 10))
    title = f"data cleaning, four 3×3 convolutions of {filters} filters, batches of {size.batch}"
    shape, steps = (1, size.pixels, size.pixels), size.steps["P3"]
    return _cleaning(name, title, "convolutions", model, shape, size, dtype, size.batch, steps)


def transformer(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    width = 16 * max(1, size.width * 4 // 300)
    model = Transformer(size.pixels, width, heads=4, layers=2)
    title = f"data cleaning, transformer of 2 layers, width {width}, {size.pixels} tokens, batches of {size.texts}"
    shape, steps = (size.pixels, size.pixels), size.steps["P5"]
    return _cleaning(name, title, "transformer", model, shape, size, dtype, size.texts, steps)


def kink(smooth: bool) -> nn.Module:
    return nn.Softplus() if smooth else nn.ReLU()


def block(channels: int, filters: int, smooth: bool, norm: bool) -> list[nn.Module]:
    pool = nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2)
    batch_norm: list[nn.Module] = [nn.BatchNorm2d(filters, track_running_stats=False)] if norm else []
    return [nn.Conv2d(channels, filters, 3, padding=1), *batch_norm, kink(smooth), pool]


class Transformer(nn.Module):
    """Pre-norm encoder layers on a linear embedding, the mean over the tokens, a linear layer.

    Attention is written out, since fused kernels have no second derivative and not every peer switches them off.
    """

    def __init__(self, features: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(features, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT / math.sqrt(d // self.heads), -1)
        x = x + self.mix((weights @ v).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# --- a GPT: λ is a weight for each training sequence -------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """P8. The widths that its names give are divided by `divisor`, so are the tokens: 96 at width 128, 128 at 256."""

    layers: int
    batch: int
    vocabulary: int
    divisor: int


TEXTS = {"full": Texts(12, 8, 256, 1), "quick": Texts(12, 4, 64, 4), "tiny": Texts(3, 2, 16, 8)}


def gpt(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    """K batches of random tokens, all different; g is the loss on one more."""
    text = TEXTS[next(key for key, value in SIZES.items() if value is size)]
    _, width, steps, *optimizer = name.split("-")
    tokens = {"128": 96, "256": 128}[width] // text.divisor
    model = GPT(text.vocabulary, tokens, int(width) // text.divisor, text.layers).to(dtype)
    some = torch.randint(text.vocabulary, (int(steps) + 1, text.batch, tokens + 1))
    lam = torch.randn(int(steps) * text.batch).to(dtype).requires_grad_()
    rows = torch.arange(len(lam)).view(int(steps), text.batch)
    inner = [(some[k, :, :-1], some[k, :, 1:], rows[k]) for k in range(int(steps))]
    last = some[-1, :, :-1], some[-1, :, 1:]
    title = f"weighting sequences, GPT of {text.layers} layers and width {int(width) // text.divisor}"
    title += f", {tokens} tokens, batches of {text.batch}" + ", AdamW" * bool(optimizer)
    return Problem(
        name, title, "gpt", model, [lam], WeightedSequences(lam), mean_token_loss, lambda: (inner, last),
        int(steps), 1e-3 if optimizer else 0.1, adamw=bool(optimizer), fused=True, slow=(width, steps) != ("128", "3"),
    )  # fmt: skip


class GPT(nn.Module):
    """A decoder as many write it: learned positions, pre-norm blocks, the head tied to the embedding."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 32)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for x in (self.embed.weight, self.place.weight):
            nn.init.normal_(x, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Block(nn.Module):
    """Causal attention by torch's fused kernel, and an MLP of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # without biases: the loss does not depend on that of the keys, and Adam would blow up its rounding errors
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class WeightedSequences:
    """h = mean_i σ(λ_i)·ℓ_i, ℓ_i the mean loss over the tokens of sequence i."""

    def __init__(self, lam: Tensor) -> None:
        self.lam = lam

    def __call__(self, model: Any, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)
        return (torch.sigmoid(self.lam[i]) * losses).mean()


def mean_token_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """g: the mean over all tokens."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# --- few-shot: λ is an encoder, w a linear head for each task ---------------------------------------------------


class Heads(nn.Module):
    """A linear classifier for each task, as one batched product: all libraries can take it as it is."""

    def __init__(self, tasks: int, features: int, ways: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tasks, ways, features))
        self.bias = nn.Parameter(torch.zeros(tasks, ways))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


def sum_of_tasks(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Σ over the tasks of the mean loss of each."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]


def few_shot(name: str, size: Size, smooth: bool, dtype: torch.dtype) -> Problem:
    """5-way 1-shot. The features do not depend on w: computed once, a task at a time, and kept with their graph."""
    ways, filters, steps = 5, size.width * 64 // 300, int(name[3:])
    layers = [layer for c in (1, filters, filters, filters) for layer in block(c, filters, smooth, norm=True)]
    encoder = nn.Sequential(*layers, nn.Flatten()).to(dtype)
    images = torch.rand(size.tasks, ways * (1 + size.queries), 1, size.pixels, size.pixels).to(dtype)
    features = filters * (size.pixels // 16) ** 2
    labels = torch.arange(ways).expand(size.tasks, ways)
    queries = labels.repeat(1, size.queries)

    def batches() -> tuple[list[Batch], Batch]:
        x = torch.stack([encoder(task) for task in images])
        return [(x[:, :ways], labels)], (x[:, ways:], queries)

    head = nn.Linear(features, ways).to(dtype)
    for p in head.parameters():
        nn.init.zeros_(p)
    kind = f"{size.tasks} tasks, 5-way 1-shot, {size.queries} queries a class"
    title = f"few-shot, Conv-4 encoder of {filters} filters, {kind}"
    return Problem(
        name, title, "few_shot", Heads(size.tasks, features, ways).to(dtype), list(encoder.parameters()),
        sum_of_tasks, sum_of_tasks, batches, steps, 0.1,
        single=(head, mean_loss, mean_loss, size.tasks), encoder=encoder, images=images,
    )  # fmt: skip


MAKERS = {"P1": linear, "P2": mlp, "P3": convolutions, "P4": few_shot, "P5": transformer, "P6": mlp, "P7": linear,
          "P8": gpt}  # fmt: skip
