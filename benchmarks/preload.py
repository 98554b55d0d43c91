"""What the server imports that all processes are forked from: once, and before any of them is measured."""

# torch imports these late: at the first dispatch mode, and at the first gradient with grad_outputs
import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # noqa: F401

from . import measure  # noqa: F401
