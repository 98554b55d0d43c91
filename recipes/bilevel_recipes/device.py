"""Where tensors live: copies to a device that do not wait for it, and the few numbers that are read back from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def place(x: Tensor, device: torch.device) -> Tensor:
    """x on the device; to a GPU through pinned memory, so that neither host nor device waits for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def number(x: Tensor) -> float:
    """The value of a scalar, for which the host waits; nan on the meta device, where nothing has a value."""
    return math.nan if x.is_meta else x.item()


def host(x: Tensor) -> Tensor:
    """A copy for the host, detached; on the meta device, which can't be copied from, x itself."""
    return x.detach() if x.is_meta else x.detach().cpu()


def set_tf32(on: bool) -> None:
    """Let float32 products and convolutions on a GPU round their factors to TF32's 10 bits, or not.

    Torch's own default is off for products and on for convolutions; here one switch is for both.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
