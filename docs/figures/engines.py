"""Time against memory of the engines and of higher. python -m docs.figures.engines

Drawn from the table in docs/results/engines.md, which `make memory` measured.
"""

import re

from .style import BLACK, BLUE, RED, Path, panels, save

TABLE = Path(__file__).parent.parent / "results" / "engines.md"
ROW = re.compile(r"^\| (.+?) \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|", re.MULTILINE)


def main() -> None:
    text = TABLE.read_text()
    plain = re.search(r"100 plain steps took ([\d.]+) s", text)
    figure, (ax,) = panels(["MLP 784-300-10, 5,000 + 5,000 samples, K = 100"], 7.6, 4.2)
    for name, seconds, live, _ in ROW.findall(text):
        label, x, y = re.sub(r"[`\"]|, a tenth.*| \(.*s, not.*", "", name), float(live.replace(",", "")), float(seconds)
        colour = RED if name.startswith("higher") else BLUE
        ax.plot(x, y, "o", color=colour, markersize=7)
        right = x > 400
        ax.annotate(label, (x, y), (-8 if right else 8, 3), textcoords="offset points", fontsize=9, color=colour,
                    ha="right" if right else "left")  # fmt: skip
    assert plain
    ax.axhline(float(plain[1]), color=BLACK, linestyle=":", linewidth=1)
    ax.annotate(
        "100 plain steps, no gradient of g", (50, float(plain[1])), (0, 4), textcoords="offset points", fontsize=9
    )
    ax.set(xlabel="MB that tensors hold", ylabel="seconds", xscale="log", xlim=(45, 1000), ylim=(0, 11))
    ax.set_xticks([50, 100, 200, 500, 1000], ["50", "100", "200", "500", "1,000"])
    ax.minorticks_off()
    save(figure, __file__)


if __name__ == "__main__":
    main()
