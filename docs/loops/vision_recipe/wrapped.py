"""# A vision recipe

The outer variables are the strength of the label smoothing and a weight for each class. The network is judged in eval
mode.

- The random numbers of mixup are drawn in the loop, as before. `loop.step` gets the mixed images and targets.
- The schedulers step as before. The block reads the rate, the momentum and the weight decay at each step.
- Inside the block the model holds the current weights, so the line that updates the EMA stays.
- `g` sets eval mode. The block restores training mode after each evaluation of `g`. The hypergradient goes through
  BatchNorm's running statistics.
- `smoothed_loss` is written out. `cross_entropy(label_smoothing=...)` takes a number, which would cut the path to λ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import bilevel_plugin as bilevel

from .setup import EPOCHS, Setup, mixup, smoothed_loss


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, ema, (smoothing, log_weights) = s.model, s.ema, s.outer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    steps = EPOCHS * len(s.loader)
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, steps - 4)]
    scheduler = SequentialLR(optimizer, parts, milestones=[4])

    def h(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        return smoothed_loss(model(x), targets, smoothing, log_weights)

    def g(model: nn.Module) -> Tensor:
        model.eval()
        return cross_entropy(model(s.x_val), s.y_val)

    with bilevel.inner(model, h, g, solver="gd", optimizer=optimizer) as loop:
        for _ in range(EPOCHS):
            model.train()
            for x, y in s.loader:
                x, targets = mixup(x, y)
                loop.step(x, targets)
                scheduler.step()
                ema.update_parameters(model)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
