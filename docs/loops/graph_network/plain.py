"""The loop as people write it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .setup import Setup, normalised


def train(s: Setup) -> Tensor:
    adjacency = normalised(s.edges, s.edge_weight.sigmoid().detach(), len(s.features))
    optimizer = torch.optim.Adam(s.model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(20):
        s.model.train()
        optimizer.zero_grad()
        output = s.model(s.features, adjacency)
        loss = F.nll_loss(output[s.train], s.labels[s.train])
        loss.backward()
        optimizer.step()
    s.model.eval()
    output = s.model(s.features, adjacency)
    return F.nll_loss(output[s.val], s.labels[s.val])
