"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .setup import Setup, mmd


def train(s: Setup) -> Tensor:
    model, weights = s.model, s.outer[0]
    opt_d = torch.optim.Adam(model["critic"].parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(model["generator"].parameters(), lr=2e-3, betas=(0.5, 0.999))

    def critic_loss(model, x, w, z):
        fake = model["generator"](z).detach()
        on_real, on_fake = softplus(-model["critic"](x)), softplus(model["critic"](fake))
        return (torch.sigmoid(w) * on_real).mean() + on_fake.mean()

    def generator_loss(model, z):
        return softplus(-model["critic"](model["generator"](z))).mean()

    def distance(model):
        model.eval()
        return mmd(model["generator"](s.z_held_out), s.held_out)

    model.train()
    for _ in range(3):
        for i in torch.randperm(len(s.images)).split(8):
            opt_d.zero_grad()
            critic_loss(model, s.images[i], weights[i], s.noise(len(i))).backward()
            opt_d.step()

            opt_g.zero_grad()
            generator_loss(model, s.noise(len(i))).backward()
            opt_g.step()
    return distance(model).detach()
