"""# Diffusion model

The body of the loop becomes one call: `loop.step(x)` does what `zero_grad`, `backward`, `clip_grad_norm_` and
`optimizer.step()` did. The clipping moves into the block's arguments. Timesteps and noise are drawn inside of the
loss, as before: the reverse sweep runs each step again with the random numbers that it had.

The network is judged at the moving average (EMA) of its weights, so the hypergradient has to go through the average.
It is a buffer of the model, and h leaves it as `bilevel.stop_gradient(...)`, which makes it a part of the loop's
state. Only what a loss does is followed, so the update moves from after a step to the begin of the next, where the
weights are the same. The outer loss takes in the last weights itself.

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
