"""The page docs/results/attribution.md, from the pieces that `python -m benchmarks.attribution` has made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel_recipes import plots, runs
from bilevel_recipes.attribution.trust import rank_correlations

from .attribution import REMOVED, SUBSETS, subsets
from .attribution_settings import SETTINGS, Setting
from .attribution_tokens import draw

HEAD = """# Which rows did it? Ours and dattri side by side

Made by `make attribution`. A method scores how much each training row matters for the loss of a query. Then the
model is trained again {subsets} times without a random share of the rows, and the **LDS** (linear datamodelling
score) is the rank correlation between the losses that the scores predict and the real ones: 1 is perfect, 0 is
chance. Figures are means over 20 queries, ± the 95 % interval over them.

- **ours**: one training, with each row at the mean weight of the subsets (`leave_out=` the share), and its exact
  gradients.
- **ours, at weight 1**: the same gradients of the training on all rows, used for every share.
- The others are those of [dattri](https://github.com/TRAIS-Lab/dattri) 0.3.0, with the options of its own
  benchmark. Of several dampings the best is shown, chosen by this very LDS, which is to their favour. TracIn and
  TRAK use ten trainings.
- **ceiling**: what a perfect method could reach. Where the batches stay the same (rows that are left out have
  weight 0 in them), training again gives the same losses, and it is 1. Where each subset is trained in batches of
  its own, the real losses are means over five orders of the batches, and the ceiling is the square root of their
  reliability (Spearman-Brown, from the agreement of single orders).
- **metasmoothness**: `bilevel.metasmoothness` at weight 1, the mean of three random directions. 1 is smooth.

CPU s are those of one method for all 20 queries, its trainings included for ours (retrainings for the ceiling are
not), and without the trainings of the checkpoints for the others. One thread, on a machine that others were using.
"""


class Pieces:
    """The pieces that are there, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Any:
        return runs.load(self._folder / f"{name}.pt")


def score(predicted: Tensor, real: Tensor) -> np.ndarray:
    """The LDS of each query."""
    return rank_correlations(predicted.double().numpy(), real.double().numpy())


def shown(values: np.ndarray) -> str:
    good = values[np.isfinite(values)]
    if not len(good):
        return "–"
    return f"{good.mean():.2f} ± {1.96 * good.std() / math.sqrt(len(good)):.2f}"


def ceiling(orders: Sequence[Tensor]) -> np.ndarray:
    """For each query, the largest expected correlation of anything with the mean over these orders."""
    if len(orders) < 2:
        return np.ones(orders[0].shape[1])
    pairs = [score(a, b) for k, a in enumerate(orders) for b in orders[:k]]
    single = np.clip(np.mean(pairs, axis=0), 1e-3, 1)
    return np.sqrt(len(orders) * single / (1 + (len(orders) - 1) * single))


class Measured:
    """The LDS of all methods in one setting."""

    def __init__(self, s: Setting, get: Pieces) -> None:
        self.s, self.about, self._get = s, get(f"{s.name}_about"), get
        self.shares = [share for share in s.shares if get(f"{s.name}_truth_{share:g}_{s.orders - 1}")]
        self.lines: dict[str, dict[float, np.ndarray]] = {}
        self.seconds: dict[str, float] = {}
        for share in self.shares:
            self._measure(share)

    @property
    def smoothness(self) -> float:
        return float(np.mean(self.about["smoothness"]))

    def _measure(self, share: float) -> None:
        s, get = self.s, self._get
        orders = [get(f"{s.name}_truth_{share:g}_{o}")["losses"] for o in range(s.orders)]
        real = torch.stack(orders).mean(0)
        masks = torch.stack(_masks(s.rows, share))
        self._add("ceiling", share, ceiling(orders))
        mine = [m for o in range(s.orders) if (m := get(f"{s.name}_ours_{share:g}_{o}"))]
        if mine:
            self._add("**ours**", share, score(-masks @ mine[0]["effects"].T, real), mine[0]["seconds"])
        if len(mine) > 1:
            mean, seconds = torch.stack([m["effects"] for m in mine]).mean(0), sum(m["seconds"] for m in mine)
            self._add(f"**ours, mean of {len(mine)} orders**", share, score(-masks @ mean.T, real), seconds)
        if one := get(f"{s.name}_ours_1_0"):
            self._add("ours, at weight 1", share, score(-masks @ one["effects"].T, real), one["seconds"])
        for name, options in (get(f"{s.name}_peers") or {"methods": {}})["methods"].items():
            tried = [(score(-masks @ o["scores"], real), o["seconds"]) for o in options]
            best = max(tried, key=lambda t: -1 if np.isnan(t[0]).all() else float(np.nanmean(t[0])))
            self._add(name, share, *best)

    def _add(self, name: str, share: float, values: np.ndarray, seconds: float = math.nan) -> None:
        self.lines.setdefault(name, {})[share] = values
        self.seconds[name] = seconds

    def table(self) -> list[str]:
        words = ", batches of each subset's own, five orders" if self.s.own_batches else ", in the same batches"
        twin = next((f"; the smooth twin of {x.title}" for x in SETTINGS if x.name == self.s.twin), "")
        out = [
            f"### {self.s.title}, {self.s.rows:,} rows{words}{twin}",
            "",
            f"{self.about['weights']:,} weights, accuracy {self.about['accuracy']:.1%}, "
            f"**metasmoothness {self.smoothness:.2f}**",
            "",
            "| left out | " + " | ".join(f"{x:.0%}" for x in self.shares) + " | CPU s |",
            "| --- " + "| ---: " * (len(self.shares) + 1) + "|",
        ]
        for name, by_share in self.lines.items():
            cells = [shown(by_share[x]) if name != "ceiling" else f"{np.nanmean(by_share[x]):.2f}" for x in self.shares]
            seconds = self.seconds[name]
            out.append(f"| {name} | " + " | ".join(cells) + f" | {'' if math.isnan(seconds) else f'{seconds:.1f}'} |")
        return [*out, ""]

    def mean(self, name: str, share: float) -> float:
        values = self.lines[name][share]
        return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _masks(rows: int, share: float) -> list[Tensor]:
    return list(subsets(_Rows(rows), share))  # pyright: ignore[reportArgumentType]


class _Rows:
    """What `subsets` needs of a problem: how many rows it has."""

    def __init__(self, rows: int) -> None:
        self.x = range(rows)


def verdict(found: Sequence[Measured]) -> list[str]:
    """The goals, and in how many cells they are met."""
    ahead = alone = cells = high = smooth = close = repeated = 0
    for m in found:
        mine = [n for n in m.lines if n.startswith("**ours")]
        others = [n for n in m.lines if n != "ceiling" and "ours" not in n]
        for share in m.shares:
            one, best = m.mean("**ours**", share), max(m.mean(n, share) for n in mine)
            if others:
                rival = max((x for n in others if not math.isnan(x := m.mean(n, share))), default=-1.0)
                cells, ahead, alone = cells + 1, ahead + (best > rival), alone + (one > rival)
            if not m.s.own_batches and m.smoothness > 0.9:
                smooth, high = smooth + 1, high + (one >= 0.95)
            if m.s.own_batches and m.smoothness > 0.9:
                repeated, close = repeated + 1, close + (best >= 0.95 * m.mean("ceiling", share))
    return [
        "## In short",
        "",
        f"- Ours has the highest LDS in {ahead} of {cells} cells; with one training alone, without the mean over "
        f"orders, in {alone}.",
        f"- Where the batches stay the same and metasmoothness is above 0.9, ours is at least 0.95 in {high} of "
        f"{smooth} cells.",
        f"- Where each subset has batches of its own and metasmoothness is above 0.9, ours is within 5 % of the "
        f"ceiling in {close} of {repeated} cells.",
        "- Where training is not smooth, no method predicts it well, ours included.",
        "",
    ]


def scatter(found: Sequence[Measured], folder: Path) -> None:
    figure, (ax,) = plots.panels(["The exact gradient predicts where training is smooth"], width=6.2, height=4.2)
    for colour, share in zip(plots.COLOURS, (0.01, 0.05, 0.1, 0.5), strict=False):
        for own, mark in ((False, "o"), (True, "^")):
            at = [m for m in found if share in m.shares and m.s.own_batches == own and "**ours**" in m.lines]
            ax.scatter(
                [m.smoothness for m in at],
                [m.mean("**ours**", share) / m.mean("ceiling", share) for m in at], color=colour, marker=mark, s=36,
                label=f"{share:.0%} left out, {'own' if own else 'same'} batches" if at else None,
            )  # fmt: skip
    ax.set_xlabel("metasmoothness of the training")
    ax.set_ylabel("LDS of one training, as a part of the ceiling")
    ax.set_ylim(0, 1.05)
    ax.legend(fontsize=8, loc="lower right")
    plots.save(figure, folder / "attribution")


def extras(get: Pieces) -> list[str]:
    out: list[str] = []
    if found := get("digits-tanh_brittle"):
        out += [
            "## How many rows carry a prediction",
            "",
            f"Digits, tanh: of {found['right']} right answers, how many become wrong when the most helpful rows are "
            "left out and the model is trained again.",
            "",
            "| rows left out | " + " | ".join(map(str, REMOVED)) + " |",
            "| --- " + "| ---: " * len(REMOVED) + "|",
            *(f"| {n} | " + " | ".join(map(str, v)) + " |" for n, v in found["flips"].items()),
            "",
        ]
    if found := get("digits-tanh_wrong"):
        out += [
            "## Finding wrong labels",
            "",
            "Digits, tanh, 1,000 rows of which 100 have a wrong label, 100 right rows as queries. The area under the "
            "ROC curve of the rows that harm their mean loss. For this purpose `bilevel-clean` is the better tool.",
            "",
            "| method | AUC |",
            "| --- | ---: |",
            *(f"| {'**ours**' if n == 'ours' else n} | {v[0]:.3f} |" for n, v in found["areas"].items()),
            "",
        ]
    return out


def letters(get: Pieces, out: Path) -> list[str]:
    found = get("text-gpt_tokens")
    if not found:
        return []
    draw(found, out / "attribution_letters")
    return [
        "## Weights of letters",
        "",
        "The small GPT, with a weight for each letter of each row, for one query. The sums over the letters are the "
        f"effects of the rows, to a relative {found['error']:.0e}.",
        "",
        "![The query, and the rows that helped and hurt it most, letter by letter](attribution_letters.png)",
        "",
    ]


def write(folder: Path, out: Path) -> None:
    """Write the page and its plot."""
    get = Pieces(folder)
    found = [m for s in SETTINGS if get(f"{s.name}_about") and (m := Measured(s, get)).shares]
    spent = sum(float(runs.load(f)["cpu"]) for f in sorted(folder.glob("*.pt")))  # pyright: ignore
    page = [
        HEAD.format(subsets=SUBSETS),
        *verdict(found),
        "![LDS, as a part of the ceiling, against metasmoothness](attribution.png)",
        "",
    ]
    page += ["## All figures", ""]
    for m in found:
        page += m.table()
    page += [*letters(get, out), *extras(get)]
    page += [f"The whole study took {spent / 60:.0f} CPU minutes.", ""]
    scatter(found, out)
    runs.write_page(out / "attribution.md", "\n".join(page))
    for extra in ("attribution.svg", "attribution_letters.svg"):
        (out / extra).unlink(missing_ok=True)
