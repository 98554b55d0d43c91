"""DQN with a target network and a replay buffer; the outer variables are the discount and the weights of rewards."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

STATES, ACTIONS, TRUE_DISCOUNT = 12, 3, 0.9


@dataclass
class Setup:
    """The network and its target, transitions of a small world, and the values that are optimal there."""

    model: nn.Module
    target: nn.Module
    replay: tuple[Tensor, Tensor, Tensor, Tensor]  # observation, action, reward features, the next observation
    optimal: tuple[Tensor, Tensor]  # all observations, and the optimal value of each action there
    outer: list[Tensor]  # the logit of the discount, the weights of the reward features


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, ACTIONS)).to(dtype)
    observation = torch.randn(STATES, 4, dtype=dtype)
    following = torch.randint(STATES, (STATES, ACTIONS))
    features = torch.stack([observation[:, 0].tanh(), observation.square().mean(1)], 1)
    state, action = torch.randint(STATES, (96,)), torch.randint(ACTIONS, (96,))
    to = following[state, action]
    logit, weights = torch.tensor(1.0, dtype=dtype), torch.tensor([0.5, 0.2], dtype=dtype)
    outer = [logit.requires_grad_(), weights.requires_grad_()]
    values = _optimal(following, features @ torch.tensor([1.0, -0.3], dtype=dtype))
    replay = observation[state], action, features[to], observation[to]
    return Setup(model, copy.deepcopy(model).requires_grad_(False), replay, (observation, values), outer)


def _optimal(following: Tensor, reward: Tensor) -> Tensor:
    """Q* of the world, by value iteration."""
    q = torch.zeros(STATES, ACTIONS, dtype=reward.dtype)
    for _ in range(200):
        q = (reward + TRUE_DISCOUNT * q.max(1).values)[following]
    return q
