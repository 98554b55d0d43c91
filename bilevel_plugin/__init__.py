"""bilevel_plugin: the training loop you have as the inner problem of a bilevel programme.

import bilevel_plugin as bilevel

with bilevel.inner(model, h, g, solver="bigsam", lr=0.1) as loop:
    for x, y, i in train_loader:
        loop.step(x, y, i, outer=(x_val, y_val))
    grad = loop.hypergrad(lam)
"""

from .autograd.graph import Gradients, State, Traced, as_leaves
from .check.forecast import Forecast, forecast
from .check.gradcheck import gradcheck
from .check.sentinel import DerivativeWarning
from .check.smoothness import metasmoothness
from .engine import CG, End, Engine, Forward, Neumann, Reverse, Tape, Unroll
from .inner import Loop, inner
from .kernels.replace import stop_gradient
from .step.fetching import fetched
from .step.record import RecordedStep
from .step.step import LossMonitor, Moved, Step
from .update.direction import clip_norm, clip_value
from .update.formulas import optimizer_rule
from .update.schedules import constant, convergent, power
from .update.solvers import BDA, GD, BiGSAM, Penalty, Rate, StepRule, Value, evaluate
from .update.update import Update

__version__ = "0.1.0"

__all__ = [
    "BDA",
    "CG",
    "GD",
    "BiGSAM",
    "DerivativeWarning",
    "End",
    "Engine",
    "Forecast",
    "Forward",
    "Gradients",
    "Loop",
    "LossMonitor",
    "Moved",
    "Neumann",
    "Penalty",
    "Rate",
    "RecordedStep",
    "Reverse",
    "State",
    "Step",
    "StepRule",
    "Tape",
    "Traced",
    "Unroll",
    "Update",
    "Value",
    "as_leaves",
    "clip_norm",
    "clip_value",
    "constant",
    "convergent",
    "evaluate",
    "fetched",
    "forecast",
    "gradcheck",
    "inner",
    "metasmoothness",
    "optimizer_rule",
    "power",
    "stop_gradient",
]
