"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from .setup import Setup, cost, reward


def train(s: Setup) -> Tensor:
    model, weights = s.model, s.outer[0]
    opt_critic = torch.optim.Adam([*model.encoder.parameters(), *model.critic.parameters()], lr=5e-3)
    opt_actor = torch.optim.Adam(model.actor.parameters(), lr=5e-3)

    def critic_loss(model, x, action, following):
        features = model.encoder(following)
        target = reward(x, action, weights) + 0.9 * model.q(features, model.actor(features))
        return mse_loss(model.q(model.encoder(x), action), target.detach())

    def actor_loss(model, x):
        features = model.encoder(x).detach()  # the encoder learns from the critic alone
        return -model.q(features, model.actor(features)).mean()

    def true_cost(model):
        return cost(s, model)

    for _ in range(4):
        for i in torch.randperm(64).split(16):
            x, action, following = (part[i] for part in s.replay)
            opt_critic.zero_grad()
            critic_loss(model, x, action, following).backward()
            opt_critic.step()

            opt_actor.zero_grad()
            actor_loss(model, x).backward()
            opt_actor.step()
    return true_cost(model).detach()
