"""A language model (LSTM) trained by truncated backpropagation through time; the outer variables weigh regularisers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

LETTERS, CHUNK = 10, 6


@dataclass
class Setup:
    """The language model, texts to train and to validate on, (length, streams) each, and the outer variables."""

    model: LanguageModel
    text: Tensor
    validation: Tensor
    outer: list[Tensor]  # the logarithms of the weights of AR and TAR


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(LETTERS, 8), nn.LSTM(8, 12), nn.Linear(12, LETTERS)

    def forward(self, letters: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Scores of the next letters, the LSTM's outputs, and its hidden state in the end."""
        outputs, hidden = self.lstm(self.embedding(letters), hidden)
        return self.decoder(outputs), outputs, hidden

    def start(self, streams: int) -> tuple[Tensor, Tensor]:
        zeros = self.decoder.weight.new_zeros(1, streams, 12)
        return zeros, zeros.clone()


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    model = LanguageModel().to(dtype)
    outer = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (-1.0, -1.5)]
    return Setup(model, _text(8 * CHUNK + 1, 5), _text(5 * CHUNK + 1, 5), outer)


def _text(length: int, streams: int) -> Tensor:
    """Streams that count upwards, in ones or twos, and slip now and then."""
    by = torch.randint(1, 3, (1, streams))
    slips = (torch.rand(length, streams) < 0.15).long() * torch.randint(LETTERS, (length, streams))
    return (torch.randint(LETTERS, (1, streams)) + (by + slips).cumsum(0)) % LETTERS


def chunks(text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pieces of the text, each with what comes one letter later."""
    return list(zip(text[:-1].split(CHUNK), text[1:].split(CHUNK), strict=True))
