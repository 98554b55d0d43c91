"""A small GPT: AdamW with two groups, warm-up and cosine, gradient accumulation, clipping, and bf16 if it is wanted."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

RESUMED, STEPS, WARMUP = 3, 8, 5  # the run goes on from a checkpoint, in the middle of its warm-up
MICRO_BATCHES, BATCH, CONTEXT = 4, 4, 8
PEAK, FLOOR = 1e-2, 1e-3  # learning rates
VOCABULARY, WIDTH, HEADS, LAYERS, DROPOUT = 13, 16, 2, 2, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.token.weight  # tied

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of each sequence."""
        hidden = self.dropout(self.token(x) + self.position.weight[: x.shape[1]])
        logits = self.head(self.norm(self.blocks(hidden)))
        return cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


@dataclass
class Setup:
    model: GPT
    optimizer: torch.optim.AdamW  # with the moments that its first steps left
    tokens: Tensor  # for each source its text
    held_out: Tensor  # a text like that of source 0
    outer: list[Tensor]  # a logit for each source: how much of the loss is its
    autocast: bool = False

    def amp(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


def make(dtype: torch.dtype = torch.float64, autocast: bool = False) -> Setup:
    torch.manual_seed(0)
    tokens = torch.stack([_text(stride, 200) for stride in (1, 3, 5)])
    logits = torch.tensor([0.0, 0.3, -0.2], dtype=dtype, requires_grad=True)
    model = GPT().to(dtype)
    optimizer = configure_optimizer(model)
    for k in range(RESUMED):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(k)
        x, y, _ = get_batch(tokens)
        model(x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Setup(model, optimizer, tokens, _text(1, 100), [logits], autocast)


def _text(stride: int, length: int) -> Tensor:
    """Tokens that go round in steps of one stride, with one in five at random."""
    regular = torch.arange(length) * stride % VOCABULARY
    return torch.where(torch.rand(length) < 0.2, torch.randint(VOCABULARY, (length,)), regular)


def configure_optimizer(model: GPT) -> torch.optim.AdamW:
    """Matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def learning_rate(k: int) -> float:
    """Linear warm-up, then a cosine down to the floor."""
    if k < WARMUP:
        return PEAK * (k + 1) / (WARMUP + 1)
    done = (k - WARMUP) / (STEPS - WARMUP)
    return FLOOR + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK - FLOOR)


def get_batch(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences at random places of random sources, what comes next in them, and the sources."""
    source = torch.randint(len(tokens), (BATCH,))
    start = torch.randint(tokens.shape[1] - CONTEXT, (BATCH,))
    at = start[:, None] + torch.arange(CONTEXT)
    return tokens[source[:, None], at], tokens[source[:, None], at + 1], source


def held_out_loss(s: Setup) -> Tensor:
    windows = s.held_out[: 8 * (CONTEXT + 1)].view(8, CONTEXT + 1)
    with s.amp():
        return s.model(windows[:, :-1], windows[:, 1:]).mean()
