"""An actor and a critic on one encoder, with an optimizer each; the outer variable weighs parts of the reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """Encoder, actor and critic in one module, a replay buffer, and the world that the actor is judged in."""

    model: ActorCritic
    replay: tuple[Tensor, Tensor, Tensor]  # observation, action, the next observation
    start: Tensor  # observations to judge the actor from
    dynamics: tuple[Tensor, Tensor]
    outer: list[Tensor]  # the weights of the parts of the reward


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 12), nn.Tanh())
        self.actor = nn.Sequential(nn.Linear(12, 1), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 1))

    def q(self, features: Tensor, action: Tensor) -> Tensor:
        return self.critic(torch.cat([features, action], 1)).squeeze(1)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = ActorCritic().to(dtype)
    a = torch.tensor([[0.9, 0.2, 0.0], [0.0, 0.9, 0.2], [0.1, 0.0, 0.9]], dtype=dtype)
    b = torch.tensor([[0.0], [0.3], [0.6]], dtype=dtype)
    observation, start = torch.randn(64, 3, dtype=dtype), torch.randn(16, 3, dtype=dtype)
    action = 2 * torch.rand(64, 1, dtype=dtype) - 1
    following = observation @ a.T + action @ b.T
    weights = torch.tensor([1.0, 0.5], dtype=dtype, requires_grad=True)
    return Setup(model, (observation, action, following), start, (a, b), [weights])


def reward(observation: Tensor, action: Tensor, weights: Tensor) -> Tensor:
    """The weighted cost of being away from the origin, and of acting."""
    return -weights[0] * observation.square().mean(1) - weights[1] * action.square().mean(1)


def cost(s: Setup, model: ActorCritic) -> Tensor:
    """What the actor really costs, over a few steps of the world."""
    a, b = s.dynamics
    x, total = s.start, torch.zeros_like(s.start[0, 0])
    for _ in range(5):
        x = x @ a.T + model.actor(model.encoder(x)) @ b.T
        total = total + x.square().mean()
    return total
