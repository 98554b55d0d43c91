"""Every loop of docs/loops: the block trains as the plain loop does, and its hypergradient is the plain loop's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import bilevel_plugin as bilevel
from docs import loops
from docs.loops import (
    END,
    HYPERGRADIENT,
    Entry,
    changed_lines,
    end_error,
    entries,
    flat,
    hypergradient_error,
    relative,
    trained,
)
from docs.loops.__main__ import pages, rows

ALL = entries()
every = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def _warnings_of_lightning() -> Iterator[None]:
    """Lightning's own code warns of torch's newer ways; every other warning is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        yield


@every
def test_the_block_ends_where_the_plain_loop_ends(entry: Entry) -> None:
    assert end_error(entry) <= END


@every
def test_the_hypergradient_is_the_derivative_of_the_plain_loop(entry: Entry) -> None:
    assert hypergradient_error(entry, directions=1) <= HYPERGRADIENT  # `make loops` tries three


@every
def test_unrolling_is_the_same_loop(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that keeps the graphs of all steps ends at the same weights, with the same hypergradient."""
    s, t = entry.make(), entry.make()
    value, grads = entry.wrapped(s)
    inner = bilevel.inner
    monkeypatch.setattr(bilevel, "inner", lambda *args, **options: inner(*args, **options | {"engine": "unroll"}))
    unrolled, found = entry.wrapped(t)
    assert relative(unrolled, value) <= END
    assert relative(flat(list(trained(t).values())), flat(list(trained(s).values()))) <= END
    assert relative(flat(found), flat(grads)) <= END


@every
def test_the_figures_are_of_this_code(entry: Entry) -> None:
    """As far as it can be told without measuring again: the table has the loop, and its numbers of lines."""
    lines, added, removed = changed_lines(entry)
    line = rows().get(entry.name)
    assert line, f"python -m docs.loops {entry.name} measures it"
    assert f"| {lines} | +{added} −{removed} |" in line


def test_the_pages_are_of_this_code() -> None:
    written = pages()
    for path, text in written.items():
        assert path.exists(), f"{path.name} is not there: python -m docs.loops --pages"
        assert path.read_text() == text, f"{path.name} is stale: python -m docs.loops --pages"
    assert set(loops.FOLDER.glob("*.md")) == set(written)
    assert set(rows()) == {entry.name for entry in ALL}


class Tampered(Entry):
    """The first loop, with one thing wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__("logistic_regression")
        object.__setattr__(self, "wrong", wrong)

    def wrapped(self, s):
        value, grads = super().wrapped(s)
        with torch.no_grad():
            if self.wrong == "weights":
                s.model.weight[0, 0] += 1e-8
            if self.wrong == "value":
                value = value * (1 + 1e-8)
            if self.wrong == "gradient":
                grads[0][0] *= 1 + 1e-4
        return value, grads


def test_the_checks_notice_what_is_wrong() -> None:
    assert end_error(Tampered("gradient")) <= END
    assert end_error(Tampered("weights")) > END
    assert end_error(Tampered("value")) > END
    assert hypergradient_error(Tampered("weights")) <= HYPERGRADIENT
    assert hypergradient_error(Tampered("gradient")) > HYPERGRADIENT


def test_a_plain_loop_that_trains_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("logistic_regression")
    monkeypatch.setattr(entry.module("plain"), "train", lambda s: s.model(s.x).sum())
    with pytest.raises(ValueError, match="leaves the model as it was"):
        end_error(entry)


def test_only_lines_that_say_something_else_count_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ["a", "", "for x in y:", "    b", "    c"]
    wrapped = ["a", "", "with d:", "    for x in y:", "        b", "", "        e"]
    monkeypatch.setattr(Entry, "code", lambda self, file: {"plain": plain, "wrapped": wrapped}[file])
    assert changed_lines(Entry("any")) == (4, 2, 1)
    assert loops.difference(Entry("any"), context=1) == [
        "", "+with d:", "     for x in y:", "         b", "-    c", "+", "+        e",
    ]  # fmt: skip
