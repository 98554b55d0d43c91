"""Attribution through a user's training: against training without the row, for rows and tokens, resumed, refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel
from bilevel_recipes import runs
from bilevel_recipes.attribution import Attribution, Influence
from bilevel_recipes.attribution.gradients import gradients_of
from bilevel_recipes.attribution.trust import GOOD, rank_correlations

ROWS, QUERIES = 60, 4


def problem(activation=nn.Tanh, lr=0.5, dtype=torch.float64):
    torch.manual_seed(0)
    x, xq = torch.randn(ROWS, 5, dtype=dtype), torch.randn(QUERIES, 5, dtype=dtype)
    y, yq = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1), (xq[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 4)).to(dtype)

    def train(weights):
        def h(model, i):
            return (weights[i] * cross_entropy(model(x[i]), y[i], reduction="none")).mean()

        order = torch.Generator().manual_seed(1)
        with bilevel.inner(model, h, solver="gd", lr=lr) as loop:
            for _ in range(5):
                for i in torch.randperm(ROWS, generator=order).split(20):
                    loop.step(i)
            yield loop

    return train, (xq, yq)


def attribution(leave_out=1, **how):
    train, queries = problem()
    return Attribution(train, ROWS, queries, leave_out, dtype=torch.float64, **how)


def test_an_effect_is_the_derivative_of_the_loss_for_the_weight_of_the_row():
    work = attribution()
    found = work.explain()
    assert found.effects.shape == (QUERIES, ROWS)
    for row in (3, 17):
        up, down = torch.ones(2, ROWS, dtype=torch.float64)
        up[row], down[row] = 1 + 1e-5, 1 - 1e-5
        slope = (work.losses(up) - work.losses(down)) / 2e-5
        assert torch.allclose(-slope, found.effects[:, row].double(), rtol=1e-6, atol=1e-9)


def test_it_predicts_a_training_without_the_row():
    work = attribution()
    found = work.explain()
    without = torch.ones(5, ROWS)
    for k in range(5):
        without[k, 10 * k] = 0
    real = torch.stack([work.losses(w.double()) for w in without])
    predicted = found.predicted(without)
    assert torch.equal(predicted[2], found.predicted(without[2]))
    changes = predicted - found.losses, real - found.losses
    assert float((changes[0] - changes[1]).norm() / changes[1].norm()) < 0.2


def test_for_halves_the_point_of_linearisation_is_the_mean_weight_and_it_predicts_better():
    one, half = attribution(), attribution(0.5)
    assert half.point()[0] == 0.5
    assert attribution(6).point()[0] == 0.9
    assert attribution(1).point()[0] == 1
    trusted = [work.trust(work.explain(), subsets=0) for work in (one, half)]
    assert all(t.smoothness > 0.9 for t in trusted)
    masks = torch.stack(
        [(torch.randperm(ROWS, generator=torch.Generator().manual_seed(s)) < 30) * 1.0 for s in range(20)]
    )
    real = torch.stack([half.losses(m.double()) for m in masks]).numpy()
    scores = [rank_correlations(work.explain().predicted(masks).numpy(), real).mean() for work in (one, half)]
    assert scores[1] > scores[0]
    assert scores[1] > 0.95


def test_gradients_one_by_one_are_those_of_the_losses():
    train, (xq, yq) = problem()
    weights = torch.ones(ROWS, dtype=torch.float64, requires_grad=True)
    queries = lambda model: cross_entropy(model(xq), yq, reduction="none")
    training = train(weights)
    loop = next(training)
    each = torch.stack(list(gradients_of(loop, weights, queries, range(QUERIES))))
    whole = loop.hypergrad(weights, loss=queries(loop).sum())
    assert next(training, None) is None
    assert torch.allclose(each.sum(0), whole, rtol=1e-10)


def text_problem():
    """Per-token weights: a row is a sequence, and each of its places has a weight."""
    torch.manual_seed(0)
    rows, length, letters = 12, 6, 5
    x, y = torch.randint(letters, (2, rows, length))
    model = nn.Sequential(nn.Embedding(letters, 8), nn.Linear(8, letters)).double()

    def train(weights):
        def h(model, i):
            loss = cross_entropy(model(x[i]).flatten(0, 1), y[i].flatten(), reduction="none").view(len(i), length)
            return (weights[i].view(len(i), -1) * loss).mean()

        with bilevel.inner(model, h, solver="gd", lr=1.0) as loop:
            for i in torch.arange(rows).split(4):
                loop.step(i)
            yield loop

    return train, lambda model: cross_entropy(model(x[:2]).transpose(1, 2), y[:2], reduction="none").mean(1)


def test_weights_of_tokens_add_up_to_those_of_rows():
    train, queries = text_problem()
    of_tokens = Attribution(train, (12, 6), queries, dtype=torch.float64).explain()
    of_rows = Attribution(train, 12, queries, dtype=torch.float64).explain()
    assert of_tokens.effects.shape == (2, 12, 6)
    assert torch.allclose(of_tokens.of_rows, of_rows.effects, rtol=1e-4, atol=1e-9)
    assert of_tokens.tokens(1, 3).shape == (6,)
    weights = torch.ones(12, 6)
    weights[3] = 0
    assert torch.allclose(of_tokens.predicted(weights), of_rows.predicted(weights[:, 0]), rtol=1e-5)
    with pytest.raises(ValueError, match="one weight for each row"):
        of_rows.tokens(1, 3)
    work = Attribution(train, (12, 6), queries, 0.25, dtype=torch.float64)
    assert work.trust(work.explain(), subsets=3).subsets == 3


def influence():
    effects = torch.tensor([[0.3, -0.1, 0.0, 0.1], [-0.2, 0.4, 0.0, 0.2]])
    return Influence(effects, torch.tensor([1.0, 2.0]), 0.25, 1.0, ("a", "b", "c", "d"), ("p", "q"))


def test_tables_have_the_largest_effects_of_either_sign():
    found = influence()
    top = found.top(0, 2)
    assert top["name"].tolist() == ["a", "d", "b"]
    assert top["did"].tolist() == ["helped", "helped", "hurt"]
    assert top["share"].tolist() == pytest.approx([0.6, 0.2, 0.2])
    assert set(top["query_name"]) == {"p"}
    together = found.together(count=1)
    assert together[["name", "did"]].to_numpy().tolist() == [["b", "helped"]] or together.shape[0] == 1
    assert found.together([0], count=1)["name"].tolist() == ["a", "b"]
    assert len(found.frame(1)) == 4


def test_it_is_written_and_read_again(tmp_path):
    found = influence()
    found.save(tmp_path / "influence.npz")
    again = Influence.load(tmp_path / "influence.npz")
    assert torch.equal(again.effects, found.effects)
    assert (again.rows, again.queries, again.weight) == (found.rows, found.queries, found.weight)
    found.to_csv(tmp_path / "top.csv", 1)
    assert pd.read_csv(tmp_path / "top.csv")["name"].tolist() == found.frame(1)["name"].tolist()


def test_trust_says_whether_to_believe_it():
    good = attribution(0.1)
    trusted = good.trust(good.explain(), subsets=10)
    assert trusted.agreement > GOOD
    assert trusted.left_out == 0.1
    assert trusted.verdict().startswith("The lists can be believed")
    assert "metasmoothness" in str(trusted)
    train, queries = problem(nn.ReLU, lr=30.0)
    bad = Attribution(train, ROWS, queries, 0.1, dtype=torch.float64)
    doubted = bad.trust(bad.explain(), subsets=10)
    assert doubted.agreement < trusted.agreement
    assert not doubted.verdict().startswith("The lists can be believed")
    unchecked = good.trust(good.explain(), subsets=0)
    assert np.isnan(unchecked.agreement)
    assert unchecked.verdict().startswith("Do not rely")


def test_an_interrupted_call_goes_on_with_the_query_after_the_last(tmp_path):
    told: list[str] = []

    def stop(share: float, words: str) -> None:
        told.append(words)
        if words.startswith("query 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribution().explain(folder=tmp_path, progress=stop)
    state = runs.load(tmp_path / "influence.pt")
    assert state is not None
    assert len(state["effects"]) == 2
    again: list[str] = []
    found = attribution().explain(folder=tmp_path, progress=lambda share, words: again.append(words))
    assert [w for w in again if w.startswith("query")] == ["query 3 of 4", "query 4 of 4"]
    assert torch.equal(found.effects, attribution().explain().effects)
    with pytest.raises(ValueError, match="queries of another training"):
        attribution(0.5).explain(folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 0}, "rows is a number"),
        ({"leave_out": 60}, "less than 60"),
        ({"leave_out": 1.5}, "a share below 1"),
    ],
)
def test_what_is_refused(change, words):
    train, queries = problem()
    with pytest.raises(ValueError, match=words):
        Attribution(**{"train": train, "rows": ROWS, "queries": queries, **change})


def test_a_training_that_does_not_hand_over_its_loop_is_refused():
    _, queries = problem()
    with pytest.raises(TypeError, match="Write `yield loop`"):
        Attribution(lambda weights: None, ROWS, queries).explain()
    with pytest.raises(TypeError, match="yielded int, and not its loop"):
        Attribution(lambda weights: iter([3]), ROWS, queries).explain()


def test_a_function_that_takes_a_hypergradient_of_its_own_is_taken_too():
    train, queries = problem()

    def took(weights):
        training = train(weights)
        return next(training).hypergrad(weights)

    found = Attribution(took, ROWS, queries, dtype=torch.float64).explain()
    assert torch.equal(found.effects, attribution().explain().effects)


def test_queries_without_a_loss_each_are_refused():
    train, (xq, yq) = problem()
    with pytest.raises(ValueError, match="reduction='none'"):
        Attribution(train, ROWS, lambda model: cross_entropy(model(xq), yq), dtype=torch.float64).explain()


def test_names_of_rows_and_queries_are_kept():
    train, queries = problem()
    found = Attribution(train, [f"row {i}" for i in range(ROWS)], queries, names="wxyz", dtype=torch.float64).explain()
    assert found.rows[7] == "row 7"
    assert found.queries == tuple("wxyz")
    assert found.top(1, 1)["query_name"].tolist()[0] == "x"


def test_ranks():
    a = np.array([[1.0, 5.0, 2.0], [2.0, 4.0, 2.0], [3.0, 3.0, 2.0]])
    found = rank_correlations(a, np.array([[1.0, 1.0, 1.0], [4.0, 4.0, 4.0], [9.0, 9.0, 9.0]]))
    assert found[:2].tolist() == pytest.approx([1, -1])
    assert np.isnan(found[2])
