"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .setup import Setup, chunks


def train(s: Setup) -> Tensor:
    model = s.model
    log_ar, log_tar = s.outer
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)

    def loss(model, x, y, hidden):
        scores, outputs, hidden = model(x, hidden)
        activation = log_ar.exp() * outputs.square().mean()
        change = log_tar.exp() * outputs.diff(dim=0).square().mean()
        return cross_entropy(scores.flatten(0, 1), y.flatten()) + activation + change, hidden

    def validation(model):
        x, y = s.validation[:-1], s.validation[1:]
        scores, _, _ = model(x, model.start(x.shape[1]))
        return cross_entropy(scores.flatten(0, 1), y.flatten())

    for _ in range(2):
        hidden = model.start(s.text.shape[1])
        for x, y in chunks(s.text):
            optimizer.zero_grad()
            value, hidden = loss(model, x, y, hidden)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            hidden = tuple(part.detach() for part in hidden)  # the gradient of the next step ends here
        scheduler.step()
    return validation(model).detach()
