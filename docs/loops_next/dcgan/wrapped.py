"""# DCGAN

The plain loop runs the generator once, and uses its images in both losses. In a block each loss has a step of its own,
and computes what it needs from the weights and the noise. So the generator runs twice, on the same noise. Its weights
do not change in between, and the images are the same. But its BatchNorm would move its statistics twice: in the second
run it does not track them.

The critic's step takes the images as a constant (`bilevel.stop_gradient`). The outer variable weighs the training
images, half of which are noise. The outer loss is the distance (MMD) between generated and held-out images, in eval
mode.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

import bilevel_plugin as bilevel

from .setup import Setup, mmd


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, weights = s.model, s.outer[0]
    critic, generator = model["critic"], model["generator"]
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def critic_loss(model, x, w, z):
        fake = bilevel.stop_gradient(generator(z))
        on_real, on_fake = softplus(-critic(x)), softplus(critic(fake))
        return (torch.sigmoid(w) * on_real).mean() + on_fake.mean()

    def generator_loss(model, z):
        generator[1].track_running_stats = False  # its statistics have moved in the critic's step
        fake = generator(z)
        generator[1].track_running_stats = True
        return softplus(-critic(fake)).mean()

    def distance(model):
        model.eval()
        return mmd(generator(s.z_held_out), s.held_out)

    model.train()
    with bilevel.inner(model, critic_loss, distance, solver="gd", optimizer=[opt_d, opt_g]) as loop:
        for _ in range(2):
            for i in torch.randperm(len(s.images)).split(8):
                z = s.noise(len(i))
                loop.step(s.images[i], weights[i], z, only=opt_d)
                loop.step(z, h=generator_loss, only=opt_g)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
