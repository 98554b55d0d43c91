from __future__ import annotations

import torch
from torch import Tensor
from transformers import get_linear_schedule_with_warmup

from .setup import Setup, next_token_loss


def train(s: Setup) -> Tensor:
    model, (logits,) = s.model, s.outer
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=2 * len(s.loader))
    model.train()
    for _ in range(2):
        for tokens, i in s.loader:
            loss = (logits[i].sigmoid() * next_token_loss(model(input_ids=tokens).logits, tokens)).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return next_token_loss(model(input_ids=s.held_out).logits, s.held_out).mean()
