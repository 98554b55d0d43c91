"""Make a page of what a command prints, with the notes that are kept beside the page in NAME_notes.md:

    python -m benchmarks.page docs/results/plan.md python -m benchmarks.plan

If the command fails, the page stays as it was.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bilevel_recipes.runs import write_page


def main(argv: Sequence[str] | None = None) -> int:
    path, *command = sys.argv[1:] if argv is None else argv
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    print(done.stdout)
    if done.returncode == 0:
        write_page(Path(path), done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
