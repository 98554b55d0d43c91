"""Several inner problems at once: every inner tensor has a leading task dimension, λ is shared.

Each loss is written for one task; its values on the tasks are summed, and since no loss sees another task's weights,
the gradient of the sum is every task's own. The solve itself is not vmapped.

A loss is vmapped over the tasks, which is fast where the model is small. A model with convolutions of its own weights
is evaluated for one task after the other: their vmap, a grouped convolution, takes more time than the loop, and up to
twice the memory (docs/results/tasks.md). So is a model with a layer that has no vmap. Each task is then a piece of the
step, whose derivative takes the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.trees import State, map_tensors, tensors_of
from ..kernels.stopping import is_stopped, stop_gradient

if TYPE_CHECKING:
    from .model import Model

_TENSOR = object()


class OneProblem:
    """A block that solves one inner problem: nothing has a task dimension."""

    count: int | None = None
    batch_dimension: int = 0  # the dimension of the tensors of a batch that counts the samples
    rows: Sequence[int | None] = (None,)  # the tasks that are evaluated one after the other, or None for all at once

    def repeat(self, x: Tensor) -> Tensor:
        """Return a tensor of the model, repeated for each task."""
        return x

    def repeated(self, buffers: State) -> State:
        """Return the buffers of the model, repeated for each task."""
        return buffers

    def map(self, function: Callable[[State], State], d: State) -> State:
        """Return function(d), computed for each task."""
        return function(d)

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function of the tensors of one task into a function of the tensors of all of them."""
        return function

    def total(self, value: Tensor) -> Tensor:
        """Return the loss as a scalar: its sum over the tasks."""
        return value

    def check_batch(self, name: str, batch: Any) -> None:
        """Raise if the batch can't be one of this loss."""

    def mapped(self, model: Model, function: Callable[..., Any], tensors: State, given: Any) -> Any:
        """Return function(model, *args, **kwargs) of each task, and replace the buffers among `tensors`."""
        raise NotImplementedError


class Tasks(OneProblem):
    """A block that solves `count` inner problems."""

    def __init__(self, count: Any, module: nn.Module, parameters: State) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"bilevel.inner: tasks must be a whole number, at least 1, got {count!r}.")
        self.count, self.batch_dimension = count, 1
        self._weights = {id(p) for p in parameters.values()}
        self.vmaps = not any(map(self._needs_loop, module.modules()))
        self.rows = (None,) if self.vmaps else range(count)

    def _needs_loop(self, module: nn.Module) -> bool:
        """Whether the module is a convolution with weights of the tasks, or has no vmap in PyTorch."""
        if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            return any(id(p) in self._weights for p in module.parameters())  # a parametrized layer has them in a child
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        return isinstance(module, nn.RNNBase) or (batch_norm and module.momentum is None)

    def repeat(self, x: Tensor) -> Tensor:
        return x.expand(self.count or 1, *x.shape)

    def repeated(self, buffers: State) -> State:
        for n, b in buffers.items():
            if b.layout != torch.strided:
                raise ValueError(
                    f"bilevel.inner: with tasks= each task has buffers of its own, and the buffer {n!r} is sparse "
                    f"({b.layout}), which can't be repeated. Let h and g close over it, or give its dense form."
                )
        return {n: self.repeat(b).clone() for n, b in buffers.items()}

    def map(self, function: Callable[[State], State], d: State) -> State:
        return torch.func.vmap(function)(d) if d else d

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.func.vmap(function)

    def total(self, value: Tensor) -> Tensor:
        return value.sum()

    def check_batch(self, name: str, batch: Any) -> None:
        for x in tensors_of(batch):
            if x.shape[:1] != (self.count,):
                raise ValueError(
                    f"bilevel.inner: with tasks={self.count} every tensor of a batch has the tasks as its first "
                    f"dimension, but {name} was given one of shape {tuple(x.shape)}. Stack the tasks' batches, or "
                    f"x.expand({self.count}, *x.shape) for what they share."
                )

    def mapped(self, model: Model, function: Callable[..., Any], tensors: State, given: Any) -> Any:
        self.check_batch("the model", given)
        found: list[Any] = []  # the form of what a call returns

        def one_task(tensors: State, rest: Any) -> Any:
            def run() -> Any:
                form, out = _form(function(model.module, *rest[0], **rest[1]))
                found.append(form)
                _check_same(found[0], form)
                return out, model.present_buffers()

            return model.swapped(tensors, run)

        # the buffers come back as results: a call may have replaced them, not only changed them in place
        if self.vmaps:
            split = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, given)
            over_tasks = torch.func.vmap(one_task, in_dims=(0, split), randomness="different")
            out, buffers = over_tasks(tensors, given)
        else:
            out, buffers = self._one_by_one(one_task, tensors, given, model.buffers)
        tensors.update(buffers)
        return _with_tensors(found[0], out)

    def _one_by_one(
        self, one_task: Callable[[State, Any], Any], tensors: State, given: Any, buffers: State
    ) -> tuple[list[Tensor], State]:
        """Return what vmap would, from a loop over the tasks."""
        # the gradients with respect to the parts of an unbind are stacked once; x[i] would be N tensors of all tasks
        parts = {n: x.unbind() for n, x in tensors.items()}
        outs: list[list[Tensor]] = []
        left: list[State] = []
        for i in range(self.count or 1):
            # a buffer may be changed in place, which autograd forbids for a part of an unbind
            mine = {n: x[i].clone() if n in buffers else x[i] for n, x in parts.items()}
            out, after = one_task(mine, map_tensors(lambda x, i=i: x[i], given))
            outs.append(out)
            left.append(after)
        return [torch.stack(x) for x in zip(*outs, strict=True)], joined_buffers(left)


def row_of(tree: Any, row: int | None) -> Any:
    """Return the part of every tensor that belongs to one task, or the tree itself if all are taken at once."""
    if row is None:
        return tree
    with torch.enable_grad():
        return map_tensors(lambda x: x[row], tree)


def joined(parts: Sequence[State]) -> State:
    """Return a state, or a gradient with respect to one, from those of all tasks; what a task lacks is 0."""
    found = {n: x for part in parts for n, x in part.items()}
    return {n: torch.stack([p[n] if n in p else torch.zeros_like(x) for p in parts]) for n, x in found.items()}


def joined_buffers(parts: Sequence[State]) -> State:
    """Return the buffers that the tasks have left."""
    stopped = {n for n in parts[0] if all(is_stopped(part[n]) for part in parts)}
    # the stack of stopped tensors is not one
    return {n: stop_gradient(x) if n in stopped else x for n, x in joined(parts).items()}


def joined_results(parts: Sequence[Any]) -> Any:
    """Return what a function has returned, from what it returned for each task."""
    forms, tensors = zip(*map(_form, parts), strict=True)
    for form in forms:
        _check_same(forms[0], form)
    return _with_tensors(forms[0], [torch.stack(xs) for xs in zip(*tensors, strict=True)])


def _form(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return the structure of the tree, with what it holds besides tensors, and its tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    others = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
    return (spec, others), [x for x in leaves if isinstance(x, Tensor)]


def _with_tensors(form: Any, tensors: Sequence[Tensor]) -> Any:
    spec, others = form
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if x is _TENSOR else x for x in others], spec)


def _check_same(one: Any, other: Any) -> None:
    """Raise unless what a function returned for two tasks differs in the values of tensors alone."""
    if one[0] != other[0] or not all(map(_is_same, one[1], other[1])):
        raise ValueError(
            "bilevel.inner: with tasks= a loss or the model returned, besides tensors, something that differs from "
            "task to task. Return it as a tensor."
        )


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (isinstance(x, (bool, int, float, complex, str)) and type(x) is type(y) and x == y)
