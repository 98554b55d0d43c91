"""The loops of this folder: `pytest docs/loops_next` (the default suite has tests/ alone)."""

from __future__ import annotations

import pytest

from docs.loops import END, HYPERGRADIENT, changed_lines, end_error, hypergradient_error

from . import NAMES, NEEDS, Next, oracle
from .__main__ import able

every = pytest.mark.parametrize("name", NAMES)


@every
def test_the_block_ends_where_the_plain_loop_ends(name: str) -> None:
    with able(name):
        assert end_error(Next(name)) <= END


@every
def test_the_hypergradient_is_the_derivative_of_the_plain_loop(name: str) -> None:
    with able(name):
        assert hypergradient_error(Next(name)) <= HYPERGRADIENT


@every
def test_what_is_new_takes_few_lines(name: str) -> None:
    lines, added, removed = changed_lines(Next(name))
    assert added - removed <= 6
    assert lines >= 20


@pytest.mark.parametrize("name", NEEDS)
def test_a_block_that_cuts_these_paths_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences see what goes through companions and computed values."""
    with able(name) as who:
        if who != "oracle":
            pytest.skip("the library has what this loop needs")
        monkeypatch.setattr(oracle, "CUT", True)
        assert hypergradient_error(Next(name), directions=1) > 1e3 * HYPERGRADIENT
