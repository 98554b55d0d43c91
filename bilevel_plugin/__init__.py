"""bilevel_plugin: the training loop you have as the inner problem of a bilevel programme.

import bilevel_plugin as bilevel

with bilevel.inner(model, h, g, solver="bigsam", lr=0.1) as loop:
    for x, y, i in train_loader:
        loop.step(x, y, i, outer=(x_val, y_val))
    grad = loop.hypergrad(lam)
"""

from .check import gradcheck
from .hypergrad import CG, Forward, Neumann, Reverse, Unroll
from .inner import Loop, inner
from .schedules import constant, convergent, power
from .solvers import BDA, GD, BiGSAM, Penalty

__version__ = "0.1.0"

__all__ = [
    "BDA",
    "CG",
    "GD",
    "BiGSAM",
    "Forward",
    "Loop",
    "Neumann",
    "Penalty",
    "Reverse",
    "Unroll",
    "constant",
    "convergent",
    "gradcheck",
    "inner",
    "power",
]
