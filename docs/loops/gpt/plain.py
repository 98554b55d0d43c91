from __future__ import annotations

import torch
from torch import Tensor, nn

from .setup import MICRO_BATCHES, RESUMED, STEPS, Setup, get_batch, held_out_loss, learning_rate


def train(s: Setup) -> Tensor:
    model, optimizer, (logits,) = s.model, s.optimizer, s.outer
    model.train()
    for k in range(RESUMED, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(k)
        for _ in range(MICRO_BATCHES):
            x, y, source = get_batch(s.tokens)
            with s.amp():
                loss = (logits.softmax(0)[source] * model(x, y)).mean() / MICRO_BATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return held_out_loss(s)
