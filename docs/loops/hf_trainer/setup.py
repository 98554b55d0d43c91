"""The Trainer of transformers with its defaults: AdamW, clipping at 1, a linear schedule; a weight for each sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

SAMPLES, LENGTH, VOCABULARY = 24, 6, 20


class Texts(Dataset[dict[str, Tensor]]):
    """The topic decides which token is frequent; in the first few texts the label is the other one."""

    def __init__(self, n: int, wrong: int) -> None:
        topic = torch.randint(2, (n,))
        words = torch.randint(4, VOCABULARY, (n, LENGTH))
        self.input_ids = torch.where(torch.rand(n, LENGTH) < 0.4, 2 + topic[:, None], words)
        self.labels = torch.where(torch.arange(n) < wrong, 1 - topic, topic)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[i], "labels": self.labels[i], "index": torch.tensor(i)}


@dataclass
class Setup:
    model: BertForSequenceClassification
    args: TrainingArguments
    train: Texts
    held_out: Texts
    outer: list[Tensor]  # a logit for each sample: how much it counts


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        num_labels=2,
    )
    args = TrainingArguments(
        learning_rate=1e-3,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,  # the index of a sample is no input of the model
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    logits = torch.zeros(SAMPLES, dtype=dtype, requires_grad=True)
    return Setup(BertForSequenceClassification(config).to(dtype), args, Texts(SAMPLES, 6), Texts(16, 0), [logits])


def held_out_loss(s: Setup) -> Tensor:
    return s.model(input_ids=s.held_out.input_ids, labels=s.held_out.labels).loss
