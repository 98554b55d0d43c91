"""# Language model by truncated BPTT

The hidden state goes from one step to the next. It is computed from the weights of the earlier steps: a constant in
the gradient of the next step, where it is detached, but not in the hypergradient.

A tensor that a step reads and writes, and that the block should follow, is a buffer of the model. So the hidden state
becomes two buffers (not persistent, so that they are not in the checkpoint), which h reads and leaves as
`bilevel.stop_gradient(...)`. The block makes them part of the loop's state, beside the weights. What starts an epoch
afresh is an argument of h, since buffers are not to be changed between steps.

Clipping moves into the block's arguments, and the scheduler stays where it was. The outer variables weigh two
regularisers of AWD-LSTM: how large the activations are (AR), and how much they change from letter to letter (TAR).
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

from .setup import Setup, chunks


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model = s.model
    log_ar, log_tar = s.outer
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    for name, part in zip(("hidden", "cell"), model.start(s.text.shape[1]), strict=True):
        model.register_buffer(name, part, persistent=False)

    def loss(model, x, y, fresh):
        hidden = model.start(x.shape[1]) if fresh else (model.hidden, model.cell)
        scores, outputs, hidden = model(x, hidden)
        model.hidden, model.cell = bilevel.stop_gradient(hidden)  # the gradient of the next step ends here
        activation = log_ar.exp() * outputs.square().mean()
        change = log_tar.exp() * outputs.diff(dim=0).square().mean()
        return cross_entropy(scores.flatten(0, 1), y.flatten()) + activation + change

    def validation(model):
        x, y = s.validation[:-1], s.validation[1:]
        scores, _, _ = model(x, model.start(x.shape[1]))
        return cross_entropy(scores.flatten(0, 1), y.flatten())

    with bilevel.inner(model, loss, validation, solver="gd", optimizer=optimizer, clip=0.25) as loop:
        for _ in range(2):
            for k, (x, y) in enumerate(chunks(s.text)):
                loop.step(x, y, fresh=k == 0)
            scheduler.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
