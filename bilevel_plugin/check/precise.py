"""Running a function of the user in float64, and again from the same state: what it holds is cast, and restored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..step.conditions import random_states, set_random_states
from .double import LOW
from .held import held

_LARGEST = 2**25  # entries of a tensor that is copied, to restore it


def tensors_held(function: Callable[..., Any], more: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the dense tensors that a function holds, with those of its modules."""
    found = {id(x): x for x in more}
    for _, x in held(function, depth=5):
        inside = [*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x]
        found.update((id(y), y) for y in inside if isinstance(y, Tensor) and y.layout == torch.strided)
    return list(found.values())


@contextmanager
def restored(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> Generator[None]:
    """Restore tensors, their gradients and random states at the end, so that the next run starts as this one did."""
    random = random_states(devices, others=True)
    before = [(x, x._version, x.data, x.detach().clone()) for x in tensors if x.numel() <= _LARGEST]
    grads = [(x, x.grad) for x in tensors if x.is_leaf]
    try:
        yield
    finally:
        set_random_states(random)
        with torch.no_grad():
            for x, version, data, copy in before:
                if x.data_ptr() != data.data_ptr():
                    x.data = data
                if x._version != version or not torch.equal(x.detach(), copy):
                    x.detach().copy_(copy)
        for x, grad in grads:
            x.grad = grad


@contextmanager
def in_float64(tensors: Sequence[Tensor]) -> Generator[None]:
    """Cast these tensors for as long as this lasts, and what operations read; new tensors are of float64 as well."""
    before = [(x, x.data, x.grad) for x in tensors if x.dtype in LOW]
    default = torch.get_default_dtype()
    try:
        for x, data, _ in before:
            x.grad = None
            x.data = data.double()
        torch.set_default_dtype(torch.float64)
        with _Casting():
            yield
    finally:
        torch.set_default_dtype(default)
        for x, data, grad in before:
            x.grad = None
            x.data = data
            x.grad = grad


class _Casting(TorchFunctionMode):
    """A mode that casts the floating-point arguments of every operation to float64."""

    @staticmethod
    def _up(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.double() if x.dtype in LOW else x
        if isinstance(x, (tuple, list, dict)):
            return pytree.tree_map(_Casting._up, x)
        return torch.float64 if isinstance(x, torch.dtype) and x in LOW else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "requires_grad_", "backward", "_make_subclass", "__deepcopy__", "grad"):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16") and args:
            return args[0].double()
        first = (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and args
        head = args[:1] if first else ()  # in place: the first is written to
        return func(*head, *map(self._up, args[len(head) :]), **{n: self._up(x) for n, x in kwargs.items()})
