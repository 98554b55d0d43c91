"""# Meta-SGD

The plain loop writes the update by hand, because each weight has its own rate. `direction=` is a function of the
direction, which is a dict of tensors keyed by the names of the parameters. It may use outer variables. So the rates go
there, and `lr=1` changes nothing else.

The initial weights and the rates are learned together: `hypergrad` takes both in one list.
"""

from torch import Tensor
from torch.nn.functional import mse_loss

import bilevel_plugin as bilevel

from .setup import Setup


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    def h(model):
        return mse_loss(model(s.x), s.y)

    def g(model):
        return mse_loss(model(s.x_query), s.y_query)

    def direction(d):
        return {name: s.rates[name] * x for name, x in d.items()}

    with bilevel.inner(s.model, h, g, solver="gd", lr=1.0, direction=direction) as loop:
        for _ in range(5):
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads
