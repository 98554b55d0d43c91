"""kill -9 at random moments of both recipes, --resume until they end, and the result compared bit by bit.

python tests/recipes/soak.py 60        # kills in all; prints the first part of docs/results/soak.md
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bilevel_recipes import runs  # noqa: E402  (found from the line above when this is a script)

COMMANDS = {
    "data_cleaning": [
        *("--train", "100", "--validation", "60", "--steps", "15", "--outer-steps", "30", "--fit-steps", "20"),
        *("--lr", "0.1", "--batch-size", "32", "--solvers", "gd,bigsam", "--quiet", "--threads", "1"),
    ],
    "few_shot": [
        *("--tasks", "3", "--outer-steps", "60", "--queries", "4", "--steps", "3", "--test-episodes", "20"),
        *("--curve-points", "3", "--curve-episodes", "10", "--save-every", "2", "--solvers", "gd,bigsam"),
        *("--baselines", "none", "--quiet", "--threads", "1"),
    ],
}
HEAD = f"""# Killed runs, damaged files, and memory over 1,000 blocks

Made by `make soak` on {os.cpu_count()} cores, CPU, torch {torch.__version__}.

## Killed runs

Runs of both commands (two solvers each) are killed by `kill -9` at random moments, and resumed until they end. Then
everything that they wrote is compared bit for bit with a run that was not killed: `results.json`, the CSV files and
every checkpoint. Only the seconds may differ. After each kill, no file under its final name may be half written. Any
difference, any half-written file and any resume that fails counts as a loss.

| recipe | kills | of these after a checkpoint | resumes | runs that ended | losses |
| --- | ---: | ---: | ---: | ---: | ---: |"""
WALL = ("seconds", "cpu_seconds", "seconds_std", "versions", "command")  # what no two runs share


def start(recipe: str, out: Path, extra: list[str] | None = None) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        f"bilevel_recipes.{recipe}",
        *(extra or COMMANDS[recipe]),
        "--resume",
        "--out",
        str(out),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def without_time(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(k): without_time(v) for k, v in tree.items() if k not in WALL}
    if isinstance(tree, (list, tuple)):
        return [without_time(v) for v in tree]
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.contiguous().numpy().tobytes()
    return repr(tree)


def result(out: Path) -> dict[str, Any]:
    """All that must be the same bit for bit."""
    found: dict[str, Any] = {"results": without_time(json.loads((out / "results.json").read_text()))}
    for table in sorted(out.glob("*.csv")):
        with open(table, newline="") as handle:
            found[table.name] = [without_time(row) for row in csv.DictReader(handle)]
    for file in sorted((out / "runs").glob("[!.]*.pt")):
        found[file.name] = without_time(runs.load(file))
    return found


def broken(out: Path) -> list[str]:
    """Files under their final names that are not whole."""
    ends = {".html": b"</html>", ".svg": b"</svg>", ".png": b"IEND\xaeB`\x82"}
    bad: list[str] = []
    for file in (f for f in out.rglob("[!.]*") if f.is_file()):
        if file.suffix in ends and not file.read_bytes().rstrip().endswith(ends[file.suffix]):
            bad.append(file.name)
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix in (".pt", ".before"):
            with zipfile.ZipFile(file) as whole:
                bad += [file.name] * (whole.testzip() is not None)
    return bad


def soak(recipe: str, kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Runs that are killed and resumed until they end, until there were that many kills."""
    begin = time.monotonic()
    reference = start(recipe, folder / "whole")
    assert reference.wait() == 0, reference.stderr.read() if reference.stderr else ""
    whole, expected = time.monotonic() - begin, result(folder / "whole")
    draw, count = random.Random(seed), {"kills": 0, "with a checkpoint": 0, "resumes": 0, "runs": 0, "losses": 0}
    while count["kills"] < kills:
        out = folder / f"run{count['runs']}"
        while True:
            process = start(recipe, out)
            count["resumes"] += (out / "settings.json").is_file()
            try:
                process.wait(draw.uniform(0.3, 1.0) * whole)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                count["kills"] += 1
                count["with a checkpoint"] += bool(list(out.glob("runs/[!.]*.pt")))
                if broken(out):
                    count["losses"] += 1
                    print(f"half-written after a kill: {broken(out)}", file=sys.stderr)
                continue
            if process.returncode != 0:
                count["losses"] += 1
                print((process.stderr.read() if process.stderr else b"").decode(), file=sys.stderr)
            elif result(out) != expected:
                count["losses"] += 1
                print(f"{out} differs from the run that was not killed", file=sys.stderr)
            break
        count["runs"] += 1
    return count


def main(kills: int) -> int:
    begin, losses = time.monotonic(), 0
    print(HEAD)
    for recipe in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            c = soak(recipe, -(-kills // len(COMMANDS)), 0, Path(folder))
        losses += c["losses"]
        figures = (c[name] for name in ("kills", "with a checkpoint", "resumes", "runs", "losses"))
        print(f"| {recipe} | {' | '.join(map(str, figures))} |", flush=True)
    print(f"\nThis took {time.monotonic() - begin:.0f} s.")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
