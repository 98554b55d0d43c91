"""The loop as it was."""

import torch
from torch import Tensor

from .setup import Setup, returns_of, rollout, true_return


def train(s: Setup) -> Tensor:
    agent = s.model
    log_entropy_bonus, shaping = s.outer
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02)

    def loss(model):
        cells, actions = rollout(s, model, episodes=8)
        returns = returns_of(s, cells, actions, shaping)
        log_p, baseline = model(cells)
        advantage = (returns - baseline).detach()
        taken = log_p.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        fit = (baseline - returns).square()
        return (-taken * advantage - log_entropy_bonus.exp() * entropy + 0.5 * fit).mean()

    def true_loss(model):
        return -true_return(s, model)

    for _ in range(15):
        optimizer.zero_grad()
        loss(agent).backward()
        optimizer.step()
    return true_loss(agent).detach()
