"""The benchmarks run on a tiny size, and all that are exact agree."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from problems import relative

from benchmarks import quality, report
from benchmarks.problems import make
from benchmarks.runners import RUNNERS, stored

NAMES = ("P1", "P3", "P4-5", "P5")  # one of each kind
HERE = [r for r in RUNNERS if not r.missing() and not r.compiled]  # compiling takes seconds


@functools.cache
def reference(name):
    return stored(make(name, "tiny", smooth=True, dtype=torch.float64))()


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runner", HERE, ids=lambda r: r.name)
def test_exact(runner, name):
    """In float64, on a smooth problem, twice in a row: the model is left as it was."""
    if not runner.takes(name):
        pytest.skip("it is for another problem")
    expected = reference(name)
    run = runner.build(make(name, "tiny", smooth=True, dtype=torch.float64))
    for found in (run(), run()):
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) <= 1e-8 or torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_right(name):
    """Stored iterates by hand against central differences along a random direction."""
    found = reference(name)
    direction = [torch.randn_like(x) for x in found]

    def value(step):
        p = make(name, "tiny", smooth=True, dtype=torch.float64)
        with torch.no_grad():
            for x, d in zip(p.outer, direction, strict=True):
                x.add_(d, alpha=step)
        inner, outer = p.batches()
        for k in range(p.steps):
            grads = torch.autograd.grad(
                p.h(p.model, *inner[k % len(inner)]), list(p.model.parameters()), retain_graph=True
            )
            with torch.no_grad():
                for x, grad in zip(p.model.parameters(), grads, strict=True):
                    x.sub_(grad, alpha=p.lr)
        return p.g(p.model, *outer).detach()

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert relative(sum((a * b).sum() for a, b in zip(found, direction, strict=True)), slope) <= 1e-6


def test_command(tmp_path):
    """The whole way from the command to the page, on one problem."""
    flags = [
        "--size",
        "tiny",
        "--problems",
        "P1",
        "--runners",
        "ours: unroll,higher,hypertorch",
        "--rounds",
        "1",
    ]
    flags += ["--parts", "table,growth", "--threads", "1", "--out", str(tmp_path)]
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks", *flags], check=True, capture_output=True, text=True
    ).stdout
    rows = json.loads((tmp_path / "benchmarks.json").read_text())["table"]["P1"]["rows"]
    for name in ("ours: unroll", "higher"):
        assert "failed" not in rows[name]
        assert rows[name]["error"] < 1e-5
        assert rows[name]["operators"] > 100
        assert f"\n| {name} |" in out
    assert "| hypertorch | not on the package index" in out
    assert (tmp_path / "benchmarks_pareto.png").is_file()
    assert (tmp_path / "benchmarks_growth.png").is_file()


def test_reached():
    curve = [(float(k), 0.95 if k > 3 else 0.8) for k in range(20)]
    assert quality.reached(curve, 0.9) == 4.0
    assert quality.reached(curve[:9], 0.9) is None  # it did not stay there for long enough


def test_only_the_exact_are_compared_with():
    rows = {
        "wrong": {"group": "peer", "error": 0.5, "seconds": [1.0]},
        "right": {"group": "peer", "error": 1e-6, "seconds": [2.0, 3.0, 9.0]},
        "no peer": {"group": "reference", "error": 1e-6, "seconds": [0.1]},
        "absent": {"group": "peer", "failed": "not installed"},
    }
    assert report.best(rows, "seconds") == 3.0
