"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .setup import Setup, ridge_error


def train(s: Setup) -> Tensor:
    model, target, log_strength = s.model, s.target, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    def loss(model, x):
        one, other = view(x), view(x)
        with torch.no_grad():
            t1, t2 = target(one), target(other)
        return 2 - (cosine_similarity(model(one), t2) + cosine_similarity(model(other), t1)).mean()

    def probe(model):
        (a, y), (b, z) = s.labelled, s.held_out
        return ridge_error((model.encoder(a), model.encoder(b)), (y, z))

    for _ in range(4):
        for x in s.samples[torch.randperm(64)].split(16):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            with torch.no_grad():
                online = dict(model.named_parameters())
                for name, p in target.named_parameters():
                    p.mul_(0.95).add_(online[name], alpha=0.05)
    return probe(model).detach()
