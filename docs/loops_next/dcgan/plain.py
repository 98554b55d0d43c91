"""The loop as it was."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .setup import Setup, mmd


def train(s: Setup) -> Tensor:
    model, weights = s.model, s.outer[0]
    critic, generator = model["critic"], model["generator"]
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def critic_loss(model, x, w, fake):
        on_real, on_fake = softplus(-critic(x)), softplus(critic(fake.detach()))
        return (torch.sigmoid(w) * on_real).mean() + on_fake.mean()

    def generator_loss(model, fake):
        return softplus(-critic(fake)).mean()

    def distance(model):
        model.eval()
        return mmd(generator(s.z_held_out), s.held_out)

    model.train()
    for _ in range(2):
        for i in torch.randperm(len(s.images)).split(8):
            fake = generator(s.noise(len(i)))
            opt_d.zero_grad()
            critic_loss(model, s.images[i], weights[i], fake).backward()
            opt_d.step()

            opt_g.zero_grad()
            generator_loss(model, fake).backward()
            opt_g.step()
    return distance(model).detach()
