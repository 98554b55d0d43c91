from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer

from .setup import Setup, held_out_loss


class WeightedTrainer(Trainer):
    logits: Tensor
    loss_is_scaled_for_ga = False  # the Trainer divides it by the number of micro-batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        losses = cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"], reduction="none")
        return (self.logits[inputs["index"]].sigmoid() * losses).mean()


def train(s: Setup) -> Tensor:
    trainer = WeightedTrainer(s.model, s.args, train_dataset=s.train)
    (trainer.logits,) = s.outer
    trainer.train()
    s.model.eval()
    with torch.no_grad():
        return held_out_loss(s)
