from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .setup import QUIET, Setup


class Module(lightning.LightningModule):
    def __init__(self, net: nn.Module, logits: Tensor) -> None:
        super().__init__()
        self.net, self.logits = net, logits

    def loss(self, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (self.logits[i].sigmoid() * cross_entropy(self.net(x), y, reduction="none")).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(s: Setup) -> Tensor:
    module = Module(s.model, *s.outer)
    trainer = lightning.Trainer(max_epochs=3, gradient_clip_val=0.5, **QUIET)
    trainer.fit(module, s.loader, s.val_loader)
    return trainer.callback_metrics["val_loss"]
