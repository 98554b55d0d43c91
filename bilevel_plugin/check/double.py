"""A loss in float64, whatever the type of the model: weights on a line, and a mode that casts what operations read.

In float32 differences would be dominated by kinks and rounding. A float64 copy of each weight exists while a loss runs,
as the loss itself keeps it for its backward pass; nothing else of the size of the weights is kept in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..autograd.trees import State, map_tensors
from ..model.session import NESTED

LOW = (torch.float16, torch.bfloat16, torch.float32)
_RESULTS_ARE_TENSORS = ("T", "H", "mT", "mH", "real", "imag", "data")  # attributes of a tensor
# of both signs and unrelated to any model; a prime number of them, so that the rows of a matrix differ
_RANDOM = torch.randn(4099, generator=torch.Generator().manual_seed(0))


def random_like(x: Tensor) -> Tensor:
    """Return fixed random numbers, as large as x together, or each of size 1 if x is 0. No generator is used."""
    numbers = _RANDOM.to(x.device, torch.float64 if x.numel() < len(_RANDOM) else torch.float32)
    numbers = numbers.repeat(-(-x.numel() // len(_RANDOM)))[: x.numel()].view(x.shape)
    size = float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))
    return numbers * (size / float(torch.linalg.vector_norm(numbers)) if size else 1.0)


class Onward(torch.autograd.Function):
    """x + t·v at t = 0, which is x. Its derivative for t is ⟨a, v⟩, and keeps no float64 copy of v."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, v: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.v = v
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():  # pyright: ignore
            return a, ctx.v(a), None


class _Dot(torch.autograd.Function):
    """⟨a, v⟩ for a tensor v of any type, which is a constant."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.held = v
        with torch._C.DisableTorchFunction():  # pyright: ignore
            return torch.dot(a.reshape(-1), v.to(a).reshape(-1))

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():  # pyright: ignore
            return b * ctx.held.to(b), None


def dot(a: Tensor, v: Tensor) -> Tensor:
    """Return ⟨a, v⟩ for a gradient a, dense or sparse."""
    return _Dot.apply(a.to_dense() if a.is_sparse else a, v)  # pyright: ignore


class InFloat64(TorchFunctionMode):
    """A mode that casts every floating-point argument to float64, and finds the outer variables of a loss.

    `instead` has what takes the place of a tensor, by its id: the weights, and the values of outer variables elsewhere.
    Any other leaf that requires grad gets a leaf of float64 as its stand-in, the same one in every operation, so that
    a loss may differentiate with respect to it. `found` has the leaves with their stand-ins, by id. With `rows`, which
    are (n, few), the stand-in of a leaf of n rows is that of its first few: it has an entry for each sample.
    """

    def __init__(self, instead: dict[int, Tensor], rows: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._instead, self._rows = instead, rows
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self._stand_ins = {id(x) for x in instead.values()}
        self.read: set[int] = set()  # the ids of what `instead` was taken for

    def _up(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, (tuple, list, dict)):
            return pytree.tree_map(self._up, x)
        return torch.float64 if isinstance(x, torch.dtype) and x in LOW else x

    def _tensor(self, x: Tensor, cast: bool = True) -> Tensor:
        if id(x) in self._instead:
            self.read.add(id(x))
            return self._instead[id(x)]
        if self.may_be_outer(x):
            if id(x) not in self.found:
                n, few = self._rows or (-1, -1)
                value = x.detach()[:few] if x.shape[:1] == (n,) else x.detach()
                self.found[id(x)] = x, value.double().clone().requires_grad_()
                self._stand_ins.add(id(self.found[id(x)][1]))
            return self.found[id(x)][1]
        return x.double() if cast and x.dtype in LOW else x

    def may_be_outer(self, x: Tensor) -> bool:
        """Whether it is a leaf of the user that a derivative may be taken for."""
        if not x.requires_grad:
            return False
        # functorch's tensors are leaves of their own level; what a nested block trains is no outer variable
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore
        known = id(x) in NESTED or id(x) in self._stand_ins
        floating = x.dtype in (*LOW, torch.float64) and x.layout == torch.strided
        return x.is_leaf and floating and not wrapped and not known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") in _RESULTS_ARE_TENSORS:
            return func(*map(self._up, args))
        if name in ("__get__", "__set__", "requires_grad_", "backward", "_make_subclass"):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:  # with respect to these very tensors: a cast would be another one
            args, kwargs = map_tensors(lambda x: self._tensor(x, cast=False), (args, kwargs))
            return func(*args, **kwargs)
        if name == "__deepcopy__":  # a copy of a weight is a leaf, as it is in the plain loop
            return self._up(args[0]).detach().clone().requires_grad_(args[0].requires_grad)
        if name in ("float", "half", "bfloat16") and args:
            return self._up(args[0]).double()
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and args:
            return func(args[0], *map(self._up, args[1:]), **kwargs)  # in place: the first is written to
        return func(*map(self._up, args), **{n: self._up(x) for n, x in kwargs.items()})


def as_float64(state: State) -> State:
    """Return copies of a state, floating-point tensors in float64."""
    types = {n: torch.float64 if x.is_floating_point() else x.dtype for n, x in state.items()}
    return {n: x.detach().to(types[n], copy=True) for n, x in state.items()}
