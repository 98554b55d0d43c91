"""A watch over operations that mix devices."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = ("_to_copy", "copy_")  # what is asked for by name


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors of two devices. A GPU would take an index of the host, and wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        if len({x.device for x in tensors}) > 1 and func.overloadpacket.__name__ not in COPIES:
            raise AssertionError(f"{func} mixes {', '.join(f'{x.device} {tuple(x.shape)}' for x in tensors)}")
        return func(*args, **(kwargs or {}))
