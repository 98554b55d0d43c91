"""N inner problems at once: every inner tensor has a leading task dimension, λ is shared.

Each loss is written for one task; its vmap over the tasks is summed, and since no loss sees another task's
weights, the gradient of the sum is every task's own. The solve itself is not vmapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .binding import Binding, Inside
from .graph import State, tensors_of

_TENSOR = object()


class TaskBinding(Binding):
    """`Binding` with weights, buffers and batches for N tasks, and losses summed over them."""

    vmaps_losses = True
    batch_dimension = 1

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tasks: int) -> None:
        if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:  # pyright: ignore
            raise ValueError(f"bilevel.inner: tasks must be a whole number, at least 1, got {tasks!r}.")
        super().__init__(model, optimizers, own_parameters=False)
        self.tasks, self.holds = tasks, False
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                raise TypeError(
                    f"bilevel.inner: tasks= vmaps the losses, and {name or 'the model'!r} ({type(module).__name__}) "
                    "has no vmap in PyTorch. Loop over the tasks with a block for each, or write it with nn.LSTMCell."
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:  # pyright: ignore
                raise TypeError(
                    f"bilevel.inner: tasks= vmaps the losses, and {name or 'the model'!r} ({type(module).__name__} "
                    "with momentum=None) reads its count as a number, which vmap does not allow. Set its momentum, or "
                    "loop over the tasks with a block for each."
                )
        self.buffers = {n: self.repeat_for_tasks(b).clone() for n, b in self.buffers.items()}

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.tasks

    def repeat_for_tasks(self, x: Tensor) -> Tensor:
        return x.expand(self.tasks or 1, *x.shape)

    def map_over_tasks(self, function: Callable[[State], State], d: State) -> State:
        return torch.func.vmap(function)(d) if d else d

    def call(self, function: Callable[..., Any], inside: Inside, args: tuple[Any, ...], kwargs: Any = {}) -> Any:  # noqa: B006
        split = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, (args, kwargs))

        others: list[Any] = []  # what a call returns besides tensors: the same for every task

        def one_task(tensors: State, rest: Any) -> Any:
            with self.swapped(tensors, inside.taking) as mine:
                leaves, spec = pytree.tree_flatten(function(self.model, *rest[0], **rest[1]))
                others[:] = [spec, [_TENSOR if isinstance(x, Tensor) else x for x in leaves]]
                return [x for x in leaves if isinstance(x, Tensor)], mine.buffers()

        # the buffers come back as results: a call may have replaced them, not only changed them in place
        tensors = {**inside.swapped, **inside.buffers()}
        out, buffers = torch.func.vmap(one_task, in_dims=(0, split), randomness="different")(tensors, (args, kwargs))
        for holder, name, n in self._buffer_places:
            holder[name] = buffers[n]
        found = iter(out)
        spec, leaves = others
        return pytree.tree_unflatten([next(found) if x is _TENSOR else x for x in leaves], spec)

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.func.vmap(function)

    def total(self, value: Tensor) -> Tensor:
        return value.sum()

    def check_batch(self, name: str, batch: tuple[Any, ...]) -> None:
        for x in tensors_of(batch):
            if x.shape[:1] != (self.tasks,):
                raise ValueError(
                    f"bilevel.inner: with tasks={self.tasks} every tensor of a batch has the tasks as its first "
                    f"dimension, but {name} was given one of shape {tuple(x.shape)}. Stack the tasks' batches, or "
                    f"x.expand({self.tasks}, *x.shape) for what they share."
                )
