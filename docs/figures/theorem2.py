"""g over the outer steps: what the choice among inner minimisers is worth (the paper's Theorem 2).

Left: h = (w₁ + w₂ − λ)²/2, g = ‖w − c‖²/2, one outer variable; both minima are known. Right: a weight for each of
300 digits, of which half have a wrong label; g is the loss on 200 others. python -m docs.figures.theorem2
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.model.losses import Loss
from bilevel_plugin.update.solvers import StepRule

from .style import SOLVERS, legend, panels, save

C = torch.tensor([2.0, 0.5], dtype=torch.float64)


def descend(
    model: nn.Module, h: Loss, g: Loss, solver: StepRule, outer: torch.optim.Optimizer, steps: int, times: int
) -> list[float]:
    """g(w_K) at each outer step; every inner loop starts from the model's own weights."""
    values = []
    for _ in range(times):
        outer.zero_grad()
        with bilevel.inner(model, h, g, solver=solver) as loop:
            loop.run(steps)
            loop.backward()
            values.append(float(loop.value))
        outer.step()
    return values


def line(solver: StepRule) -> list[float]:
    lam = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    model = nn.ParameterDict({"w": torch.tensor([-1.0, 1.0], dtype=torch.float64)})
    h = lambda m: (m["w"].sum() - lam).square() / 2
    g = lambda m: (m["w"] - C).square().sum() / 2
    return descend(model, h, g, solver, torch.optim.SGD([lam], 0.5), steps=400, times=15)


def digits(solver: StepRule) -> list[float]:
    torch.manual_seed(0)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(y))
    x, y = (x[order] / 16 - 0.3).float(), y[order]
    x, y, x_val, y_val = x[:300], y[:300].clone(), x[300:500], y[300:500]
    y[:150] = (y[:150] + torch.randint(1, 10, (150,))) % 10
    lam = torch.zeros(300, requires_grad=True)
    h = lambda m: (torch.sigmoid(lam) * F.cross_entropy(m(x), y, reduction="none")).mean()
    g = lambda m: F.cross_entropy(m(x_val), y_val)
    return descend(nn.Linear(64, 10), h, g, solver, torch.optim.Adam([lam], 0.2), steps=50, times=15)


def main() -> None:
    figure, (left, right) = panels(["a quadratic, K = 400", "300 digits, half mislabelled, K = 50"], 5.2, 3.6)
    for name, (make, colour) in SOLVERS.items():
        for ax, values in ((left, line(make(0.3))), (right, digits(make(0.5)))):
            ax.plot(range(1, len(values) + 1), values, "-o", markersize=3, color=colour, label=name)
            print(f"{name:<36} g = {values[0]:.4f} at first, {values[-1]:.4f} after {len(values)} outer steps")
    # GD moves along (1, 1) alone, so that c stays (c₁ − c₂ − w₁ + w₂)²/4 away; on the whole line g can be 0
    for value, text in ((float((C[0] - C[1] + 2) ** 2 / 4), "least that GD can reach"), (0.0, "least of Eq. 3")):
        left.axhline(value, color="0.6", linewidth=1, linestyle=":")
        left.annotate(text, (15, value), xytext=(0, 4), textcoords="offset points", ha="right", fontsize=8)
    for ax in (left, right):
        ax.set(xlabel="outer step", ylabel="$g(w_K)$", ylim=(-0.15 if ax is left else 0, None))
    legend(figure, [left, right])
    save(figure, __file__)


if __name__ == "__main__":
    main()
