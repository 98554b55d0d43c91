"""The table against other libraries: the judge is right, so is a block, and the page says what was found."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import peers_matrix
from benchmarks.peers_loops import LIBRARIES, OURS, ROWS, Row, built, ours, perceptron, truth
from benchmarks.runners import importable

ROW = {row.title: row for row in ROWS}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_a_block_is_right_in_each_loop_or_warns(row: Row) -> None:
    cell = peers_matrix.cell(row, OURS)
    assert cell["outcome"] == ("warns" if "detach" in row.title else "right"), cell


@pytest.mark.usefixtures("double")
def test_what_is_wrong_is_found() -> None:
    """Half of the gradient is off by a half; a library that stops, or lacks something, is told apart."""
    row = ROW["SGD"]

    def half(loop):
        return [grad / 2 for grad in ours(loop)]

    def stops(loop):
        raise RuntimeError("no such kernel\nat line 3")

    def lacks(loop):
        raise peers_matrix.NotThereError("it has one rule")

    off = peers_matrix.attempt(row, half)
    assert off["outcome"] == "wrong"
    assert abs(off["error"] - 0.5) < 1e-6
    assert peers_matrix.shown(off) == "**50 %**"
    assert peers_matrix.attempt(row, stops) == {"outcome": "error", "note": "RuntimeError: no such kernel"}
    assert peers_matrix.attempt(row, lacks) == {"outcome": "not there", "note": "it has one rule"}


@pytest.mark.usefixtures("double")
def test_the_judge_is_that_of_a_closed_form() -> None:
    """One step: dg(w_1)/dλ = −t·⟨∇g(w_1), ∂∇h(w_0)/∂λ⟩."""

    def make():
        return replace(loop := perceptron(), batches=loop.batches[:1])

    start, end = built(make), built(make)
    end.plain()
    weights = list(start.model.parameters())
    grads = torch.autograd.grad(start.h(start.model, *start.batches[0]), weights, create_graph=True)
    at_end = torch.autograd.grad(end.g(end.model, *end.val), list(end.model.parameters()))
    closed = torch.autograd.grad(grads, start.lam[0], [-0.5 * x for x in at_end])[0]
    assert torch.allclose(truth(make), closed, rtol=1e-7, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != OURS])
def test_each_library_is_right_where_it_should_be(library: str) -> None:
    """The runners are not what is wrong: on plain SGD all agree with the differences."""
    if (why := importable(LIBRARIES[library].module)) is not True:
        pytest.skip(f"{library} is not installed: {why}")
    found = peers_matrix.measured(library, [ROW["SGD"], ROW["`nn.LSTM`"]], {"memory": ("P5", 4, 3)})
    assert [found["cells"][title]["outcome"] for title in ("SGD", "`nn.LSTM`")] == ["right", "right"]
    assert found["cells"]["memory"]["ratio"] > 1


def test_the_page_is_that_of_the_stored_figures(tmp_path, monkeypatch) -> None:
    """docs/results/peers.md was not edited by hand, and a library without figures says so."""
    stored = peers_matrix.Path(__file__).parent.parent / "docs" / "results"
    for name in ("peers.json", "peers_notes.md"):
        (tmp_path / name).write_text((stored / name).read_text(encoding="utf-8"), encoding="utf-8")
    peers_matrix.main(["--libraries", "", "--out", str(tmp_path)])
    assert (tmp_path / "peers.md").read_text(encoding="utf-8") == (stored / "peers.md").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    assert set(found) == set(LIBRARIES)
    del found["Betty"]
    assert "not installed here" in peers_matrix.table(found, ["SGD"])


def test_an_unknown_library_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        peers_matrix.main(["--libraries", "lower"])
    assert "no lower; known: bilevel_plugin, higher" in capsys.readouterr().err
