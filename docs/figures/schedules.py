"""Where GD and BiG-SAM with both schedules go, on a quadratic with a whole line of inner minimisers.

h = (w₁ + w₂ − 1)²/2, g = ‖w − c‖²/2, c = (2, 0.5). Run from the repository: python -m docs.figures.schedules
"""

import torch
from torch import Tensor, nn

import bilevel_plugin as bilevel

from .style import GREEN, PINK, SOLVERS, panels, save

C = torch.tensor([2.0, 0.5], dtype=torch.float64)
START = torch.tensor([-1.0, 1.0], dtype=torch.float64)
STEPS = 400


def h(model: nn.ParameterDict) -> Tensor:
    return (model["w"].sum() - 1).square() / 2


def g(model: nn.ParameterDict) -> Tensor:
    return (model["w"] - C).square().sum() / 2


def path(solver: bilevel.GD | bilevel.BiGSAM) -> Tensor:
    model = nn.ParameterDict({"w": START.clone()})
    points = [START]
    with bilevel.inner(model, h, g, solver=solver, engine=bilevel.Reverse(truncate=1)) as loop:
        for _ in range(STEPS):
            loop.step()
            points.append(loop.weights["w"].detach())
    return torch.stack(points)


def main() -> None:
    runs = {name: (path(make(0.3)), colour) for name, (make, colour) in SOLVERS.items()}
    best = C - (C.sum() - 1) / 2
    figure, (left, right) = panels([f"{STEPS} steps from one start", "only one of them goes there"], 5.4, 4.3)
    line = torch.tensor([-1.2, 2.3])
    left.plot(line, 1 - line, color="black", linewidth=1)
    left.text(1.55, -0.45, "argmin h", fontsize=9, rotation=-45, rotation_mode="anchor")
    for name, (points, colour) in runs.items():
        left.plot(*points.T, "-o", color=colour, markersize=3, linewidth=1.2, label=name)
        right.plot(range(STEPS + 1), (points - best).norm(dim=1), color=colour)
    for point, marker, colour, text, place in (
        (best, "*", GREEN, "least g on argmin h:\nthe problem's solution", (-0.35, -1.0)),
        (C, "X", PINK, "argmin g", (1.75, 0.65)),
        (START, "s", "black", "start", (-1.1, 1.15)),
    ):
        left.plot(*point, marker, color=colour, markersize=15 if marker == "*" else 8, zorder=3)
        left.annotate(text, tuple(point), place, fontsize=9, color=colour)
    left.set(xlabel="$w_1$", ylabel="$w_2$", aspect="equal")
    right.set(xlabel="step k", ylabel="distance to the solution", yscale="log")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    save(figure, __file__)
    for name, (points, _) in runs.items():
        w = points[-1]
        inner, outer = (w.sum() - 1).square() / 2, (w - C).square().sum() / 2
        print(f"{name:<36} w = ({w[0]:.3f}, {w[1]:.3f})  h = {inner:.5f}  g = {outer:.4f}")


if __name__ == "__main__":
    main()
