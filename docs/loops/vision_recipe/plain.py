from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from .setup import EPOCHS, Setup, mixup, smoothed_loss


def train(s: Setup) -> Tensor:
    model, ema, (smoothing, log_weights) = s.model, s.ema, s.outer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    steps = EPOCHS * len(s.loader)
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, steps - 4)]
    scheduler = SequentialLR(optimizer, parts, milestones=[4])
    for _ in range(EPOCHS):
        model.train()
        for x, y in s.loader:
            x, targets = mixup(x, y)
            loss = smoothed_loss(model(x), targets, smoothing, log_weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(s.x_val), s.y_val)
