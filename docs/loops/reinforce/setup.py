"""REINFORCE with a learned baseline in a grid; the outer variables are the entropy bonus and extra rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SIDE, HORIZON, DISCOUNT = 4, 10, 0.95
GOAL = SIDE * SIDE - 1


@dataclass
class Setup:
    """A policy with its baseline, the grid, and the outer variables."""

    model: Agent
    following: Tensor  # (cell, action) -> the next cell
    reward: Tensor  # for being in a cell
    outer: list[Tensor]  # the logarithm of the entropy bonus, an extra reward for each cell


class Agent(nn.Module):
    """Log-probabilities of the actions, and the baseline, for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(SIDE * SIDE, 12), nn.Tanh())
        self.policy, self.baseline = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(cell)
        return self.policy(features).log_softmax(-1), self.baseline(features).squeeze(-1)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    row, column = torch.arange(SIDE * SIDE) // SIDE, torch.arange(SIDE * SIDE) % SIDE
    moves = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])
    to = torch.stack([row, column], 1)[:, None] + moves
    to = to.clamp(0, SIDE - 1)
    following = to[..., 0] * SIDE + to[..., 1]
    following[GOAL] = GOAL
    reward = torch.zeros(SIDE * SIDE, dtype=dtype)
    reward[GOAL] = 1.0
    entropy = torch.tensor(-2.0, dtype=dtype, requires_grad=True)
    shaping = (0.1 * (row + column)).to(dtype).requires_grad_()
    return Setup(Agent().to(dtype), following, reward, [entropy, shaping])


def rollout(s: Setup, model: Agent, episodes: int) -> tuple[Tensor, Tensor]:
    """The cells that were visited and the actions that were taken, (HORIZON, episodes) each."""
    cell, cells, actions = torch.zeros(episodes, dtype=torch.long), [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            action = torch.multinomial(model(cell)[0].exp(), 1).squeeze(1)
            cells.append(cell)
            actions.append(action)
            cell = s.following[cell, action]
    return torch.stack(cells), torch.stack(actions)


def returns_of(s: Setup, cells: Tensor, actions: Tensor, shaping: Tensor) -> Tensor:
    """The discounted sums of what is still to come, with the extra rewards."""
    rewards = (s.reward + shaping)[s.following[cells, actions]]
    total, returns = torch.zeros_like(rewards[0]), []
    for r in reversed(rewards):
        total = r + DISCOUNT * total
        returns.insert(0, total)
    return torch.stack(returns)


def true_return(s: Setup, model: Agent) -> Tensor:
    """The expected return of the policy from the first cell, by dynamic programming, without the extra rewards."""
    probabilities = model(torch.arange(SIDE * SIDE))[0].exp()
    values = torch.zeros_like(s.reward)
    for _ in range(HORIZON):
        values = (probabilities * (s.reward + DISCOUNT * values)[s.following]).sum(1)
    return values[0]
