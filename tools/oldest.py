"""python tools/oldest.py: the core tests on the oldest Python and torch that pyproject.toml allows (`make oldest`).

It makes an environment of its own, .venv-oldest, in which torch, numpy, pytest and hypothesis are installed and nothing
else: several GB, since torch from the package index comes with CUDA. The outcome is written to docs/results/oldest.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-oldest"
RESULTS = ENVIRONMENT / "core.xml"
OUTCOMES = ("passed", "skipped", "failed")
Row = tuple[str, str, str]  # file, outcome, reason


def minimum(text: str, pattern: str) -> str:
    """Return the version that `pattern` finds in pyproject.toml."""
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"tools/oldest.py: pyproject.toml has no line that matches {pattern}.")
    return found[1]


def interpreter(version: str) -> str:
    """Return Python of that version, from PATH or pyenv, or the one that runs this script if there is none."""
    known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in (shutil.which(f"python{version}"), *map(str, reversed(known))):
        # pyenv puts a python3.x on PATH for each version that it knows; it fails where that version is not switched on
        if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return python
    return sys.executable


def install(python: str, torch: str) -> Path:
    """Return the Python of an environment with that torch, which is made if it is not there."""
    mine = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not mine.exists():
        subprocess.run([python, "-m", "venv", ENVIRONMENT], check=True)
    # torch 2.6 was built against numpy 2.1; later releases of numpy warn of what it does
    wanted = [f"torch=={torch}.*", "numpy<2.3", "pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "-e", str(ROOT)]
    subprocess.run([mine, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
    return mine


def run(python: Path, more: list[str]) -> None:
    """Run the core tests. A crash of pytest fails here; a failing test fails the command after the page is written."""
    RESULTS.unlink(missing_ok=True)
    flags = ["--core", "-n", "auto", f"--junitxml={RESULTS}", "-o", "junit_family=xunit1"]
    code = subprocess.run([python, "-m", "pytest", *flags, *more, "tests"], cwd=ROOT).returncode
    if code not in (0, 1) or not RESULTS.exists():
        raise SystemExit(f"tools/oldest.py: pytest ended with code {code} and no result.")


def rows(root: ElementTree.Element) -> Iterable[Row]:
    for case in root.iter("testcase"):
        bad = next((e for e in case if e.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        name = f"{case.get('name')}: "
        if bad is not None:
            yield case.get("file", ""), "failed", name + (bad.get("message") or "").partition("\n")[0]
        elif skipped is not None:
            yield case.get("file", ""), "skipped", skipped.get("message") or ""
        else:
            yield case.get("file", ""), "passed", ""


def cpu() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def table(found: list[Row]) -> list[str]:
    counts = Counter((file, outcome) for file, outcome, _ in found)
    lines = [f"| file | {' | '.join(OUTCOMES)} |", "| --- | ---: | ---: | ---: |"]
    for file in sorted({file for file, _, _ in found}):
        lines.append(f"| `{file}` | " + " | ".join(str(counts[file, outcome]) for outcome in OUTCOMES) + " |")
    total = Counter(outcome for _, outcome, _ in found)
    return [*lines, "| **all** | " + " | ".join(f"**{total[outcome]}**" for outcome in OUTCOMES) + " |"]


def page(root: ElementTree.Element, versions: str, oldest: str) -> str:
    """Return the page, from the output of pytest."""
    found = list(rows(root))
    seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    lines = [
        "# Oldest versions",
        "",
        f"Made by `make oldest` on {datetime.date.today().isoformat()}: the core tests with {versions}, "
        f"in {seconds:.0f} s on {os.cpu_count()} cores ({cpu()}). {oldest}",
        "",
        "The core tests are those of `pytest --core`: they need torch, numpy, pytest and hypothesis alone. The tests",
        "of the recipes, the documentation and the benchmarks run on the versions of `constraints.txt` alone.",
        "",
        *table(found),
    ]
    for outcome, title in (("failed", "Failed"), ("skipped", "Skipped")):
        reasons = Counter(reason for _, kind, reason in found if kind == outcome)
        if reasons:
            lines += ["", f"## {title}", "", "| tests | reason |", "| ---: | --- |"]
            lines += [f"| {n} | {reason.replace('|', chr(92) + '|')} |" for reason, n in reasons.most_common()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/oldest.md", help="the page to write")
    args, more = parser.parse_known_args()  # what is left goes to pytest
    text = (ROOT / "pyproject.toml").read_text()
    python, torch = minimum(text, r'requires-python = ">=([\d.]+)"'), minimum(text, r'"torch>=([\d.]+)"')
    mine = install(interpreter(python), torch)
    run(mine, more)
    ask = "import platform, torch; print('Python', platform.python_version(), 'and torch', torch.__version__)"
    versions = subprocess.run([mine, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    oldest = f"`pyproject.toml` allows Python {python} and torch {torch}, and later ones."
    if not versions.startswith(f"Python {python}."):
        oldest += f" No Python {python} was found on this machine."
    root = ElementTree.parse(RESULTS).getroot()
    args.out.write_text(page(root, versions, oldest), encoding="utf-8")
    print(args.out.read_text(encoding="utf-8"))
    return any(outcome == "failed" for _, outcome, _ in rows(root))


if __name__ == "__main__":
    sys.exit(main())
