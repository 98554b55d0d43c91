"""# The Trainer of transformers

`trainer.train()` stays, and with it the Trainer's schedule, callbacks, logging, evaluation and checkpoints. The outer
variable is a weight for each sample.

- `training_step` is where the Trainer takes the gradient of a micro-batch. It is overridden. `loop.accumulate` takes
  the gradient. After the last micro-batch (`accelerator.sync_gradients`), `loop.step()` takes the step.
- The Trainer then clips, and calls `optimizer.step()`. No parameter has a `.grad` at that point, so neither call has an
  effect. The block clips by `clip=`, and reads the rate of the schedule at each step.
- `create_optimizer()` is called before the block, because the block needs the optimizer. `train()` uses that one.
- `h` is `compute_loss`, divided by the number of micro-batches, as in `training_step`. That number is part of the
  batch, because the last step of an epoch may have fewer.
- The `grad_norm` that the Trainer logs is 0. A checkpoint has the weights, but not the state of the optimizer.

**With accelerate alone** you keep your own loop. `optimizer=` takes the optimizer inside accelerate's wrapper
(`optimizer.optimizer`), and `loop.step(...)` replaces `accelerator.backward(loss)` and `optimizer.step()`. Under
`accelerator.accumulate(model)`, use the two calls of `training_step` below. [An example](../tutorials/accelerate.md).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer

import bilevel_plugin as bilevel

from .setup import Setup, held_out_loss


class WeightedTrainer(Trainer):
    logits: Tensor
    loss_is_scaled_for_ga = False  # the Trainer divides it by the number of micro-batches
    loop: bilevel.Loop

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        losses = cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"], reduction="none")
        return (self.logits[inputs["index"]].sigmoid() * losses).mean()

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        losses = self.loop.accumulate(self._prepare_inputs(inputs), self.current_gradient_accumulation_steps)
        if self.accelerator.sync_gradients:
            self.loop.step()
        return losses.h


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    trainer = WeightedTrainer(s.model, s.args, train_dataset=s.train)
    (trainer.logits,) = s.outer

    def h(model: nn.Module, inputs: dict[str, Tensor], parts: int) -> Tensor:
        model.train()
        return trainer.compute_loss(model, inputs) / parts

    def g(model: nn.Module) -> Tensor:
        model.eval()
        return held_out_loss(s)

    optimizer, clip = trainer.create_optimizer(), s.args.max_grad_norm
    with bilevel.inner(s.model, h, g, solver="gd", optimizer=optimizer, clip=clip) as trainer.loop:
        trainer.train()
        value, grads = trainer.loop.value, trainer.loop.hypergrad(s.outer)
        trainer.loop.commit_()
    return value, grads
