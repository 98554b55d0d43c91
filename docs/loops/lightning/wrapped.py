"""# A Lightning module

`trainer.fit` stays, with automatic optimisation. Schedule, logging, callbacks and validation are Lightning's. The outer
variable is a weight for each sample.

- `training_step` calls `loop.step`, which takes the gradient and the step, and logs the loss that it returns.
- `backward` does nothing. Lightning then clips and steps its optimizer. No parameter has a `.grad` at that point, so
  neither call has an effect. The block clips by `clip=`, and reads the rate of the scheduler at each step.
- The block needs the optimizer. So `configure_optimizers` is called first, and Lightning is given what it returned.
- `h` is the loss alone, without `self.log`. It is evaluated again when the loop is differentiated, which is outside a
  training step, and there Lightning refuses to log.
- Validation runs inside the block, with the current weights.
- With `accumulate_grad_batches=n`, `training_step` calls `loop.accumulate`, the hook `on_before_optimizer_step` calls
  `loop.step()`, and `h` divides by n.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

from .setup import QUIET, Setup


class Module(lightning.LightningModule):
    def __init__(self, net: nn.Module, logits: Tensor) -> None:
        super().__init__()
        self.net, self.logits = net, logits

    def loss(self, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (self.logits[i].sigmoid() * cross_entropy(self.net(x), y, reduction="none")).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loop.step(*batch).h
        self.log("loss", loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        pass  # the block has taken the gradient, and the step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    module = Module(s.model, *s.outer)
    trainer = lightning.Trainer(max_epochs=3, gradient_clip_val=0.5, **QUIET)
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured  # the Trainer's optimizer is to be that of the block

    def h(net: nn.Module, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return module.loss(x, y, i)

    def g(net: nn.Module) -> Tensor:
        module.eval()
        ((x, y),) = s.val_loader
        return cross_entropy(net(x), y)

    with bilevel.inner(s.model, h, g, solver="gd", optimizer=configured["optimizer"], clip=0.5) as module.loop:
        trainer.fit(module, s.loader, s.val_loader)
        value, grads = module.loop.value, module.loop.hypergrad(s.outer)
        module.loop.commit_()
    return value, grads
