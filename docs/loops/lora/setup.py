"""Fine-tuning of a causal language model with LoRA adapters (peft): AdamW over the adapters, linear schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCES, LENGTH, VOCABULARY = 24, 8, 11


@dataclass
class Setup:
    model: PeftModel
    loader: DataLoader[tuple[Tensor, ...]]  # token ids, and the number of each sequence
    held_out: Tensor
    outer: list[Tensor]  # a logit for each sequence: how much it counts


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    config = GPT2Config(
        bos_token_id=0,
        eos_token_id=0,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
    )
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = get_peft_model(GPT2LMHeadModel(config), adapters).to(dtype)
    train, held_out = _counting(SEQUENCES, wrong=8), _counting(8, wrong=0)
    loader = DataLoader(TensorDataset(train, torch.arange(SEQUENCES)), batch_size=6, shuffle=True)
    return Setup(model, loader, held_out, [torch.zeros(SEQUENCES, dtype=dtype, requires_grad=True)])


def _counting(n: int, wrong: int) -> Tensor:
    """Sequences that count upwards; the first few of them are random."""
    regular = (torch.randint(VOCABULARY, (n, 1)) + torch.arange(LENGTH)) % VOCABULARY
    return torch.where(torch.arange(n)[:, None] < wrong, torch.randint(VOCABULARY, (n, LENGTH)), regular)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of each sequence."""
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(1)
