"""How wrong is the hypergradient of the last m of K = 200 steps? python -m docs.figures.truncation

Left: a quadratic in 20 dimensions; (1 − t·μ)^m, with μ the least curvature of h, is dotted. Right: an MLP 64-16-10 with
a weight for each of 300 digits, under the three solvers.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_plugin.model.losses import Loss
from bilevel_plugin.update.solvers import StepRule

from .style import AMBER, BLUE, GREEN, SOLVERS, panels, save

STEPS = 200
LENGTHS = (1, 2, 3, 5, 7, 10, 14, 20, 30, 40, 60, 80, 100, 120, 140, 160, 180, 200)


def errors(model: nn.Module, h: Loss, g: Loss, lam: Tensor, solver: StepRule) -> list[float]:
    """The relative error for each length, from one loop of each."""
    grads = []
    for m in LENGTHS:
        with bilevel.inner(model, h, g, solver=solver, engine=bilevel.Reverse(truncate=m)) as loop:
            loop.run(STEPS)
            grads.append(loop.hypergrad(lam))
    return [float((x - grads[-1]).norm() / grads[-1].norm()) for x in grads[:-1]]


def quadratic(least: float) -> list[float]:
    """Curvatures from `least` to 1 and rates of 1."""
    torch.manual_seed(0)
    curvature = torch.logspace(torch.tensor(least).log10().item(), 0, 20, dtype=torch.float64)
    target, wanted = torch.randn(2, 20, dtype=torch.float64)
    lam = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    model = nn.ParameterDict({"w": torch.zeros(20, dtype=torch.float64)})
    h = lambda m: (curvature * (m["w"] - target - lam).square()).sum() / 2
    g = lambda m: (m["w"] - wanted).square().sum() / 2
    return errors(model, h, g, lam, bilevel.GD(1.0))


def digits(solver: StepRule) -> list[float]:
    torch.manual_seed(0)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = x / 16 - 0.3
    lam = torch.zeros(300, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    h = lambda m: (torch.sigmoid(lam) * F.cross_entropy(m(x[:300]), y[:300], reduction="none")).mean()
    g = lambda m: F.cross_entropy(m(x[300:500]), y[300:500])
    return errors(model, h, g, lam, solver)


def main() -> None:
    figure, (left, right) = panels(["a quadratic, t = 1", "MLP on digits, t = 0.5"], 5.2, 3.8)
    for least, colour in ((0.1, GREEN), (0.03, AMBER), (0.01, BLUE)):
        found = quadratic(least)
        left.plot(LENGTHS[:-1], found, "-o", markersize=3, color=colour, label=f"least curvature {least}")
        left.plot(LENGTHS[:-1], [(1 - least) ** m for m in LENGTHS[:-1]], ":", color=colour, linewidth=1)
    for name, (make, colour) in SOLVERS.items():
        found = digits(make(0.5))
        right.plot(LENGTHS[:-1], found, "-o", markersize=3, color=colour, label=name)
        print(name, {m: round(e, 3) for m, e in zip(LENGTHS, found, strict=False)})
    for ax in (left, right):
        ax.set(xlabel="steps gone back over, m", ylabel="relative error")
        ax.legend(fontsize=8)
    left.set(yscale="log", ylim=(1e-7, 3))
    right.set(ylim=(0, 1.05))
    save(figure, __file__)


if __name__ == "__main__":
    main()
