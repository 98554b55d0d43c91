"""What a block does differently on several processes, as one object; here for a block that is alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..autograd.trees import State


class Alone:
    """One process. Its heir `model.group.Group` stands for N processes of torch.distributed."""

    share: float = 1.0  # the weight of this process in a mean over all ranks
    shards: bool = False  # whether each rank stores only its part of a state

    def check_start(self, parameters: State) -> None:
        """Raise if the ranks start from different weights."""

    def check_same(self, z: State, statistics: Sequence[str]) -> None:
        """Raise if the ranks have reached different states; running statistics may differ."""

    def once(self, x: Tensor) -> Tensor:
        """Count once the gradient of a tensor that each rank uses outside the losses, such as a rate or an option."""
        return x

    def entering(self, w: State) -> State:
        """Return the weights that the losses of this process use, where graphs are kept."""
        return w

    def mean(self, d: State, parameters: State) -> State:
        """Return the gradient of the mean loss over the ranks, from the gradient of this process's loss."""
        return d

    def sum(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Sum what the loss of each process contributes to the adjoint."""
        return grads

    def means(self, values: State, what: str = "") -> State:
        """Average the values of losses over the ranks. Raise unless `what` is the same on each of them."""
        return values

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Return the maximum of each number over the ranks."""
        return numbers

    def gather(self, inputs: Sequence[Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients with respect to the inputs, from the contributions of this process."""
        return list(parts)

    def part_of(self, size: int) -> range:
        """Return which of so many numbers this process stores."""
        return range(size)

    def join_parts(self, part: Tensor) -> Tensor:
        """Return all numbers, from the parts that the ranks store."""
        return part

    def close(self) -> None:
        """Forget the group of processes."""
