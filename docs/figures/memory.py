"""What a hypergradient holds in memory, beside plain training and other libraries. python -m docs.figures.memory

Drawn from docs/results/benchmarks.json, which `make bench` measured: the problem P8-256-20.
"""

import json

from .style import AMBER, BLACK, BLUE, RED, Path, panels, save

FILE = Path(__file__).parent.parent / "results" / "benchmarks.json"
PROBLEM = "P8-256-20"


def main() -> None:
    found = json.loads(FILE.read_text())["table"][PROBLEM]
    training, states = found["training"]["live"] / 1e6, found["training"]["iterates"] / 1e6
    figure, (ax,) = panels(["Peak memory: a hypergradient through\n20 steps of a GPT of 12 layers"], 6.0, 3.0)

    def bar(label: str, megabytes: float, colour: str, text: str, stored: float = 0.0) -> None:
        ax.barh(label, megabytes, color=colour, height=0.6)
        ax.barh(label, stored, left=megabytes, color=AMBER, height=0.6)
        ended = colour == RED
        ax.annotate(
            text, (megabytes + stored, label), (-8 if ended else 8, 0), textcoords="offset points", va="center",
            ha="right" if ended else "left", color="white" if ended else BLACK,
        )  # fmt: skip

    bar("plain training", training, BLACK, f"{training:,.0f} MB")
    working = found["rows"]["ours: reverse blocks=auto"]["live"] / 1e6 - states
    ours = 'bilevel_plugin,\nblocks="auto"'
    bar(ours, working, BLUE, f"{working:,.0f} MB + {states:,.0f} MB of stored weights", states)
    for name in ("higher", "TorchOpt"):
        limit = found["rows"][name]["limit"]  # a KeyError if it finished: then this is another picture
        bar(name, limit / 1e6, RED, f"stopped at {limit / 2**30:.0f} GiB")
    ax.invert_yaxis()
    ax.set(xlabel="MB that tensors hold", xlim=(0, 8900), xticks=range(0, 8001, 2000))
    save(figure, __file__)


if __name__ == "__main__":
    main()
