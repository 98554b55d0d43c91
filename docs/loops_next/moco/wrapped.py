"""# MoCo

The key encoder is a companion of the model, a moving average of its weights. The keys and the queue are values that the
loop computes between its steps, so they come from `loop.compute`. A key stays in the queue for several steps, and the
queue is computed from the one before. The hypergradient goes back through all of them, to the key encoder as it was
when the key was made.

The outer variable is the strength of the noise, one number for each coordinate, in queries and keys. The outer loss is
that of a linear probe on the features, fitted in closed form.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import bilevel_plugin as bilevel

from .setup import Setup, ridge_error


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, key_encoder, queue, log_strength = s.model, s.key_encoder, s.queue, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    def enqueue(model, x, queue):
        keys = normalize(key_encoder(view(x)))
        return keys, torch.cat([keys, queue])[:32]

    def loss(model, x, keys, queue):
        query = normalize(model(view(x)))
        positive = (query * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ queue.T], 1) / 0.2
        return cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def probe(model):
        (a, y), (b, z) = s.labelled, s.held_out
        return ridge_error((model(a), model(b)), (y, z))

    follow = {key_encoder: bilevel.ema(0.9)}
    with bilevel.inner(model, loss, probe, solver="gd", optimizer=optimizer, companions=follow) as loop:
        for _ in range(3):
            for x in s.samples[torch.randperm(64)].split(16):
                keys, following = loop.compute(enqueue, x, queue)
                loop.step(x, keys, queue)
                queue = following
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
