"""The path of the data through the files. python -m docs.figures.architecture"""

from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .style import BLUE, GREEN, RED, save

BOXES = {  # key -> x, y, width, title, text, colour
    "yours": (0.0, 3.0, 2.1, "yours", "model, h, g, λ\nyour loop", "0.35"),
    "model": (2.8, 4.2, 2.6, "model/", "w in the model, h(w)", BLUE),
    "solvers": (2.8, 3.0, 2.6, "update/solvers", "weights of h and g in step k", BLUE),
    "updates": (2.8, 1.8, 2.6, "update/", "SGD, Adam, …, clipping", BLUE),
    "inner": (2.8, 0.4, 2.6, "inner, loop, run", "where they meet", RED),
    "step": (6.1, 3.0, 2.3, "step/step", "z⁺ = Υ(z, Σ ∇ℓ_i)", BLUE),
    "record": (9.1, 3.0, 2.5, "step/record", "the same step, run again", BLUE),
    "pullback": (9.1, 4.2, 2.5, "pullback/", "the derivative of one piece", GREEN),
    "engines": (12.3, 3.0, 2.5, "engine/", "the derivative of a loop", GREEN),
    "grads": (12.3, 0.4, 2.5, "gradients", "hypergrad(λ), backward()", "0.35"),
}
ARROWS = [("yours", "model"), ("yours", "solvers"), ("yours", "updates"), ("model", "step"), ("solvers", "step"),
          ("updates", "step"), ("step", "record"), ("step", "pullback"), ("record", "engines"), ("pullback", "engines"),
          ("engines", "grads")]  # fmt: skip
HEIGHT = 0.9


def main() -> None:
    figure, ax = plt.subplots(figsize=(12.4, 4.2), layout="constrained")
    for x, y, width, title, text, colour in BOXES.values():
        box = FancyBboxPatch((x, y), width, HEIGHT, "round,pad=0.02,rounding_size=0.1", fc="white", ec=colour, lw=1.5)
        ax.add_patch(box)
        ax.text(x + width / 2, y + 0.69, title, ha="center", va="center", fontsize=10, color=colour, weight="bold")
        ax.text(x + width / 2, y + 0.28, text, ha="center", va="center", fontsize=9)
    for begin, end in ARROWS:
        (x, y, width, *_), (to_x, to_y, to_width, *_) = BOXES[begin], BOXES[end]
        if to_x > x:
            ends = (x + width + 0.03, y + HEIGHT / 2), (to_x - 0.03, to_y + HEIGHT / 2)
        else:
            ends = (x + width / 2, y - 0.03), (to_x + to_width / 2, to_y + HEIGHT + 0.03)
        ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color="0.3", shrinkA=0, shrinkB=0))
    ax.text(10.35, 2.85, "K steps", ha="center", va="top", fontsize=9)
    ax.text(8.85, 0.85, "loop hands every step to the engine,\nand asks it for the gradient of g at z_K",
            ha="center", va="center", fontsize=9, color=RED)  # fmt: skip
    ax.set(xlim=(-0.1, 14.9), ylim=(0.2, 5.3))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
