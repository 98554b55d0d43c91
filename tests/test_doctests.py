"""The examples in the docstrings of the public names, run as they are printed."""

import doctest
import importlib
import pkgutil

import pytest

import bilevel_plugin

# Parts for solvers, engines and updates of one's own: docs/extending.md, which the tests run, has their examples.
IN_EXTENDING = {"Engine", "OuterLoss", "Step", "StepRule", "Tape", "Traced", "Update", "traced"}
TYPES = {
    "Gradients",
    "Rate",
    "State",
    "Value",
    "DerivativeWarning",
    "Loop",
    "Forecast",
    "copy",
}  # Loop: its methods have examples
METHODS = {"accumulate", "backward", "commit_", "hypergrad", "run", "step"}


def examples():
    """The docstrings of the package that have an example, by name."""
    modules = [m.name for m in pkgutil.walk_packages(bilevel_plugin.__path__, "bilevel_plugin.")]
    found = [t for m in modules for t in doctest.DocTestFinder().find(importlib.import_module(m)) if t.examples]
    return {t.name.removeprefix("bilevel_plugin."): t for t in found}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found = runner.run(EXAMPLES[name], out=said.append)
    assert found.attempted > 0
    assert found.failed == 0, "".join(said)


def test_every_public_name_has_an_example():
    names = {name.rpartition(".")[2] for name in EXAMPLES}
    assert set(bilevel_plugin.__all__) - names == IN_EXTENDING | TYPES
    assert names >= METHODS
