"""# Language model by truncated BPTT

The hidden state is passed from one step to the next. It is computed from the weights of the earlier steps. The plain
loop detaches it, so it is a constant in the gradient of the next step. In the hypergradient it is not a constant.

A tensor that a step reads and writes must be a buffer of the model, so that the block can follow it. Here the hidden
state becomes two buffers. They are not persistent, so they are not in a checkpoint. `h` reads them, and sets them to
`bilevel.stop_gradient(...)`. They are then part of the loop's state, beside the weights. Buffers must not be changed
between steps, so the start of an epoch is an argument of `h`.

Clipping becomes an argument of the block. The scheduler stays where it was. The outer variables weigh two regularisers
of AWD-LSTM: the size of the activations (AR), and their change from letter to letter (TAR).
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
