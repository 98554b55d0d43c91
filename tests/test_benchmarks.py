"""The benchmarks run, on a small case."""

import subprocess
import sys


def test_memory():
    command = [sys.executable, "-m", "benchmarks.memory", "--samples", "100", "--steps", "4", "--repeat", "1"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in ("unroll", "reverse", "reverse, checkpoint='sqrt'", "higher 0.2.1"):
        assert f"\n{name}" in out
