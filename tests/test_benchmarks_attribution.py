"""The study of attribution: plain trainings are those of torch, scores are right, the page has what there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel
from benchmarks import attribution, attribution_methods, attribution_page, forecasts
from benchmarks.attribution_settings import SETTINGS, Problem, setting, text_and_letters
from bilevel_recipes import runs
from bilevel_recipes.attribution import Attribution

TINY = replace(setting("digits-tanh"), rows=60, batch=20, epochs=2)


def test_a_stack_of_trainings_is_each_of_them_by_torch():
    p = Problem(replace(TINY, momentum=0.9), queries=3)
    masks = torch.ones(2, 60)
    masks[1, ::3] = 0
    states, losses, right = p.retrained(masks)
    for k, mask in enumerate(masks):
        model = Problem(replace(TINY, momentum=0.9), queries=3).model
        sgd = torch.optim.SGD(model.parameters(), lr=TINY.lr, momentum=0.9)
        for i in p.batches(torch.arange(60), 0):
            sgd.zero_grad()
            (mask[i] * cross_entropy(model(p.x[i]), p.y[i], reduction="none")).mean().backward()
            sgd.step()
        for n, w in model.named_parameters():
            assert torch.allclose(states[n][k], w, atol=1e-5)
        assert torch.allclose(losses[k], p.queries(model).detach(), atol=1e-5)
        assert torch.equal(right[k], model(p.xq).argmax(1) == p.yq)


@pytest.mark.parametrize("name", ["digits-tanh", "text-gpt"])
def test_the_library_trains_in_the_same_way(name):
    p = Problem(replace(setting(name), rows=60, batch=20, epochs=1), queries=2)
    masks = torch.ones(2, 60)
    masks[1, 5:25] = 0
    work = Attribution(p.train(), 60, p.queries)
    for mask, losses in zip(masks, p.retrained(masks)[1], strict=True):
        assert torch.allclose(work.losses(mask), losses, atol=1e-4)


def test_batches_of_their_own_have_only_rows_that_are_there():
    p = Problem(replace(TINY, own_batches=True))
    masks = torch.stack(attribution.random_subsets(60, 30, 3, seed=0))
    seen = [set() for _ in masks]
    for x, _, weight in p._stacked(masks, 0):
        assert (weight == 1).all()
        for k, rows in enumerate(x):
            seen[k] |= {int((p.x == row).all(1).nonzero()[0]) for row in rows}
    assert [len(s) for s in seen] == [30] * 3
    assert all(masks[k, list(s)].all() for k, s in enumerate(seen))


def test_the_ceiling():
    """Orders that agree have one of 1; what is added at random lowers it as it should."""
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(400, 3, generator=generator)
    assert attribution_page.ceiling([real]).tolist() == [1, 1, 1]
    assert attribution_page.ceiling([real, real, real]) == pytest.approx(np.ones(3), abs=1e-6)
    orders = [real + torch.randn(400, 3, generator=generator) for _ in range(5)]
    best = attribution_page.score(real, torch.stack(orders).mean(0))
    assert attribution_page.ceiling(orders) == pytest.approx(best, abs=0.06)


def test_area_under_the_curve():
    positive = torch.tensor([True, True, False, False])
    assert attribution.area(torch.tensor([4.0, 3.0, 2.0, 1.0]), positive) == 1
    assert attribution.area(torch.tensor([1.0, 4.0, 2.0, 3.0]), positive) == 0.5


def test_the_command_makes_each_piece_once_and_the_page_of_them(tmp_path, monkeypatch, capsys):
    few = replace(TINY, name="tiny", shares=(0.5,), epochs=1)
    for module in (attribution, attribution_page):
        monkeypatch.setattr(module, "SETTINGS", [few])
    monkeypatch.setattr(attribution, "SUBSETS", 6)
    monkeypatch.setattr(attribution_methods, "MODELS", 2)
    flags = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert attribution.main(flags) == 0
    assert capsys.readouterr().err.count("CPU s") == len(list((tmp_path / "runs").glob("*.pt")))
    page = (tmp_path / "attribution.md").read_text()
    assert "| **ours** |" in page
    assert "metasmoothness" in page
    assert (tmp_path / "attribution.png").stat().st_size > 1000
    assert attribution.main(flags) == 0
    assert capsys.readouterr().err == ""


def test_rivals_are_left_out_where_dattri_is_not(monkeypatch, tmp_path):
    if attribution_methods.dattri() is not None:
        found = attribution_methods.peers(p := Problem(TINY, queries=2), [p.start], [p.start])
        scores, _, option = found["influence, CG"]()[0]
        assert scores.shape == (60, 2)
        assert option == "damping 1"
    monkeypatch.setattr(attribution_methods, "dattri", lambda: None)
    assert attribution_methods.peers(Problem(TINY), [], []) == {}


def test_settings_have_names_of_their_own():
    assert len({s.name for s in SETTINGS}) == len(SETTINGS)
    text, letters = text_and_letters(8)
    assert len(text) == 40 * 32 * 8
    assert set(text) == set(letters)
    assert runs.versions()["torch"]


@pytest.mark.parametrize(
    "name", ["weights of rows, linear", "noise matrix", "learning rate of each step", "soft labels"]
)
def test_problems_of_the_forecasts_can_be_followed_a_little(name):
    assert bilevel.forecast(*forecasts.PROBLEMS[name](0), sizes=(0.01,)).radius == 0.01
