"""Architectures of every kind, small, each with the losses of data cleaning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from problems import weighted
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Sequence(nn.Module):
    """Tokens through an embedding and a layer on (batch, time, feature) to class scores."""

    def __init__(self, layer, width=8, tied=False):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, width), layer
        self.out = nn.Linear(width, 5, bias=not tied)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        y = self.layer(self.embed(x))
        return self.out((y[0] if isinstance(y, tuple) else y).mean(1))


class Attend(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inside(x, x, x, need_weights=False)[0]


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inside(x, x)


class Double(nn.Module):
    """A parametrization of one's own."""

    def forward(self, w):
        return 2 * w.tanh()


def doubled(layer):
    return parametrize.register_parametrization(layer, "weight", Double())


class Shared(nn.Module):
    """One submodule under two names, a frozen layer, a weight that no loss touches, a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.out = nn.Linear(3, 5)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.out(self.second(self.frozen(self.first(x).tanh()).tanh()).tanh()) * (1 + 0.1 * self.calls)


def images(*layers):
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *layers)


def vectors(*layers):
    return nn.Sequential(nn.Linear(3, 8), *layers)


POOLED = nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)


ARCHITECTURES = {
    "batchnorm": (lambda: vectors(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)), (3,)),
    "batchnorm, no momentum": (lambda: vectors(nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 5)), (3,)),
    "layernorm": (lambda: vectors(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5)), (3,)),
    "groupnorm": (lambda: vectors(nn.GroupNorm(2, 8), nn.SiLU(), nn.Linear(8, 5)), (3,)),
    "dropout": (lambda: vectors(nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5)), (3,)),
    "conv": (lambda: images(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), *POOLED), (16,)),
    "lstm": (lambda: Sequence(nn.LSTM(8, 8, 2, batch_first=True)), "tokens"),
    "lstm with dropout": (lambda: Sequence(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3)), "tokens"),
    "gru": (lambda: Sequence(nn.GRU(8, 8, batch_first=True)), "tokens"),
    "sdpa": (lambda: Sequence(Attend()), "tokens"),
    "multihead attention": (lambda: Sequence(SelfAttention()), "tokens"),
    "transformer encoder": (lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), "tokens"),
    "transformer decoder": (lambda: Sequence(DecoderLayer()), "tokens"),
    "tied weights": (lambda: Sequence(nn.GRU(8, 8, batch_first=True), tied=True), "tokens"),
    "shared submodule": (Shared, (3,)),
    "weight norm": (lambda: vectors(nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 5))), (3,)),
    "orthogonal": (lambda: vectors(nn.Tanh(), parametrizations.orthogonal(nn.Linear(8, 5))), (3,)),
    "own parametrization": (lambda: vectors(nn.Tanh(), doubled(nn.Linear(8, 5))), (3,)),
}


def problem(name, dtype=torch.float64):
    torch.manual_seed(0)
    make, shape = ARCHITECTURES[name]
    model = make().to(dtype)
    sample = (
        (lambda n: torch.randint(5, (n, 6))) if shape == "tokens" else (lambda n: torch.randn(n, *shape, dtype=dtype))
    )
    batch, outer = ((sample(n), torch.randint(5, (n,))) for n in (6, 5))
    lam = torch.randn(6, dtype=dtype, requires_grad=True)

    h, g = weighted(lam)
    return model, h, g, lam, tuple(batch), tuple(outer)
