"""TD(0) learning of a value function; the outer variables are the discount and the weights of the rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """A value network, transitions (state, reward features, next state), and returns that were measured."""

    model: nn.Module
    transitions: tuple[Tensor, Tensor, Tensor]
    measured: tuple[Tensor, Tensor]  # states, and the returns from there
    outer: list[Tensor]  # the logit of the discount, the weights of the reward features


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)).to(dtype)
    state = torch.randn(80, 3, dtype=dtype)
    move = torch.tensor([[0.9, 0.3, 0.0], [-0.3, 0.9, 0.1], [0.0, -0.1, 0.8]], dtype=dtype)
    following = state @ move.T + 0.1 * torch.randn_like(state)
    features = torch.stack([state[:, 0].tanh(), state.square().mean(1)], 1)
    returns = 2 * state[:, 0].tanh() - 0.5 * state.square().mean(1)
    logit, weights = torch.tensor(1.0, dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype)
    outer = [logit.requires_grad_(), weights.requires_grad_()]
    transitions = state[:48], features[:48], following[:48]
    return Setup(model, transitions, (state[48:], returns[48:]), outer)
