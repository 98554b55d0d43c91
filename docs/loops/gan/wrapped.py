"""# GAN

The block holds both networks in one `nn.ModuleDict`, and takes both optimizers as a list. Each turn of the loop has two
steps, as before. The first is on the critic's loss and moves only the critic (`only=opt_d`). The second is on the
generator's loss.

`fake.detach()` becomes `bilevel.stop_gradient(fake)`. For the critic's own gradient the two are the same. But the
critic after the step depends on the generator, and the hypergradient includes that path.

The outer variable weighs the training images, half of which are noise. The outer loss is the distance (MMD) between
generated and held-out images. It is computed with the generator's BatchNorm in eval mode, and its running statistics
are part of the state.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

import bilevel_plugin as bilevel

from .setup import Setup, mmd


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, weights = s.model, s.outer[0]
    opt_d = torch.optim.Adam(model["critic"].parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(model["generator"].parameters(), lr=2e-3, betas=(0.5, 0.999))

    def critic_loss(model, x, w, z):
        fake = bilevel.stop_gradient(model["generator"](z))
        on_real, on_fake = softplus(-model["critic"](x)), softplus(model["critic"](fake))
        return (torch.sigmoid(w) * on_real).mean() + on_fake.mean()

    def generator_loss(model, z):
        return softplus(-model["critic"](model["generator"](z))).mean()

    def distance(model):
        model.eval()
        return mmd(model["generator"](s.z_held_out), s.held_out)

    model.train()
    with bilevel.inner(model, critic_loss, distance, solver="gd", optimizer=[opt_d, opt_g]) as loop:
        for _ in range(3):
            for i in torch.randperm(len(s.images)).split(8):
                loop.step(s.images[i], weights[i], s.noise(len(i)), only=opt_d)
                loop.step(s.noise(len(i)), h=generator_loss, only=opt_g)
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
