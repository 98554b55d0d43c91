"""The installed programs before their imports have ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
SCRIPTS = re.findall(r'^(bilevel-\w+) = "(.+):(.+)"$', (HOME / "pyproject.toml").read_text(encoding="utf-8"), re.M)


def test_the_programs_are_found() -> None:
    assert [program for program, _, _ in SCRIPTS] == ["bilevel-clean", "bilevel-fewshot", "bilevel-attribute"]


@pytest.mark.parametrize(("program", "module", "function"), SCRIPTS)
def test_ctrl_c_while_imports_run(program: str, module: str, function: str) -> None:
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        f"from {module} import {function} as main\n"
        "sys.exit(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HOME}:{HOME / 'recipes'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, f"{program}: stopped.")
