"""# PPO with advantages and several epochs

The advantages, the returns and the old log-probabilities are computed from the weights at the beginning of an
iteration. The steps of its epochs take minibatches of them. So they are computed by `loop.compute`: for those steps
they are constants, as before; the hypergradient goes back through them to the weights and the rewards that they were
computed from. The actions are drawn from a distribution, and remain data.

The outer variables are the entropy bonus and an extra reward for each cell. The outer loss is the expected return
under the true reward, by dynamic programming.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import bilevel_plugin as bilevel

from .setup import Setup, advantages_of, rollout, true_return


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model = s.model
    entropy_bonus, shaping = s.outer
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

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

    with bilevel.inner(model, loss, missing_return, solver="gd", optimizer=optimizer) as loop:
        for _ in range(3):
            cells, actions = rollout(s, model, 8)
            old, advantages, returns = loop.compute(estimates, cells, actions)
            cell, action = cells[:-1].flatten(), actions.flatten()
            for _ in range(2):
                for i in torch.randperm(64).split(32):
                    loop.step(cell[i], action[i], old[i], advantages[i], returns[i])
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
