"""N inner problems at once: every inner tensor has a leading task dimension, λ is shared.

Each loss is written for one task; its vmap over the tasks is summed, and since no loss sees another task's
weights, the gradient of the sum is every task's own. The solve itself is not vmapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .binding import Binding, State, tensors_of


class TaskBinding(Binding):
    """`Binding` with weights, buffers and batches for N tasks, and losses summed over them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, tasks: int) -> None:
        if tasks < 1:
            raise ValueError(f"bilevel.inner: tasks must be at least 1, got {tasks}.")
        super().__init__(model, optimizer)
        self.tasks = tasks
        self.buffers = {n: self.each(b).clone() for n, b in self.buffers.items()}

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.tasks

    def each(self, x: Tensor) -> Tensor:
        return x.expand(self.tasks, *x.shape)

    def call(
        self, function: Callable[..., Any], w: State, buffers: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, State]:
        one_task = super().call
        split = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, (args, kwargs))
        # the buffers come back as results: a call may have replaced them, not only changed them in place
        return torch.func.vmap(  # pyright: ignore[reportUnknownVariableType]
            lambda w, buffers, rest: one_task(function, w, buffers, *rest),  # pyright: ignore
            in_dims=(0, 0, split),
            randomness="different",
        )(w, buffers, (args, kwargs))

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
