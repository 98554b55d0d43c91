"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .setup import Setup, ridge_error


def train(s: Setup) -> Tensor:
    model, log_strength = s.model, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)

    def view(x):
        return x + log_strength.exp() * torch.randn_like(x)

    def loss(model, x):
        model.train()
        z1, z2 = model.encoder(view(x)), model.encoder(view(x))
        p1, p2 = model.predictor(z1), model.predictor(z2)
        c1, c2 = z1.detach(), z2.detach()
        return -(cosine_similarity(p1, c2) + cosine_similarity(p2, c1)).mean() / 2

    def probe(model):
        model.eval()
        (a, y), (b, z) = s.labelled, s.held_out
        return ridge_error((model.encoder(a), model.encoder(b)), (y, z))

    for _ in range(4):
        for x in s.samples[torch.randperm(64)].split(16):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            scheduler.step()
    return probe(model).detach()
