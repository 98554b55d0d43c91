"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from .setup import Setup, ridge_error


def train(s: Setup) -> Tensor:
    model, key_encoder, queue, log_strength = s.model, s.key_encoder, s.queue, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    @torch.no_grad()
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

    for _ in range(3):
        for x in s.samples[torch.randperm(64)].split(16):
            keys, following = enqueue(model, x, queue)
            optimizer.zero_grad()
            loss(model, x, keys, queue).backward()
            optimizer.step()
            queue = following
            with torch.no_grad():
                for key, p in zip(key_encoder.parameters(), model.parameters(), strict=True):
                    key.mul_(0.9).add_(p, alpha=0.1)
    return probe(model).detach()
