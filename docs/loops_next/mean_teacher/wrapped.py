"""# Mean teacher

The teacher is a moving average of the student, and a companion of it. The student learns to agree with the teacher, and
it is the teacher that is judged: the outer loss reads the companion, and no weight of the student.

The outer variable weighs the labelled samples, of which some labels are wrong. The outer loss is the teacher's error on
held-out samples.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, teacher, weights = s.model, s.teacher, s.outer[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def loss(model, x, y, w, u):
        errors = cross_entropy(model(x), y, reduction="none")
        targets = teacher(u + 0.1 * torch.randn_like(u)).softmax(1)
        consistency = mse_loss(model(u + 0.1 * torch.randn_like(u)).softmax(1), targets)
        return (torch.sigmoid(w) * errors).mean() + 3 * consistency

    def error(model):
        teacher.eval()
        x, y = s.held_out
        return cross_entropy(teacher(x), y)

    x, y = s.labelled
    follow = {teacher: bilevel.ema(0.9)}
    with bilevel.inner(model, loss, error, solver="gd", optimizer=optimizer, companions=follow) as loop:
        for _ in range(4):
            for i, j in zip(torch.randperm(32).split(8), torch.randperm(64).split(16), strict=True):
                loop.step(x[i], y[i], weights[i], s.unlabelled[j])
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
