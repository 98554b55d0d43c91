"""The README's Python runs as printed."""

import contextlib
import io
import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run_as_printed():
    example, check = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    torch.manual_seed(0)
    names, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(example, names)
    wrong, right = map(int, re.findall(r"(\d+)%", out.getvalue()))
    assert wrong >= 90
    assert right <= 10
    with contextlib.redirect_stdout(out):
        exec(check, names)
    assert names["report"], out.getvalue()
