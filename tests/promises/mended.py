"""Take out of red.py what is mended: `python tests/promises/mended.py [files]`. Nothing is ever added by it.

It runs the tests of these files (all, if none is named) with the marks, and looks for those that pass unexpectedly.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from red import RED, Red

HERE = Path(__file__).parent


class Passed:
    """Collects the listed tests that pass, as (file, test, what, variant)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and str(report.longrepr).startswith("[XPASS(strict)]"):
            path, _, test = report.nodeid.partition("::")
            name, _, params = test.partition("[")
            what, _, variant = params.removesuffix("]").rpartition("-")
            self.found.append((Path(path).name, name, what, variant))


def without(passed: list[tuple[str, str, str, str]]) -> Red:
    """The list without these tests."""
    kept: Red = {}
    for file, tests in RED.items():
        for test, (row, found) in tests.items():
            for what, variants in found.items():
                if (file, test, what, variants) in passed:
                    continue
                left = [v for v in variants.split() if (file, test, what, v) not in passed]
                if left or not variants:
                    kept.setdefault(file, {}).setdefault(test, (row, {}))[1][what] = " ".join(left)
    return kept


def main() -> None:
    passed = Passed()
    files = sys.argv[1:] or [str(HERE)]
    pytest.main(["-q", "-n", "0", "--tb=no", "-p", "no:cacheprovider", *files], plugins=[passed])
    source = HERE / "red.py"
    head, _, _ = source.read_text().partition("RED: Red = ")
    source.write_text(f"{head}RED: Red = {without(passed.found)!r}\n")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(source)], check=False)
    print(f"{len(passed.found)} mended")


if __name__ == "__main__":
    main()
