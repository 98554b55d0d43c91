"""# BYOL

The target follows the online network as a moving average of its weights. The rule is `bilevel.ema(0.95)`, and the
target is a companion of the model: a constant in the gradient of a step, and no constant in the hypergradient. The
parameters of a companion follow those of the model that have their names; the predictor has none.

The outer variable is the strength of the noise, one number for each coordinate, which both networks see. The outer loss
is that of a linear probe on the features, fitted in closed form.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import bilevel_plugin as bilevel

from .setup import Setup, ridge_error


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, target, log_strength = s.model, s.target, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    def loss(model, x):
        one, other = view(x), view(x)
        t1, t2 = target(one), target(other)
        return 2 - (cosine_similarity(model(one), t2) + cosine_similarity(model(other), t1)).mean()

    def probe(model):
        (a, y), (b, z) = s.labelled, s.held_out
        return ridge_error((model.encoder(a), model.encoder(b)), (y, z))

    follow = {target: bilevel.ema(0.95)}
    with bilevel.inner(model, loss, probe, solver="gd", optimizer=optimizer, companions=follow) as loop:
        for _ in range(4):
            for x in s.samples[torch.randperm(64)].split(16):
                loop.step(x)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
