"""The influence of training rows on queries, as numbers, tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .. import runs

COLUMNS = ["query", "query_name", "row", "name", "did", "effect", "share"]


@dataclass(frozen=True)
class Influence:
    """The influence of every row on every query.

    Attributes:
        effects: queries × rows (× tokens): by how much the loss of the query rises if the row is left out. A row with
            a positive effect helped.
        losses: the loss of each query where training was linearised.
        share: the share of the rows that the question was about.
        weight: the weight of each row where training was linearised.
        rows, queries: their names.
    """

    effects: Tensor
    losses: Tensor
    share: float
    weight: float
    rows: tuple[str, ...]
    queries: tuple[str, ...]

    @property
    def of_rows(self) -> Tensor:
        """The effects of whole rows, queries × rows: those of their tokens together."""
        return self.effects.flatten(2).sum(2) if self.effects.ndim > 2 else self.effects

    def predicted(self, weights: Tensor) -> Tensor:
        """Return the predicted loss of each query after training with these weights, such as 0 for what is left out.

        Several sets of weights may be given along a first dimension.
        """
        shape = self.effects.shape[1:]
        moved = (weights.to(self.effects) - self.weight).reshape(-1, shape.numel())
        found = self.losses - moved @ self.effects.reshape(len(self.effects), -1).T
        return found[0] if weights.shape == shape else found

    def top(self, query: int, count: int = 10) -> pd.DataFrame:
        """Return the rows that helped and hurt this query most, those that helped first."""
        effects = self.of_rows[query].numpy()
        return self._lines(effects, count).assign(query=query, query_name=self.queries[query]).loc[:, COLUMNS]

    def together(self, queries: Sequence[int] | None = None, count: int = 20) -> pd.DataFrame:
        """Return the rows to look at first for these queries as a whole: their mean loss.

        queries: by default those of all.
        """
        which = list(range(len(self.queries)) if queries is None else queries)
        return self._lines(self.of_rows[which].mean(0).numpy(), count)

    def frame(self, count: int = 10) -> pd.DataFrame:
        """Return `top` of every query, one below the other."""
        return pd.concat([self.top(q, count) for q in range(len(self.queries))], ignore_index=True)

    def tokens(self, query: int, row: int) -> Tensor:
        """Return the effect of each token of this row on this query."""
        if self.effects.ndim == 2:
            raise ValueError(
                "attribution: there is one weight for each row, so nothing is known of tokens. Give rows=(rows, "
                "tokens), and multiply the loss of each token by its weight."
            )
        return self.effects[query, row]

    def to_csv(self, path: str | Path, count: int = 10) -> None:
        """Write `frame` to a file."""
        runs.write_text(Path(path), self.frame(count).to_csv(index=False))

    def save(self, path: str | Path) -> None:
        """Write all effects to an .npz file."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file, effects=self.effects.numpy(), losses=self.losses.numpy(), rows=np.array(self.rows),
                queries=np.array(self.queries), share=self.share, weight=self.weight,
            )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Influence:
        """Read what `save` has written."""
        with np.load(path, allow_pickle=False) as found:
            return cls(
                torch.tensor(found["effects"]), torch.tensor(found["losses"]), float(found["share"]),
                float(found["weight"]), tuple(found["rows"].tolist()), tuple(found["queries"].tolist()),
            )  # fmt: skip

    def _lines(self, effects: np.ndarray, count: int) -> pd.DataFrame:
        """Return a line for each of the rows with the largest effects of either sign."""
        order = np.argsort(-effects, kind="stable")
        helped = [int(i) for i in order[:count] if effects[i] > 0]
        hurt = [int(i) for i in order[::-1][:count] if effects[i] < 0]
        total = float(np.abs(effects).sum()) or 1.0
        return pd.DataFrame(
            [
                {"row": i, "name": self.rows[i], "did": did, "effect": float(effects[i]),
                 "share": abs(float(effects[i])) / total}
                for did, rows in (("helped", helped), ("hurt", hurt)) for i in rows
            ],
            columns=COLUMNS[2:],
        )  # fmt: skip
