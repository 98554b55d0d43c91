"""The path of the data through the files. python -m docs.figures.architecture"""

from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .style import BLUE, GREEN, RED, save

BOXES = {  # key -> x, y, width, title, text, colour
    "yours": (0.0, 3.0, 2.3, "yours", "model, h, g, λ\nyour loop", "0.35"),
    "binding": (3.0, 4.2, 2.6, "binding.py, tasks.py", "h as a function of w", BLUE),
    "solvers": (3.0, 3.0, 2.6, "solvers.py, schedules.py", "weights of h and g in step k", BLUE),
    "updates": (3.0, 1.8, 2.6, "updates.py", "SGD, Adam, AdamW", BLUE),
    "inner": (3.0, 0.4, 2.6, "inner.py", "inner(), Loop: where they meet", RED),
    "step": (6.3, 3.0, 2.5, "step.py, compiled.py", "z⁺ = Φ_k(z, λ), again alike", BLUE),
    "engines": (9.5, 3.0, 2.6, "hypergrad/", "reverse, unroll, forward,\ncg, neumann", GREEN),
    "grads": (9.5, 0.4, 2.6, "gradients", "hypergrad(λ), backward()", "0.35"),
}
ARROWS = [("yours", "binding"), ("yours", "solvers"), ("yours", "updates"), ("binding", "step"), ("solvers", "step"),
          ("updates", "step"), ("step", "engines"), ("engines", "grads")]  # fmt: skip
HEIGHT = 0.9


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.4, 4.2), layout="constrained")
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
    ax.text(7.55, 2.75, "K steps", ha="center", va="top", fontsize=9)
    ax.text(7.55, 0.85, "inner.py hands Φ_k to the engine, and asks it for\nthe gradient of g at z_K",
            ha="center", va="center", fontsize=9, color=RED)  # fmt: skip
    ax.set(xlim=(-0.1, 12.2), ylim=(0.2, 5.3))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
