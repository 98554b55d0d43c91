"""N inner problems at once: every inner tensor has a leading task dimension, λ is shared.

Each loss is written for one task; its values on the tasks are summed, and since no loss sees another task's weights,
the gradient of the sum is every task's own. The solve itself is not vmapped.

A loss is vmapped over the tasks, which is fast where the model is small. A model with convolutions of its own weights
is evaluated for one task after the other: their vmap, a grouped convolution, takes more time than the loop, and up to
twice the memory (docs/results/tasks.md). So is a model with a layer that has no vmap. If the engine does not need the
graph of a whole step, derivatives are then computed for one task after the other too, in the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd.trees import State, tensors_of
from ..kernels.stopping import is_stopped, stop_gradient
from .model import AUX, Binding, InnerProblem, Inside

_TENSOR = object()


class TaskBinding(Binding):
    """`Binding` with weights, buffers and batches for N tasks, and losses summed over them."""

    batch_dimension = 1

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tasks: int, *, whole_graphs: bool = False
    ) -> None:
        if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:  # pyright: ignore
            raise ValueError(f"bilevel.inner: tasks must be a whole number, at least 1, got {tasks!r}.")
        super().__init__(model, optimizers, own_parameters=False)
        self.tasks, self.holds = tasks, False
        self.vmaps_losses = not any(map(self.needs_loop, model.modules()))
        self._separates = not (self.vmaps_losses or whole_graphs)
        for n, b in self.buffers.items():
            if b.layout != torch.strided:
                raise ValueError(
                    f"bilevel.inner: with tasks= each task has buffers of its own, and the buffer {n!r} is sparse "
                    f"({b.layout}), which can't be repeated. Let h and g close over it, or give its dense form."
                )
        self.buffers = {n: self.repeat_for_tasks(b).clone() for n, b in self.buffers.items()}

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.tasks

    def repeat_for_tasks(self, x: Tensor) -> Tensor:
        return x.expand(self.tasks or 1, *x.shape)

    def map_over_tasks(self, function: Callable[[State], State], d: State) -> State:
        return torch.func.vmap(function)(d) if d else d

    def needs_loop(self, module: nn.Module) -> bool:
        """Whether the module is a convolution with weights of the tasks, or has no vmap in PyTorch."""
        if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            weights = {id(p) for p in self.parameters.values()}
            return any(id(p) in weights for p in module.parameters())  # a parametrized layer has them in a child
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        return isinstance(module, nn.RNNBase) or (batch_norm and module.momentum is None)

    def call(self, function: Callable[..., Any], inside: Inside, args: tuple[Any, ...], kwargs: Any = {}) -> Any:  # noqa: B006
        self.check_batch("the model", (args, kwargs))
        tensors = {**inside.swapped, **inside.buffers()}
        found: list[Any] = []  # the form of what a call returns

        def one_task(tensors: State, rest: Any) -> Any:
            with self.swapped(tensors, inside.taking) as mine:
                form, out = _form(function(self.model, *rest[0], **rest[1]))
                found.append(form)
                _check_same(found[0], form)
                return out, mine.buffers()

        # the buffers come back as results: a call may have replaced them, not only changed them in place
        if self.vmaps_losses:
            split = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, (args, kwargs))
            over_tasks = torch.func.vmap(one_task, in_dims=(0, split), randomness="different")
            out, buffers = over_tasks(tensors, (args, kwargs))
        else:
            out, buffers = self._one_by_one(one_task, tensors, (args, kwargs))
        for holder, name, n in self._buffer_places:
            holder[name] = buffers[n]
        return _with_tensors(found[0], out)

    def _one_by_one(
        self, one_task: Callable[[State, Any], Any], tensors: State, rest: Any
    ) -> tuple[list[Tensor], State]:
        """Return what vmap would, from a loop over the tasks."""
        # the gradients for the parts of an unbind are stacked once; those of x[i] would be N tensors of all tasks
        parts = {n: x.unbind() for n, x in tensors.items()}
        outs: list[list[Tensor]] = []
        buffers: list[State] = []
        for i in range(self.tasks or 1):
            # a buffer may be changed in place, which autograd forbids for a part of an unbind
            mine = {n: x[i].clone() if n in self.buffers else x[i] for n, x in parts.items()}
            out, left = one_task(mine, pytree.tree_map(lambda x, i=i: x[i] if isinstance(x, Tensor) else x, rest))
            outs.append(out)
            buffers.append(left)
        together = {n: torch.stack([left[n] for left in buffers]) for n in buffers[0]}
        stopped = {n for n in together if all(is_stopped(left[n]) for left in buffers)}
        after = {
            n: stop_gradient(x) if n in stopped else x for n, x in together.items()
        }  # the stack of them is not one
        return [torch.stack(x) for x in zip(*outs, strict=True)], after

    def vmapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.func.vmap(function)

    def total(self, value: Tensor) -> Tensor:
        return value.sum()

    def separate(self) -> Sequence[InnerProblem]:
        return [InnerProblem(OneTask(self), i) for i in range(self.tasks or 1)] if self._separates else ()

    def joined_aux(self, parts: Sequence[Any]) -> Any:
        forms, tensors = zip(*map(_form, parts), strict=True)
        for form in forms:
            _check_same(forms[0], form)
        joined: list[Tensor] = []
        for xs in zip(*tensors, strict=True):
            joined.append(torch.cat(xs))
            if hasattr(xs[0], AUX):
                setattr(joined[-1], AUX, self.token)
        return _with_tensors(forms[0], joined)

    def check_batch(self, name: str, batch: tuple[Any, ...]) -> None:
        for x in tensors_of(batch):
            if x.shape[:1] != (self.tasks,):
                raise ValueError(
                    f"bilevel.inner: with tasks={self.tasks} every tensor of a batch has the tasks as its first "
                    f"dimension, but {name} was given one of shape {tuple(x.shape)}. Stack the tasks' batches, or "
                    f"x.expand({self.tasks}, *x.shape) for what they share."
                )


class OneTask(TaskBinding):
    """The binding of N tasks, for one of them: states and batches have one row. It shares all that the other notes."""

    tasks = property(lambda self: 1)  # pyright: ignore

    def __init__(self, whole: TaskBinding) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.__dict__ = whole.__dict__

    def separate(self) -> Sequence[InnerProblem]:
        return ()


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
