"""clean(): the function, its parts, and its baselines, on a few hundred digits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_recipes.data_cleaning import baselines, clean
from bilevel_recipes.data_cleaning.clean import SOLVERS, Indexed, batches, log_odds, suggest
from bilevel_recipes.data_cleaning.score import f1, verdict
from bilevel_recipes.models import MODELS, build


def digits(begin: int, end: int) -> tuple[Tensor, Tensor]:
    part = load_digits()
    return torch.tensor(part.data[begin:end] / 8 - 1, dtype=torch.float), torch.tensor(part.target[begin:end])


def problem(n: int = 200, m: int = 150) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Noisy digits with 40 % wrong labels, checked ones, and which of the noisy are right."""
    (x, y), validation = digits(0, n), digits(n, n + m)
    wrong = torch.arange(n) % 5 < 2
    return (x, torch.where(wrong, (y + 1 + torch.arange(n) % 9) % 10, y)), validation, ~wrong


def linear() -> nn.Module:
    return build("linear", (64,), 10, 0)


FAST: dict[str, Any] = {"steps": 20, "outer_steps": 3, "lr": 0.1, "momentum": 0.5}


@pytest.mark.parametrize("judge", ["evidence", "validation"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_wrong_labels_are_found(judge: Any, solver: str) -> None:
    train, validation, truth = problem()
    result = clean(linear(), train, validation, judge=judge, solver=solver, **FAST)
    assert f1(result.kept, truth) > 0.85
    assert result.weights[truth].mean() > result.weights[~truth].mean()
    assert [row["step"] for row in result.history] == [1, 2, 3]
    suspects = ~result.kept & ~truth
    assert (result.suggested[suspects] == digits(0, 200)[1][suspects]).float().mean() > 0.7
    assert torch.equal(result.suggested[result.kept], train[1][result.kept])


def test_the_first_step_of_the_paper_is_the_sign_of_the_hypergradient() -> None:
    """Against central differences of g(w_K(λ)): one Adam step moves λ_i against ∂g/∂λ_i."""
    train, validation, _ = problem(12, 30)
    model = linear().double()
    train, validation = (train[0].double(), train[1]), (validation[0].double(), validation[1])

    def g(lam: Tensor) -> Tensor:
        w, b = torch.zeros(10, 64, dtype=torch.double), torch.zeros(10, dtype=torch.double)
        for k in range(1, 6):
            a = k**-0.25
            w, b = w.requires_grad_(), b.requires_grad_()
            ce = nn.functional.cross_entropy
            loss = a * (torch.sigmoid(lam) * ce(train[0] @ w.T + b, train[1], reduction="none")).mean()
            loss = loss + (1 - a) * ce(validation[0] @ w.T + b, validation[1])
            dw, db = torch.autograd.grad(loss, [w, b])
            w, b = (w - 0.1 * dw).detach(), (b - 0.1 * db).detach()
        return nn.functional.cross_entropy(validation[0] @ w.T + b, validation[1])

    eye, eps = torch.eye(12, dtype=torch.double), 1e-4
    slope = torch.stack([(g(eps * e) - g(-eps * e)) / (2 * eps) for e in eye])
    result = clean(model, train, validation, judge="validation", lr=0.1, momentum=0.0, steps=5, outer_steps=1, eta=0.5)
    assert torch.allclose(result.lam, (-0.5 * slope.sign()).float(), atol=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("temper", [0.25, 1.0, 4.0])
def test_log_odds_find_the_posterior_whatever_the_confidence(share: float, temper: float) -> None:
    """10,000 labels drawn from known probabilities, a share of them kept; the model is over- or underconfident."""
    draw, n = torch.Generator().manual_seed(0), 10_000
    logits = 3 * torch.randn(n, 10, generator=draw)
    truth = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    shift = torch.randint(1, 10, (n,), generator=draw)
    y = torch.where(torch.rand(n, generator=draw) < share, truth, (truth + shift) % 10)
    p = logits.softmax(1)[torch.arange(n), y]
    exact = share * p / (share * p + (1 - share) * (1 - p) / 9)  # Bayes, with what nobody knows
    found = torch.sigmoid(log_odds(temper * logits, y))
    assert (found - exact).abs().mean() < 0.03
    assert abs(found.mean() - share) < 0.03


def test_log_odds_stay_finite_for_a_certain_model() -> None:
    odds = log_odds(torch.tensor([[1e4, 0.0], [1e4, 0.0], [0.0, 1e4]]), torch.tensor([0, 1, 1]))
    assert torch.isfinite(odds).all()
    assert odds[0] > odds[1]


def test_suggest_never_repeats_a_label_that_it_calls_wrong() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    assert suggest(scores, torch.tensor([0, 0, 0]), torch.tensor([-1.0, 1.0, -1.0])).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"judge": "evidence"},
        {"judge": "evidence", "batch_size": 16},
        {"judge": "validation"},
        {"judge": "validation", "batch_size": 16, "workers": 1},
        {"judge": "validation", "warm": True},
    ],
)
def test_going_on_from_any_step_gives_the_same_bits(options: dict[str, Any]) -> None:
    train, validation, _ = problem()
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.2), nn.Linear(8, 10))
    states: list[dict[str, Any]] = []
    options = {**FAST, **options}
    whole = clean(model, train, validation, on_step=lambda s: states.append(copy.deepcopy(s)), **options)
    for state in states[:-1]:
        rest = clean(model, train, validation, state=state, **options)
        assert torch.equal(rest.lam, whole.lam)
        assert torch.equal(rest.suggested, whole.suggested)


def test_seeds_differ_and_the_model_is_left_alone() -> None:
    train, validation, _ = problem()
    model = build("mlp", (64,), 10, 0)
    before = copy.deepcopy(model.state_dict())
    a, b = (
        clean(model, train, validation, judge="validation", batch_size=16, warm=True, seed=s, **FAST).lam
        for s in (0, 1)
    )
    assert not torch.equal(a, b)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_bf16_and_checkpointing_find_the_same_samples() -> None:
    train, validation, truth = problem()
    model = linear()
    plain = clean(model, train, validation, judge="validation", **FAST)
    stored = clean(model, train, validation, judge="validation", engine=bilevel.Reverse(checkpoint="sqrt"), **FAST)
    rough = clean(model, train, validation, judge="validation", bf16=True, **FAST)
    torch.testing.assert_close(plain.lam, stored.lam, rtol=1e-4, atol=1e-5)  # a step that is run again rounds otherwise
    assert f1(rough.kept, truth) > 0.9


def test_influence_is_the_hypergradient_in_units_of_log_odds() -> None:
    """λ(influence = 2) − λ(0) is twice λ(1) − λ(0), where nothing is capped, and not 0."""
    train, validation, _ = problem()
    zero, one, two = (
        clean(linear(), train, validation, influence=b, steps=5, outer_steps=1, lr=0.01).lam for b in (0, 1, 2)
    )
    free = two.abs() < 8
    assert free.float().mean() > 0.5
    assert torch.allclose((two - zero)[free], 2 * (one - zero)[free], rtol=1e-3, atol=1e-4)
    assert (one - zero).abs().max() > 0.01


def test_clean_leaves_the_generator_alone_and_a_warm_start_is_no_evidence() -> None:
    train, validation, _ = problem()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    clean(linear(), train, validation, **FAST)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="has seen the half to be judged"):
        clean(linear(), train, validation, warm=True)


def test_every_changes_bigsam() -> None:
    train, validation, _ = problem()
    model = linear()
    once, seldom = (
        clean(model, train, validation, judge="validation", every=e, **FAST).history[-1]["g"] for e in (1, 7)
    )
    assert once < seldom  # fewer steps on g leave g higher


@pytest.mark.parametrize(
    ("option", "message"), [({"judge": "oracle"}, "evidence, validation"), ({"solver": "adam"}, "gd, bigsam")]
)
def test_unknown_names_list_the_known(option: dict[str, Any], message: str) -> None:
    train, validation, _ = problem()
    with pytest.raises(ValueError, match=message):
        clean(linear(), train, validation, **option)


def test_an_epoch_of_batches_shows_every_row_once() -> None:
    pair, rows = digits(0, 50), torch.arange(10, 50)
    feed = batches(pair, rows, 8, torch.Generator().manual_seed(0))
    epoch = [next(feed) for _ in range(5)]
    assert sorted(torch.cat([i for *_, i in epoch]).tolist()) == rows.tolist()
    assert all(torch.equal(x, pair[0][i]) and torch.equal(y, pair[1][i]) for x, y, i in epoch)
    assert len(Indexed(pair, rows)) == 40


@pytest.mark.parametrize("name", MODELS)
def test_models_take_images_and_depend_on_the_seed_alone(name: str) -> None:
    shape, x = (3, 16, 16), torch.randn(2, 3, 16, 16)
    torch.manual_seed(5)
    first = build(name, shape, 7, 0)
    torch.manual_seed(6)
    second = build(name, shape, 7, 0)
    assert first(x).shape == (2, 7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_resnet_takes_second_derivatives() -> None:
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 2
    result = clean(
        build("resnet18", (1, 8, 8), 2, 0), (x, y), (x, y), judge="validation", steps=2, outer_steps=1, lr=0.01
    )
    assert result.lam.abs().max() > 0.1
    assert torch.isfinite(result.lam).all()


def test_models_for_images_refuse_rows() -> None:
    with pytest.raises(ValueError, match="use linear or mlp"):
        build("cnn", (20,), 3, 0)
    with pytest.raises(ValueError, match="linear, mlp, cnn, resnet18"):
        build("vit", (20,), 3, 0)


def test_the_baselines_find_wrong_labels() -> None:
    train, validation, truth = problem()
    model = linear()
    kept, probabilities = baselines.by_validation(model, train, validation, steps=50, lr=0.1)
    assert f1(kept, truth) > 0.9
    assert torch.allclose(probabilities.sum(1), torch.ones(200))
    assert baselines.accuracy(baselines.fit(model, validation, steps=50, lr=0.1), digits(1000, 1300)) > 0.8


def test_cleanlab_where_it_is_installed() -> None:
    pytest.importorskip("cleanlab")
    train, _, truth = problem()
    probabilities = baselines.cross_validated(linear(), train, steps=50, lr=0.03)
    assert f1(baselines.by_cleanlab(train[1], probabilities), truth) > 0.8  # all kept: 0.75


def test_f1_of_both_classes() -> None:
    kept, clean_ = [True, True, True, False, False], [True, True, False, False, True]
    found = verdict(kept, clean_)
    assert found == {
        "f1_clean": pytest.approx(4 / 6),
        "f1_corrupted": pytest.approx(2 / 4),
        "precision": 0.5,
        "recall": 0.5,
    }
    everything_bad = verdict([False] * 10, [True] + [False] * 9)
    assert everything_bad["f1_corrupted"] == pytest.approx(18 / 19)  # 0.947: why the paper's F1 is the other one
    assert everything_bad["f1_clean"] == 0
