"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

from .setup import Setup


def train(s: Setup) -> Tensor:
    model, target = s.model, s.target
    logit, weights = s.outer
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def td_loss(model, observation, action, features, following):
        with torch.no_grad():
            best = target(following).max(1).values
            y = features @ weights + torch.sigmoid(logit) * best
        return smooth_l1_loss(model(observation).gather(1, action[:, None]).squeeze(1), y)

    def error(model):
        observation, values = s.optimal
        return mse_loss(model(observation), values)

    steps = 0
    for _ in range(3):
        for i in torch.randperm(96).split(16):
            optimizer.zero_grad()
            td_loss(model, *(x[i] for x in s.replay)).backward()
            optimizer.step()
            steps += 1
            if steps % 4 == 0:
                target.load_state_dict(model.state_dict())
    return error(model).detach()
