"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .setup import Setup, advantages_of, rollout, true_return


def train(s: Setup) -> Tensor:
    model = s.model
    entropy_bonus, shaping = s.outer
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    @torch.no_grad()
    def estimates(model, cells, actions):
        log_probabilities, values = model(cells)
        old = log_probabilities[:-1].gather(-1, actions[..., None]).squeeze(-1)
        advantages = advantages_of((s.reward + shaping)[cells[1:]], values)
        returns = advantages + values[:-1]
        advantages = (advantages - advantages.mean()) / advantages.std()
        return old.flatten(), advantages.flatten(), returns.flatten()

    def loss(model, cell, action, old, advantage, returns):
        log_probabilities, value = model(cell)
        ratio = (log_probabilities.gather(-1, action[:, None]).squeeze(-1) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        return 0.5 * mse_loss(value, returns) - gain - entropy_bonus.exp() * entropy

    def missing_return(model):
        return -true_return(s, model)

    for _ in range(3):
        cells, actions = rollout(s, model, 8)
        old, advantages, returns = estimates(model, cells, actions)
        cell, action = cells[:-1].flatten(), actions.flatten()
        for _ in range(2):
            for i in torch.randperm(64).split(32):
                optimizer.zero_grad()
                loss(model, cell[i], action[i], old[i], advantages[i], returns[i]).backward()
                optimizer.step()
    return missing_return(model).detach()
