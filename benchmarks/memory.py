"""`make memory`: the engines and `higher` on P2 alone, MLP 784-300-10, 5,000 samples, full batch, K = 100."""

from __future__ import annotations

import sys

from .__main__ import main

if __name__ == "__main__":
    fixed = [
        "--problems",
        "P2",
        "--parts",
        "table",
        "--runners",
        "ours,higher",
        "--rounds",
        "3",
        "--out",
        "runs/memory",
    ]
    sys.exit(main([*fixed, *sys.argv[1:]]))
