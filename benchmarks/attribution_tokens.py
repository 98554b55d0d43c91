"""The figure of weights of letters: which part of which row helped a small language model with a query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bilevel_recipes import plots

from .attribution_settings import Problem, setting, text_and_letters

SHOWN = 4  # rows that helped, and as many that hurt


def draw(found: dict[str, Any], path: Path) -> Path:
    """Draw the first query and the rows with the largest effects on it, with each letter coloured by its effect."""
    p = Problem(setting("text-gpt"))
    _, letters = text_and_letters(len(p.x))
    effects: torch.Tensor = found["effects"][0]
    order = torch.argsort(effects.sum(1), descending=True).tolist()
    lines = [("query", p.yq[0], torch.zeros(p.yq.shape[1]))]
    lines += [("helped", p.y[i], effects[i]) for i in order[:SHOWN]]
    lines += [("hurt", p.y[i], effects[i]) for i in order[: -SHOWN - 1 : -1]]
    top = float(torch.stack([e for _, _, e in lines]).abs().max())
    figure, (ax,) = plots.panels(["Effect of each letter on the loss of the query (blue helped, orange hurt)"], 9, 3.4)
    ax.set_axis_off()
    for row, (what, codes, strength) in enumerate(lines):
        ax.text(-0.5, -row, what, ha="right", va="center", fontsize=9, color="0.35")
        for place, (code, e) in enumerate(zip(codes.tolist(), (strength / top).tolist(), strict=True)):
            colour = plots.COLOURS[0] if e > 0 else plots.COLOURS[1]
            ax.add_patch(
                plots.plt.Rectangle((place, -row - 0.42), 1, 0.84, color=colour, alpha=min(1, abs(e)) * 0.8, lw=0)
            )
            letter = {"\n": "↵", " ": "·"}.get(letters[code], letters[code])
            ax.text(place + 0.5, -row, letter, ha="center", va="center", fontsize=9, family="monospace")
    ax.set_xlim(-4, len(lines[0][1]))
    ax.set_ylim(-len(lines) + 0.4, 0.6)
    return plots.save(figure, path)
