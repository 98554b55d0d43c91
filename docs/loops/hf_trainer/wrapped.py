"""# The Trainer of transformers

`trainer.train()` stays, and with it the schedule, callbacks, logging, evaluation and checkpoints of the Trainer. The
outer variable is a weight for each sample.

- `training_step` is where the Trainer takes the gradient of a micro-batch. It is overridden: `loop.accumulate` takes
  the gradient, and `loop.step()` the step when the last micro-batch is there (`accelerator.sync_gradients`).
- The Trainer goes on to clip and to call `optimizer.step()`. No parameter has a `.grad` then, so neither does
  anything. The block has the clipping as `clip=`, and the schedule's rate is read at each step.
- `create_optimizer()` is called before the block, which needs the optimizer. `train()` uses the one that is there.
- `h` is `compute_loss`, divided by the number of micro-batches as `training_step` does it. That number is part of the
  batch, since the last step of an epoch may have fewer.
- The `grad_norm` that the Trainer logs is 0, and a checkpoint has the weights but not the state of the optimizer.

**With accelerate alone** it is the loop that you have: `optimizer=` takes the optimizer inside of accelerate's wrapper
(`optimizer.optimizer`), and `loop.step(...)` stands for `accelerator.backward(loss)` and `optimizer.step()`. Under
`accelerator.accumulate(model)` it is the two calls of `training_step` below. [An example](../tutorials/accelerate.md).
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
