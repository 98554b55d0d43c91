"""The noise matrix and the loop that learns it, against formulas that are written out here a second time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel_recipes.clean.noise import (
    DECAY,
    SPREAD,
    STRENGTH,
    Folds,
    Noise,
    estimate,
    expectation_maximisation,
    given_label_loss,
    learn,
    outer_loss,
    precondition,
    uniform_noise,
)


def random_matrix(classes: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that sum to 1, with entries from about 0.001 to 0.999."""
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(classes, classes, generator=draw, dtype=dtype)).softmax(1)


def example(
    rows: int = 40, inputs: int = 3, classes: int = 3, checked: int = 8, count: int = 4, seed: int = 0
) -> Folds:
    """A small problem in the default precision, with two groups of inputs."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % classes
    x = torch.randn(rows, inputs, generator=draw) + F.one_hot(y, max(inputs, classes))[:, :inputs]
    at = torch.arange(rows) < checked
    y = torch.where(~at & (torch.rand(rows, generator=draw) < 0.2), (y + 1) % classes, y)
    fold = torch.randperm(rows, generator=draw) % count
    penalty = 0.5 + torch.rand(inputs, generator=draw)
    group = (torch.arange(inputs) >= inputs - 1).long()
    return Folds(x, y, torch.full_like(y, -1), at, fold, penalty, group, classes)


# --- the noise matrix -------------------------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(0, 10**6), st.floats(0.05, 20))
def test_a_matrix_that_is_set_is_the_one_that_is_read(classes, seed, temperature):
    noise, matrix = Noise(classes, alpha=0.9).double(), random_matrix(classes, seed, torch.float64)
    with torch.no_grad():
        noise.deviation.normal_()  # of an older matrix
    noise.set(matrix, temperature)
    found = noise.log_matrix().exp()
    torch.testing.assert_close(found, matrix, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.sum(1), torch.ones(classes, dtype=torch.float64))
    assert float(noise.log_temperature.detach().exp()) == pytest.approx(temperature, rel=1e-6)
    assert float(noise.deviation.detach().mean(1).abs().max()) < 1e-9  # of all that give the matrix, the smallest


@given(st.integers(2, 8), st.floats(0.001, 0.95), st.integers(0, 10**6))
def test_rows_of_the_matrix_sum_to_one_whatever_the_variables_are(classes, rate, seed):
    noise = Noise(classes, alpha=0.5, rate=rate)
    uniform = noise.log_matrix().exp()
    torch.testing.assert_close(uniform.diagonal(), torch.full((classes,), 1 - rate), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        noise.deviation.copy_(10 * torch.randn(classes, classes, generator=torch.Generator().manual_seed(seed)))
    torch.testing.assert_close(noise.log_matrix().exp().sum(1), torch.ones(classes))


@given(st.integers(2, 5), st.integers(1, 7), st.integers(0, 10**6))
def test_the_loss_of_given_labels_against_two_loops(classes, rows, seed):
    draw = torch.Generator().manual_seed(seed)
    log_p = torch.randn(rows, 2, classes, generator=draw, dtype=torch.float64).log_softmax(-1)
    y, matrix = torch.randint(classes, (rows,), generator=draw), random_matrix(classes, seed, torch.float64)
    found, flat = given_label_loss(log_p, y, matrix.log()), given_label_loss(log_p[:, 1], y, matrix.log())
    for row in range(rows):
        for fold in range(2):
            p = sum(math.exp(log_p[row, fold, c]) * float(matrix[c, y[row]]) for c in range(classes))
            assert float(found[row, fold]) == pytest.approx(-math.log(p), rel=1e-9)
        assert float(flat[row]) == pytest.approx(float(found[row, 1]), rel=1e-12)


def test_without_noise_it_is_the_cross_entropy():
    logits, y = torch.randn(20, 4), torch.arange(20) % 4
    exact = given_label_loss(logits.log_softmax(1), y, torch.eye(4).log())
    torch.testing.assert_close(exact, F.cross_entropy(logits, y, reduction="none"))


def test_the_outer_loss_is_the_likelihood_with_the_prior():
    folds, noise = example(), Noise(3, alpha=0.8)
    with torch.no_grad():
        noise.deviation.normal_()
    logits = torch.randn(40, 3)
    p, matrix, total = logits.softmax(1), noise.log_matrix().detach().exp(), 0.0
    for row in range(40):
        y = int(folds.y[row])
        total -= math.log(float(p[row, y] if folds.checked[row] else p[row] @ matrix[:, y]))
    total += float(noise.deviation.detach().square().sum()) / (2 * SPREAD**2)
    assert outer_loss(folds, noise, logits).item() == pytest.approx(total / 40, rel=1e-5)


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_preconditioning_leaves_the_ridge_classifier_what_it_was():
    draw = torch.Generator().manual_seed(0)
    mixed = torch.randn(80, 5, generator=draw, dtype=torch.float64) * torch.tensor([30.0, 3, 1, 0.1, 0.03]) + 7
    x = mixed @ torch.linalg.qr(torch.randn(5, 5, generator=draw, dtype=torch.float64))[0]
    target = torch.randn(80, 2, generator=draw, dtype=torch.float64)
    inputs, penalty = precondition(x)
    plain = x - x.mean(0)
    plain = plain / plain.square().sum(1).mean().sqrt()
    for decay in (1e-4, 1e-2, 1.0):
        same = inputs @ torch.linalg.solve(inputs.T @ inputs + decay * penalty.diag(), inputs.T @ target)
        ridge = plain @ torch.linalg.solve(plain.T @ plain + decay * torch.eye(5).double(), plain.T @ target)
        torch.testing.assert_close(same, ridge, rtol=1e-6, atol=1e-8)


def test_preconditioning_leaves_the_logistic_classifier_what_it_was():
    from sklearn.linear_model import LogisticRegression

    folds = example(rows=90, inputs=4)
    x = folds.x.double() * torch.tensor([5.0, 1.0, 0.2, 1.0])
    inputs, penalty = precondition(x)
    plain = (x - x.mean(0)) / (x - x.mean(0)).square().sum(1).mean().sqrt()
    expected = LogisticRegression(C=1 / 0.3, tol=1e-10, max_iter=5000).fit(plain, folds.y).predict_proba(plain)
    weight, bias = torch.zeros(4, 3).double().requires_grad_(), torch.zeros(3).double().requires_grad_()
    search = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-8,
                               tolerance_change=1e-15)  # fmt: skip

    def loss():
        search.zero_grad()
        fit = F.cross_entropy(inputs @ weight + bias, folds.y, reduction="sum")
        (total := fit + 0.3 * (penalty[:, None] * weight.square()).sum() / 2).backward()
        return total

    search.step(loss)
    found = (inputs @ weight + bias).softmax(1).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_preconditioned_inputs_have_much_the_same_variance():
    x = torch.randn(2000, 6) @ torch.diag(torch.tensor([30.0, 10, 3, 1, 1, 1]))
    inputs, _ = precondition(x)
    variance = torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
    assert float(variance[-1] / variance[0]) < 3  # 900 before
    assert float(variance[-1]) <= 1


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_awkward_inputs_stay_finite(scale):
    column = torch.linspace(-1, 1, 30)[:, None]
    cases = {
        "one column": column,
        "constant": torch.full((30, 3), 0.1),
        "zero": torch.zeros(30, 2),
        "a constant column": torch.cat([column, torch.ones(30, 1)], 1),
        "deficient": column @ torch.ones(1, 5),
        "more columns than rows": torch.randn(30, 100),
    }
    for name, x in cases.items():
        inputs, penalty = precondition(x * scale)
        assert inputs.shape == (30, len(penalty)), name
        assert len(penalty) >= 1, name
        assert torch.isfinite(inputs).all(), name
        assert torch.isfinite(penalty).all(), name
        assert float(inputs.square().mean()) < 100, name
    assert precondition(cases["deficient"] * scale)[0].shape[1] == 1
    torch.testing.assert_close(precondition(column * scale), precondition(column), rtol=1e-4, atol=1e-5)


def test_only_the_first_principal_components_are_kept():
    x = torch.randn(200, 20) @ torch.diag(torch.linspace(5, 1, 20))
    inputs, penalty = precondition(x, most=4)
    whole, _ = precondition(x)
    assert inputs.shape == (200, 4)
    torch.testing.assert_close(inputs, whole[:, :4])
    assert penalty.tolist() == sorted(penalty.tolist())  # the component of most variance is penalised least


# --- the inner loop ---------------------------------------------------------------------------------------------------


def losses_of(folds, weight, bias, log_matrix, fold):
    """h without decay, and g, of the classifier of one fold, written as sums over its rows."""
    log_p = (folds.x @ weight + bias).log_softmax(1)
    train = folds.fold != fold
    noisy, verified = train & ~folds.checked, train & folds.checked
    through = (log_p[noisy].exp() @ log_matrix.exp())[torch.arange(int(noisy.sum())), folds.y[noisy]]
    h = -through.log().sum() / (~folds.checked).sum()
    return h, F.nll_loss(log_p[verified], folds.y[verified], reduction="sum") / folds.checked.sum()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.99, 1.0])
def test_no_curvature_of_the_losses_is_above_the_bound(alpha):
    folds = example(rows=24, checked=6, count=2)
    folds.x[:2] *= 6  # two outliers, both checked
    matrix, bound = random_matrix(3, 1, torch.float64).log(), folds.curvature()(alpha)
    largest = 0.0
    for scale in (0.0, 0.3, 3.0):
        at = scale * torch.randn(4, 3)

        def total(flat, fold=0):
            weight, bias = flat.view(4, 3)[:3], flat.view(4, 3)[3]
            h, g = losses_of(folds, weight, bias, matrix, fold)
            return alpha * h + (1 - alpha) * g

        hessian = torch.autograd.functional.hessian(total, at.flatten())
        largest = max(largest, float(torch.linalg.eigvalsh(hessian)[-1]))
    assert 0 < largest <= bound


@pytest.mark.usefixtures("double")
def test_the_bound_of_the_curvature_is_reached():
    folds = replace(example(rows=24, inputs=2, classes=2, checked=6, count=2), fold=torch.zeros(24, dtype=torch.long))

    def total(flat):  # two classes of the same probability, no noise; the classifier of the fold -1 sees all rows
        h, g = losses_of(folds, flat.view(3, 2)[:2], flat.view(3, 2)[2], torch.eye(2).log().clamp_min(-50), -1)
        return 0.7 * h + 0.3 * g

    hessian = torch.autograd.functional.hessian(total, torch.zeros(6))
    assert float(torch.linalg.eigvalsh(hessian)[-1]) == pytest.approx(folds.curvature()(0.7), rel=1e-6)


@settings(max_examples=25)
@given(st.floats(-3, 3), st.floats(0.01, 0.999), st.floats(1, 300), st.integers(2, 60),
       st.sampled_from(["bigsam", "gd"]), st.integers(0, 1000))  # fmt: skip
def test_training_never_diverges(scale, alpha, outlier, checked, solver, seed):
    one = example(rows=64, checked=checked, seed=seed)
    one.x[:2] = outlier * one.x[:1]  # the same row twice, with two labels: no step may go far either way
    one.x.mul_(10**scale)
    # each row in both folds: what a classifier was trained on is what it is asked about
    twice = {name: getattr(one, name).repeat_interleave(2, 0) for name in ("x", "y", "truth", "checked")}
    folds = replace(one, **twice, fold=torch.arange(128) % 2)
    noise = Noise(3, alpha=alpha, groups=2)
    matrix = noise.log_matrix().detach()
    logits = folds.own(learn(folds, noise, steps=40, outer_steps=0, solver=solver)[0])

    def objective(log_p):
        h = given_label_loss(log_p[~folds.checked], folds.y[~folds.checked], matrix).mean()
        g = F.nll_loss(log_p[folds.checked], folds.y[folds.checked])
        return float(alpha * h + (1 - alpha) * g if solver == "bigsam" else h)

    begin = objective(torch.zeros(128, 3).log_softmax(1))
    assert objective(logits.log_softmax(1)) < begin


def plain_loop(folds: Folds, noise: Noise, solver: str, steps: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The held-out logits and the outer loss by a loop as anybody would write it, one fold after the other."""
    alpha = torch.sigmoid(noise.share.detach()) if solver == "bigsam" else torch.tensor(1.0)
    log_matrix, temperature = noise.log_matrix().detach(), noise.log_temperature.detach().exp()
    decay = noise.log_decay.detach().exp()[folds.group] * folds.penalty / len(folds.y)
    logits = torch.zeros(len(folds.y), folds.classes)
    for fold in range(folds.count):
        w = [torch.zeros(folds.x.shape[1], folds.classes, requires_grad=True),
             torch.zeros(folds.classes, requires_grad=True)]  # fmt: skip
        velocity = [torch.zeros_like(part) for part in w]
        for _ in range(steps):
            h, g = losses_of(folds, *w, log_matrix, fold)
            total = alpha * (h + (decay[:, None] * w[0].square()).sum() / 2) + (1 - alpha) * g
            for part, v, slope in zip(w, velocity, torch.autograd.grad(total, w), strict=True):
                v.mul_(0.8).add_(slope)
                part.data.sub_(rate * v)
        here = folds.fold == fold
        logits[here] = (temperature * (folds.x[here] @ w[0] + w[1])).detach()
    return logits, outer_loss(folds, noise, logits).detach()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("solver", ["bigsam", "gd"])
def test_hypergradients_against_differences_of_the_plain_loop(solver):
    folds, noise = example(), Noise(3, alpha=0.8, groups=2, rate=0.2)
    with torch.no_grad():
        noise.deviation.normal_()
        noise.log_decay.add_(torch.tensor([1.0, -0.5]))
        noise.log_temperature.fill_(0.3)
    alpha = 0.8 if solver == "bigsam" else 1.0
    x = torch.cat([folds.x, torch.ones(40, 1)], 1)
    a, b = (part.T @ part / len(part) for part in (x[~folds.checked], x[folds.checked]))
    decay = float((noise.log_decay.exp()[folds.group] * folds.penalty).detach().max()) / 40
    rate = 1 / (float(torch.linalg.eigvalsh(alpha * a + (1 - alpha) * b)[-1]) / 2 + alpha * decay)
    differences, start = {}, {name: value.detach().clone() for name, value in noise.named_parameters()}
    for name, value in noise.named_parameters():
        differences[name] = torch.zeros_like(value)
        for i in range(value.numel()):
            ends = []
            for step in (1e-5, -1e-5):
                value.data.view(-1)[i] += step
                ends.append(float(plain_loop(folds, noise, solver, 7, rate)[1]))
                value.data.copy_(start[name])
            differences[name].view(-1)[i] = (ends[0] - ends[1]) / 2e-5
    expected, loss = plain_loop(folds, noise, solver, 7, rate)
    logits, _ = learn(folds, noise, steps=7, outer_steps=0, solver=solver)
    torch.testing.assert_close(folds.own(logits), expected)
    _, losses = learn(folds, noise, steps=7, outer_steps=1, solver=solver)
    assert losses[0] == pytest.approx(float(loss), rel=1e-9)
    assert losses[1] < losses[0]
    for name, value in noise.named_parameters():
        if name == "share" and solver == "gd":
            assert value.grad is None
            continue
        assert differences[name].abs().min() > 1e-6, name  # every variable matters, so a wrong zero would show
        torch.testing.assert_close(value.grad, differences[name], rtol=1e-5, atol=1e-9, msg=name)


def test_no_classifier_has_seen_the_label_of_the_row_that_it_judges():
    folds = example(rows=60, checked=20)
    before = folds.own(learn(folds, Noise(3, alpha=0.7, groups=2), steps=15, outer_steps=0)[0])
    for row in (0, 7, 19, 20, 33, 59):  # three checked ones, and three others
        y = folds.y.clone()
        y[row] = (y[row] + 1) % 3
        after = folds.own(learn(replace(folds, y=y), Noise(3, alpha=0.7, groups=2), steps=15, outer_steps=0)[0])
        here = folds.fold == folds.fold[row]
        assert torch.equal(before[here], after[here]), row  # bit for bit, as its fold is left out
        assert not torch.equal(before[~here], after[~here]), row


def test_outer_steps_lower_the_outer_loss_and_are_told():
    folds, noise, told = example(rows=120, checked=30, seed=3), Noise(3, alpha=0.7, groups=2), []
    _, losses = learn(folds, noise, steps=15, outer_steps=6, on_step=lambda: told.append(1))
    assert len(losses) == len(told) == 7
    assert min(losses[3:]) < losses[0]


# --- estimates --------------------------------------------------------------------------------------------------------


def sampled(matrix: torch.Tensor, rows: int, sharpness: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, true classes drawn from their probabilities, and labels drawn with noise."""
    logits = sharpness * torch.randn(rows, len(matrix))
    truth = torch.multinomial(logits.softmax(1), 1)[:, 0]
    return logits, truth, torch.multinomial(matrix[truth], 1)[:, 0]


def test_expectation_maximisation_finds_the_matrix_again():
    matrix = torch.tensor([[0.7, 0.3, 0, 0], [0, 1, 0, 0], [0.1, 0.1, 0.5, 0.3], [0.02, 0.02, 0.02, 0.94]])
    logits, _, y = sampled(matrix, 40000)
    found = expectation_maximisation(logits.softmax(1), y, rounds=100)
    assert float((found - matrix).abs().max()) < 0.02
    torch.testing.assert_close(found.sum(1), torch.ones(4))
    uniform = uniform_noise(logits.softmax(1), y, rounds=100)
    assert float((uniform - matrix).abs().max()) > 0.2


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6])
def test_the_rate_of_uniform_noise_is_found(rate):
    matrix = (1 - rate) * torch.eye(5) + rate / 4 * (1 - torch.eye(5))
    logits, _, y = sampled(matrix, 40000)
    torch.testing.assert_close(uniform_noise(logits.softmax(1), y, rounds=100), matrix, atol=0.01, rtol=0)


def test_few_rows_leave_the_matrix_near_uniform_noise():
    p = torch.tensor([[0.98, 0.01, 0.01]] * 5)
    y = torch.ones(5, dtype=torch.long)  # five rows of class 0, all with the label 1
    found, prior = expectation_maximisation(p, y), uniform_noise(p, y)
    moved = found - prior
    assert 0.02 < float(moved[0, 1]) <= 5 / (5 + STRENGTH)
    assert float(moved[1:].abs().max()) < 0.01  # nothing was seen of the other classes


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 6.0])
def test_the_temperature_is_found(temperature):
    matrix = torch.tensor([[0.8, 0.2, 0.0], [0.05, 0.9, 0.05], [0.0, 0.3, 0.7]])
    logits, truth, y = sampled(matrix, 5000)
    checked = torch.arange(5000) < 500
    folds = replace(example(rows=5000), y=torch.where(checked, truth, y), checked=checked)
    found, scale = estimate(folds, logits / temperature)
    assert scale / temperature == pytest.approx(1, abs=0.14)  # the candidates are a factor of 1.26 apart
    assert float((found - matrix).abs().max()) < 0.06


def test_the_estimate_uses_the_way_to_find_a_matrix_that_is_given():
    matrix = random_matrix(3, 0)
    logits, _, y = sampled(matrix, 2000)
    folds = replace(example(rows=2000), y=y)
    seen = []
    found, _ = estimate(folds, logits, lambda p, labels: seen.append((p.shape, len(labels))) or matrix)
    assert torch.equal(found, matrix)
    assert set(seen) == {((1992, 3), 1992)}  # the eight checked rows tell nothing about the noise


def test_the_decay_begins_where_the_inputs_were_scaled_for():
    assert Noise(3, alpha=0.5).log_decay.exp().tolist() == pytest.approx([DECAY])
