"""# SimSiam

SimSiam stops the gradient on one branch. But the branch is computed from the weights, and the weights after the step
depend on it. So `z.detach()` becomes `bilevel.stop_gradient(z)`. The scheduler stays where it was.

The outer variable is the strength of the augmentation, one number for each coordinate. Its random numbers are drawn in
the loss, as before. The outer loss is that of a linear probe on the features, fitted in closed form, with BatchNorm in
eval mode.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import bilevel_plugin as bilevel

from .setup import Setup, ridge_error


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, log_strength = s.model, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    def loss(model, x):
        model.train()
        z1, z2 = model.encoder(view(x)), model.encoder(view(x))
        p1, p2 = model.predictor(z1), model.predictor(z2)
        c1, c2 = bilevel.stop_gradient(z1), bilevel.stop_gradient(z2)
        return -(cosine_similarity(p1, c2) + cosine_similarity(p2, c1)).mean() / 2

    def probe(model):
        model.eval()
        (a, y), (b, z) = s.labelled, s.held_out
        return ridge_error((model.encoder(a), model.encoder(b)), (y, z))

    with bilevel.inner(model, loss, probe, solver="gd", optimizer=optimizer) as loop:
        for _ in range(4):
            for x in s.samples[torch.randperm(64)].split(16):
                loop.step(x)
                scheduler.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
