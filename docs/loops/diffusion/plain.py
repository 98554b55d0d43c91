"""The loop as it was."""

import torch
from torch import Tensor

from .setup import STEPS, Setup


def train(s: Setup) -> Tensor:
    model, log_weights = s.model, s.outer[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def errors(network, x, t, noise):
        kept = s.kept[t, None]
        return (network(kept.sqrt() * x + (1 - kept).sqrt() * noise, t) - noise).square().mean(1)

    def loss(model, x):
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        return (log_weights.softmax(0)[t] * STEPS * errors(model, x, t, noise)).mean()

    for _ in range(6):
        for x in s.train[torch.randperm(len(s.train))].split(16):
            optimizer.zero_grad()
            loss(model, x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.average = model.averaged().detach()
    return errors(model.at(model.average), *s.validation).mean().detach()
