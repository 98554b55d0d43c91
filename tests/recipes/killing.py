"""A command, killed in mid-run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bilevel_recipes import runs

ROOT = Path(__file__).parents[2]


def killed(module: str, command: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    """Start a command of one run, kill -9 it after its first checkpoint: the file's name, and what it holds."""
    process = subprocess.Popen([sys.executable, "-m", module, *command, "--out", str(out)], cwd=ROOT)
    folder = out / "runs"
    end = time.monotonic() + 60
    while not list(folder.glob("[!.]*.pt")) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.03)  # into the middle of a later outer step
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (file,) = folder.glob("[!.]*.pt")
    found = runs.load(file)
    assert found is not None
    assert "record" not in found, "the run ended before it was killed: the test shows nothing"
    return file.name, found
