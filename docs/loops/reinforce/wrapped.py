"""# REINFORCE

The episodes are played inside the loss, as before. `torch.multinomial` draws the actions, and the reverse sweep draws
the same ones when it runs a step again. One thing changes: the advantage becomes `bilevel.stop_gradient(...)`. It is
a constant in the gradient of a step. But it depends on the weights of the baseline, and so does the policy after the
step.

The outer variables are the entropy bonus and an extra reward for each cell. The outer loss is the true expected return,
computed by dynamic programming.

**Actions are discrete.** The hypergradient is that of the loop with the actions that were drawn. It leaves out that
another policy would draw other actions. Differences of the plain loop with a fixed seed leave that out too.
"""

import torch
from torch import Tensor

import bilevel_plugin as bilevel

from .setup import Setup, returns_of, rollout, true_return


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    agent = s.model
    log_entropy_bonus, shaping = s.outer
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02)

    def loss(model):
        cells, actions = rollout(s, model, episodes=8)
        returns = returns_of(s, cells, actions, shaping)
        log_p, baseline = model(cells)
        advantage = bilevel.stop_gradient(returns - baseline)
        taken = log_p.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        fit = (baseline - returns).square()
        return (-taken * advantage - log_entropy_bonus.exp() * entropy + 0.5 * fit).mean()

    def true_loss(model):
        return -true_return(s, model)

    with bilevel.inner(agent, loss, true_loss, solver="gd", optimizer=optimizer) as loop:
        for _ in range(15):
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
