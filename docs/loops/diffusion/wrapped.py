"""# Diffusion model

`loop.step(x)` replaces `zero_grad`, `backward`, `clip_grad_norm_` and `optimizer.step()`. The clipping becomes an
argument of the block. Timesteps and noise are drawn inside the loss, as before. The reverse sweep runs each step again
with the same random numbers.

The outer loss uses the moving average (EMA) of the weights, so the hypergradient must go through the average. The
average is a buffer of the model. `h` sets it to `bilevel.stop_gradient(...)`, which makes it part of the loop's state.
The block follows only what a loss computes. So the update of the average moves from the end of a step to the beginning
of the next one, where the weights are the same. The outer loss adds the last weights itself.

The outer variable is a weight for each timestep. The outer loss is the plain, unweighted loss on validation points.
"""

import torch
from torch import Tensor

import bilevel_plugin as bilevel

from .setup import STEPS, Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, log_weights = s.model, s.outer[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def errors(network, x, t, noise):
        kept = s.kept[t, None]
        return (network(kept.sqrt() * x + (1 - kept).sqrt() * noise, t) - noise).square().mean(1)

    def loss(model, x):
        model.average = bilevel.stop_gradient(model.averaged())
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        return (log_weights.softmax(0)[t] * STEPS * errors(model, x, t, noise)).mean()

    def validation(model):
        return errors(model.at(model.averaged()), *s.validation).mean()

    with bilevel.inner(model, loss, validation, solver="gd", optimizer=optimizer, clip=1.0) as loop:
        for _ in range(6):
            for x in s.train[torch.randperm(len(s.train))].split(16):
                loop.step(x)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    model.average = model.averaged().detach()
    return value, grads
