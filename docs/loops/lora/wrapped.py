"""# LoRA adapters

Some of the sequences for fine-tuning are junk. The outer variable is a weight for each sequence.

- The inner variable is the trainable part of the model: the adapters. The frozen base is not copied, and no gradients
  are taken for it. So the states that the block stores have the size of the adapters.
- The optimizer is the one you have, over the trainable parameters.
- The dropout of the adapters draws the same numbers as in the plain loop, and again when a step is differentiated.
- If a quantised layer of the base has no derivative for its input, the error names that layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

import bilevel_plugin as bilevel

from .setup import Setup, next_token_loss


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, (logits,) = s.model, s.outer
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=2 * len(s.loader))

    def h(model: nn.Module, tokens: Tensor, i: Tensor) -> Tensor:
        return (logits[i].sigmoid() * next_token_loss(model(input_ids=tokens).logits, tokens)).mean()

    def g(model: nn.Module) -> Tensor:
        model.eval()
        return next_token_loss(model(input_ids=s.held_out).logits, s.held_out).mean()

    model.train()
    with bilevel.inner(model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(2):
            for tokens, i in s.loader:
                loop.step(tokens, i)
                scheduler.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
