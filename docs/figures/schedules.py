"""Draw where GD and BiG-SAM with both schedules go, on a quadratic with a whole line of inner minimisers.

h = (w₁ + w₂ − 1)²/2, g = ‖w − c‖²/2, c = (2, 0.5). Run from the repository: python docs/figures/schedules.py
"""

from pathlib import Path

import matplotlib
import torch
from torch import nn

import bilevel_plugin as bilevel

matplotlib.use("Agg")
import matplotlib.pyplot as plt

C = torch.tensor([2.0, 0.5], dtype=torch.float64)
START = torch.tensor([-1.0, 1.0], dtype=torch.float64)
STEPS = 400


def h(model: nn.ParameterDict) -> torch.Tensor:
    return (model["w"].sum() - 1).square() / 2


def g(model: nn.ParameterDict) -> torch.Tensor:
    return (model["w"] - C).square().sum() / 2


def path(solver: bilevel.GD | bilevel.BiGSAM) -> torch.Tensor:
    model = nn.ParameterDict({"w": START.clone()})
    points = [START]
    with bilevel.inner(model, h, g, solver=solver, hypergrad=bilevel.Reverse(truncate=1)) as loop:
        for _ in range(STEPS):
            loop.step()
            points.append(loop.weights["w"].detach())
    return torch.stack(points)


def main() -> None:
    runs = {
        "GD": (path(bilevel.GD(0.3)), "tab:gray"),
        "BiG-SAM, power(0.25): the paper's": (path(bilevel.BiGSAM(0.3, alpha=bilevel.power(0.25))), "tab:orange"),
        "BiG-SAM, convergent()": (path(bilevel.BiGSAM(0.3, alpha=bilevel.convergent())), "tab:blue"),
    }
    best = C - (C.sum() - 1) / 2
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    line = torch.tensor([-1.2, 2.4])
    left.plot(line, 1 - line, color="black", linewidth=1, label="argmin h")
    for name, (points, colour) in runs.items():
        left.plot(*points.T, "-o", color=colour, markersize=3, linewidth=1.2, label=name)
        right.plot(range(STEPS + 1), (points - best).norm(dim=1), color=colour, label=name)
    left.plot(*best, "*", color="green", markersize=15, label="Eq. 3: least g on argmin h")
    left.plot(*C, "X", color="red", markersize=9, label="argmin g")
    left.plot(*START, "s", color="black", markersize=6, label="start")
    left.set(xlabel="$w_1$", ylabel="$w_2$", title=f"{STEPS} steps from one start", aspect="equal")
    left.legend(fontsize=7, loc="lower left")
    right.set(
        xlabel="step k", ylabel="distance to the solution of Eq. 3", yscale="log", title="Only one of them goes there"
    )
    right.legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
    for name, (points, _) in runs.items():
        w = points[-1]
        inner, outer = (w.sum() - 1).square() / 2, (w - C).square().sum() / 2
        print(f"{name:<36} w = ({w[0]:.3f}, {w[1]:.3f})  h = {inner:.5f}  g = {outer:.4f}")


if __name__ == "__main__":
    main()
