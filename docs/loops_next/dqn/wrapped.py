"""# DQN with a target network

The target network is a companion of the model: after every fourth step it takes the model's weights. The rule moves
into `companions=`, so the block knows how the target depends on the weights. In the gradient of a step the target is a
constant, and needs no `torch.no_grad()`. In the hypergradient it is not: the discount and the rewards reach the last
weights through the targets as well.

The outer variables are the discount and the weights of two reward features. The outer loss is the distance to the
optimal values of the world.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, target = s.model, s.target
    logit, weights = s.outer
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def td_loss(model, observation, action, features, following):
        best = target(following).max(1).values
        y = features @ weights + torch.sigmoid(logit) * best
        return smooth_l1_loss(model(observation).gather(1, action[:, None]).squeeze(1), y)

    def error(model):
        observation, values = s.optimal
        return mse_loss(model(observation), values)

    follow = {target: bilevel.copy(every=4)}
    with bilevel.inner(model, td_loss, error, solver="gd", optimizer=optimizer, companions=follow) as loop:
        for _ in range(3):
            for i in torch.randperm(96).split(16):
                loop.step(*(x[i] for x in s.replay))
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
