"""One run of a function of the user, as far as its first hypergradient: what `check_loop` sees of it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.trees import State
from ..loop import Loop
from ..model.losses import evaluating_loss
from .readings import Reader, Reading


class Stop(BaseException):
    """Ends a run of the user's function where its first hypergradient is taken."""


class NotDouble(Exception):
    """A model of the loop is not in float64."""


@dataclass
class Run:
    """What one run of the user's function has shown."""

    lam: Sequence[Tensor]
    differentiate: bool
    only_float64: bool
    value: Tensor | None = None
    grads: list[Tensor] = field(default_factory=list[Tensor])
    readings: list[Reading] = field(default_factory=list[Reading])
    start: float = 0.0
    end: State = field(default_factory=dict[str, Tensor])
    unused: set[str] = field(default_factory=set[str])  # weights that some step left alone
    random: Tensor | None = None
    refused: str = ""  # why the library gives no hypergradient
    block: Any = None

    def __call__(self, block: Any, loop: Loop) -> None:
        """Watch a block that was opened: take a reading at every step, and end the run at the first hypergradient."""
        if evaluating_loss():
            return
        model: nn.Module = block._model
        inside = [*model.parameters(), *model.buffers()]
        if self.only_float64 and any(x.is_floating_point() and x.dtype != torch.float64 for x in inside):
            raise NotDouble(f"the model {type(model).__name__}")
        self.block, self.readings, self.unused = block, [], set()
        self.start = sum(float(x.detach().double().sum()) for x in inside if x.is_floating_point())
        losses = {name: f for name, f in zip("hg", block._losses, strict=True) if f is not None}
        losses |= {} if block._direction is None else {"direction=": block._direction}
        reader = Reader(losses, block._optimizers, {id(x) for x in (*inside, *self.lam)})
        taken, gathered = loop.step, loop.accumulate

        def step(*batch: Any, **named: Any) -> Any:
            self.readings.append(reader.read((*batch, *named.values())))
            before = {n: x.detach().clone() for n, x in loop.weights.items()}
            result = taken(*batch, **named)
            self.unused.update(n for n, x in loop.weights.items() if torch.equal(x.detach(), before[n]))
            return result

        def accumulate(*batch: Any, **named: Any) -> Any:
            self.readings.append(reader.read((*batch, *named.values())))
            return gathered(*batch, **named)

        def stop(*_: Any, outer: Any = None, loss: Tensor | None = None, **named: Any) -> Any:
            self.random = torch.get_rng_state()
            self.readings.append(reader.read((outer,)))
            self._finish(loop, outer, loss)
            raise Stop

        # the methods of this one loop, which `loop.run` calls as well
        vars(loop).update(step=step, accumulate=accumulate, hypergrad=stop, backward=stop)

    def _finish(self, loop: Loop, outer: Any, loss: Tensor | None) -> None:
        self.end = loop.state_dict() if loop._run.model.tasks.count is None else {}
        if self.differentiate:
            try:
                self.grads = Loop.hypergrad(loop, list(self.lam), outer=outer, loss=loss, allow_unused=True)
            except RuntimeError as error:
                if not str(error).startswith("bilevel."):
                    raise
                self.refused = str(error)
        if outer is not None:
            loop.add_outer_loss(outer=outer)
        self.value = (loop.value if loss is None else loss.sum()).detach().to(torch.float64).cpu()
