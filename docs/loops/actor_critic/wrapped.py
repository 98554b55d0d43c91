"""# Actor and critic

Two optimizers hold parts of one model. Each turn of the loop has two steps, and each step moves the weights of its own
optimizer (`only=`). The actor's loss also reads the critic's weights, but no gradient is taken for them.

Both `.detach()` become `bilevel.stop_gradient`. The target of the critic and the features that the actor reads are
constants in the gradient of a step. But they depend on the weights, and the hypergradient includes that path.

The outer variable weighs the two parts of the reward. The outer loss is the cost of the actor under the true reward.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import bilevel_plugin as bilevel

from .setup import Setup, cost, reward


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, weights = s.model, s.outer[0]
    opt_critic = torch.optim.Adam([*model.encoder.parameters(), *model.critic.parameters()], lr=5e-3)
    opt_actor = torch.optim.Adam(model.actor.parameters(), lr=5e-3)

    def critic_loss(model, x, action, following):
        features = model.encoder(following)
        target = reward(x, action, weights) + 0.9 * model.q(features, model.actor(features))
        return mse_loss(model.q(model.encoder(x), action), bilevel.stop_gradient(target))

    def actor_loss(model, x):
        features = bilevel.stop_gradient(model.encoder(x))  # the encoder learns from the critic alone
        return -model.q(features, model.actor(features)).mean()

    def true_cost(model):
        return cost(s, model)

    with bilevel.inner(model, critic_loss, true_cost, solver="gd", optimizer=[opt_critic, opt_actor]) as loop:
        for _ in range(4):
            for i in torch.randperm(64).split(16):
                x, action, following = (part[i] for part in s.replay)
                loop.step(x, action, following, only=opt_critic)
                loop.step(x, h=actor_loss, only=opt_actor)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
