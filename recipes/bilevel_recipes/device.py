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


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 numbers by instructions made for them; without these, float32 is faster.

    A CPU has them with avx512_bf16 or amx_bf16, unless ATEN_CPU_CAPABILITY keeps torch from using AVX-512.
    """
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    found = torch.cpu.get_capabilities()
    wide = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")
    return wide and bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def set_tf32(on: bool) -> None:
    """Let float32 products and convolutions on a GPU round their factors to TF32's 10 bits, or not.

    Torch's own default is off for products and on for convolutions; here one switch is for both.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
