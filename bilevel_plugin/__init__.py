"""bilevel_plugin: the training loop you have as the inner problem of a bilevel programme.

import bilevel_plugin as bilevel

with bilevel.inner(model, h, g, solver="bigsam", lr=0.1) as loop:
    for x, y, i in train_loader:
        loop.step(x, y, i, outer=(x_val, y_val))
    grad = loop.hypergrad(lam)
"""

from .autograd.derive import Gradients, Traced
from .autograd.missing import DerivativeWarning
from .autograd.trees import State, as_leaves
from .check.check_loop import check_loop
from .check.forecast import Forecast, forecast
from .check.gradcheck import gradcheck
from .check.smoothness import metasmoothness
from .engine import CG, Engine, Forward, Neumann, OuterLoss, Reverse, Tape, Unroll
from .inner import Loop, inner
from .kernels.stopping import stop_gradient
from .step.fetching import fetched
from .step.step import Step
from .step.traced import traced
from .update.companions import copy, ema
from .update.direction import clip_norm, clip_value
from .update.formulas import lion
from .update.registry import optimizer_rule
from .update.sam import sam
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
    "Engine",
    "Forecast",
    "Forward",
    "Gradients",
    "Loop",
    "Neumann",
    "OuterLoss",
    "Penalty",
    "Rate",
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
    "check_loop",
    "clip_norm",
    "clip_value",
    "constant",
    "convergent",
    "copy",
    "ema",
    "evaluate",
    "fetched",
    "forecast",
    "gradcheck",
    "inner",
    "lion",
    "metasmoothness",
    "optimizer_rule",
    "power",
    "sam",
    "stop_gradient",
    "traced",
]
