"""A recipe on several processes, started by torchrun: each has the same flags and data, and computes a share.

torchrun --standalone --nproc-per-node 2 -m bilevel_recipes.data_cleaning ...
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def join(device: str) -> None:
    """Join the group of processes, if torchrun started this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        cuda = torch.device(device).type == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from here on, "cuda" means this device
        dist.init_process_group("nccl" if cuda else "gloo")


def leave() -> None:
    if dist.is_initialized():
        gc.collect()  # a group that something still holds aborts the process at its end (gloo, torch 2.13)
        dist.destroy_process_group()


def group() -> Any:
    """The processes that work together, or None if this one is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait until all processes reach this call."""
    if dist.is_initialized():
        dist.barrier()


def size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def share(tensors: tuple[Tensor, ...], group: Any) -> tuple[Tensor, ...]:
    """This process's part of the rows of each."""
    if group is None:
        return tensors
    return tuple(x.tensor_split(size(group))[dist.get_rank(group)] for x in tensors)


def mean(x: Tensor, group: Any) -> Tensor:
    """The mean of x over the processes."""
    if group is not None:
        dist.all_reduce(x, group=group)
        x = x / size(group)
    return x


def is_lost(error: RuntimeError) -> bool:
    """Whether the error means that another process has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
