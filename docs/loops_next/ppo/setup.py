"""PPO in a grid, with advantages and several epochs; the outer variables are the entropy bonus and extra rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SIDE, HORIZON, DISCOUNT, TRACE = 4, 8, 0.95, 0.9
GOAL = SIDE * SIDE - 1


@dataclass
class Setup:
    """The agent, the grid, and the outer variables."""

    model: Agent
    following: Tensor  # (cell, action) -> the next cell
    reward: Tensor  # for being in a cell
    outer: list[Tensor]  # the logarithm of the entropy bonus, an extra reward for each cell


class Agent(nn.Module):
    """Log-probabilities of the actions, and the value, for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(SIDE * SIDE, 12), nn.Tanh())
        self.policy, self.value = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(cell)
        return self.policy(features).log_softmax(-1), self.value(features).squeeze(-1)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    row, column = torch.arange(SIDE * SIDE) // SIDE, torch.arange(SIDE * SIDE) % SIDE
    moves = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])
    to = (torch.stack([row, column], 1)[:, None] + moves).clamp(0, SIDE - 1)
    following = to[..., 0] * SIDE + to[..., 1]
    following[GOAL] = GOAL
    reward = torch.zeros(SIDE * SIDE, dtype=dtype)
    reward[GOAL] = 1.0
    entropy = torch.tensor(-3.0, dtype=dtype, requires_grad=True)
    shaping = (0.1 * (row + column)).to(dtype).requires_grad_()
    return Setup(Agent().to(dtype), following, reward, [entropy, shaping])


def rollout(s: Setup, model: Agent, episodes: int) -> tuple[Tensor, Tensor]:
    """The cells that were visited, (HORIZON + 1, episodes), and the actions that were taken, (HORIZON, episodes)."""
    cells, actions = [torch.zeros(episodes, dtype=torch.long)], []
    with torch.no_grad():
        for _ in range(HORIZON):
            actions.append(torch.multinomial(model(cells[-1])[0].exp(), 1).squeeze(1))
            cells.append(s.following[cells[-1], actions[-1]])
    return torch.stack(cells), torch.stack(actions)


def advantages_of(rewards: Tensor, values: Tensor) -> Tensor:
    """The generalised advantages (GAE) of rewards (HORIZON, episodes), from values (HORIZON + 1, episodes)."""
    errors = rewards + DISCOUNT * values[1:] - values[:-1]
    total, advantages = torch.zeros_like(errors[0]), []
    for error in reversed(errors):
        total = error + DISCOUNT * TRACE * total
        advantages.insert(0, total)
    return torch.stack(advantages)


def true_return(s: Setup, model: Agent) -> Tensor:
    """The expected return of the policy from the first cell, by dynamic programming, without the extra rewards."""
    probabilities = model(torch.arange(SIDE * SIDE))[0].exp()
    values = torch.zeros_like(s.reward)
    for _ in range(HORIZON):
        values = (probabilities * (s.reward + DISCOUNT * values)[s.following]).sum(1)
    return values[0]
